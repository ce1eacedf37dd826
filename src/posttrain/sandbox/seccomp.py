"""A system-call filter: what foreign code may never ask of the kernel, whatever user it runs as.

The filter is a program for the kernel's packet-filter machine (BPF), written out here; no library is needed. A refused
call fails with EPERM; one that is unknown to us, because the kernel is newer, with ENOSYS. Calls of another mode of the
machine (32 bit, x32), whose numbers mean something else, end the process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD, _EQUAL, _AT_LEAST, _MASK, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # absolute words, immediate operands
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in the kernel's struct seccomp_data
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_FIRST_UNKNOWN = 468
_AF_UNIX = 1
_CLONE_THREAD = 0x10000
_NEW_NAMESPACES = 0x7E020080  # every CLONE_NEW* flag

# name -> number on (x86_64, aarch64); -1 = the machine has no such call
_ALWAYS = {
    # other programs
    "execve": (59, 221),
    "execveat": (322, 281),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # namespaces, mounts, roots
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    # memory and queues that no limit of a process counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semctl": (66, 191),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "mq_notify": (244, 184),
    # large or privileged parts of the kernel that no such code needs
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "personality": (135, 92),
    "modify_ldt": (154, -1),
    "vmsplice": (278, 75),
    "syslog": (103, 116),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "lookup_dcookie": (212, 18),
    "uselib": (134, -1),
    "ustat": (136, -1),
    "sysfs": (139, -1),
    "vhangup": (153, 58),
    "seccomp": (317, 277),
}
# where there are no namespaces, also what Landlock leaves open: other processes, metadata of files, all sockets
_WITHOUT_NAMESPACES = {
    "socket": (41, 198),
    "fork": (57, -1),
    "vfork": (58, -1),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "sched_setaffinity": (203, 122),
    "truncate": (76, 45),
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, -1),
    "fchown": (93, 55),
    "lchown": (94, -1),
    "fchownat": (260, 54),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
}
# refused as if the kernel did not know them, so that libraries fall back on the calls that can be looked into
_UNKNOWN = {"clone3": (435, 435), "openat2": (437, 437)}
_CLONE, _SOCKET, _PRCTL, _IOCTL, _FCNTL = (56, 220), (41, 198), (157, 167), (16, 29), (72, 25)
_KILL_CALL, _TGKILL, _PRLIMIT, _OPEN, _OPENAT = (62, 129), (234, 131), (302, 261), (2, -1), (257, 56)
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_OWNER_OF_SIGNALS = (0x8901, 0x8902)  # FIOSETOWN, SIOCSPGRP
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15
_O_TRUNC_ONLY, _O_TRUNC_OR_WRITE = 0o1000, 0o1003


@dataclass(frozen=True, slots=True)
class Rule:
    """Refuses a call when (argument & mask) is, or with `unless` is not, `value`. No argument: always."""

    call: tuple[int, int]
    argument: int | None = None
    value: int = 0
    mask: int = 0xFFFFFFFF
    unless: bool = False
    error: int = errno.EPERM


def rules(*, namespaces: bool, pid: int) -> list[Rule]:
    """What is refused. `pid`: the only process; without namespaces it may start no other one, and signal none."""
    found = [Rule(call) for call in _ALWAYS.values()]
    found += [Rule(call, error=errno.ENOSYS) for call in _UNKNOWN.values()]
    found += [Rule(_IOCTL, 1, request) for request in _TERMINAL_INPUT]
    if namespaces:
        found.append(Rule(_SOCKET, 0, _AF_UNIX, unless=True, error=errno.EACCES))
        found += [Rule(_CLONE, 0, bit, mask=bit) for bit in _bits(_NEW_NAMESPACES)]
        return found
    found += [Rule(call) for call in _WITHOUT_NAMESPACES.values()]
    found.append(Rule(_CLONE, 0, _CLONE_THREAD, mask=_CLONE_THREAD, unless=True))
    found += [Rule(call, 0, pid, unless=True) for call in (_KILL_CALL, _TGKILL)]
    found.append(Rule(_PRLIMIT, 0, 0, unless=True))
    found.append(Rule(_PRCTL, 0, 1))  # it must end with its parent
    found += [Rule(_IOCTL, 1, request) for request in _OWNER_OF_SIGNALS]
    found += [Rule(_FCNTL, 1, command) for command in (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX)]
    found += [Rule(_OPEN, 1, _O_TRUNC_ONLY, _O_TRUNC_OR_WRITE), Rule(_OPENAT, 2, _O_TRUNC_ONLY, _O_TRUNC_OR_WRITE)]
    return found


def install(*, namespaces: bool) -> None:
    """Filters this thread's calls from now on, and those of all that it starts. Needs no_new_privs."""
    program = b"".join(compile_filter(rules(namespaces=namespaces, pid=os.getpid())))
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    holder = ctypes.create_string_buffer(head, len(head))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.c_void_p(ctypes.addressof(holder)), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")


def compile_filter(refused: Sequence[Rule]) -> Iterator[bytes]:
    """The instructions, 8 bytes each."""
    machine = platform.machine()
    column = ("x86_64", "aarch64").index(machine)
    yield _step(_LOAD, _ARCHITECTURE)
    yield _step(_EQUAL, _AUDIT[machine], yes=1)
    yield _step(_RETURN, _KILL)
    yield _step(_LOAD, _NUMBER)
    yield _step(_AT_LEAST, _X32_BIT, no=1)
    yield _step(_RETURN, _KILL)
    yield _step(_AT_LEAST, _FIRST_UNKNOWN, no=1)
    yield _step(_RETURN, _REFUSE | errno.ENOSYS)
    for rule in refused:
        if rule.call[column] >= 0:
            yield from _compiled(rule, rule.call[column])
    yield _step(_RETURN, _ALLOW)


def _compiled(rule: Rule, number: int) -> Iterator[bytes]:
    refuse = _step(_RETURN, _REFUSE | rule.error)
    if rule.argument is None:
        yield from (_step(_EQUAL, number, no=1), refuse)
        return
    yield _step(_EQUAL, number, no=5)
    yield _step(_LOAD, _ARGUMENTS + 8 * rule.argument)  # the low half: all our arguments are ints
    yield _step(_MASK, rule.mask)
    yield _step(_EQUAL, rule.value, yes=int(rule.unless), no=int(not rule.unless))
    yield refuse
    yield _step(_LOAD, _NUMBER)


def _step(code: int, operand: int, *, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("<HBBI", code, yes, no, operand)


def _bits(mask: int) -> list[int]:
    return [1 << i for i in range(32) if mask >> i & 1]
