"""What Linux offers for isolation and Python's library does not: namespaces, mounts, capabilities, Landlock.

Standard library only. Every function raises OSError with the name of the call that failed.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Sequence

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x20000, 0x2000000, 0x4000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_NOATIME = 1, 2, 4, 8, 32, 1024
MS_NODIRATIME, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 2048, 4096, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 24, 38, 36
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63
_SYSCALLS = {  # name -> number on x86_64, aarch64
    "pivot_root": (155, 41),
    "capset": (126, 91),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
MACHINES = ("x86_64", "aarch64")

# Landlock: https://docs.kernel.org/userspace-api/landlock.html
_FS_EXECUTE, _FS_WRITE_FILE, _FS_READ_FILE, _FS_READ_DIR = 1, 2, 4, 8
_FS_TRUNCATE, _FS_IOCTL_DEV = 1 << 14, 1 << 15
_FS_ALL = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_FS_READ = _FS_EXECUTE | _FS_READ_FILE | _FS_READ_DIR
_FS_OF_FILES = _FS_EXECUTE | _FS_WRITE_FILE | _FS_READ_FILE | _FS_TRUNCATE | _FS_IOCTL_DEV
_NET_TCP = 3  # bind and connect, from ABI 4
_SCOPES = 3  # abstract unix sockets and signals, from ABI 6
_RULE_PATH_BENEATH = 1

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    done = _libc.mount(source.encode(), target.encode(), _text(kind), ctypes.c_ulong(flags), _text(options or None))
    _check(done, f"mount {target}")


def bind(source: str, target: str, *, read_only: bool = True) -> None:
    """Shows `source` at `target`, which must exist; without set-user-id programs, and read-only unless told otherwise.

    Devices keep working only where `read_only` is False.
    """
    try:
        mount(source, target, None, MS_BIND)
    except OSError:
        mount(source, target, None, MS_BIND | MS_REC)  # what lies below is locked to it in a user namespace
    if read_only:
        mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | _locked_flags(target))


def _locked_flags(target: str) -> int:
    """Flags that a user namespace must not take off a mount."""
    found = os.statvfs(target).f_flag
    kept = found & (MS_NOEXEC | MS_NOATIME | MS_NODIRATIME)
    return kept | (MS_RELATIME if found & 4096 else 0)


def enter_root(path: str) -> None:
    """Makes `path`, a mount point, the root; nothing of the old one stays reachable."""
    os.chdir(path)
    _check(_syscall("pivot_root", b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")


def prctl(option: int, value: int = 0) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def drop_capabilities() -> None:
    """From the process, for good, and from whatever it could start."""
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # none of that number, or we had no right to it anyway
            continue
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _check(_syscall("capset", header, bytes(24)), "capset")


def map_ids(inside: int, uid: int, gid: int, *, proc: int | None = None) -> None:
    """In a new user namespace: user and group `inside` are uid and gid of the one around it.

    proc: an open /proc/self, where that cannot be reached by its name any more.
    """
    own = os.open("/proc/self", os.O_PATH) if proc is None else proc
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {uid} 1"), ("gid_map", f"{inside} {gid} 1")):
        place = os.open(name, os.O_WRONLY, dir_fd=own)
        try:
            os.write(place, text.encode())
        finally:
            os.close(place)
    if proc is None:
        os.close(own)


def landlock_version() -> int:
    """The kernel's Landlock ABI; 0 when it has none."""
    if platform.machine() not in MACHINES:
        return 0
    return max(0, _syscall("landlock_create_ruleset", None, 0, 1))


def landlock(readable: Sequence[str], writable: Sequence[str]) -> None:
    """From now on only these files and directories can be opened; no TCP; no signal to anybody outside.

    Paths that do not exist are left out. Needs no_new_privs. What the kernel's version does not know is not limited:
    see `landlock_version`.
    """
    version = landlock_version()
    handled = _FS_ALL[min(version, 5)]
    net, scopes = (_NET_TCP if version >= 4 else 0), (_SCOPES if version >= 6 else 0)
    attributes = struct.pack("QQQ", handled, net, scopes)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    rules = _syscall("landlock_create_ruleset", attributes, len(attributes), 0)
    _check(rules, "landlock_create_ruleset")
    for paths, rights in ((readable, _FS_READ & handled), (writable, handled & ~_FS_EXECUTE)):
        for path in paths:
            if os.path.exists(path):
                _allow_beneath(rules, path, rights)
    _check(_syscall("landlock_restrict_self", rules, 0), "landlock_restrict_self")
    os.close(rules)


def _allow_beneath(rules: int, path: str, rights: int) -> None:
    directory = os.path.isdir(path)
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights if directory else rights & _FS_OF_FILES, place)
        _check(_syscall("landlock_add_rule", rules, _RULE_PATH_BENEATH, rule, 0), f"landlock_add_rule {path}")
    finally:
        os.close(place)


def _syscall(name: str, *arguments: object) -> int:
    number = _SYSCALLS[name][MACHINES.index(platform.machine())]
    given = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _libc.syscall(ctypes.c_long(number), *given)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _text(value: str | None) -> bytes | None:
    return None if value is None else value.encode()
