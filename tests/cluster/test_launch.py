"""Starting ranks on this machine: light stand-ins for trainers, real processes and signals."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest

from posttrain.cluster.launch import launch_local
from posttrain.cluster.supervisor import Samplers

WAIT = "\nwhile True:\n    time.sleep(0.05)\n"


def script(folder: Path, code: str) -> list[str]:
    """A rank that writes its process id to a file named after its number, then runs `code`."""
    head = f"""
        import os, signal, sys, time
        from pathlib import Path
        from posttrain.cluster.launch import die_with_launcher
        die_with_launcher()
        rank, folder = int(os.environ["RANK"]), Path({str(folder)!r})
        (folder / f"pid{{rank}}").write_text(str(os.getpid()))
        def all_there():
            while len(list(folder.glob("pid*"))) < int(os.environ["WORLD_SIZE"]):
                time.sleep(0.02)
    """
    path = folder / "rank.py"
    path.write_text(textwrap.dedent(head) + code)
    return [sys.executable, str(path)]


def left(folder: Path) -> list[int]:
    """Process ids of ranks that are still there."""
    found = [int(said) for file in folder.glob("pid*") if (said := file.read_text())]  # one may be about to write it
    return [process for process in found if runs(process)]


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ranks_know_their_places(tmp_path: Path):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    code = f"(folder / f'seen{{rank}}').write_text(' '.join(os.environ[name] for name in {names!r}))"
    assert launch_local(script(tmp_path, code), 3) == 0
    seen = [(tmp_path / f"seen{rank}").read_text().split() for rank in range(3)]
    assert [row[:5] for row in seen] == [[str(rank), str(rank), "3", "3", "127.0.0.1"] for rank in range(3)]
    assert len({row[5] for row in seen}) == 1


HELD = """
import socket
host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
try:
    socket.socket().bind((host, port))
except OSError:
    socket.create_server((host, port)).close()
else:
    sys.exit("the port was free for everybody")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the port is only looked up")
def test_the_port_where_ranks_meet_is_kept_for_rank_0(tmp_path: Path):
    """Between its choice and rank 0's listening lie the imports of torch and transformers: seconds."""
    assert launch_local(script(tmp_path, HELD), 1) == 0


def test_a_rank_that_fails_is_named_with_its_traceback_and_ends_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    code = "all_there()\nif rank == 2:\n    raise KeyError('no such layer')\n" + WAIT
    assert launch_local(script(tmp_path, code), 3) == 1
    said = capfd.readouterr().err
    assert "rank 2 failed with exit status 1" in said
    assert "KeyError: 'no such layer'" in said
    assert "Traceback" in said
    assert left(tmp_path) == []


def test_a_rank_that_is_killed_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    code = "all_there()\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n" + WAIT
    assert launch_local(script(tmp_path, code), 2) == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in capfd.readouterr().err
    assert left(tmp_path) == []


def test_a_killed_rank_is_blamed_before_one_that_failed_because_of_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    code = """
all_there()
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
stat = Path("/proc") / (folder / "pid2").read_text() / "stat"
while stat.exists() and ") Z " not in stat.read_text():
    time.sleep(0.02)
sys.exit(75 if rank == 0 else 1)
"""
    assert launch_local(script(tmp_path, code), 3) == 128 + signal.SIGKILL
    assert "rank 2 was killed by SIGKILL" in capfd.readouterr().err


def test_who_only_noticed_is_not_blamed(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Rank 0 fails and says so itself; the others find it gone."""
    code = "all_there()\nif rank == 0:\n    sys.exit('error: no such file')\nsys.exit(75)"
    assert launch_local(script(tmp_path, code), 3) == 1
    said = capfd.readouterr().err
    assert said.strip() == "error: no such file"


def test_rank_0_says_to_the_end_what_it_has_failed_of(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """The others hear at once that it goes; it still has to close what it has, and to print."""
    code = "all_there()\nif rank == 0:\n    time.sleep(2)\n    sys.exit('error: no such file')\nsys.exit(75)"
    assert launch_local(script(tmp_path, code), 2) == 1
    assert capfd.readouterr().err.strip() == "error: no such file"


def test_a_rank_that_takes_its_time_to_say_why_is_blamed_before_rank_0(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    code = (
        "all_there()\nif rank:\n    time.sleep(2)\n    raise KeyError('no such layer')\nsys.exit('connection closed')"
    )
    assert launch_local(script(tmp_path, code), 2) == 1
    said = capfd.readouterr().err
    assert "rank 1 failed with exit status 1" in said
    assert "KeyError: 'no such layer'" in said


JOIN = """
import torch
from posttrain.trainer import ranks
there = ranks.join_ranks(torch.device("cpu"))
there.sum(torch.ones(1))
if sys.platform == "linux":
    mine = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if os.path.lexists(path)}
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/self/net", name).read_text().splitlines()]
    listens = [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
    (folder / f"heard{rank}").write_text(" ".join(listens))
there.sum(torch.ones(1))
ranks.leave_ranks()
"""


def test_a_launch_inside_of_torchrun_is_one_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What torchrun has said of itself would make rank 0 wait for a store that torchrun keeps elsewhere."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert launch_local(script(tmp_path, JOIN), 2) == 0
    if sys.platform == "linux":
        heard = " ".join((tmp_path / f"heard{rank}").read_text() for rank in range(2)).split()
        assert heard
        assert {address[-8:] for address in heard} == {"0100007F"}, "127.0.0.1: no other machine can call"


def elsewhere() -> str:
    """An address of this machine that is not for itself alone; '' where there is none, or no namespace of our own."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, suppress(OSError):
        asked.connect(("192.0.2.1", 9))  # sends nothing
        found: str = asked.getsockname()[0]
        if shutil.which("unshare") and not subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
            return "" if found.startswith("127.") else found
    return ""


NAMESPACE = ("unshare", "--user", "--map-root-user", "--uts")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ranks_listen_here_alone_wherever_the_name_of_the_host_leads(tmp_path: Path):
    """Gloo would listen there, for everybody: it asks nobody for a secret."""
    if not (address := elsewhere()):
        pytest.skip("no other address, or no namespace in which the host may be named after it")
    command = f"import socket, sys; socket.sethostname({address!r}); from posttrain.cluster.launch import launch_local"
    command += f"; sys.exit(launch_local({script(tmp_path, JOIN)!r}, 2))"
    assert subprocess.run([*NAMESPACE, sys.executable, "-c", command]).returncode == 0
    heard = " ".join((tmp_path / f"heard{rank}").read_text() for rank in range(2)).split()
    assert {address[-8:] for address in heard} == {"0100007F"}, "127.0.0.1"


@pytest.mark.parametrize("stubborn", [False, True], ids=["ends in order", "has to be killed"])
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_an_interrupt_and_a_kill_of_the_launcher_leave_no_rank(tmp_path: Path, stubborn: bool):
    code = "signal.signal(signal.SIGINT, lambda *_: sys.exit(0 if rank else 130))\n"
    code += "(folder / f'set{rank}').touch()\n" + WAIT
    hears = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # not so in a shell's background
    command = f"{hears}; from posttrain.cluster.launch import launch_local; launch_local({script(tmp_path, code)!r}, 2)"
    launcher = subprocess.Popen([sys.executable, "-c", command], stderr=subprocess.PIPE)
    until = time.monotonic() + 120
    while len(list(tmp_path.glob("set*"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(launcher.pid, signal.SIGKILL if stubborn else signal.SIGINT)
    launcher.communicate(timeout=120)
    while left(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    assert left(tmp_path) == []


BUSY = """
def busy(*_):
    (folder / f'heard{rank}').touch()
signal.signal(signal.SIGINT, busy)
(folder / f'set{rank}').touch()
while not (folder / 'heard0').exists():
    time.sleep(0.05)
time.sleep(3 if rank == 0 else 600)  # it writes a checkpoint
while (folder / 'hangs').exists():
    time.sleep(0.05)
(folder / 'written').touch()
sys.exit(130)
"""


@pytest.mark.parametrize("what", ["writes", "is interrupted again", "takes too long"])
def test_rank_0_may_finish_what_it_writes_unless_it_is_interrupted_again_or_takes_too_long(tmp_path: Path, what: str):
    """The others do not hear of it."""
    if what != "writes":
        (tmp_path / "hangs").touch()
    seconds = 5 if what == "takes too long" else 600
    command = f"""
import signal, sys
from posttrain.cluster import launch
signal.signal(signal.SIGINT, signal.default_int_handler)  # not so in a shell's background
assert launch.INTERRUPT_SECONDS == 600
launch.INTERRUPT_SECONDS = {seconds}
sys.exit(launch.launch_local({script(tmp_path, BUSY)!r}, 2))
"""
    launcher = subprocess.Popen([sys.executable, "-c", command])
    until = time.monotonic() + 120
    while len(list(tmp_path.glob("set*"))) < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    launcher.send_signal(signal.SIGINT)
    while not (tmp_path / "heard0").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    if what == "is interrupted again":
        launcher.send_signal(signal.SIGINT)
    assert launcher.wait(120) == 128 + signal.SIGINT
    assert (tmp_path / "written").exists() == (what == "writes")
    assert not (tmp_path / "heard1").exists()
    assert left(tmp_path) == []


SAMPLER = """
import os, signal, sys, time
from pathlib import Path
from posttrain.cluster.launch import die_with_launcher
die_with_launcher()
folder = Path(sys.argv[1])
number, seen = os.environ["POSTTRAIN_SAMPLER"], len(list(folder.glob("began*")))
assert ":" in os.environ["POSTTRAIN_CALLS"] and os.environ["POSTTRAIN_SECRET"] and "RANK" not in os.environ
(folder / f"began{seen}").write_text(f"{number} {os.getpid()}")
"""


def samplers(folder: Path, code: str, **options: int) -> Samplers:
    path = folder / "sampler.py"
    path.write_text(SAMPLER + code)
    return Samplers(count=1, command=[sys.executable, str(path), str(folder)], **options)


def test_a_sampler_that_is_killed_itself_or_on_request_is_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """The first ends by itself, the second is named by rank 0, first with the process id of somebody else."""
    code = """
if rank == 0:
    def came(count):
        while not ((folder / f"began{count}").exists() and (folder / f"began{count}").read_text()):
            time.sleep(0.02)
        return (folder / f"began{count}").read_text().split()
    first, second = came(0), came(1)
    os.write(int(os.environ["POSTTRAIN_KILL_REQUESTS"]), f"sampler 0 {first[1]}\\nsampler 0 {second[1]}\\n".encode())
    came(2)
else:
    while not (folder / "began2").exists():
        time.sleep(0.02)
"""
    dies = "if seen == 0:\n    os.kill(os.getpid(), signal.SIGKILL)" + WAIT
    assert launch_local(script(tmp_path, code), 2, samplers(tmp_path, dies, restarts=2)) == 0
    said = capfd.readouterr().err
    assert [line for line in said.splitlines() if "sampler" in line] == [
        "sampler 0 was killed by SIGKILL; it is started again (1 left)",
        "sampler 0 was killed by SIGKILL; it is started again (0 left)",
    ]
    assert all(not Path(f"/proc/{(tmp_path / f'began{n}').read_text().split()[1]}").exists() for n in range(3))


STEPPING = """
signal.signal(signal.SIGINT, lambda *_: (folder / 'heard').touch())
(folder / "set").touch()
while not ((folder / "heard").exists() and (folder / "began1").exists()):  # the step needs its sampler
    time.sleep(0.02)
(folder / "written").touch()
sys.exit(130)
"""


@pytest.mark.parametrize("restarts", [1, 0])
def test_a_sampler_that_is_killed_after_an_interrupt_is_started_again_for_the_step_in_progress(
    tmp_path: Path, restarts: int
):
    """Where none may be, the step has no end, and nobody waits for it."""
    dies = """
while seen > 0 or not (folder / "heard").exists():
    time.sleep(0.02)
os.kill(os.getpid(), signal.SIGKILL)
"""
    samplers(tmp_path, dies)
    command = f"""
import signal, sys
from posttrain.cluster import launch
from posttrain.cluster.supervisor import Samplers
signal.signal(signal.SIGINT, signal.default_int_handler)  # not so in a shell's background
launch.GRACE_SECONDS = 1.0
program = [sys.executable, {str(tmp_path / "sampler.py")!r}, {str(tmp_path)!r}]
samplers = Samplers(count=1, command=program, restarts={restarts})
sys.exit(launch.launch_local({script(tmp_path, STEPPING)!r}, 1, samplers))
"""
    launcher = subprocess.Popen([sys.executable, "-c", command], stderr=subprocess.PIPE)
    until = time.monotonic() + 120
    while not ((tmp_path / "set").exists() and (tmp_path / "began0").exists()):
        assert time.monotonic() < until
        time.sleep(0.05)
    launcher.send_signal(signal.SIGINT)
    try:
        _, said = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
    assert launcher.returncode == 128 + signal.SIGINT
    assert (tmp_path / "written").exists() == bool(restarts)
    assert (b"it is started again (0 left)" in said) == bool(restarts)
    assert (b"no sampler may be started again" in said) == (not restarts)
    assert left(tmp_path) == []


def test_a_sampler_that_fails_is_not_killed_before_it_has_said_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Its connection breaks first, so rank 0 wants it ended; killed, it would be started again."""
    code = """
while not ((folder / "began0").exists() and (folder / "began0").read_text()):
    time.sleep(0.02)
process = (folder / "began0").read_text().split()[1]
os.write(int(os.environ["POSTTRAIN_KILL_REQUESTS"]), f"sampler 0 {process}\\n".encode())
(folder / "requested").touch()
"""
    fails = (
        "while not (folder / 'requested').exists(): time.sleep(0.02)\ntime.sleep(1)\nraise KeyError('no such layer')"
    )
    assert launch_local(script(tmp_path, code + WAIT), 1, samplers(tmp_path, fails, restarts=9)) == 1
    said = capfd.readouterr().err
    assert "started again" not in said
    assert "sampler 0 failed with exit status 1; it said:" in said
    assert "KeyError: 'no such layer'" in said


def test_a_sampler_that_fails_or_dies_too_often_ends_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    fails = samplers(tmp_path, "raise KeyError('no such layer')", restarts=9)
    assert launch_local(script(tmp_path, WAIT), 2, fails) == 1
    said = capfd.readouterr().err
    assert "sampler 0 failed with exit status 1; it said:" in said
    assert "KeyError: 'no such layer'" in said
    dies = samplers(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", restarts=1)
    assert launch_local(script(tmp_path, WAIT), 1, dies) == 1
    assert "no sampler may be started again (cluster.sampler_restarts)" in capfd.readouterr().err
    assert left(tmp_path) == []
