"""Each call: when it arrived, in whose trace it is, and how long it took."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...bus.entries import usable_trace
from ...telemetry import TraceContext, instruments, names, now_ns
from ..policy.audit import AuditLog
from ..policy.caller import CALLER, NOBODY, ROUTE, Caller
from ..serving.account import Account
from ..serving.measures import Measures
from .http import CALL_ID, CLIENT_LEFT, ERROR_CODE


class RouteNames:
    """The names of some routes."""

    def __init__(self, paths: Iterable[str]) -> None:
        """`paths`: those of the routes, in their order, with names in braces for what varies."""
        paths = list(dict.fromkeys(paths))
        self._plain = frozenset(each for each in paths if "{" not in each)
        # Starlette's pattern, and the path without the kinds of what stands in braces.
        self._patterns = [compile_path(each)[:2] for each in paths if "{" in each]

    def of(self, path: str) -> str:
        """The name of the route that a path takes, such as "/v2/models/{model}/infer"; "" where
        there is none, so that nobody makes names."""
        if path in self._plain:
            return path
        return next((name for pattern, name in self._patterns if pattern.match(path)), "")


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


class ObservedCall:
    """A call while it is under way.

    Attributes:
        name: What it is called.
        status: Of its answer, as of one over HTTP, as far as there is one.
        account: What it comes to.
        trace: Where its spans belong.
    """

    __slots__ = ("account", "name", "status", "trace")

    def __init__(self, name: str, trace: TraceContext) -> None:
        self.name = name
        self.status = CLIENT_LEFT
        self.account = Account()
        self.trace = trace


class CallObserver:
    """Measures calls, whatever they come by, and makes a span of each, between the client's and the
    pipeline's. It names each call, too."""

    def __init__(
        self, measures: Measures, access_log: bool = False, audit: AuditLog | None = None
    ) -> None:
        """Args: with `access_log` there is a line for each call in the log, and in `audit`, where
        that is given, one for each that needs anything."""
        self._measures = measures
        self._access_log = access_log
        self._audit = audit
        self._under_way = 0
        self._idle = anyio.Event()
        measures.watch(instruments.GATEWAY_IN_FLIGHT, lambda: self._under_way)

    async def idle(self) -> None:
        """Waits until no call is under way."""
        while self._under_way:
            self._idle = anyio.Event()
            await self._idle.wait()

    @contextmanager
    def observed(self, scope: Scope, route: str, *, traced: bool) -> Iterator[ObservedCall]:
        """Open while a call is under way.

        Args:
            scope: The call's; its state gets what `arrival_of` and `call_id_of` tell.
            route: What its path is called when there is a route for it, else "".
            traced: Whether it begins a trace where its client is in none. What asks for health
                each second would begin as many.
        """
        state = scope.setdefault("state", {})
        arrived_ns: int = state.get(ARRIVED) or now_ns()
        headers = Headers(scope=scope)
        client = client_trace(headers)
        call = ObservedCall(call_id(headers), self._begin(client, traced))
        state[_KEY] = Arrival(arrived_ns, call.trace, call.account)
        state[CALL_ID] = call.name
        self._under_way += 1
        try:
            yield call
        except Exception:
            call.status = max(call.status, _FAILED)
            raise
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()
            self._tell(scope, client, route, arrived_ns, call.status)

    def _begin(self, client: TraceContext, traced: bool) -> TraceContext:
        tracing = self._measures.tracing
        if client.traceparent:
            return tracing.begin_below(client)
        return tracing.begin() if traced else TraceContext()

    def _tell(
        self, scope: Scope, client: TraceContext, route: str, arrived_ns: int, status: int
    ) -> None:
        ended_ns = now_ns()
        _, trace, account = scope["state"][_KEY]
        method = scope["method"] if scope["method"] in _METHODS else _OTHER_METHOD
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
        if self._audit is not None:
            self._tell_audit(self._audit, scope, method, route, status, ended_ns - arrived_ns)
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
                **({names.REQUEST_MODEL: account.model} if account.model else {}),
            },
            error=str(status) if status >= _FAILED else "",
            own=trace,
            kind="server",
        )

    def _tell_audit(
        self, audit: AuditLog, scope: Scope, method: str, route: str, status: int, duration_ns: int
    ) -> None:
        state = scope["state"]
        _, trace, account = state[_KEY]
        # The route knows its own name where a part of the path is a name of something.
        found, needed = state.get(ROUTE, (route, ""))
        if needed == "nothing":
            return
        caller: Caller = state.get(CALLER, NOBODY)
        address, _ = scope.get("client") or ("", 0)
        told = {
            "call_id": state[CALL_ID],
            **trace.log_ids,
            "key_id": caller.key_id,
            "key_name": caller.name,
            "tenant": account.tenant or caller.tenant,
            "client": address,
            "method": method,
            "route": found,
            "model": account.model,
            "status": status,
            "code": state.get(ERROR_CODE) or account.code,
            "complete": account.complete,
            "prompt_tokens": account.prompt_tokens,
            "completion_tokens": account.completion_tokens,
            "duration_ms": round(duration_ns / 1e6, 2),
        }
        audit.write("call", told, account.texts)


class ObservedCalls:
    """ASGI: has an observer see each call; its answer has the header `CALL_HEADER`.

    A GET whose client is in no trace has no span.

    Attributes:
        observer: That, for calls that come by other ways as well.
    """

    def __init__(
        self,
        app: ASGIApp,
        measures: Measures,
        routes: Collection[str],
        access_log: bool = False,
        audit: AuditLog | None = None,
    ) -> None:
        """Args: `routes` are the paths that there are, as routes have them, and no other is named;
        the others are as of `CallObserver`."""
        self.observer = CallObserver(measures, access_log, audit)
        self._app = app
        self._routes = RouteNames(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.of(scope["path"])
        traced = bool(route) and scope["method"] != "GET"
        with self.observer.observed(scope, route, traced=traced) as call:

            async def send_noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    call.status = message["status"]
                    answered = MutableHeaders(scope=message)
                    answered[CALL_HEADER] = call.name
                    answered.update(call.account.headers)
                await send(message)
                if message["type"] == "http.response.body":
                    call.account.sent_bytes += len(message.get("body", b""))
                    call.account.complete = not message.get("more_body", False)

            await self._app(scope, receive, send_noted)
