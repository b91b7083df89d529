"""The framing of HTTP/1.1: requests without doubt about their ends, answered one at a time."""

from __future__ import annotations

from typing import Any, Literal

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 1 << 16
"""Bytes of a head, and of the lines around a body's chunks beside `_CHUNK_BYTES` for each byte."""

_CHUNK_BYTES = 16

Reading = Literal["", "head", "body"]


class NotHttp(Exception):
    """A request is not valid HTTP; the message says why."""


class StrictProtocol(HttpToolsProtocol):
    """uvicorn's connection, which refuses what a proxy may read in another way (RFC 9112, 6.3).

    A proxy and this server that find different ends of one request would read one client's bytes as
    another client's request. llhttp refuses a Transfer-Encoding beside a Content-Length, among
    others; this class refuses chunks before HTTP/1.1, other versions, and requests without one
    host.

    Attributes:
        running: The request that is being answered, or the last one that was; `cycle` is the last
            one that has come.
        reading: What is arriving; "" between two requests.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.running: RequestResponseCycle | None = None
        self.reading: Reading = ""
        # Of the message that is arriving: bytes of its body, and all others.
        self._body_bytes = self._other_bytes = 0
        self._has_ended = False
        # Bytes behind a request that is being answered, and why those behind it are not HTTP.
        self._held = b""
        self._why = ""

    def refuse(self, why: str) -> None:
        """Refuse what has come, and close the connection."""
        raise NotImplementedError

    def forget_waiting(self) -> None:
        """Forget what has come behind the request that is being answered."""
        self.pipeline.clear()
        self._held = b""

    @property
    def is_answering(self) -> bool:
        """Whether a request is being answered, or waits for its body."""
        return self.running is not None and not self.running.response_complete

    @property
    def awaits_body(self) -> bool:
        """Whether the request that is being answered waits for its body; one behind it may too."""
        return self.is_answering and self.reading == "body" and self.running is self.cycle

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._why:
            return
        if self.is_answering and self.reading != "body":
            self._held += data
            self.flow.pause_reading()
            return
        self._feed(data)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.is_answering or self.transport.is_closing():
            return
        if self._why:
            self.refuse(self._why)
        elif self._held:
            held, self._held = self._held, b""
            self._feed(held)

    def connection_lost(self, exc: Exception | None) -> None:
        self.forget_waiting()
        if self.running is not None and not self.running.response_complete:
            self.running.disconnected = True
            self.running.message_event.set()
        super().connection_lost(exc)

    def _feed(self, data: bytes) -> None:
        self._has_ended, body_bytes = False, self._body_bytes
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            else:
                self._feed(self._without_upgrade() + data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            self._fail(str(error.__context__ or error))
            return
        if self._has_ended:
            self._body_bytes = self._other_bytes = 0
            return
        self._other_bytes += len(data) - (self._body_bytes - body_bytes)
        if self._other_bytes > MAX_HEAD_BYTES + _CHUNK_BYTES * self._body_bytes:
            self._fail(f"the {self.reading or 'head'} is too large")

    def _without_upgrade(self) -> bytes:
        """Return the head that has come without its offer of another protocol, for a new parser:
        this one takes the body behind it for that protocol's."""
        version = self.parser.get_http_version().encode()
        self.parser = httptools.HttpRequestParser(self)
        line = b"%s %s HTTP/%s" % (self.scope["method"].encode(), self.url, version)
        kept = [b"%s: %s" % each for each in self.headers if each[0] != b"upgrade"]
        return b"\r\n".join([line, *kept, b"", b""])

    def _fail(self, why: str) -> None:
        """Refuse what comes, after the requests before it have been answered."""
        self._why = why
        if not self.is_answering or self.awaits_body:
            self.refuse(why)
            return
        if self.reading == "body":
            self.pipeline.popleft()
        self.reading = ""

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.running = cycle
        super()._start_asgi_task(cycle, app)

    # --- called by the parser -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.reading = "head"

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.reading == "head":  # else a trailer
            super().on_header(name, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        version, names = self.parser.get_http_version(), [name for name, _ in self.headers]
        if version not in ("1.0", "1.1"):
            raise NotHttp("this is another version of HTTP")
        if self.parser.get_method() == b"CONNECT":
            raise NotHttp("this is no proxy")
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (version == "1.0" or codings != [b"chunked"]):
            raise NotHttp("the body has a Transfer-Encoding other than chunks, in HTTP/1.1")
        if names.count(b"host") != 1 and (version == "1.1" or b"host" in names):
            raise NotHttp("there is not one header Host")
        if b"#" in self.url:
            raise NotHttp("there is a fragment in the target")
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > (
            MAX_HEAD_BYTES
        ):
            raise NotHttp("the head is too large")
        if self.parser.should_upgrade():
            self.scope["method"] = self.parser.get_method().decode()
            if not self._should_upgrade():
                return
        self.reading = "body"
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.reading == "head":  # an offer that is not taken
            return
        self.reading, self._has_ended = "", True
        super().on_message_complete()
