"""Observation of calls: trace, span, duration, access log and audit log of each."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...bus.entries import usable_trace
from ...config import shown
from ...config.logger import get_logger
from ...telemetry import TraceContext, instruments, names, now_ns
from ..policy.audit import AuditLog
from ..policy.caller import CALLER, NOBODY, ROUTE, Caller
from ..serving.account import Account
from ..serving.measures import Measures
from .http import CALL_ID, CLIENT_LEFT, ERROR_CODE

_METHODS = frozenset(
    ("CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE")
)
_OTHER_METHOD = "_OTHER"
"""The name of any other method in OpenTelemetry's conventions."""

ARRIVED = "arrived_ns"
"""Key of a call's state: when its head came, before it waited for a round."""

CALL_HEADER = "X-Request-Id"
"""The call's id, by the client or else the gateway; in the response and the log."""

_MAX_CALL_ID_LENGTH = 128
_ARRIVAL = "arrival"
_FAILED = 500


@dataclass(slots=True)
class ObservedCall:
    """An observed call.

    Attributes:
        at_ns: When the head was complete, on the clock of `now_ns`.
        trace: The parent of the call's spans; empty without a trace.
        account: The call's account.
        name: The call's id.
        status: The HTTP status of the response, so far.
    """

    at_ns: int
    trace: TraceContext
    account: Account
    name: str = ""
    status: int = CLIENT_LEFT


def observed_call(request: Request) -> ObservedCall:
    """Return the observation of a call; an unobserved one arrives now."""
    found: ObservedCall | None = request.scope.get("state", {}).get(_ARRIVAL)
    return found or ObservedCall(now_ns(), TraceContext(), Account())


def client_trace(headers: Headers) -> TraceContext:
    """Return the client's trace, by W3C Trace Context; empty without exactly one valid header."""
    given = headers.getlist("traceparent")
    if len(given) != 1:
        return TraceContext()
    trace = TraceContext(*usable_trace(given[0].strip(), ",".join(headers.getlist("tracestate"))))
    return trace if trace.is_valid else TraceContext()


def call_id(headers: Headers) -> str:
    """Return the client's id of a call, if a header and a log can hold it; else a new one."""
    given = headers.get(CALL_HEADER, "").strip()
    usable = 0 < len(given) <= _MAX_CALL_ID_LENGTH and given.isascii() and given.isprintable()
    return given if usable else uuid.uuid4().hex


class RouteNames:
    """Names of routes, for metrics and spans: few, since unknown paths share one."""

    def __init__(self, paths: Iterable[str]) -> None:
        """`paths`: those of the routes, in order, with parameters in braces."""
        paths = list(dict.fromkeys(paths))
        self._plain = frozenset(each for each in paths if "{" not in each)
        # Starlette's pattern, and the path without the parameters' types.
        self._patterns = [compile_path(each)[:2] for each in paths if "{" in each]

    def of(self, path: str) -> str:
        """Return the route of a path, such as "/v2/models/{model}/infer"; "" if there is none."""
        if path in self._plain:
            return path
        return next((name for pattern, name in self._patterns if pattern.match(path)), "")


class CallObserver:
    """Observes calls over any protocol, with a span of each between the client's and the
    pipeline's spans."""

    def __init__(
        self, measures: Measures, access_log: bool = False, audit: AuditLog | None = None
    ) -> None:
        """`access_log`: whether each call has a line in the log. `audit`: has a line of each call
        that needs a scope."""
        self._measures = measures
        self._access_log = access_log
        self._audit = audit
        self._in_flight = 0
        self._idle = anyio.Event()
        measures.watch(instruments.GATEWAY_IN_FLIGHT, lambda: self._in_flight)

    async def idle(self) -> None:
        """Wait until no call is in flight."""
        while self._in_flight:
            self._idle = anyio.Event()
            await self._idle.wait()

    @contextmanager
    def observed(self, scope: Scope, route: str, *, traced: bool) -> Iterator[ObservedCall]:
        """Open while a call is in flight.

        Args:
            scope: The call's; its state is set for `observed_call` and `call_id_of`.
            route: The name of its route; "" if it has none.
            traced: Whether it begins a trace if its client is in none. Probes would begin one a
                second.
        """
        state = scope.setdefault("state", {})
        headers = Headers(scope=scope)
        client = client_trace(headers)
        tracing = self._measures.tracing
        if client.traceparent:
            trace = tracing.begin_below(client)
        else:
            trace = tracing.begin() if traced else TraceContext()
        call = ObservedCall(state.get(ARRIVED) or now_ns(), trace, Account(), call_id(headers))
        state[_ARRIVAL] = call
        state[CALL_ID] = call.name
        self._in_flight += 1
        try:
            yield call
        except Exception:
            call.status = max(call.status, _FAILED)
            raise
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()
            self._record(scope, call, client, route)

    def _record(self, scope: Scope, call: ObservedCall, client: TraceContext, route: str) -> None:
        ended_ns = now_ns()
        duration_ms = round((ended_ns - call.at_ns) / 1e6, 2)
        method = scope["method"] if scope["method"] in _METHODS else _OTHER_METHOD
        address, _ = scope.get("client") or ("", 0)
        metrics, tracing = self._measures.metrics, self._measures.tracing
        if metrics.enabled:
            labels = {
                names.HTTP_METHOD: method,
                names.HTTP_ROUTE: route,
                names.HTTP_STATUS: str(call.status),
            }
            metrics.record(instruments.HTTP_DURATION, (ended_ns - call.at_ns) / 1e9, labels)
        if self._access_log:
            _log_access(call, method, route, scope["path"], duration_ms, address)
        if self._audit is not None:
            _audit(self._audit, scope["state"], call, method, route, duration_ms, address)
        if route and call.trace.sampled and tracing.enabled:
            attributes = {
                names.HTTP_METHOD: method,
                names.HTTP_ROUTE: route,
                names.HTTP_STATUS: call.status,
                names.URL_PATH: route,
                names.URL_SCHEME: scope["scheme"],
                names.CLIENT_ADDRESS: address,
                **({names.REQUEST_MODEL: call.account.model} if call.account.model else {}),
            }
            tracing.span(
                f"{method} {route}",
                client,
                call.at_ns,
                ended_ns,
                attributes,
                error=str(call.status) if call.status >= _FAILED else "",
                own=call.trace,
                kind="server",
            )


def _log_access(
    call: ObservedCall, method: str, route: str, path: str, duration_ms: float, address: str
) -> None:
    """Write a call's line in the access log: no text of clients but a path without a route, quoted
    and cut."""
    account = call.account
    fields: dict[str, str | int | float | bool] = {"route": route}
    if not route:
        fields["path"] = shown(path)
    if account.model:
        fields["model"] = account.model
    if account.tenant:
        fields |= {
            "tenant": account.tenant,
            "prompt_tokens": account.prompt_tokens,
            "completion_tokens": account.completion_tokens,
        }
    if not account.complete:
        fields["complete"] = False
    get_logger().info(
        "http_call",
        method=method,
        **fields,
        status=call.status,
        duration_ms=duration_ms,
        sent_bytes=account.sent_bytes,
        call_id=call.name,
        client=address,
        **call.trace.log_ids,
    )


def _audit(
    audit: AuditLog,
    state: dict[str, Any],
    call: ObservedCall,
    method: str,
    route: str,
    duration_ms: float,
    address: str,
) -> None:
    # The policy's route has the full name, also within a model's own application.
    found, needed = state.get(ROUTE, (route, ""))
    if needed == "nothing":
        return
    caller: Caller = state.get(CALLER, NOBODY)
    account = call.account
    fields = {
        "call_id": call.name,
        **call.trace.log_ids,
        "key_id": caller.key_id,
        "key_name": caller.name,
        "tenant": account.tenant or caller.tenant,
        "client": address,
        "method": method,
        "route": found,
        "model": account.model,
        "status": call.status,
        "code": state.get(ERROR_CODE) or account.code,
        "complete": account.complete,
        "prompt_tokens": account.prompt_tokens,
        "completion_tokens": account.completion_tokens,
        "duration_ms": duration_ms,
    }
    audit.write("call", fields, account.texts)


class ObservedCalls:
    """ASGI: observes each call; its response has the header `CALL_HEADER`.

    A GET outside a client's trace has no span.

    Attributes:
        observer: For calls over other protocols as well.
    """

    def __init__(
        self,
        app: ASGIApp,
        measures: Measures,
        routes: Collection[str],
        access_log: bool = False,
        audit: AuditLog | None = None,
    ) -> None:
        """`routes`: the paths of routes; the others are as for `CallObserver`."""
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
                    headers = MutableHeaders(scope=message)
                    headers[CALL_HEADER] = call.name
                    headers.update(call.account.headers)
                await send(message)
                if message["type"] == "http.response.body":
                    call.account.sent_bytes += len(message.get("body", b""))
                    call.account.complete = not message.get("more_body", False)

            await self._app(scope, receive, send_noted)
