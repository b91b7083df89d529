"""Submission of the requests of all interfaces: fair queueing, deadlines, policy, accounting."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import anyio
import anyio.lowlevel
import msgspec

from ...bus.codec import encode_request
from ...bus.public import (
    Completion,
    ErrorInfo,
    GenerateRequest,
    Output,
    Timings,
    Usage,
)
from ...config import (
    BACKGROUND,
    MAX_PRIORITY,
    BusError,
    Config,
    NanoInferenceError,
    RequestError,
    prompt_too_long,
    shown,
)
from ...pipeline.client import BusClient
from ...telemetry import Operation, instruments, names, now_ns
from ..call import Account, Call
from ..caller import Caller, may_use
from ..server.http import DEFAULT_RETRY_S, EngineError, field_error, task_group
from ..server.measures import Measures
from .capacity import Capacity, Ticket
from .chain import PolicyChain
from .durable_calls import Attachment
from .fields import in_words_of_body
from .lane_state import DRAINING, ModelLength, Readiness
from .request_ids import concerns, ids_of, name_of
from .request_log import RequestLog
from .sessions import with_session
from .times import with_http

AT_ONCE = 16
"""Prompts that are prepared, or begun, before the event loop serves others."""

ENDED_EARLY = ErrorInfo(code="aborted", message="the request was aborted")
"""The error of a request that was ended while it waited here."""

# Ended lines of batches that go on in one turn of the event loop. A step may end hundreds, for
# which the calls of clients would wait.
_LINES_AT_ONCE = 4

# The end of the name of the share of a tenant's lines.
_LINES = "\0lines"

# Period of counting lanes while requests wait.
_COUNT_LANES_S = 10.0


Take = Callable[[int, Output], Awaitable[None]]
"""Takes an output of a call's request, by the request's index."""


@dataclass(eq=False, slots=True)
class _Owner:
    """The owner of a request that waits or runs here.

    Attributes:
        tenant: Its tenant.
        model: Its model or adapter.
        connections: Connections that await it: several only of a durable call.
    """

    tenant: str
    model: str
    connections: int = 0


class TooLate(EngineError):
    """A call's deadline has passed."""

    def __init__(self, call: Call, before: str = "all of it could run") -> None:
        """`before`: what came too late."""
        message = f"the call's time ({call.limited_by}) was over before {before}; give it more"
        super().__init__(message, code="expired")


@contextmanager
def in_time(call: Call, before: str = "all of it could run", grace_s: float = 0) -> Iterator[None]:
    """Cancel what exceeds a call's deadline.

    Args:
        before: As of `TooLate`.
        grace_s: More time.

    Raises:
        TooLate: It was cancelled.
    """
    if (left_ns := call.left_ns) is None:
        yield
        return
    with anyio.move_on_after(max(0, left_ns) / 1e9 + grace_s) as scope:
        yield
    if scope.cancelled_caught:
        raise TooLate(call, before)


@dataclass(eq=False)
class Submissions:
    """A gateway's requests that wait for a place or are in the pipeline.

    Attributes:
        length: Most tokens of a prompt with its completion.
        log: The last requests, for the console; None without it.
    """

    client: BusClient
    config: Config
    measures: Measures
    readiness: Readiness
    policy: PolicyChain
    log: RequestLog | None = None

    def __post_init__(self) -> None:
        config = self.config
        self.length = ModelLength(self.client, config)
        self._capacity = Capacity(config.gateway_places, config.gateway.max_waiting, self.measures)
        self._line_turns = anyio.Semaphore(_LINES_AT_ONCE)
        self._count_lanes_at = 0.0
        # Several connections may be attached to one.
        self._request_ids: Counter[str] = Counter()
        # By the id on the bus of a request that waits or runs here.
        self._owners: dict[str, _Owner] = {}
        self._model = config.bus.model

    @property
    def in_flight(self) -> int:
        """The number of requests in the pipeline."""
        return len(self._request_ids)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a place."""
        return self._capacity.waiting

    @property
    def runs_calls(self) -> bool:
        """Whether requests run here that are of no batch."""
        return not all(share.endswith(_LINES) for share in self._capacity.held)

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs here."""
        return not (self._owners or self._request_ids)

    def has(self, caller: Caller, name: str) -> bool:
        """Return whether a request that a caller may mean waits or runs here, or one of its call;
        see `ids_of`."""
        return bool(self._meant(ids_of(caller, name)))

    async def abort(self, caller: Caller, name: str) -> None:
        """End the request that a caller means, or the requests of its call, wherever they are."""
        ids = ids_of(caller, name)
        await self._end({*self._meant(ids), *ids})

    async def abort_own(self, caller: Caller, name: str) -> bool:
        """Abort requests like `abort`, of the caller's tenant and models only; return whether there
        was one here.
        """
        own = {
            each
            for each in self._meant(ids_of(caller, name))
            if (owner := self._owners[each]).tenant == caller.tenant
            and may_use(caller, owner.model)
        }
        await self._end(own)
        return bool(own)

    def _meant(self, ids: Sequence[str]) -> set[str]:
        return {each for each in self._owners if any(concerns(id, each) for id in ids)}

    async def _end(self, request_ids: Collection[str]) -> None:
        waiting = self._owners.keys() - self._request_ids.keys()
        self._capacity.end(request_ids.__contains__)
        for each in sorted(set(request_ids) - waiting):
            await self.client.cancel(each)

    def end_waiting(self, call_id: str) -> None:
        """End a call's waiting requests."""
        self._capacity.end(partial(concerns, call_id))

    async def abort_all(self) -> None:
        """End all waiting requests, and all requests in the pipeline, of any client."""
        self._capacity.end(lambda request_id: True)
        await self.client.cancel_all()

    def check_ready(self) -> None:
        """Raises EngineError (shutting_down) when the gateway is draining."""
        if self.readiness.draining:
            raise EngineError(
                f"{DRAINING}; send it again, to another one",
                code="shutting_down",
                retry_after_s=DEFAULT_RETRY_S,
            )

    def check_size(self, request: GenerateRequest, max_model_len: int) -> None:
        """Refuse a prompt that the bus or admission would refuse.

        Args:
            max_model_len: As `length` returns it.

        Raises:
            RequestError: prompt_too_long, request_too_large.
        """
        text, token_ids = request.prompt or "", request.prompt_token_ids or ()
        # A prompt to embed needs no room for a completion.
        if len(token_ids) > (most := max_model_len - (request.embed is None)):
            given = f"the prompt has {len(token_ids)}"
            raise prompt_too_long(max_model_len, given, f"shorten it to {most} or fewer")
        max_bytes = self.config.bus.max_request_bytes
        # Most texts are short enough at four bytes a character.
        if len(text) * 4 > max_bytes and len(text.encode(errors="surrogatepass")) > max_bytes:
            raise RequestError(
                f"the prompt alone has more than {max_bytes} bytes, which is the most that a "
                "request may have (bus.max_request_bytes); shorten it",
                code="request_too_large",
            )

    def check_priority(self, caller: Caller, asked: int, *, lower_first: bool = True) -> None:
        """Refuse a priority above the caller's limit. Priority 0, the default, is capped later.

        Args:
            asked: The engine's priority, in which higher ones are earlier.
            lower_first: Whether lower priorities run earlier in the interface; in the engine,
                higher ones do.

        Raises:
            FieldError: invalid_priority.
        """
        most = self._max_priority(caller)
        if not asked or -MAX_PRIORITY <= asked <= most:
            return
        low, high, given = -MAX_PRIORITY, most, asked
        if lower_first:
            low, high, given = -high, -low, -given
        own = caller.max_priority is not None
        setting = "max_priority of the key or its tenant" if own else "gateway.max_priority"
        raise field_error(
            "priority",
            f"is {shown(given)}; it must be from {low} to {high}, where "
            f"{'lower' if lower_first else 'higher'} is earlier ({setting}). Leave it out, or have "
            "the limit raised",
            code="invalid_priority",
        )

    def check_encoded(self, request: GenerateRequest) -> None:
        """Refuse a request that is too large for the bus, before any of its call is published.

        Raises:
            RequestError: request_too_large.
        """
        most = self.config.bus.max_request_bytes
        # An upper bound, since encoding the prompt takes time: 20 digits and a comma for a token,
        # six bytes for an escaped character.
        rest = msgspec.structs.replace(request, prompt=None, prompt_token_ids=None)
        bound = 21 * len(request.prompt_token_ids or ()) + 6 * len(request.prompt or "")
        if bound + len(encode_request(rest)[1]) <= most:
            return
        if (size := len(encode_request(request)[1])) > most:
            raise RequestError(
                f"the prompt with its parameters makes a request of {size} bytes, and a request "
                f"may have {most} (bus.max_request_bytes); send less",
                code="request_too_large",
            )

    async def run(
        self,
        call: Call,
        requests: Sequence[GenerateRequest],
        take: Take | None = None,
        attachment: Attachment | None = None,
        before: Callable[[int], str] = lambda index: "",
    ) -> list[Completion]:
        """Run the requests of a call, each from when there is a place for it.

        The first error ends the others. An aborted request is no error: there may be tokens.

        Args:
            take: Awaited with the index of a request and each of its outputs.
            attachment: To the durable call that they belong to; they may have been published
                before. Any other request ends when its outputs are not read.
            before: Returns the text, by the index of a request, that the answer shows before each
                sample.

        Raises:
            NanoInferenceError: The first error; the policy's refusal; `shutting_down`.
        """
        published = () if attachment is None else attachment.begun_before
        self.check_ready()
        requests = with_session(call, requests, self.client.bus.store.trees)
        self._observe(call, requests)

        completions: dict[int, Completion] = {}
        owned: dict[str, _Owner] = {}
        # The places of a tenant's lines are not those of its other calls, which come first.
        share = f"{call.tenant}{_LINES}" if call.batch_line else call.tenant

        async def run(index: int, begun: bool, placed: bool) -> None:
            try:
                made = self._outputs(call, requests[index], begun, attachment, before(index))
                async with aclosing(made) as outputs:
                    async for output in outputs:
                        if isinstance(output, Completion):
                            completions[index] = output
                            # Its client may use the id again once it has the answer.
                            self._leave(requests[index].request_id, owned)
                        if take is not None:
                            await take(index, output)
                        # anyio's checkpoint takes ten times as long, for each output.
                        await asyncio.sleep(0)
            finally:
                if placed:
                    self._capacity.give_back(share)

        waiting = {
            request.request_id: index
            for index, request in enumerate(requests)
            if request.request_id not in published
        }
        new = [requests[index] for index in waiting.values()]

        async def place(ticket: Ticket, request_id: str) -> bool:
            await self._count_lanes()
            with in_time(call):
                return await self._capacity.take(ticket, request_id)

        with self._owned(call, requests, owned, attachment is not None):
            async with self.policy.admitted(call, new):
                if len(requests) == 1:  # in this task
                    begun = True
                    if new:
                        with self._capacity.wait(share, [*waiting]) as ticket:
                            begun = await place(ticket, new[0].request_id)
                    await run(0, begun, begun and bool(new))
                    return [*completions.values()]
                async with task_group() as group:
                    for index, request in enumerate(requests):
                        if request.request_id in published:
                            group.start_soon(run, index, True, False)
                    with self._capacity.wait(share, [*waiting]) as ticket:
                        for number, (request_id, index) in enumerate(waiting.items()):
                            begun = await place(ticket, request_id)
                            group.start_soon(run, index, begun, begun)
                            if number % AT_ONCE == 0 or group.cancel_scope.cancel_called:
                                await anyio.lowlevel.checkpoint()
        return [completion for _, completion in sorted(completions.items())]

    def _observe(self, call: Call, requests: Sequence[GenerateRequest]) -> None:
        """Add requests to the operation of their call; a call may make more than once."""
        account, measures = call.account, self.measures
        if not (measures.tracing.enabled or measures.metrics.enabled) or not requests:
            return
        if account.operation is None:
            model = requests[0].model or self.config.engine.model_name
            named = call.requested_model or account.model
            id = name_of(call.caller, requests[0].request_id) if len(requests) == 1 else ""
            account.operation = Operation(call.at_ns, model, id, named=named)
        for each in requests:
            account.operation.begin(each)

    @contextmanager
    def _owned(
        self,
        call: Call,
        requests: Sequence[GenerateRequest],
        owned: dict[str, _Owner],
        attached: bool,
    ) -> Iterator[None]:
        """Open while a call runs; its first error is that of its account.

        Args:
            owned: Gets the owners of its requests.
            attached: It belongs to a durable call, so that other connections may await the same
                requests.

        Raises:
            RequestError: duplicate_request: another call has a request of the same id here. Neither
                that request nor its line in the log changes.
        """
        model = self.config.engine.model_name
        code, message, log = "", "", self.log
        try:
            if not attached:
                self._check_new(call, requests)
            for each in requests:
                owner = _Owner(call.tenant, each.model or model)
                owner = owned[each.request_id] = self._owners.setdefault(each.request_id, owner)
                owner.connections += 1
            if log is not None:
                arrived_ns = call.account.arrived_ns
                log.arrived(call.tenant, requests, model, arrived_ns, call.caller)
                call.account.listed = True
            yield
        except NanoInferenceError as error:
            if isinstance(error, TooLate):
                self.measures.refused("expired")
            code, message = error.code, error.message
            call.account.code = code
            raise
        finally:
            left = [each for each in list(owned) if self._leave(each, owned)]
            if log is not None:
                log.left(left, code, message)

    def _leave(self, request_id: str, owned: dict[str, _Owner]) -> bool:
        """Stop awaiting a request; return whether no other connection awaits it either."""
        owner = owned.pop(request_id, None)
        if owner is None:
            return False
        owner.connections -= 1
        if owner.connections:
            return False
        del self._owners[request_id]
        return True

    def _check_new(self, call: Call, requests: Sequence[GenerateRequest]) -> None:
        for each in requests:
            if each.request_id in self._owners:
                raise RequestError(
                    f"a request {shown(name_of(call.caller, each.request_id))} of yours is in "
                    "flight here; take another id, or wait for its end",
                    code="duplicate_request",
                )

    async def _outputs(
        self,
        call: Call,
        request: GenerateRequest,
        begun: bool,
        attachment: Attachment | None,
        before: str,
    ) -> AsyncGenerator[Output, None]:
        """Yield the outputs of a request, or its abort if it has not `begun`."""
        published = attachment is not None and request.request_id in attachment.entries
        if attachment is not None and not (begun and attachment.begins(request.request_id)):
            await attachment.end_early(request.request_id)
            begun = False
        if not begun:
            end = Completion(
                request_id=request.request_id,
                entry_id="",
                status="cancelled",
                error=ENDED_EARLY,
                usage=Usage(time={}, billed_ns=0),
                timings=Timings(finished_ns=now_ns()),
            )
            yield with_http(end, call.account)
            return
        if not published and (left_ns := call.left_ns) is not None:
            if left_ns <= 0:
                raise TooLate(call)
            request = msgspec.structs.replace(request, budget_ns=left_ns)
        most = BACKGROUND if call.batch_line else self._max_priority(call.caller)
        if not published and request.priority > most:
            request = msgspec.structs.replace(request, priority=most)
        if not published and self._model:
            labels = {names.REQUEST_MODEL: self._model}
            self.measures.metrics.record(instruments.MODEL_ROUTES, 1, labels)
        log = self.log
        if log is not None:
            log.began(request.request_id)
        with self._counted(request.request_id):
            submit = self.client.submit if attachment is None else attachment.outputs
            # A durable call goes on after this, and a call without a stream has no chunks to count.
            is_counted = attachment is None and request.stream
            made = _accounted(call.account, request, submit(request, call.trace), is_counted)
            allowed = self.policy.outputs(call, request, made, before)
            async with aclosing(allowed) as outputs:
                async for output in outputs:
                    if call.batch_line:
                        async with self._line_turns:
                            await anyio.lowlevel.checkpoint()
                    if log is not None:
                        log.output(request, output)
                    if isinstance(output, Completion):
                        _check(output)
                        call.aborted |= output.status == "cancelled"
                    yield output

    async def filtered_end(
        self, call: Call, request: GenerateRequest, end: Completion, before: str = ""
    ) -> Output:
        """Filter the end of a request that was found on the bus; `before` as for `run`."""

        async def found() -> AsyncGenerator[Output, None]:
            call.aborted |= end.status == "cancelled"
            yield end

        async with aclosing(self.policy.outputs(call, request, found(), before)) as outputs:
            async for output in outputs:
                return output
        return end

    def _max_priority(self, caller: Caller) -> int:
        own = caller.max_priority
        return self.config.gateway.max_priority if own is None else own

    @contextmanager
    def _counted(self, request_id: str) -> Iterator[None]:
        self._request_ids[request_id] += 1
        try:
            yield
        finally:
            self._request_ids[request_id] -= 1
            if not self._request_ids[request_id]:
                del self._request_ids[request_id]

    async def _count_lanes(self) -> None:
        """Set the number of places by that of the lanes, unless a setting has it."""
        now = anyio.current_time()
        if not self.waiting or now < self._count_lanes_at:
            return
        self._count_lanes_at = now + _COUNT_LANES_S
        if self.config.gateway.max_in_flight is None:
            with suppress(BusError):
                lanes = {report.lane for report in await self.client.deployment.reports()}
                self._capacity.resize(self.config.gateway_places * max(1, len(lanes)))


async def _accounted(
    account: Account,
    request: GenerateRequest,
    outputs: AsyncGenerator[Output, None],
    is_counted: bool,
) -> AsyncGenerator[Output, None]:
    """Count the tokens of a request's outputs, before guardrails filter them."""
    left, request_id, operation = account.left, request.request_id, account.operation
    left[request_id] = 0 if is_counted else None
    async with aclosing(outputs):
        async for output in outputs:
            if isinstance(output, Completion):
                del left[request_id]
                output = with_http(output, account)
                account.add(output.usage)
                if operation is not None:
                    operation.end(output)
            else:
                if operation is not None and not operation.first_chunk_ns:
                    operation.first_chunk_ns = now_ns()
                if (seen := left[request_id]) is not None:
                    left[request_id] = seen + len(output.token_ids)
            yield output


def _check(completion: Completion) -> None:
    """Raises EngineError unless a request is done or cancelled."""
    error = completion.error
    if error is not None and completion.status != "cancelled":
        message, param = in_words_of_body(error)
        raise EngineError(
            message,
            code=error.code,
            param=param,
            retry_after_s=error.retry_after_s,
            completion=completion,
        )
