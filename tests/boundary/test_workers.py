"""Worker processes: what is left when one cannot be started. (Their end: `invariants/test_nothing_lives_on.py`.)"""

from __future__ import annotations

import os
import sys

import pytest

from posttrain.boundary.workers import WorkerProcess


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
def test_a_worker_that_cannot_be_started_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/no/such/program")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        WorkerProcess("posttrain.tools.worker")
    assert os.listdir("/proc/self/fd") == before
