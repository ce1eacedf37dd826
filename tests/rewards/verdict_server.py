"""A verdict server: OpenAI's chat completions over HTTP, in a process of its own, judging by plain rules.

    python tests/rewards/verdict_server.py   prints its URL and serves until it is killed

It reads the prompts of `posttrain.rewards`: a statement and a response are answered with a grade, responses to be told
apart with items. What it knows to see in a response is in `SEEN`. Every tenth answer is 503, as of a busy judge.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SEEN: dict[str, Callable[[str], bool]] = {
    "The response asks for a search.": lambda text: "<search>" in text,
    "The response gives an answer at once.": lambda text: "<answer>" in text,
    "The response says anything at all.": lambda text: bool(text.strip()),
}
WISHED, UNWISHED = "The response asks for a search.", "The response gives an answer at once."
BUSY_EVERY = 10


def verdict(prompt: str) -> dict[str, Any]:
    responses = re.findall(r"<response>(.*?)</response>", prompt, re.DOTALL)
    statement = re.search(r"<statement>(.*?)</statement>", prompt, re.DOTALL)
    if statement:
        return {"reasoning": "by rule", "score": 2 * SEEN[statement[1].strip()](_unfenced(responses[0]))}
    tells = [text for text in (WISHED, UNWISHED) if len({SEEN[text](_unfenced(one)) for one in responses}) == 2]
    made = [{"description": text, "title": ""} for text in tells]
    return {"positive_rubrics": [m for m in made if m["description"] == WISHED],
            "negative_rubrics": [m for m in made if m["description"] == UNWISHED]}  # fmt: skip


def _unfenced(text: str) -> str:
    return text.replace("&lt;", "<")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.asked += 1
        busy = Handler.asked % BUSY_EVERY == 1
        message = {"role": "assistant", "content": json.dumps(verdict(body["messages"][-1]["content"]))}
        reply = {"error": {"message": "busy"}} if busy else {"choices": [{"index": 0, "message": message}]}
        data = json.dumps(reply).encode()
        self.send_response(503 if busy else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        return None


@contextmanager
def verdict_server() -> Iterator[str]:
    """Its URL; the process ends with the block."""
    process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_address[1]}/v1", flush=True)
    server.serve_forever()
