"""The folder of a program that has no file system of its own: how full it is, and how it is removed.

A program may fill it with directories a hundred thousand deep, which no path reaches and no recursion survives, and
close them to itself and to us.
"""

from __future__ import annotations

import os
import secrets

_MOST_ENTRIES = 20_000  # a million empty files weigh nothing, but must be deleted
_DEEPEST = 64  # directories within each other


def holds_more_than(most_bytes: int, folder: str) -> bool:
    """True as well for what cannot be weighed: too many entries, too deep, closed directories."""
    total = entries = 0
    left = [(folder, 0)]
    while left:
        path, depth = left.pop()
        try:
            with os.scandir(path) as found:
                for entry in found:
                    entries += 1
                    total += _bytes(entry)
                    if entry.is_dir(follow_symlinks=False):
                        left.append((entry.path, depth + 1))
        except (FileNotFoundError, NotADirectoryError):  # the program has just removed it
            continue
        except OSError:
            return True
        if entries > _MOST_ENTRIES or total > most_bytes or depth > _DEEPEST:
            return True
    return False


def _bytes(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        return 0


def remove(folder: str) -> None:
    """All of it, once no process is left that could change it. Directories are emptied by moving what is in them up."""
    os.chmod(folder, 0o700)
    mark, moved = secrets.token_hex(8), 0
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for inner in list(os.scandir(entry.path)):
                if not inner.is_dir(follow_symlinks=False):
                    os.unlink(inner.path)
                    continue
                os.chmod(inner.path, 0o700)  # a directory is moved by whoever may write to it
                moved += 1
                os.rename(inner.path, os.path.join(folder, f".{mark}-{moved}"))
            os.rmdir(entry.path)
    os.rmdir(folder)
