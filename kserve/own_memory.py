"""Shared memory of this process: made here, and removed by it or by those who come after it."""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path

from ..config.temporary import SHARED_MEMORY, new_name, own, sweep

_PREFAULTED = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)

_ANEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class OwnSharedMemory:
    """A POSIX shared memory object for this user alone.

    It is removed by `close`, and else when this process ends, by an exception too. When it is
    killed, the object is left until somebody sweeps: the next who makes one, or the next
    `nano-inference` that begins (`config/temporary.py`).

    Attributes:
        key: Its name, as `shm_open` takes it.
        mapping: All of it, whose pages are there. It stays while somebody has it.
    """

    def __init__(self, n_bytes: int, purpose: str) -> None:
        """Reserves it.

        Args:
            n_bytes: How long it is.
            purpose: A word for its name.

        Raises:
            OSError: There is not enough shared memory.
        """
        sweep()
        path, file, lock = _made(purpose)
        self.key = f"/{path.name}"
        self._remove = weakref.finalize(self, _remove, path, lock, os.getpid())
        try:
            # Else the memory would be looked for when it is written, and its lack kill the process.
            os.posix_fallocate(file, 0, n_bytes)
            self.mapping = mmap.mmap(file, n_bytes, flags=_PREFAULTED)
        except OSError as error:
            self.close()
            raise OSError(
                error.errno,
                f"{n_bytes} bytes of shared memory are not to be had ({error.strerror}); enlarge "
                f"{SHARED_MEMORY}, or do without it (use_shm=False)",
            ) from None
        finally:
            os.close(file)

    def close(self) -> None:
        """Removes the object; what is mapped stays mapped."""
        self._remove()


def _made(purpose: str) -> tuple[Path, int, int]:
    """Path and descriptor of a new object, and what keeps others from sweeping it."""
    while True:
        path = SHARED_MEMORY / new_name(purpose)
        try:
            file = os.open(path, _ANEW, 0o600)
        except OSError as error:
            raise OSError(
                error.errno,
                f"shared memory can't be made in {SHARED_MEMORY} ({error.strerror}); do without "
                "it (use_shm=False)",
            ) from None
        lock = own(path)
        if lock is not None:
            return path, file, lock
        os.close(file)


def _remove(path: Path, lock: int, owner: int) -> None:
    # A process that was forked from the owner has this to run too, when it ends.
    if os.getpid() == owner:
        path.unlink(missing_ok=True)
    os.close(lock)
