"""Where a request ends, for servers that stand in a row.

A proxy and a server behind it that find different ends of one request take a part of it for the
next: somebody's bytes are then read as another's request. What leaves room for that is refused, as
https://www.rfc-editor.org/rfc/rfc9112#section-6.3 allows, and the connection is closed.
"""

from __future__ import annotations

from typing import Any

import h11


class StrictParser(h11.Connection):
    """h11's of a server, which by itself takes the body's end from Transfer-Encoding where there is
    a Content-Length as well, and requests of any version."""

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._max_head_bytes = max_head_bytes

    def next_event(self) -> Any:
        """The next event of the client. Raises h11.RemoteProtocolError for what is refused."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {bytes(name) for name, _ in event.headers}
            old = event.http_version < b"1.1"
            if b"transfer-encoding" in names and (old or b"content-length" in names):
                raise h11.RemoteProtocolError("the body's length is told in two ways")
            if _size(event) > self._max_head_bytes:
                # By itself it looks at heads only that have not come as a whole.
                raise h11.RemoteProtocolError("the head is too large")
            if not event.http_version.startswith(b"1."):
                raise h11.RemoteProtocolError("this is another version of HTTP")
        return event


def _size(request: h11.Request) -> int:
    """Bytes of a head, about."""
    fields = sum(len(name) + len(value) for name, value in request.headers)
    return len(request.method) + len(request.target) + fields
