"""The golden tests are worth something: every fault planted in the maths is caught by them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKER = Path(__file__).resolve().parents[2] / "benchmarks" / "mutation.py"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="faults are planted in forked processes")
def test_every_planted_fault_is_caught():
    done = subprocess.run([sys.executable, str(CHECKER), "--json"], capture_output=True, text=True, timeout=600)
    assert done.stdout, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["missed"] == []
    assert result["caught"] == result["planted"] >= 100
    assert done.returncode == 0
