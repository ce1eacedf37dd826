"""A real vLLM server in a process of its own, which can be killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx
import torch

from posttrain.cluster.launch import free_port
from posttrain.sampler.vllm_engine import LEAST_SHARE, RECEIVER

SOURCE = Path(__file__).resolve().parents[2] / "src"
READY_SECONDS = 600


@dataclass
class Served:
    """A server of the model in `folder`; what it says goes to `log`."""

    folder: Path
    log: Path
    options: tuple[str, ...] = ("--logprobs-mode", "processed_logprobs", "--worker-extension-cls", RECEIVER)
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Started, and killed in the end."""
        with free_port() as self.port:
            try:
                self.start()
                self.wait()
                yield self
            finally:
                self.kill()

    def start(self) -> None:
        """Does not wait for it."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.folder)]
        command += ["--port", str(self.port), "--host", "127.0.0.1", "--enforce-eager", "--max-num-seqs", "64"]
        command += ["--kv-cache-memory-bytes", str(1 << 27), *self.options]
        command += ["--dtype", "float32"]  # on a GPU "auto" would halve it
        if torch.cuda.is_available():
            command += ["--gpu-memory-utilization", str(LEAST_SHARE)]  # others may use the GPU, too
        else:
            command += ["--block-size", "32", "--no-enable-chunked-prefill"]
        settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env=os.environ | settings | {"PYTHONPATH": path},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it answers."""
        assert self.process is not None
        end = time.monotonic() + READY_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/models").is_success:
                    return
            except httpx.TransportError:
                time.sleep(0.3)
        tail = self.log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"the server is not there after {READY_SECONDS} s, or has ended:\n{tail}")

    def kill(self) -> None:
        """With everything that it has started."""
        if self.process is None:
            return
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        self.process = None
