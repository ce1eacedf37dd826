"""Code that tries to get out. Each attack prints what it got; the test says what it must not have got."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sandbox.ways import WAYS

from posttrain.sandbox import Sandbox, SandboxError, SandboxLimits, SandboxResult

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="isolation needs Linux")
SMALL = SandboxLimits(wall_seconds=5.0, memory_bytes=256 << 20, disk_bytes=8 << 20, file_bytes=4 << 20, processes=8)
FOLDERS = "posttrain-sandbox-*"
SECRET = "hush-hush-hush"
TRY = """
def attempt(name, call):
    try:
        print(name, 'GOT', repr(call())[:300])
    except BaseException as error:
        print(name, 'refused', type(error).__name__, getattr(error, 'errno', None))
"""


IGNORE_ALL = """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: time.sleep(1)
"""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the sandbox puts the folders of programs, which may be of another user than we are."""
    tmp_path_factory.getbasetemp()  # made now, where it belongs
    kept, tempfile.tempdir = tempfile.tempdir, None
    folder = tempfile.mkdtemp(prefix="posttrain-test-")
    os.chmod(folder, 0o711)
    tempfile.tempdir = folder
    yield Path(folder)
    tempfile.tempdir = kept
    assert list(Path(folder).glob(FOLDERS)) == []
    shutil.rmtree(folder)


@pytest.fixture(params=WAYS, scope="module")
def box(request: pytest.FixtureRequest, scratch: Path) -> Iterator[Sandbox]:
    os.environ["SOME_API_KEY"] = SECRET
    sandbox = Sandbox(SMALL, isolation=request.param)
    yield sandbox
    sandbox.close()
    del os.environ["SOME_API_KEY"]


def attack(box: Sandbox, code: str, **options: object) -> SandboxResult:
    return box.run_blocking(TRY + code, **options)  # type: ignore[arg-type]


def assert_refused(result: SandboxResult) -> None:
    assert result.exit_code == 0, result
    assert "GOT" not in result.stdout, result.stdout
    assert "refused" in result.stdout


def test_no_socket_reaches_anybody(box: Sandbox):
    """A real server on this machine, reached from here and not from inside."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        result = attack(
            box,
            f"""
import socket, urllib.request, ctypes
attempt('tcp', lambda: socket.create_connection(('127.0.0.1', {port}), timeout=1))
attempt('udp', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53)))
attempt('v6', lambda: socket.create_connection(('::1', {port}), timeout=1))
attempt('dns', lambda: socket.getaddrinfo('example.org', 80))
attempt('http', lambda: urllib.request.urlopen('http://127.0.0.1:{port}/', timeout=1).read())
attempt('raw', lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt('netlink', lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))
attempt('packet', lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attempt('vsock', lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).connect((2, 1)))
attempt('alg', lambda: socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET))
libc = ctypes.CDLL(None, use_errno=True)
def libc_socket(family):
    number = libc.socket(family, 1, 0)
    if number < 0: raise OSError(ctypes.get_errno(), '')
    return number
attempt('libc', lambda: libc_socket(2))
""",
        )
    assert_refused(result)


def test_unix_sockets_of_this_machine_are_out_of_reach(box: Sandbox, tmp_path: Path):
    """A named one and an abstract one, such as desktops and container engines listen on."""
    path = f"/tmp/posttrain-test-{os.getpid()}.sock"
    with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as abstract:
        named.bind(path)
        os.chmod(path, 0o777)
        named.listen()
        abstract.bind(f"\0posttrain-test-{os.getpid()}")
        abstract.listen()
        result = attack(
            box,
            f"""
import socket
def connect(address):
    s = socket.socket(socket.AF_UNIX)
    s.connect(address)
    return s
attempt('named', lambda: connect({path!r}))
attempt('abstract', lambda: connect({chr(0) + path[5:-5]!r}))
""",
        )
    os.unlink(path)
    assert_refused(result)


def test_files_of_this_machine_cannot_be_read(box: Sandbox, tmp_path: Path):
    tmp_path.chmod(0o755)
    secret = tmp_path / "secret.txt"
    secret.write_text(SECRET)
    secret.chmod(0o644)
    result = attack(
        box,
        f"""
import os, glob, ctypes
own = ({str(Path.home() / ".bashrc")!r}, {str(secret)!r}, {__file__!r}, '/proc/{os.getpid()}/environ')
for path in (*own, '/etc/shadow', '/etc/hostname', '/proc/1/environ', '/proc/self/environ', '/proc/self/mem',
             '/sys/kernel/notes', '/dev/mem', '/dev/vda', '/dev/kmsg', '/dev/tty', '/var/log/dpkg.log'):
    attempt(path, lambda: open(path, 'rb').read(100))
    attempt(path, lambda: os.open(path, os.O_RDONLY))
attempt('list /home', lambda: os.listdir('/home'))
attempt('list /proc', lambda: os.listdir('/proc'))
attempt('list', lambda: os.listdir({str(tmp_path)!r}))
attempt('handle', lambda: None if ctypes.CDLL(None).open_by_handle_at(-100, None, 0) >= 0 else 1 / 0)
""",
    )
    assert_refused(result)
    assert SECRET not in result.stdout


def test_the_environment_holds_no_secret(box: Sandbox):
    """Neither the variables nor the memory of the process, which is read in full."""
    code = """
import os, gc, ctypes
print(sorted(os.environ))
word = '-'.join(['hush'] * 3)
print([a for o in gc.get_objects() if isinstance(o, (dict, list)) for a in map(repr, list(o)) if word in a][:1])
n = ctypes.c_void_p.in_dll(ctypes.CDLL(None), 'environ')
block = ctypes.cast(n, ctypes.POINTER(ctypes.c_char_p))
i = 0
while block[i]:
    print(block[i]); i += 1
"""
    result = box.run_blocking(code)
    assert result.ok, result
    assert SECRET not in result.stdout
    assert "API_KEY" not in result.stdout


def test_nothing_outside_can_be_written(box: Sandbox, tmp_path: Path):
    tmp_path.chmod(0o777)
    victim = tmp_path / "victim.txt"
    victim.write_text("before")
    victim.chmod(0o666)
    result = attack(
        box,
        f"""
import os, sys, sysconfig
stdlib = os.path.dirname(os.__file__)
for path in ('/evil', '/etc/evil', '/usr/lib/evil', stdlib + '/evil.py', {str(tmp_path / "evil")!r},
             {str(victim)!r}, stdlib + '/os.py', '/dev/evil'):
    attempt(path, lambda: open(path, 'w'))
    attempt(path, lambda: open(path, 'a'))
    attempt(path, lambda: os.open(path, os.O_RDONLY | os.O_TRUNC))
    attempt(path, lambda: os.truncate(path, 0))
    attempt(path, lambda: os.mkdir(path + 'd'))
for path in ({str(victim)!r}, stdlib + '/os.py'):
    attempt(path, lambda: os.unlink(path))
    attempt(path, lambda: os.rename(path, path + '2'))
    attempt(path, lambda: os.chmod(path, 0o777))
    attempt(path, lambda: os.utime(path))
    attempt(path, lambda: os.link(path, 'link'))
    attempt(path, lambda: os.setxattr(path, 'user.x', b'1'))
attempt('mknod', lambda: os.mknod('disk', 0o60600, os.makedev(254, 0)))
""",
    )
    assert_refused(result)
    assert victim.read_text() == "before"
    assert victim.stat().st_mode & 0o777 == 0o666
    assert sorted(path.name for path in tmp_path.iterdir()) == ["victim.txt"]


def test_symbolic_links_lead_nowhere(box: Sandbox, tmp_path: Path):
    tmp_path.chmod(0o755)
    (tmp_path / "secret.txt").write_text(SECRET)
    (tmp_path / "secret.txt").chmod(0o644)
    result = attack(
        box,
        f"""
import os
os.symlink({str(tmp_path)!r}, 'out')
os.symlink('/', 'root')
os.symlink('/proc/self/cwd/../../..', 'up')
attempt('link', lambda: open('out/secret.txt').read())
attempt('root', lambda: open('root' + {str(tmp_path / "secret.txt")!r}).read())
attempt('up', lambda: open('up/etc/shadow').read())
attempt('dots', lambda: open('../' * 30 + {str(tmp_path / "secret.txt")[1:]!r}).read())
os.symlink('/etc/shadow', 'main.txt')
attempt('write', lambda: open('main.txt', 'w'))
""",
    )
    assert_refused(result)


def test_other_processes_cannot_be_seen_or_signalled(box: Sandbox):
    """Even one of the same user: a child of this test, as long as we are no other user."""
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        result = attack(
            box,
            f"""
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
def checked(result):
    if result < 0: raise OSError(ctypes.get_errno(), '')
    return result
attempt('kill', lambda: os.kill({sleeper.pid}, signal.SIGKILL))
attempt('parent', lambda: os.kill({os.getpid()}, 0))
attempt('group', lambda: os.killpg({os.getpgid(0)}, 0))
attempt('ptrace', lambda: checked(libc.ptrace(16, {sleeper.pid}, 0, 0)))
attempt('tgkill', lambda: checked(libc.syscall(234, {sleeper.pid}, {sleeper.pid}, 9)))
attempt('pidfd', lambda: os.pidfd_open({sleeper.pid}))
attempt('priority', lambda: os.setpriority(os.PRIO_PROCESS, {sleeper.pid}, 10))
attempt('read', lambda: checked(libc.process_vm_readv({sleeper.pid}, None, 0, None, 0, 0)))
attempt('limits', lambda: __import__('resource').prlimit({sleeper.pid}, 7))
""",
        )
        assert_refused(result)
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


def test_every_process_outside_outlives_kill_all(box: Sandbox):
    """kill(-1) reaches what the namespace holds, and nothing outside."""
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        box.run_blocking("import os, signal\nos.kill(-1, signal.SIGKILL)")
        assert sleeper.poll() is None
        assert box.run_blocking("print('still')").stdout == "still\n"
    finally:
        sleeper.kill()
        sleeper.wait()


def test_no_way_to_more_rights(box: Sandbox):
    result = attack(
        box,
        """
import ctypes, os, subprocess
libc = ctypes.CDLL(None, use_errno=True)
def checked(result):
    if result < 0: raise OSError(ctypes.get_errno(), '')
    return result
attempt('setuid', lambda: os.setuid(0) if os.getuid() else 1 / 0)
attempt('unshare', lambda: checked(libc.unshare(0x10000000)))
attempt('mount', lambda: checked(libc.mount(b'tmpfs', b'.', b'tmpfs', 0, None)))
attempt('chroot', lambda: os.chroot('.'))
attempt('clone', lambda: checked(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)))
attempt('clone3', lambda: checked(libc.syscall(435, ctypes.create_string_buffer(88), 88)))
attempt('bpf', lambda: checked(libc.syscall(321, 0, 0, 0)))
attempt('io_uring', lambda: checked(libc.syscall(425, 1, ctypes.create_string_buffer(120))))
attempt('keyctl', lambda: checked(libc.syscall(250, 0, 0)))
attempt('memfd', lambda: os.memfd_create('x'))
attempt('unknown', lambda: checked(libc.syscall(500, 0)))
attempt('exec', lambda: os.execv('/bin/sh', ['sh', '-c', 'id']))
attempt('program', lambda: subprocess.run(['/bin/sh', '-c', 'id'], check=True))
attempt('shell', lambda: 1 / 0 if os.system('id') else 'ran')
attempt('sudo', lambda: subprocess.run(['sudo', 'id'], check=True))
attempt('raise limit', lambda: __import__('resource').setrlimit(9, (-1, -1)))
""",
    )
    assert_refused(result)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the other modes of x86-64")
def test_calls_of_another_machine_mode_end_the_program(box: Sandbox):
    result = box.run_blocking("import ctypes\nctypes.CDLL(None).syscall(0x40000000 + 39)")
    assert result.exit_code == -31, result  # SIGSYS


def test_the_program_is_no_root(box: Sandbox):
    result = box.run_blocking("import os; print(os.getuid(), os.geteuid(), os.getgroups())")
    uid, euid, *_ = result.stdout.split()
    assert uid == euid
    if box.isolation == "namespaces":
        assert uid != "0"


@pytest.mark.alone
@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ("wall", "import time\ntime.sleep(60)"),
        ("wall", IGNORE_ALL),
        ("output", "while 1: print('x' * 1000)"),
        ("output", "import os\nwhile 1: os.write(2, b'x' * 100000)"),
    ],
    ids=["sleep", "signals ignored", "stdout", "stderr"],
)
def test_what_goes_on_for_ever_is_ended(box: Sandbox, limit: str, code: str):
    result = box.run_blocking(code, timeout_s=0.8)
    assert (result.limit, result.exit_code) == (limit, None), result
    assert len(result.stdout) + len(result.stderr) <= SMALL.output_bytes + 1
    assert result.seconds < 4


def test_an_endless_loop_uses_up_its_cpu_time():
    box = Sandbox(SandboxLimits(wall_seconds=20, cpu_seconds=1))
    codes = ("while True: pass", "import signal\nsignal.signal(24, signal.SIG_IGN)\nwhile True: pass")

    async def both() -> list[SandboxResult]:
        return await asyncio.gather(*map(box.run, codes))

    for result in asyncio.run(both()):
        assert (result.limit, result.exit_code) == ("cpu", None), result
    box.close()


def test_code_that_holds_the_interpreter_is_ended(box: Sandbox):
    assert box.run_blocking("9**9**9**9", timeout_s=0.8).limit == "wall"


def test_a_memory_bomb_meets_its_limit(box: Sandbox):
    result = box.run_blocking("x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert result.limit == "memory", result
    assert box.run_blocking("try: bytearray(1 << 40)\nexcept MemoryError: print('none')").stdout == "none\n"


def test_a_memory_bomb_of_many_processes(box: Sandbox):
    code = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        x = b'x' * (120 << 20)
        time.sleep(30)
time.sleep(30)
"""
    result = box.run_blocking(code)
    if box.isolation == "namespaces":
        assert (result.limit, result.exit_code) == ("memory", None), result
    else:
        assert "fork" in result.stderr or "PermissionError" in result.stderr


def test_a_fork_bomb_is_held_and_gone(box: Sandbox):
    code = "import os, time\nwhile True:\n  try: os.fork()\n  except OSError: time.sleep(0.01)"
    before = count_processes()
    result = box.run_blocking(code, timeout_s=1.0)
    assert result.limit in ("wall", "cpu"), result
    assert settles_at(before)
    assert box.run_blocking("print(1)").ok


def test_threads_are_counted_too(box: Sandbox):
    code = """
import threading, time
started = 0
try:
    for _ in range(1000):
        threading.Thread(target=time.sleep, args=(20,), daemon=True).start(); started += 1
except RuntimeError: pass
import os
print(started, flush=True)
os._exit(0)
"""
    started = int(box.run_blocking(code).stdout)
    assert started < (SMALL.processes if box.isolation == "namespaces" else 200)


@pytest.mark.alone
def test_daemons_die_with_the_run(box: Sandbox, tmp_path: Path):
    """A grandchild in a session of its own, with closed files, as daemons are made."""
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for n in range(3): os.close(n)
        time.sleep(300)
    os._exit(0)
print('gone')
"""
    before = count_processes()
    started = time.monotonic()
    result = box.run_blocking(code)
    assert time.monotonic() - started < 4, "the answer does not wait for the daemon"
    if box.isolation == "namespaces":
        assert result.stdout == "gone\n", result
    assert settles_at(before)


def test_a_huge_file_and_too_many_files(box: Sandbox):
    result = attack(
        box,
        """
import os
attempt('one file', lambda: open('big', 'wb').write(b'x' * (6 << 20)))
os.path.exists('big') and os.unlink('big')
def many():
    for i in range(100_000):
        with open(f'f{i}', 'wb') as f: f.write(b'x' * (1 << 20))
many()
""",
    )
    assert "GOT" not in result.stdout
    assert "No space left" in result.stderr or result.limit == "disk", result


DEEP = """
import os
try:
    for _ in range(3000):
        os.mkdir('d'); os.chdir('d')
except OSError: pass
open('bottom', 'w').write('x')
"""
CLOSED = """
import os
os.mkdir('closed', 0o300); os.mkdir('closed/none', 0o000)
with open('closed/big', 'wb') as f: f.write(b'x' * 1000)
print('made')
"""
MANY = """
import time
try:
    for i in range(100_000): open(f'f{i}', 'w').close()
except OSError: pass
"""


@pytest.mark.parametrize("code", [DEEP, CLOSED, MANY], ids=["deeper than paths reach", "closed", "many empty files"])
def test_odd_folders_break_nothing_and_are_removed(box: Sandbox, scratch: Path, code: str):
    result = box.run_blocking(code)
    assert result.limit in (None, "disk", "wall"), result
    assert left_behind(scratch) == []
    assert box.run_blocking("import os; print(os.listdir('.'))").stdout == "[]\n"


def test_nothing_remains_of_a_run_that_is_given_up(scratch: Path):
    before = set(scratch.glob(FOLDERS))
    box = Sandbox(SMALL, isolation=WAYS[-1])
    code = "open('left', 'w').write('x' * 1000)\nimport time\ntime.sleep(60)"
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(box.run(code), 0.7))
    box.close()
    assert set(scratch.glob(FOLDERS)) == before


def test_nothing_remains_when_we_are_killed(scratch: Path):
    before = set(scratch.glob(FOLDERS))
    program = f"""
import os, signal, tempfile
tempfile.tempdir = {str(scratch)!r}
from posttrain.sandbox import Sandbox
box = Sandbox(isolation={WAYS[-1]!r})
print(box.run_blocking("print(1)").stdout, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("1", -9), done.stderr
    ends = time.monotonic() + 5.0
    while set(scratch.glob(FOLDERS)) != before and time.monotonic() < ends:
        time.sleep(0.02)
    assert set(scratch.glob(FOLDERS)) == before


def left_behind(scratch: Path) -> list[Path]:
    """What launchers keep in their folders."""
    return [path for folder in scratch.glob(FOLDERS) for path in folder.iterdir()]


def test_nothing_remains_for_the_next_run(box: Sandbox):
    box.run_blocking("open('left.txt', 'w').write('x'); import os; os.environ['A'] = 'b'; import json; json.evil = 1")
    code = "import os, json; print(os.listdir('.'), os.environ.get('A'), hasattr(json, 'evil'))"
    assert box.run_blocking(code).stdout == "[] None False\n"


def test_two_runs_do_not_see_each_other(box: Sandbox):
    """The one looks for the file and the process of the other while it runs."""
    results: list[SandboxResult] = []
    first = threading.Thread(
        target=lambda: results.append(box.run_blocking("open('mine', 'w').write('x'); import time; time.sleep(1)"))
    )
    first.start()
    time.sleep(0.3)
    code = "import os, glob\nprint(glob.glob('/tmp/**/mine', recursive=True))\n"
    assert box.run_blocking(code).stdout == "[]\n"
    first.join()
    assert results[0].ok


def test_no_folder_and_no_mount_is_left(box: Sandbox, scratch: Path):
    box.run_blocking("open('x', 'w').write('x' * 1000)")
    assert left_behind(scratch) == []
    assert "posttrain-sandbox" not in Path("/proc/mounts").read_text()


def count_processes() -> int:
    """Of ours: forks keep the command line of their launcher, which names this process."""
    mark, count = f"# for {os.getpid()}".encode(), 0
    for entry in Path("/proc").iterdir():
        try:
            count += entry.name.isdigit() and mark in (entry / "cmdline").read_bytes()
        except OSError:
            continue
    return count


def settles_at(count: int) -> bool:
    """The monitor of a run ends just after its answer."""
    ends = time.monotonic() + 2.0
    while count_processes() > count and time.monotonic() < ends:
        time.sleep(0.01)
    return count_processes() <= count


def test_closing_kills_what_runs():
    box = Sandbox(SMALL, isolation=WAYS[0])
    seen: list[BaseException | SandboxResult] = []

    def run() -> None:
        try:
            seen.append(box.run_blocking("import time; time.sleep(60)", timeout_s=60.0))
        except SandboxError as error:
            seen.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.5)
    box.close()
    thread.join(5.0)
    assert isinstance(seen[0], SandboxError)
