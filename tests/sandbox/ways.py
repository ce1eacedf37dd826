"""The ways of isolation that work on this machine; the tests run in each."""

from __future__ import annotations

import sys

from posttrain.sandbox import Isolation, Sandbox, SandboxError


def working() -> list[Isolation]:
    found: list[Isolation] = []
    ways: tuple[Isolation, ...] = ("namespaces", "landlock")
    for way in ways if sys.platform == "linux" else ():
        try:
            Sandbox(isolation=way).close()
        except SandboxError:
            continue
        found.append(way)
    return found


WAYS = working()
