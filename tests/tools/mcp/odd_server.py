"""An MCP server over stdio that misbehaves on demand. Standard library only, so that it starts at once.

python odd_server.py [--die-at-start | --slow-start | --stubborn] [--named NAME]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

STARTED = time.time()
SCHEMA = {
    "type": "object",
    "title": "echoArguments",
    "properties": {"text": {"type": "string", "title": "Text"}, "seconds": {"type": "number", "title": "Seconds"}},
}
NAMES = ("echo", "sleep", "die", "hang", "grandchild", "fail", "refuse", "picture", "odd.name", "who", "generic")
LOCK = threading.Lock()


def send(message: dict[str, Any]) -> None:
    with LOCK:
        print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": words}], **more}


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if name == "sleep":
        time.sleep(arguments["seconds"])
    if name == "die":
        print("the last words", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "grandchild":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        return text(str(child.pid))
    if name == "fail":
        return text("it did not work", isError=True)
    if name == "picture":
        return {"content": [{"type": "image", "data": "QUJD", "mimeType": "image/png"}, {"type": "text", "text": "x"}]}
    if name == "who":
        return text(json.dumps({"pid": os.getpid(), "env": dict(os.environ)}))
    return text(arguments.get("text", ""), structuredContent={"text": arguments.get("text", "")})


def answer(request: dict[str, Any], name: str) -> None:
    method, number = request["method"], request.get("id")
    params = request.get("params") or {}
    if method == "initialize":
        version = params["protocolVersion"]
        info = {"name": name, "version": "1"}
        send({"id": number, "result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}})
    elif method == "ping":
        send({"id": number, "result": {}})
    elif method == "tools/list":
        tools = [{"name": tool, "description": f"Does {tool}.", "inputSchema": SCHEMA} for tool in NAMES]
        send({"id": number, "result": {"tools": tools}})
    elif method == "tools/call" and params["name"] == "refuse":
        send({"id": number, "error": {"code": -32602, "message": "text is wrong"}})
    elif method == "tools/call" and params["name"] == "generic":
        send({"id": number, "error": {"code": -32000, "message": "busy with something else"}})
    elif method == "tools/call":
        send({"id": number, "result": call(params["name"], params.get("arguments") or {})})
    elif number is not None:
        send({"id": number, "error": {"code": -32601, "message": f"no method {method}"}})


def main() -> None:
    name = sys.argv[sys.argv.index("--named") + 1] if "--named" in sys.argv else "odd"
    if "--die-at-start" in sys.argv:
        print("cannot find its settings", file=sys.stderr, flush=True)
        sys.exit(2)
    if "--slow-start" in sys.argv:
        time.sleep(60)
    if "--stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("method") == "tools/call" and request["params"]["name"] == "hang":
            time.sleep(60)  # in the reading thread: not even a ping is answered
        threading.Thread(target=answer, args=(request, name), daemon=True).start()
    if "--stubborn" in sys.argv:
        time.sleep(60)


if __name__ == "__main__":
    main()
