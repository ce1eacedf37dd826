"""How a program is shut in, step by step, by the means that the machine has.

`namespaces`: a root directory of its own, no network, no other process in sight; then Landlock, the call filter and the
limits of the kernel on top. `landlock`: where namespaces are forbidden (most containers): one process that can open
only Python's files and its folder, and can make no socket, no process and no signal. `none`: limits only.
"""

from __future__ import annotations

import os
import resource
import signal
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.sandbox import kernel, seccomp

NAMESPACES, LANDLOCK, NONE = "namespaces", "landlock", "none"
FOLDER = "/sandbox"  # the program's own, inside its root; /tmp leads there too
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_INSIDE = 1000  # user and group of the program, as it sees them in a user namespace
_FIRST_UID, _UIDS = 1 << 30, 1 << 20  # root gives each run a user of its own, so that its processes are counted alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run: where it happens, what it may read, and its limits. Sizes in bytes."""

    isolation: str
    place: str  # a directory outside, empty; the program's folder where it has no root of its own
    readable: tuple[str, ...]
    import_path: tuple[str, ...]
    as_root: bool
    changes_user: bool  # root gives the program a user of its own
    uid: int
    wall_seconds: float
    cpu_seconds: float
    memory_bytes: int
    disk_bytes: int
    file_bytes: int
    output_bytes: int
    processes: int

    @property
    def on_linux(self) -> bool:
        return sys.platform == "linux"

    @property
    def folder(self) -> str:
        return FOLDER if self.isolation == NAMESPACES else self.place


def plan_of(request: Mapping[str, Any], place: str) -> Plan:
    """The plan for a request; which user the program gets depends on who we are."""
    as_root = os.geteuid() == 0
    isolation, readable = request["isolation"], tuple(request["readable"])
    changes_user = as_root and (isolation == NAMESPACES or (isolation == LANDLOCK and _readable_by_all(readable)))
    names = "wall_seconds cpu_seconds memory_bytes disk_bytes file_bytes output_bytes processes"
    return Plan(
        isolation=isolation,
        place=place,
        readable=readable,
        import_path=tuple(request["import_path"]),
        as_root=as_root,
        changes_user=changes_user,
        uid=_FIRST_UID + os.getpid() % _UIDS if changes_user else os.getuid(),
        **{name: request[name] for name in names.split()},
    )


def leave_namespaces(plan: Plan) -> None:
    """The monitor's part: its next child begins new namespaces. An ordinary user needs one of users for that."""
    if plan.isolation != NAMESPACES:
        return
    spaces = kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(spaces if plan.as_root else spaces | kernel.CLONE_NEWUSER)
    if not plan.as_root:
        kernel.map_ids(0, uid, gid)


def build_root(plan: Plan, request: Mapping[str, Any]) -> None:
    """init's part: the root directory, the folder with the given files, and no rights over them."""
    proc = None
    if plan.isolation == NAMESPACES:
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWCGROUP)
        proc = os.open("/proc/self", os.O_PATH)  # the new root has none
        _new_root(plan)
    os.chdir(plan.folder)
    for name, text in request["files"].items():
        _write_file(name, text)
    if plan.changes_user:
        _hand_over(plan)
    if proc is not None:
        _drop_rights(plan, proc)
        os.close(proc)


def confine_program(plan: Plan) -> None:
    """The program's part, in an order in which each step still may do what it must."""
    if plan.isolation == LANDLOCK:
        _drop_rights(plan)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    _set_limits(plan)
    if plan.isolation == NONE:
        return
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if kernel.landlock_version():
        readable = ("/",) if plan.isolation == NAMESPACES else (*plan.readable, *_DEVICES)
        kernel.landlock(readable, (plan.folder, "/dev/null"))
    elif plan.isolation == LANDLOCK:
        raise OSError("this kernel has no Landlock")
    seccomp.install(namespaces=plan.isolation == NAMESPACES)


def _new_root(plan: Plan) -> None:
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    root = plan.place
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID, "size=1m,nr_inodes=2k,mode=755")
    for path in sorted(plan.readable):  # what lies in another one is seen already
        _show(path, root + path)
    for path in _DEVICES:
        if os.path.exists(path):
            _show(path, root + path, read_only=False)
    _make_folder(root + "/etc")
    uid = plan.uid if plan.changes_user else _INSIDE
    _write_file(f"{root}/etc/passwd", f"sandbox:x:{uid}:{uid}::{FOLDER}:/bin/false\n")
    _make_folder(root + FOLDER)
    options = f"size={plan.disk_bytes},nr_inodes={max(64, plan.disk_bytes >> 12)},mode=700"
    if not os.path.lexists(root + "/tmp"):  # it exists where something in it is readable
        os.symlink(FOLDER, root + "/tmp")
    kernel.mount("tmpfs", root + FOLDER, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC, options)
    kernel.enter_root(root)
    kernel.mount("none", "/", None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID)


def _show(path: str, target: str, *, read_only: bool = True) -> None:
    """The same path inside; a symbolic link stays one (`/lib` is one to `usr/lib` on most systems)."""
    if os.path.lexists(target) or not os.path.exists(path):
        return
    _make_folder(os.path.dirname(target))
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.bind(path, target, read_only=read_only)


def _make_folder(path: str) -> None:
    os.makedirs(path, mode=0o755, exist_ok=True)


def _write_file(name: str, text: str) -> None:
    if os.path.dirname(name):
        _make_folder(os.path.dirname(name))
    with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)


def _hand_over(plan: Plan) -> None:
    """Root made the files; they become those of the program's user."""
    os.chown(".", plan.uid, plan.uid)
    for folder, folders, files in os.walk("."):
        for name in folders + files:
            os.chown(os.path.join(folder, name), plan.uid, plan.uid)


def _drop_rights(plan: Plan, proc: int | None = None) -> None:
    """Another user where we are root, no capabilities, no way back."""
    if plan.changes_user:
        os.setgroups([])
        os.setresgid(plan.uid, plan.uid, plan.uid)
        os.setresuid(plan.uid, plan.uid, plan.uid)
    elif proc is not None:
        kernel.unshare(kernel.CLONE_NEWUSER)  # a second time: the program shall not see itself as root
        kernel.map_ids(_INSIDE, 0, 0, proc=proc)
    kernel.drop_capabilities()


def _readable_by_all(paths: tuple[str, ...]) -> bool:
    """Whether any user reaches these directories (Python may lie in root's home)."""
    for path in filter(os.path.isdir, paths):
        place = os.path.realpath(path)
        while True:
            if not os.stat(place).st_mode & stat.S_IXOTH:
                return False
            if place == "/":
                break
            place = os.path.dirname(place)
    return True


def _set_limits(plan: Plan) -> None:
    cpu = max(1, int(plan.cpu_seconds + 0.999))
    _limit(resource.RLIMIT_CPU, cpu, cpu + 1)
    _limit(resource.RLIMIT_CORE, 0, 0)
    _limit(resource.RLIMIT_FSIZE, plan.file_bytes, plan.file_bytes)
    _limit(resource.RLIMIT_NOFILE, 64, 64)
    if sys.platform == "linux":  # elsewhere they count something else, or nothing
        _limit(resource.RLIMIT_AS, plan.memory_bytes, plan.memory_bytes)
        _limit(resource.RLIMIT_MEMLOCK, 0, 0)
    if plan.isolation == NAMESPACES:  # else it would count all processes of the user
        _limit(resource.RLIMIT_NPROC, plan.processes + 1, plan.processes + 1)  # init is one of them


def _limit(which: int, soft: int, hard: int) -> None:
    _, allowed = resource.getrlimit(which)
    if allowed != resource.RLIM_INFINITY:
        soft, hard = min(soft, allowed), min(hard, allowed)
    resource.setrlimit(which, (soft, hard))
