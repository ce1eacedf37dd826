"""Our modules that numba compiles (`*_numba`). It is optional, and slow to load: asked for only when there is work."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from importlib.util import find_spec
from types import ModuleType

log = logging.getLogger(__name__)


def may_compile() -> bool:
    """Whether numba is installed; whether it loads is known to `numba_code`."""
    return find_spec("numba") is not None


@cache
def numba_code(name: str) -> ModuleType | None:
    """The module of that name; None, with a warning, where numba does not load. It takes half a second."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a numba that is older than this numpy, or finds no place for what it compiles
        log.warning("numba does not load (%s), so that nothing is compiled: install another version of it", error)
        return None
