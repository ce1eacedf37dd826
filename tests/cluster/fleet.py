"""Ranks for tests: processes forked from a server that has imported torch and transformers once."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from forked import server
from posttrain.cluster.launch import free_port
from posttrain.cluster.start import connected_ranks
from posttrain.config import RLConfig
from posttrain.loops import rl

SECONDS = 180


def on_ranks(count: int, log: Path, work: Callable[..., None], *arguments: Any) -> None:
    """`work(*arguments)` on each of `count` ranks at once; AssertionError with what they said when one fails."""
    with free_port() as port:
        processes = [
            server().Process(target=_rank, args=(number, count, port, log, work, arguments)) for number in range(count)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(SECONDS)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    if any(codes):
        said = "\n".join(f"--- rank {n}\n{Path(f'{log}.{n}').read_text()}" for n in range(count))
        raise AssertionError(f"exit codes {codes}\n{said}")


def _rank(number: int, count: int, port: int, log: Path, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {key: str(value) for key, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with Path(f"{log}.{number}").open("w", buffering=1) as said:
        os.dup2(said.fileno(), 2)
        with redirect_stdout(said), redirect_stderr(said):
            work(*arguments)


def train(config: RLConfig) -> None:
    """Starts the run, or goes on with it where there is one."""
    with connected_ranks(config, ranks=int(os.environ["WORLD_SIZE"])) as workers:
        if workers is None:
            return
        begun = (config.run.directory / "config.yaml").is_file()
        run = rl.resume(config.run.directory, workers=workers) if begun else rl.start(config, workers=workers)
        try:
            rl.train(run)
        finally:
            run.close()
