"""Observation of calls: trace, span, duration, access log and audit log of each."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
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
from ..serving.account import Account, no_time
from ..serving.measures import Measures
from .http import CALL_ID, CLIENT_LEFT, ERROR_CODE

_METHODS = frozenset(
    ("CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE")
)
_OTHER_METHOD = "_OTHER"
"""The name of any other method in OpenTelemetry's conventions."""

ARRIVED, UNREAD = "arrived_ns", "unread_ns"
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
        audit: Has a line of each call that needs a scope.
    """

    app: ASGIApp
    measures: Measures
    routes: Collection[str]
    access_log: bool = False
    audit: AuditLog | None = None

    def __post_init__(self) -> None:
        self._route_of = route_names(self.routes)
        self._in_flight = 0
        self._idle = anyio.Event()
        self.measures.watch(instruments.GATEWAY_IN_FLIGHT, lambda: self._in_flight)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._route_of(scope["path"])
        traced = bool(route) and scope["method"] != "GET"
        with self.observed(scope, route, traced=traced) as call:

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

            await self.app(scope, receive, send_noted)

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
        tracing = self.measures.tracing
        if client.traceparent:
            trace = tracing.begin_below(client)
        else:
            trace = tracing.begin() if traced else TraceContext()
        at_ns = state.get(ARRIVED) or now_ns()
        account = Account(arrived_ns=at_ns, unread_ns=state.get(UNREAD, no_time))
        call = ObservedCall(at_ns, trace, account, call_id(headers))
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
        method = scope["method"] if scope["method"] in _METHODS else _OTHER_METHOD
        address, _ = scope.get("client") or ("", 0)
        metrics, tracing = self.measures.metrics, self.measures.tracing
        named = {names.HTTP_METHOD: method, names.HTTP_ROUTE: route}
        if metrics.enabled:
            labels = named | {names.HTTP_STATUS: str(call.status)}
            metrics.record(instruments.HTTP_DURATION, (ended_ns - call.at_ns) / 1e9, labels)
        fields = {
            "method": method,
            "status": call.status,
            "duration_ms": round((ended_ns - call.at_ns) / 1e6, 2),
            "call_id": call.name,
            "client": address,
            **call.trace.log_ids,
        }
        if self.access_log:
            _log_access(call.account, route, scope["path"], fields)
        if self.audit is not None:
            _audit(self.audit, scope["state"], call.account, route, fields)
        if route and call.trace.sampled and tracing.enabled:
            attributes: dict[str, Any] = {
                **named,
                names.HTTP_STATUS: call.status,
                names.URL_PATH: route,
                names.URL_SCHEME: scope["scheme"],
                names.CLIENT_ADDRESS: address,
                **({names.REQUEST_MODEL: call.account.model} if call.account.model else {}),
                **names.time_attributes(call.account.time, call.account.billed_ns),
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


def _usage(account: Account) -> dict[str, int]:
    return {"prompt_tokens": account.prompt_tokens, "completion_tokens": account.completion_tokens}


def _log_access(account: Account, route: str, path: str, fields: dict[str, Any]) -> None:
    """Write a call's line in the access log: no text of clients but a path without a route, quoted
    and cut."""
    line: dict[str, Any] = {"method": fields["method"], "route": route}
    if not route:
        line["path"] = shown(path)
    if account.model:
        line["model"] = account.model
    if account.tenant:
        line |= {"tenant": account.tenant, **_usage(account)}
    if not account.complete:
        line["complete"] = False
    get_logger().info("http_call", **line | fields, sent_bytes=account.sent_bytes)


def _audit(
    audit: AuditLog, state: dict[str, Any], account: Account, route: str, fields: dict[str, Any]
) -> None:
    # The policy's route has the full name, also within a model's own application.
    found, needed = state.get(ROUTE, (route, ""))
    if needed == "nothing":
        return
    caller: Caller = state.get(CALLER, NOBODY)
    about = {
        "key_id": caller.key_id,
        "key_name": caller.name,
        "tenant": account.tenant or caller.tenant,
        "route": found,
        "model": account.model,
        "code": state.get(ERROR_CODE) or account.code,
        "complete": account.complete,
    }
    audit.write("call", fields | about | _usage(account), account.texts)
