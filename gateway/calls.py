"""Each call over HTTP: when it arrived, in whose trace it is, and how long it took."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from typing import NamedTuple

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..bus.entries import usable_trace
from ..telemetry import TraceContext, instruments, names, now_ns
from .account import Account
from .http import CALL_ID, CLIENT_LEFT
from .measures import Measures

_METHODS = frozenset(
    ("CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE")
)
_OTHER_METHOD = "_OTHER"
"""What OpenTelemetry's conventions call any other."""

ARRIVED = "arrived_ns"
"""Under which a connection leaves in a call's state when its head came; it may wait after that."""

CALL_HEADER = "X-Request-Id"
"""What a client calls a call, or else what the gateway does; the answer and the log repeat it."""

_MAX_CALL_ID_LENGTH = 128

_KEY = "arrival"
_FAILED = 500


class Arrival(NamedTuple):
    """What is known of a call from its head.

    Attributes:
        at_ns: When the head was complete, on the clock of `now_ns`.
        trace: Where the spans of what the call leads to belong; empty where there is no trace.
        account: What it comes to.
    """

    at_ns: int
    trace: TraceContext
    account: Account


def arrival_of(request: Request) -> Arrival:
    """A call's, as `ObservedCalls` has noted it; where nobody has, it arrives now."""
    found: Arrival | None = request.scope.get("state", {}).get(_KEY)
    return found or Arrival(now_ns(), TraceContext(), Account())


def client_trace(headers: Headers) -> TraceContext:
    """The trace that the client is in, by the headers of W3C Trace Context; empty without a valid
    one, also when there are several."""
    given = headers.getlist("traceparent")
    if len(given) != 1:
        return TraceContext()
    trace = TraceContext(*usable_trace(given[0].strip(), ",".join(headers.getlist("tracestate"))))
    return trace if trace.is_valid else TraceContext()


def call_id(headers: Headers) -> str:
    """What the client calls a call, where that can stand in a header and a log; else a new name."""
    given = headers.get(CALL_HEADER, "").strip()
    usable = 0 < len(given) <= _MAX_CALL_ID_LENGTH and given.isascii() and given.isprintable()
    return given if usable else uuid.uuid4().hex


class ObservedCalls:
    """ASGI: measures each call, and makes a span of it, between the client's and the pipeline's.

    It names each call, too: its answer has the header `CALL_HEADER`.

    A GET whose client is in no trace has no span: what asks for health each second would begin as
    many traces.
    """

    def __init__(
        self,
        app: ASGIApp,
        measures: Measures,
        routes: Collection[str],
        *,
        access_log: bool = False,
    ) -> None:
        """Args: `routes` are the paths that there are. No other is named, so that nobody makes
        names. With `access_log` there is a line for each call."""
        self._app = app
        self._measures = measures
        self._routes = frozenset(routes)
        self._access_log = access_log
        self._under_way = 0
        self._idle = anyio.Event()
        measures.watch(instruments.GATEWAY_IN_FLIGHT, lambda: self._under_way)

    async def idle(self) -> None:
        """Waits until no call is under way."""
        while self._under_way:
            self._idle = anyio.Event()
            await self._idle.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        arrived_ns: int = state.get(ARRIVED) or now_ns()
        headers = Headers(scope=scope)
        client, named = client_trace(headers), call_id(headers)
        trace, account = self._begin(scope, client), Account()
        state[_KEY] = Arrival(arrived_ns, trace, account)
        state[CALL_ID] = named
        # Unless there is an answer.
        status = CLIENT_LEFT

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answered = MutableHeaders(scope=message)
                answered[CALL_HEADER] = named
                answered.update(account.headers)
            await send(message)
            if message["type"] == "http.response.body":
                account.sent_bytes += len(message.get("body", b""))
                account.complete = not message.get("more_body", False)

        self._under_way += 1
        try:
            await self._app(scope, receive, send_noted)
        except Exception:
            status = max(status, _FAILED)
            raise
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()
            self._tell(scope, client, arrived_ns, status)

    def _begin(self, scope: Scope, client: TraceContext) -> TraceContext:
        tracing = self._measures.tracing
        if client.traceparent:
            return tracing.begin_below(client)
        if scope["method"] == "GET" or scope["path"] not in self._routes:
            return TraceContext()
        return tracing.begin()

    def _tell(self, scope: Scope, client: TraceContext, arrived_ns: int, status: int) -> None:
        ended_ns = now_ns()
        _, trace, account = scope["state"][_KEY]
        method = scope["method"] if scope["method"] in _METHODS else _OTHER_METHOD
        route = scope["path"] if scope["path"] in self._routes else ""
        if self._measures.metrics.enabled:
            labels = {
                names.HTTP_METHOD: method,
                names.HTTP_ROUTE: route,
                names.HTTP_STATUS: str(status),
            }
            seconds = (ended_ns - arrived_ns) / 1e9
            self._measures.metrics.record(instruments.HTTP_DURATION, seconds, labels)
        address, _ = scope.get("client") or ("", 0)
        if self._access_log:
            account.log(
                method=method,
                route=route,
                path=scope["path"],
                status=status,
                duration_ns=ended_ns - arrived_ns,
                call_id=scope["state"][CALL_ID],
                client=address,
                trace=trace,
            )
        if not (route and trace.sampled and self._measures.tracing.enabled):
            return
        self._measures.tracing.span(
            f"{method} {route}",
            client,
            arrived_ns,
            ended_ns,
            {
                names.HTTP_METHOD: method,
                names.HTTP_ROUTE: route,
                names.HTTP_STATUS: status,
                names.URL_PATH: route,
                names.URL_SCHEME: scope["scheme"],
                names.CLIENT_ADDRESS: address,
            },
            error=str(status) if status >= _FAILED else "",
            own=trace,
            kind="server",
        )
