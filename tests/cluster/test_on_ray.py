"""Seats on a real Ray cluster of this machine: light stand-ins for ranks and samplers, real processes and signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from forked import Program

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]
SECONDS = 300
PROGRAM = """
import os, sys, time
from pathlib import Path
from posttrain.cluster.launch import die_with_launcher
die_with_launcher()
folder = Path(sys.argv[1])
name = f"sampler{os.environ['POSTTRAIN_SAMPLER']}" if "POSTTRAIN_SAMPLER" in os.environ else f"rank{os.environ['RANK']}"
number = len(list(folder.glob(f"{name}-*")))
(folder / f"draft-{name}").write_text(f"{os.getpid()} {os.getppid()} {os.environ['POSTTRAIN_CALLS']}")
(folder / f"draft-{name}").rename(folder / f"{name}-{number}")
while not (folder / "over").exists():
    time.sleep(0.05)
"""
DRIVER = """
import sys
from posttrain.cluster.supervisor import Samplers
from posttrain.cluster.on_ray import launch_ray
from posttrain.config import ClusterConfig
folder = sys.argv[1]
command = [sys.executable, f"{folder}/program.py", folder]
cluster = ClusterConfig(ray="local", samplers=2, timeline=f"{folder}/timeline.json")
sys.exit(launch_ray(command, 1, Samplers(count=2, restarts=3, command=command), cluster=cluster, gpus=False))
"""


def driver(folder: Path) -> Program:
    (folder / "program.py").write_text(PROGRAM)
    return Program(folder, folder, code=DRIVER)


def until(found: Callable[[], bool], process: Program | None = None) -> None:
    ends = time.monotonic() + SECONDS
    while not found():
        assert process is None or process.poll() is None, process.ended(0)
        assert time.monotonic() < ends
        time.sleep(0.05)


def said(folder: Path, name: str) -> tuple[int, int, str]:
    """(process id, that of its seat, where it is to call)"""
    process, seat, calls = (folder / name).read_text().split()
    return int(process), int(seat), calls


def of_the_session(process: int) -> list[str]:
    """Commands of the Ray session that this driver began."""
    found = []
    for other in Path("/proc").glob("[0-9]*"):
        try:
            command = (other / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if f"_{process}/" in command and "/session_" in command:
            found.append(command)
    return found


def running(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_samplers_are_seated_again_and_a_killed_driver_leaves_nothing(tmp_path: Path):
    """A sampler's process dies, then the seat of the other one; in the end the driver dies, too."""
    process = driver(tmp_path)
    until(lambda: all((tmp_path / f"{name}-0").exists() for name in ("rank0", "sampler0", "sampler1")), process)
    assert len({said(tmp_path, f"{name}-0")[2] for name in ("rank0", "sampler0", "sampler1")}) == 1
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    for name in ("rank0", "sampler1"):
        assert os.getpriority(os.PRIO_PROCESS, said(tmp_path, f"{name}-0")[0]) == ours, "Ray would make it 15"
    host, _, port = said(tmp_path, "rank0-0")[2].rpartition(":")
    with socket.socket() as other, pytest.raises(OSError, match="already in use"):
        other.bind((host, int(port)))  # it is kept for rank 0, which listens there in some seconds
    os.kill(said(tmp_path, "sampler0-0")[0], signal.SIGKILL)
    until((tmp_path / "sampler0-1").exists, process)
    assert said(tmp_path, "sampler0-0")[1] == said(tmp_path, "sampler0-1")[1], "the same seat"
    os.kill(said(tmp_path, "sampler1-0")[1], signal.SIGKILL)
    until((tmp_path / "sampler1-1").exists, process)
    assert said(tmp_path, "sampler1-0")[1] != said(tmp_path, "sampler1-1")[1]
    assert of_the_session(process.pid)
    process.kill()
    _, _, errors = process.ended(SECONDS)
    for number in (0, 1):
        assert f"sampler {number} was killed by SIGKILL; it is started again" in errors
    names = ("rank0-0", "sampler0-0", "sampler0-1", "sampler1-0", "sampler1-1")
    until(lambda: not any(running(said(tmp_path, name)[0]) for name in names))
    until(lambda: not of_the_session(process.pid))


def test_a_launch_that_ends_leaves_a_timeline_and_nothing_else(tmp_path: Path):
    process = driver(tmp_path)
    until((tmp_path / "sampler1-0").exists, process)
    (tmp_path / "over").touch()
    status, _, errors = process.ended(SECONDS)
    assert status == 0, errors
    assert any(event["cat"].startswith("task") for event in json.loads((tmp_path / "timeline.json").read_text()))
    until(lambda: not of_the_session(process.pid))


WRITES = """
import os, signal, sys, time
from pathlib import Path
from posttrain.cluster.launch import die_with_launcher
die_with_launcher()
folder = Path(sys.argv[1])
signal.signal(signal.SIGINT, lambda *_: (folder / "heard").touch())
(folder / "begun").write_text(str(os.getpid()))
while not (folder / "heard").exists():
    time.sleep(0.05)
time.sleep(2)  # it writes a checkpoint
while (folder / "hangs").exists():
    time.sleep(0.05)
(folder / "written").touch()
sys.exit(130)
"""
INTERRUPTED = """
import signal, sys
from posttrain.cluster import on_ray
from posttrain.config import ClusterConfig
signal.signal(signal.SIGINT, signal.default_int_handler)  # not so in a shell's background
folder, on_ray.INTERRUPT_SECONDS = sys.argv[1], float(sys.argv[2])
command = [sys.executable, f"{folder}/program.py", folder]
sys.exit(on_ray.launch_ray(command, 1, cluster=ClusterConfig(ray="local"), gpus=False))
"""


@pytest.mark.parametrize("what", ["writes", "is interrupted again", "takes too long"])
def test_an_interrupt_reaches_rank_0_which_may_finish_what_it_writes(tmp_path: Path, what: str):
    """Unless it is interrupted again, or takes too long. Ray blocks the signal in all that it starts."""
    (tmp_path / "program.py").write_text(WRITES)
    if what != "writes":
        (tmp_path / "hangs").touch()
    process = Program(tmp_path, tmp_path, 5 if what == "takes too long" else 600, code=INTERRUPTED)
    until((tmp_path / "begun").exists, process)
    os.kill(process.pid, signal.SIGINT)
    until((tmp_path / "heard").exists, process)
    if what == "is interrupted again":
        os.kill(process.pid, signal.SIGINT)
    status, _, errors = process.ended(SECONDS)
    assert status == 128 + signal.SIGINT, errors
    assert (tmp_path / "written").exists() == (what == "writes")
    until(lambda: not running(int((tmp_path / "begun").read_text())))
    until(lambda: not of_the_session(process.pid))


SEATS = """
import json, os, sys, time
import ray
from posttrain.cluster.on_ray import Room
from posttrain.config import ClusterConfig
ray.init(num_cpus=3, num_gpus=2, include_dashboard=False, log_to_driver=False, address="local")
room = Room(ray, 2, ClusterConfig(samplers=1, colocated=True), gpus=True, near=True)
seats = [room.seat(number) for number in range(3)]
show = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
ray.get([seat.begin.remote(show, {}, ".") for seat in seats])
while any(seen.status is None for seen in ray.get([seat.state.remote(0) for seat in seats])):
    time.sleep(0.05)
print(json.dumps([seen.said.decode().strip() for seen in ray.get([seat.state.remote(0) for seat in seats])]))
ray.shutdown()
"""


def test_samplers_share_the_gpus_of_ranks(tmp_path: Path) -> None:
    """Two ranks and a sampler on a cluster that says it has two GPUs: the sampler sees that of the first rank."""
    status, out, err = Program(tmp_path, code=SEATS).ended(SECONDS)
    assert status == 0, err
    first, second, sampler = json.loads(out.splitlines()[-1])
    assert {first, second} == {"0", "1"}
    assert sampler == first
