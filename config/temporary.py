"""Temporary folders and shared memory, which are swept when their owner was killed.

The owner holds a lock (flock) on each for as long as it lives, and the kernel takes it back however
the owner ends. So what has a name of ours, belongs to this user and is not locked has no owner any
more. The number of a process in the name would not say that: containers that share /dev/shm each
count their processes for themselves.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # where Linux has it

_ONLY_LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """A folder for this user alone, removed at the end.

    Args:
        purpose: A word for its name.
    """
    while True:
        folder = Path(tempfile.gettempdir()) / new_name(purpose)
        folder.mkdir(mode=0o700)
        if (lock := own(folder)) is not None:
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def new_name(purpose: str) -> str:
    """A name by which `sweep` knows what is ours. Only what has been made by `own` may have one."""
    return f"nano-inference-{_machine()}-{purpose}-{secrets.token_hex(8)}"


def own(path: Path) -> int | None:
    """Takes the lock of what has just been made.

    Returns:
        A descriptor, which holds the lock until it is closed; to be closed when `path` is gone.
        None when somebody who swept was faster and has removed it.
    """
    try:
        file = os.open(path, _ONLY_LOOK)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owned = _is_at(file, path)
    except BlockingIOError:
        owned = False
    except OSError:
        owned = True  # there are no locks on this file system, and so nothing is swept
    if owned:
        return file
    os.close(file)
    return None


def sweep() -> None:
    """Removes what owners left behind that were killed, on this machine since it was started."""
    ours = re.compile(f"nano-inference-{_machine()}-[a-z]+-[0-9a-f]{{16}}")
    for place in {Path(tempfile.gettempdir()), SHARED_MEMORY}:
        try:
            names = os.listdir(place)
        except OSError:
            continue
        for name in filter(ours.fullmatch, names):
            _remove_unless_owned(place / name)


def _remove_unless_owned(path: Path) -> None:
    try:
        file = os.open(path, _ONLY_LOOK)
    except OSError:
        return
    try:
        status = os.fstat(file)
        if status.st_uid != os.geteuid():
            return
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(file, path):
            return
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(path, ignore_errors=True)
        elif stat.S_ISREG(status.st_mode):
            path.unlink()
    except OSError:
        return  # it is locked, or locks are not to be had
    finally:
        os.close(file)


def _is_at(file: int, path: Path) -> bool:
    """Whether what is open is still what has that name."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except FileNotFoundError:
        return False


@cache
def _machine() -> str:
    """This machine since it was started. Where several share a file system, a lock of one may say
    nothing to the others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = platform.node()
    return hashlib.sha256(boot.encode()).hexdigest()[:8]
