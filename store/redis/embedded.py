"""The password of `up`'s embedded server: in a file that only its user can read.

Loopback is open to every user of the machine, and a writer of the server owns the pipeline.
Processes of `up` get the password by environment. Other processes of the same user find the file by
the server's port, whenever they connect to 127.0.0.1 without credentials.
"""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from redis import CredentialProvider, Redis, RedisError
from redis.backoff import NoBackoff
from redis.retry import Retry

from ...config.temporary import cache_folder

HOST = "127.0.0.1"
"""The embedded server's only address."""

_MOST_BYTES = 4096


class EmbeddedPassword(CredentialProvider):
    """Credentials for a port of this machine: the embedded server's password, if there is one.

    Read for each connection: the password changes with each start of `up`.
    """

    def __init__(self, port: int) -> None:
        self._port = port

    def get_credentials(self) -> Any:
        """Return the password, or nothing, which redis-py takes for a server without one."""
        password = read_password(self._port)
        return (password,) if password else ()

    async def get_credentials_async(self) -> Any:
        return self.get_credentials()


def read_password(port: int) -> str:
    """Return the password of this user's embedded server; "" if none is known."""
    folder = _folder()
    if folder is None:
        return ""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(folder / str(port), flags)
    except OSError:
        return ""
    try:
        status = os.fstat(file)
        ours = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o600
        if not ours or not stat.S_ISREG(status.st_mode):
            return ""
        return os.read(file, _MOST_BYTES).decode("ascii", "replace")
    except OSError:
        return ""
    finally:
        os.close(file)


@contextmanager
def kept_password(port: int, password: str) -> Iterator[Path | None]:
    """Keep the password in its file while the server runs.

    Yields:
        The file; None if no folder of this user's cache can hold it.
    """
    folder = _folder()
    if folder is None:
        yield None
        return
    path = folder / str(port)
    try:
        with NamedTemporaryFile(dir=folder, delete=False) as file:  # its mode is 600
            file.write(password.encode())
        os.replace(file.name, path)
    except OSError:
        yield None
        return
    try:
        yield path
    finally:
        if read_password(port) == password:  # and not that of a successor
            path.unlink(missing_ok=True)


def answers(url: str) -> bool:
    """Return whether the server at this URL answers, within a second."""
    timeouts = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0}
    try:
        with Redis.from_url(url, retry=Retry(NoBackoff(), 0), **timeouts) as redis:
            return bool(redis.ping())
    except RedisError:
        return False


def _folder() -> Path | None:
    # A home folder may be shared by several machines.
    return cache_folder("servers", platform.node() or "localhost")
