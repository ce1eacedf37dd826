"""How long this process has lived. Loads nothing, so that it can be asked as soon as there is a process."""

from __future__ import annotations

import os
import time
from pathlib import Path

LOADED = time.monotonic()


def process_seconds() -> float:
    """Seconds since this process started, interpreter and imports included.

    Where the system does not tell: since this module was loaded.
    """
    since_loaded = time.monotonic() - LOADED
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # after boot
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, ValueError, IndexError):
        return since_loaded
    return age if since_loaded <= age < since_loaded + 600 else since_loaded
