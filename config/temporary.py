"""Temporary folders and shared memory that are removed even if their owner was killed, and a folder
that is kept.

The owner holds a lock (flock) on each, which the kernel releases when the process ends. So an
unlocked file with this package's name and this user's id has no owner. A PID in the name would not
show that: containers that share /dev/shm have PIDs of their own.
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
    """Create a folder for this user alone, and remove it at the end.

    Args:
        purpose: A word in its name.
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


def cache_folder(*parts: str) -> Path | None:
    """Return a folder of this package's cache, by the XDG specification; None if there is none that
    only this user may write to.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the specification has it ignored
        home = os.environ.get("HOME")
        # The system's entry of the user; "~" itself without one.
        base = os.path.join(os.path.expanduser("~") if home is None else home, ".cache")
    if not os.path.isabs(base):
        return None
    folder = Path(base, "nano-inference", *parts)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if only_we_write(folder.stat()) else None
    except OSError:
        return None


@contextmanager
def lock_file(path: Path) -> Iterator[int]:
    """Open a file that serves as a lock alone, and yield its descriptor.

    It may be in a folder where others write: no link is followed, and no content is changed.

    Raises:
        OSError: It is a link, or can't be created.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def only_we_write(status: os.stat_result) -> bool:
    """Return whether no other user may write to a file or folder."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def new_name(purpose: str) -> str:
    """Return a name that `sweep` recognises. Only files locked by `own` may have one."""
    return f"nano-inference-{_machine()}-{purpose}-{secrets.token_hex(8)}"


def own(path: Path) -> int | None:
    """Lock a new file or folder.

    Returns:
        A descriptor that holds the lock; close it once `path` is removed. None if a sweeping
        process removed `path` first.
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
    """Remove files whose owners were killed, on this machine since its boot."""
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
    """Return whether an open file still has this path."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except FileNotFoundError:
        return False


@cache
def _machine() -> str:
    """Return the id of this machine's boot: on a shared file system, locks of another machine may
    be invisible.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = platform.node()
    return hashlib.sha256(boot.encode()).hexdigest()[:8]
