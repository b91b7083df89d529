"""Observation of calls: trace, span, duration, access log and audit log of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anyio
from starlette.datastructures import MutableHeaders
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...bus.entries import usable_trace
from ...config import shown
from ...config.logger import get_logger
from ...telemetry import TraceContext, instruments, names, now_ns
from ..call import Account, Call
from .http import CALL_HEADER, call_of
from .measures import Measures

_METHODS = frozenset(
    ("CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE")
)
_OTHER_METHOD = "_OTHER"
"""The name of any other method in OpenTelemetry's conventions."""

_MISTAKEN, _FAILED = 400, 500

_MOST_LOGGED = 256
"""Lines of a process about ignored fields."""

OnCall = Callable[[Call, str, dict[str, Any]], None]
"""Called at the end of each call with its route's name, and fields for a log."""


def client_trace(call: Call) -> TraceContext:
    """Return the client's trace, by W3C Trace Context; empty without exactly one valid header."""
    given = call.header_values("traceparent")
    if len(given) != 1:
        return TraceContext()
    states = ",".join(call.header_values("tracestate"))
    trace = TraceContext(*usable_trace(given[0].strip(), states))
    return trace if trace.is_valid else TraceContext()


def route_names(paths: Iterable[str]) -> Callable[[str], str]:
    """Return a function that returns the route of a path, such as "/v2/models/{model}/infer"; "" if
    there is none. Few names, for metrics and spans.

    Args:
        paths: The paths of the routes, in order, with parameters in braces.
    """
    paths = list(dict.fromkeys(paths))
    plain = frozenset(each for each in paths if "{" not in each)
    # Starlette's pattern, and the path without the parameters' types.
    patterns = [compile_path(each)[:2] for each in paths if "{" in each]

    def name_of(path: str) -> str:
        if path in plain:
            return path
        return next((name for pattern, name in patterns if pattern.match(path)), "")

    return name_of


@dataclass(eq=False)
class ObservedCalls:
    """ASGI: observes each call; its response has the header `CALL_HEADER`.

    A call over any protocol has a span between the client's and the pipeline's spans, but for a GET
    outside a client's trace.

    Attributes:
        routes: The paths of the routes.
        access_log: Whether each call has a line in the log.
        on_call: None for none.
    """

    app: ASGIApp
    measures: Measures
    routes: Collection[str]
    access_log: bool = False
    on_call: OnCall | None = None

    def __post_init__(self) -> None:
        self._route_of = route_names(self.routes)
        self._ignored: set[tuple[str, str]] = set()
        self._in_flight = 0
        self._idle = anyio.Event()
        self.measures.watch(instruments.GATEWAY_IN_FLIGHT, lambda: self._in_flight)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = call_of(scope)
        route = self._route_of(call.path)
        with self.observed(call, route, traced=bool(route) and call.method != "GET"):

            async def send_noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    call.status = message["status"]
                    headers = MutableHeaders(scope=message)
                    headers[CALL_HEADER] = call.id
                    headers.update(call.account.response_headers)
                await send(message)
                if message["type"] == "http.response.body":
                    call.account.sent_bytes += len(message.get("body", b""))
                    call.account.complete = not message.get("more_body", False)

            await self.app(scope, receive, send_noted)

    async def idle(self) -> None:
        """Wait until no call is in flight."""
        while self._in_flight:
            self._idle = anyio.Event()
            await self._idle.wait()

    @contextmanager
    def observed(self, call: Call, route: str, *, traced: bool) -> Iterator[None]:
        """Open while a call is in flight; it gets its trace.

        Args:
            route: The name of its route; "" if it has none.
            traced: Whether it begins a trace if its client is in none. Probes would begin one a
                second.
        """
        client, tracing = client_trace(call), self.measures.tracing
        if client.traceparent:
            call.trace = tracing.begin_below(client)
        elif traced:
            call.trace = tracing.begin()
        call.account.arrived_ns = call.at_ns
        self._in_flight += 1
        try:
            yield
        except Exception:
            call.status = max(call.status, _FAILED)
            raise
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()
            self._record(call, client, route)

    def _record(self, call: Call, client: TraceContext, route: str) -> None:
        ended_ns = now_ns()
        method = call.method if call.method in _METHODS else _OTHER_METHOD
        metrics, tracing = self.measures.metrics, self.measures.tracing
        named = {names.HTTP_METHOD: method, names.HTTP_ROUTE: route}
        if metrics.enabled:
            labels = named | {names.HTTP_STATUS: str(call.status)}
            metrics.record(instruments.HTTP_DURATION, (ended_ns - call.at_ns) / 1e9, labels)
        fields = {
            "method": method,
            "status": call.status,
            "duration_ms": round((ended_ns - call.at_ns) / 1e6, 2),
            "call_id": call.id,
            "client": call.address,
            **call.trace.log_ids,
        }
        if self.access_log:
            _log_access(call.account, route, call.path, fields)
        if call.account.ignored:
            self._log_ignored(route, call.account.ignored_names)
        if self.on_call is not None:
            self.on_call(call, route, fields)
        operation = call.account.operation
        if operation is not None:
            operation.measure(metrics, ended_ns, _error_of(call))
        if route and call.trace.sampled and tracing.enabled:
            attributes: dict[str, Any] = {
                **named,
                names.HTTP_STATUS: call.status,
                names.URL_PATH: route,
                names.URL_SCHEME: call.scheme,
                names.CLIENT_ADDRESS: call.address,
                **(operation.attributes if operation is not None else _model_of(call)),
                **names.time_attributes(call.account.time, call.account.billed_ns),
            }
            error = _error_of(call)
            # By the conventions of HTTP the client's mistake is no error of the server.
            mistaken = _MISTAKEN <= call.status < _FAILED
            tracing.span(
                operation.span_name if operation is not None else f"{method} {route}",
                client,
                call.at_ns,
                ended_ns,
                attributes | {names.ERROR_TYPE: error} if mistaken else attributes,
                error="" if mistaken else error,
                own=call.trace,
                kind="server",
            )

    def _log_ignored(self, route: str, ignored: str) -> None:
        """Write one line for each route and set of ignored fields, up to a limit: clients choose
        the names."""
        if len(self._ignored) < _MOST_LOGGED and (route, ignored) not in self._ignored:
            self._ignored.add((route, ignored))
            get_logger().info("fields_ignored", route=route, fields=ignored)


def _error_of(call: Call) -> str:
    """Return the code of the error that ended a call, perhaps after the head of its response, else
    its status; "" for success."""
    code = call.code or call.account.code
    if call.status >= _MISTAKEN:
        return code or str(call.status)
    return "" if code == "content_filter" else code


def _model_of(call: Call) -> dict[str, str]:
    """Return the model of a call without requests for an engine, such as one of KServe."""
    return {names.REQUEST_MODEL: call.account.model} if call.account.model else {}


def _log_access(account: Account, route: str, path: str, fields: dict[str, Any]) -> None:
    """Write a call's line in the access log: no text of clients but a path without a route, quoted
    and cut."""
    line: dict[str, Any] = {"method": fields["method"], "route": route}
    if not route:
        line["path"] = shown(path)
    if account.model:
        line["model"] = account.model
    if account.tenant:
        line |= {"tenant": account.tenant, **account.usage}
    if not account.complete:
        line["complete"] = False
    get_logger().info("http_call", **line | fields, sent_bytes=account.sent_bytes)
