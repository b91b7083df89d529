"""The HTTP server that runs the application."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

# For requests in flight when the server is to stop.
_LEAVE_S = 5


class HttpServer(uvicorn.Server):
    """uvicorn, which leaves the process's signals and its logs alone."""

    def __init__(self, app: Starlette, max_connections: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                # uvicorn counts the connection that asks.
                limit_concurrency=max_connections + 1,
                timeout_graceful_shutdown=_LEAVE_S,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
