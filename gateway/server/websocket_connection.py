"""A connection that has become a WebSocket; imported with the first one."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from ...config import NanoInferenceError
from .connections import Connections, Phase
from .measures import Reason
from .websocket import WORKING

_TRY_AGAIN_LATER, _SERVICE_RESTART = 1013, 1012


class WebSocketConnection(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket, as one of the `Connections`.

    Attributes:
        phase: "working" while a call is in flight; an idle one may be replaced.
    """

    phase: Phase = "working"

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._all = connections
        # Bytes that the client hasn't taken, and since when it has taken none.
        self._unsent_bytes = 0
        self._unsent_since_s = connections.now_s
        self.app_state = {**self.app_state, WORKING: self._set_working}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._all.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.leave(self)
        super().connection_lost(exc)

    def end(self, error: NanoInferenceError | None = None) -> None:
        """Close the connection; with an error, after a frame that says so."""
        if error is not None and self.handshake_complete and not self.close_sent:
            restarts = error.code == "shutting_down"
            self.conn.send_close(_SERVICE_RESTART if restarts else _TRY_AGAIN_LATER, error.code)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
            self.transport.close()
            return
        self.transport.abort()

    def check(self, window_s: float) -> Reason | None:
        """End the connection of a client that does not read; return the reason."""
        unsent_bytes = self.transport.get_write_buffer_size()
        if not unsent_bytes or unsent_bytes != self._unsent_bytes:
            self._unsent_bytes, self._unsent_since_s = unsent_bytes, self._all.now_s
        elif self._all.now_s - self._unsent_since_s >= self._all.config.send_timeout_s:
            self.end()
            return "slow_reader"
        return None

    def _set_working(self, working: bool) -> None:
        self.phase = "working" if working else "idle"
        if not self.disconnected:
            self._all.moved(self)
