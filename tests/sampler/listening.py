"""The endpoint, served over HTTP by a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from posttrain.endpoint.app import App
from posttrain.endpoint.serving import Listener


@contextmanager
def listening(make: Callable[[], App]) -> Iterator[str]:
    """The address of an app that is served by a thread."""
    loop = asyncio.new_event_loop()
    listener = Listener(make(), "127.0.0.1", 0)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(listener.start(), loop).result(30)
        yield f"{listener.url}/v1"
        asyncio.run_coroutine_threadsafe(listener.stop(), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
