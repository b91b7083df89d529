"""The last requests of a gateway: their state, times and texts, for the console."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec

import msgspec

from ...bus.public import Completion, GenerateRequest, Output
from ...config import RequestError
from ...config.logger import get_logger
from ...telemetry import Metrics, instruments, now_ns
from ..call import CLIENT_LEFT, Call
from ..caller import ANYBODY, NOBODY, Caller, may_use, tenant_seen_by
from .request_ids import ids_of, name_of

MOST_REQUESTS = 10_000
"""Requests that are remembered; the oldest are forgotten first."""

MOST_REFUSED = 1000
"""Refused calls among them, so that a flood of these leaves room for requests."""

MOST_DETAIL_BYTES = 32 << 20
"""Memory of the details of ended requests; of older ones only the line of the list remains."""

TENANT_WINDOW_NS = 60_000_000_000
"""Time over which the tokens of tenants are counted."""

PREVIEW_TOKENS, PROMPT_TOKENS = 48, 4096
"""Most tokens of a prompt in the list, and in its details."""

_SAMPLE_TOKENS, _TEXT = 2048, 16_384
_PREVIEW = 160
_CUT = "…"
_FAILED = 500
LoggedState = Literal["waiting", "running", "done", "error", "refused", "cancelled", "expired"]

P = ParamSpec("P")

_IN_FLIGHT = ("waiting", "running")


class LoggedRequest(msgspec.Struct):
    """One request, or a call that the gateway refused before it was one. Times are nanoseconds of
    the wall clock, 0 before the event.

    Attributes:
        number: Counts the requests of this gateway.
        changed: Number of the log's last change of this request.
        id: The request's id on the bus.
        name: The id that its client has.
        tenant: Its tenant; "" of a refused call whose caller is unknown.
        model: The model or adapter.
        of_model: The model whose tokenizer reads its tokens; "" of a refused call.
        state: "waiting" for a place in the pipeline, "running", or how it ended; "refused" by the
            gateway, before the pipeline had it.
        arrived_ns: Its call reached the gateway.
        began_ns: It entered the pipeline.
        first_ns: Its first token came.
        ended_ns: It ended.
        prompt: The end of its prompt; token ids until they are read. Method and path of a refused
            call.
        answer: The beginning of its first sample.
        code: Code of its error.
        message: Message of its error.
        finish: Why its first sample ended.
        cause: The largest cause of its time (docs/time.md).
        status: HTTP status of a refused call.
        client: Address of a refused call.
        versions: The first and the last weight version of its tokens.
    """

    number: int
    id: str
    name: str
    tenant: str
    model: str
    of_model: str
    arrived_ns: int
    changed: int = 0
    state: LoggedState = "waiting"
    began_ns: int = 0
    first_ns: int = 0
    ended_ns: int = 0
    prompt: str | tuple[int, ...] = ""
    answer: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    samples: int = 1
    code: str = ""
    message: str = ""
    finish: str = ""
    cause: str = ""
    status: int = 0
    client: str = ""
    versions: tuple[int, int] | None = None

    @property
    def ended(self) -> bool:
        return self.state not in _IN_FLIGHT

    def seen_by(self, caller: Caller) -> bool:
        """Return whether a caller may read it: without keys everybody, else callers of its tenant
        and administrators, for the models of their keys."""
        own = tenant_seen_by(caller) in (None, self.tenant)
        if not self.of_model:
            return own
        return own and may_use(caller, self.of_model) and may_use(caller, self.model)


class TenantUse(msgspec.Struct):
    """A tenant's use of this gateway.

    Attributes:
        tokens: Tokens of its requests that ended in the last minute, prompts included.
        running: Its requests in the pipeline.
        waiting: Its requests that wait for a place here.
    """

    tenant: str
    tokens: int = 0
    running: int = 0
    waiting: int = 0


def _harmless(
    note: Callable[Concatenate[RequestLog, P], None],
) -> Callable[Concatenate[RequestLog, P], None]:
    """Log and count an error of a method, since no request may fail by being listed."""

    @wraps(note)
    def noted(self: RequestLog, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            note(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001
            self.failed(note.__name__, error)

    return noted


class RequestLog:
    """The requests of one gateway, of all models. Bounded in number and in bytes.

    An error in it is logged and counted; the request goes on.

    Attributes:
        changes: Number of changes so far.
    """

    def __init__(
        self,
        most: int = MOST_REQUESTS,
        most_bytes: int = MOST_DETAIL_BYTES,
        metrics: Metrics | None = None,
    ) -> None:
        self.changes = 0
        self._metrics = metrics or Metrics()
        self._metrics.record(instruments.REQUEST_LOG_FAILED, 0)
        # Errors in the log, of which each kind is logged once: a token may cause one.
        self._failures: set[tuple[str, str]] = set()
        self._most, self._most_bytes = most, most_bytes
        self._last = 0
        # The most recently changed last.
        self._requests: OrderedDict[str, LoggedRequest] = OrderedDict()
        self._running: dict[str, LoggedRequest] = {}
        self._details: OrderedDict[str, bytes] = OrderedDict()
        self._detail_bytes = 0
        self._grown: set[str] = set()
        self._used: deque[tuple[int, str, int]] = deque()
        self._refused: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def find(self, caller: Caller, id: str) -> LoggedRequest | None:
        """Return the request that a caller means (see `ids_of`), if the caller may read it."""
        found = (self._requests.get(each) for each in ids_of(caller, id))
        return next((each for each in found if each is not None and each.seen_by(caller)), None)

    def detail(self, request_id: str) -> dict[str, Any]:
        """Return what is kept of an ended request, as JSON; empty if there is nothing."""
        raw = self._details.get(request_id)
        return {} if raw is None else msgspec.msgpack.decode(raw)

    def failed(self, where: str, error: Exception) -> None:
        """Count an error, and log it if it is the first one of its kind."""
        self._metrics.record(instruments.REQUEST_LOG_FAILED, 1)
        kind = (where, type(error).__name__)
        if kind not in self._failures:
            self._failures.add(kind)
            get_logger().error("request_not_listed", where=where, exc_info=error)

    @_harmless
    def arrived(
        self,
        tenant: str,
        requests: Sequence[GenerateRequest],
        of_model: str,
        arrived_ns: int = 0,
        caller: Caller = ANYBODY,
    ) -> None:
        """Add the requests of a call, unless the call was resumed and they are known.

        Args:
            arrived_ns: When the call's first byte came; 0 if that is unknown.
            caller: The caller, which named the requests.
        """
        at = arrived_ns or now_ns()
        for request in requests:
            known = self._requests.get(request.request_id)
            if known is not None and not known.ended:
                continue
            tokens = request.prompt_token_ids or ()
            found = LoggedRequest(
                number=self._next(),
                id=request.request_id,
                name=name_of(caller, request.request_id),
                tenant=tenant,
                model=request.model or of_model,
                of_model=of_model,
                arrived_ns=at,
                prompt=_end_of(request.prompt or "", _PREVIEW) or tokens[-PREVIEW_TOKENS:],
                prompt_tokens=len(tokens),
                samples=request.n,
            )
            self._forget_detail(found.id)
            self._requests[found.id] = self._running[found.id] = found
            self._change(found)
        self._make_room()

    @_harmless
    def refused(self, call: Call) -> None:
        """Add an ended call that has an error, unless its requests are listed already."""
        own = call.path.startswith("/console")  # the page's, such as one without a key
        if call.account.listed or call.status == CLIENT_LEFT or own:
            return
        number, tenant = self._next(), ""
        if call.caller != NOBODY:  # a tenant that a stranger names proves nothing
            with suppress(RequestError):
                tenant = call.tenant
        found = LoggedRequest(
            number=number,
            id=f"refused-{number}",
            name=call.id,
            tenant=tenant,
            model=_start_of(call.requested_model or call.account.model or call.model, _PREVIEW),
            of_model="",
            arrived_ns=call.at_ns,
            state="error" if call.status == _FAILED else "refused",
            ended_ns=now_ns(),
            prompt=_start_of(f"{call.method} {call.path}", _PREVIEW),
            code=call.code,
            message=call.message[:_TEXT],
            status=call.status,
            client=call.address,
        )
        self._requests[found.id] = found
        self._change(found)
        self._refused.append(found.id)
        if len(self._refused) > MOST_REFUSED:
            self._requests.pop(self._refused.popleft(), None)
        self._make_room()

    @_harmless
    def began(self, request_id: str) -> None:
        """Note that a request enters the pipeline."""
        if (found := self._running.get(request_id)) is not None and not found.began_ns:
            found.began_ns, found.state = now_ns(), "running"
            self._change(found)

    @_harmless
    def output(self, request: GenerateRequest, output: Output) -> None:
        """Note an output as the client gets it."""
        if (found := self._running.get(request.request_id)) is None:
            return
        if isinstance(output, Completion):
            self._end(found, request, output)
            return
        if not found.first_ns:
            found.first_ns = now_ns()
        found.completion_tokens += len(output.token_ids)
        if len(found.answer) <= _PREVIEW and not output.sample_index:
            found.answer = _start_of(found.answer + output.text, _PREVIEW)
        self._grown.add(found.id)

    @_harmless
    def left(self, request_ids: Iterable[str], code: str, message: str) -> None:
        """End what is left of a call that is over: with an error, or since its client left."""
        for request_id in request_ids:
            found = self._no_longer_running(request_id)
            if found is not None:
                if code in ("", "cancelled"):
                    found.state = "cancelled"
                elif code == "expired":
                    found.state = "expired"
                else:
                    found.state = "error" if found.began_ns else "refused"
                found.code, found.message, found.ended_ns = code, message[:_TEXT], now_ns()
                self._change(found)

    def changed_after(self, change: int, limit: int) -> tuple[list[LoggedRequest], int]:
        """Return requests changed after a change, the least recent first, and the change up to
        which they are complete."""
        self._count_growth()
        newest: list[LoggedRequest] = []
        for found in reversed(self._requests.values()):
            if found.changed <= change:
                break
            newest.append(found)
        page = newest[::-1][:limit]
        return page, page[-1].changed if len(page) < len(newest) else self.changes

    def tenants(self) -> Iterator[TenantUse]:
        """Yield the use of each tenant of the last minute."""
        self._forget_used(now_ns())
        uses: dict[str, TenantUse] = {}
        for _, tenant, tokens in self._used:
            uses.setdefault(tenant, TenantUse(tenant)).tokens += tokens
        for found in self._running.values():
            use = uses.setdefault(found.tenant, TenantUse(found.tenant))
            if found.began_ns:
                use.running += 1
            else:
                use.waiting += 1
        yield from uses.values()

    def _end(self, found: LoggedRequest, request: GenerateRequest, end: Completion) -> None:
        self._no_longer_running(found.id)
        found.state, found.ended_ns = end.status, now_ns()
        found.first_ns = found.first_ns or end.timings.first_token_ns
        usage = end.usage
        found.prompt_tokens = usage.prompt_tokens or found.prompt_tokens
        found.cached_tokens, found.completion_tokens = usage.cached_tokens, usage.completion_tokens
        if end.error is not None:
            found.code, found.message = end.error.code, end.error.message[:_TEXT]
        if end.samples:
            found.answer = _start_of(end.samples[0].text, _PREVIEW)
            found.finish = end.samples[0].finish_reason
        versions = [version for each in end.samples for version, _ in each.weight_versions]
        if versions:
            found.versions = min(versions), max(versions)
        if usage.time:
            found.cause = max(usage.time, key=usage.time.__getitem__)
        tokens = usage.prompt_tokens + usage.completion_tokens
        self._used.append((found.ended_ns, found.tenant, tokens))
        self._forget_used(found.ended_ns)
        self._keep_detail(found.id, msgspec.msgpack.encode(_detail_of(request, end)))
        self._change(found)

    def _no_longer_running(self, request_id: str) -> LoggedRequest | None:
        # Without a console that reads changes, nothing else would empty this.
        self._grown.discard(request_id)
        return self._running.pop(request_id, None)

    def _forget_used(self, at_ns: int) -> None:
        while self._used and self._used[0][0] < at_ns - TENANT_WINDOW_NS:
            self._used.popleft()

    def _change(self, found: LoggedRequest) -> None:
        self.changes += 1
        found.changed = self.changes
        self._requests.move_to_end(found.id)

    def _count_growth(self) -> None:
        """Count new tokens as changes; not each by itself, since that would cost each token."""
        for request_id in self._grown:
            if (found := self._running.get(request_id)) is not None:
                self._change(found)
        self._grown.clear()

    def _next(self) -> int:
        self._last += 1
        return self._last

    def _make_room(self) -> None:
        while len(self._requests) > self._most:
            oldest = next(iter(self._requests))
            del self._requests[oldest]
            self._no_longer_running(oldest)
            self._forget_detail(oldest)

    def _keep_detail(self, request_id: str, detail: bytes) -> None:
        self._details[request_id] = detail
        self._detail_bytes += len(detail)
        while self._detail_bytes > self._most_bytes:
            self._forget_detail(next(iter(self._details)))

    def _forget_detail(self, request_id: str) -> None:
        self._detail_bytes -= len(self._details.pop(request_id, b""))


def _start_of(text: str, most: int) -> str:
    """Return a text, or its beginning with a mark."""
    return text if len(text) <= most else text[:most] + _CUT


def _end_of(text: str, most: int) -> str:
    """Return a text, or its end with a mark."""
    return text if len(text) <= most else _CUT + text[-most:]


def _detail_of(request: GenerateRequest, end: Completion) -> dict[str, Any]:
    """Return what is kept of a request and its end."""
    return {
        "prompt": _end_of(request.prompt or "", _TEXT),
        "prompt_token_ids": (end.prompt_token_ids or request.prompt_token_ids or ())[
            -PROMPT_TOKENS:
        ],
        "priority": request.priority,
        "images": len(request.images),
        "trace_id": end.trace_id,
        "entry_id": end.entry_id,
        "usage": end.usage,
        "timings": end.timings,
        "samples": [
            {
                "text": _start_of(each.text, _TEXT),
                "token_ids": each.token_ids[:_SAMPLE_TOKENS],
                "tokens": len(each.token_ids),
                "finish_reason": each.finish_reason,
                "weight_versions": each.weight_versions,
                "drafted": each.num_draft_tokens,
                "accepted": each.num_accepted_draft_tokens,
            }
            for each in end.samples
        ],
    }
