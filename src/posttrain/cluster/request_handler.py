"""How a process answers the requests that rank 0 puts to its sampler."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from posttrain.cluster.channel import Channel, RankLost
from posttrain.cluster.sampler import params_of
from posttrain.sampler.own_copy import NO_WEIGHTS
from posttrain.sampler.protocol import CountingSampler, Sampler


class RequestHandler:
    """The requests that came over `channel` and are open. They wait while `may_sample` is not set."""

    def __init__(self, sampler: Sampler, channel: Channel) -> None:
        self.sampler, self.channel = sampler, channel
        self.may_sample = asyncio.Event()
        self.may_sample.set()
        self._open: dict[int, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def hear(self, order: Mapping[str, Any]) -> bool:
        """Whether the order was one about a request; then it is obeyed."""
        match order["do"]:
            case "sample":
                self._open[order["id"]] = asyncio.create_task(self._answer(order))
            case "cancel":
                if (task := self._open.get(order["id"])) is not None:
                    task.cancel()
            case "release":
                self.sampler.release(order["session"])
            case _:
                return False
        return True

    async def idle(self) -> None:
        """Until nothing is open: what was cancelled is not gone at once."""
        await asyncio.gather(*self._open.values(), return_exceptions=True)

    async def _answer(self, order: Mapping[str, Any]) -> None:
        number = order["id"]
        how = {"seed": order["seed"], "session": order["session"]}
        try:
            await self.may_sample.wait()
            done = await self.sampler.sample(order["ids"], params_of(order["params"]), **how)
            # a transfer broke amid the turn, if there is such a token: rank 0 takes the request away from here
            if NO_WEIGHTS not in done.versions:
                counted = {"counters": self.sampler.counters()} if isinstance(self.sampler, CountingSampler) else {}
                self.channel.send({"id": number, "sampled": asdict(done), **counted})
        except RankLost:
            return  # the channel's own thread hears it, too
        except Exception as error:  # raised again where it was asked
            with suppress(RankLost):
                self.channel.send({"id": number, "error": str(error), "kind": type(error).__name__})
        finally:
            if self._open.get(number) is asyncio.current_task():  # else it was cancelled, and is asked again
                del self._open[number]
