"""Prompts of forks: found in the parent's output once, and then kept until the fork is answered."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import aclosing
from typing import NamedTuple

import msgspec

from ...bus import Bus
from ...bus.entries import RequestEntry, entry_key
from ...bus.public import Completion, Fork, ForkOrigin, GenerateRequest, ImageInput
from ...config import BusError, ChannelClosed, RequestError, shown
from ...telemetry import TraceContext
from .parts.forks import invalid_fork
from .requests import Requests, Unanswered

KEPT_S = 3600
"""Time for which a fork's prompt is kept after the last renewal on a durable bus: a lane's
successor takes its entries over sooner."""

IN_MEMORY_S = 1 << 31
"""The same in memory, where all ends with the process."""


class _Prompt(msgspec.Struct, frozen=True, array_like=True):
    """The prompt of a fork.

    Attributes:
        model: Id of the parent's adapter; "" for none.
        images: Ids of the parent's images.
        trace: Traceparent of the parent; "" if unknown.
    """

    origin: ForkOrigin
    token_ids: tuple[int, ...]
    model: str
    images: tuple[str, ...]
    trace: str


_decode = msgspec.msgpack.Decoder(_Prompt).decode


class _Parent(NamedTuple):
    """A parent without its sample.

    Attributes:
        tenant: "" if it can't be known.
    """

    entry_id: str
    tenant: str
    token_ids: tuple[int, ...]
    model: str
    images: tuple[str, ...]
    trace: str
    origin: ForkOrigin | None


class ForkedPrompts:
    """Finds the prompts of forks, and keeps them while the forks are in flight.

    A running parent is found in this lane, by its request, and its tokens in its result stream; an
    ended one by its terminal message, which any lane has written. The fork waits for tokens that
    are not there yet: until the parent's end at most. A parent without chunks, or of another lane,
    is forked at its end.

    What was found is stored before the fork runs: after a failure the fork goes on with the same
    prompt, though the parent may be gone, or have other tokens.

    Attributes:
        held: Keys of entries whose prompts are kept.
    """

    def __init__(
        self, bus: Bus, requests: Requests, model: str, trace_of: Callable[[str], TraceContext]
    ) -> None:
        """Args:
        bus: The bus.
        requests: Requests of this lane.
        model: Name of its model.
        trace_of: Returns the context of admission's span of an entry without a client's trace.
        """
        self._bus, self._requests, self._model, self._trace_of = bus, requests, model, trace_of
        self._for_s = KEPT_S if bus.durable else IN_MEMORY_S
        self.held: set[str] = set()

    async def resolve(self, entry: RequestEntry) -> RequestEntry:
        """Return the entry of a checked fork with its prompt in place of `fork`.

        Raises:
            RequestError: unknown_request, invalid_fork; or the bus refuses a command.
        """
        request, forks = entry.request, self._bus.store.forks
        assert isinstance(request, GenerateRequest)
        try:
            raw = await forks.find(entry.key, self._for_s)
            if raw is None:
                found = msgspec.msgpack.encode(await self._find(entry, request))
                raw = await forks.put(entry.key, found, self._for_s)
        except ChannelClosed:
            raise
        except BusError as error:
            raise RequestError(error.message, code=error.code) from None
        self.held.add(entry.key)
        prompt = _decode(raw)
        return msgspec.structs.replace(
            entry,
            request=msgspec.structs.replace(
                request,
                fork=None,
                prompt_token_ids=prompt.token_ids,
                images=tuple(ImageInput(id=id) for id in prompt.images),
                model=request.model or prompt.model,
            ),
            origin=prompt.origin,
            origin_trace=prompt.trace,
        )

    async def release(self, key: str) -> None:
        """Drop the prompt of an entry that is answered."""
        if key in self.held:
            self.held.discard(key)
            await self._bus.store.forks.remove(key)

    def forget(self, keys: Collection[str]) -> None:
        """Leave the prompts of these entries to another lane."""
        self.held.difference_update(keys)

    async def renew(self) -> None:
        """Keep all prompts for longer."""
        if self.held:
            await self._bus.store.forks.renew(tuple(self.held), self._for_s)

    # --- parents ------------------------------------------------------------------------------

    async def _find(self, entry: RequestEntry, request: GenerateRequest) -> _Prompt:
        fork, results = request.fork, self._bus.results
        assert fork is not None
        entry_id = self._entry_of(fork.request_id, entry)
        if entry_id is None:
            # Without a search of the results stream, which would take longer the more it holds.
            recorded = await results.recorded(fork.request_id, search=False)
            ended = [each for each in recorded if each.request_id == fork.request_id]
            if ended:
                return self._of_ended(ended[-1], request, fork)
            last = await results.last(fork.request_id, "")
            if last is None:
                raise _unknown(fork)
            entry_id = last.entry_id  # another lane runs it
        return await self._follow(entry_id, request, fork)

    async def _follow(self, entry_id: str, request: GenerateRequest, fork: Fork) -> _Prompt:
        """Wait for the tokens of a parent that has not ended, as far as known."""
        token_ids: list[int] = []
        if (prompt := self._of_running(entry_id, token_ids, request, fork)) is not None:
            return prompt
        follow = self._bus.results.follow
        async with aclosing(follow(fork.request_id, entry_id, keep=True)) as outputs:
            async for output in outputs:
                if isinstance(output, Completion):
                    return self._of_ended(output, request, fork)
                if output.sample_index == fork.sample_index:
                    del token_ids[output.token_offset :]
                    token_ids += output.token_ids
                prompt = self._of_running(entry_id, token_ids, request, fork)
                if prompt is not None:
                    return prompt
        raise _unknown(fork)

    def _entry_of(self, request_id: str, fork: RequestEntry) -> str | None:
        """Return the entry of a request that this lane has, and had before the fork."""
        item = self._requests.ledger.accepted(request_id)
        if item is not None:
            return item.entry_id
        return self._requests.incoming.before(fork.key, request_id)

    def _of_running(
        self, entry_id: str, token_ids: list[int], request: GenerateRequest, fork: Fork
    ) -> _Prompt | None:
        """Return the prompt of a fork, if its parent runs here and has the tokens."""
        item = self._requests.ledger.accepted(fork.request_id)
        if item is None or item.entry_id != entry_id or item.accepted is None:
            return None
        sampling = item.accepted.admitted.sampling
        _check_sample(fork, item.accepted.opened.n, sampling.max_tokens)
        parent = _parent_in_flight(item)
        if parent.tenant != request.tenant:
            raise _unknown(fork)
        if len(token_ids) < fork.at:
            return None
        return _prompt_of(parent, token_ids, fork)

    def _of_ended(self, ended: Completion, request: GenerateRequest, fork: Fork) -> _Prompt:
        recipe = ended.recipe
        if recipe is None:
            raise invalid_fork(
                f"request {shown(fork.request_id)} has no recipe: it ended before it ran, or its "
                "pipeline had admission.recipes off; a request with one can be forked after its end"
            )
        if recipe.tenant != request.tenant:
            raise _unknown(fork)
        if ended.model not in (self._model, recipe.adapter):
            raise invalid_fork(
                f"request {shown(fork.request_id)} is of the model {shown(ended.model)}, whose "
                f"tokens are not those of {shown(self._model)}; send the fork to that model"
            )
        samples = {sample.sample_index: sample.token_ids for sample in ended.samples}
        token_ids = samples.get(fork.sample_index, ())
        _check_sample(fork, max(samples, default=-1) + 1, len(token_ids))
        own = self._trace_of(entry_key(ended.entry_id, ended.request_id))
        trace = own.traceparent if ended.trace_id and own.trace_id == ended.trace_id else ""
        parent = _Parent(
            ended.entry_id,
            recipe.tenant,
            ended.prompt_token_ids,
            recipe.adapter,
            recipe.images,
            trace,
            ended.fork,
        )
        return _prompt_of(parent, token_ids, fork)


def _parent_in_flight(item: Unanswered) -> _Parent:
    assert item.accepted is not None
    admitted = item.accepted.admitted
    return _Parent(
        item.entry_id,
        admitted.tenant,
        admitted.prompt.token_ids,
        admitted.info.adapter,
        admitted.prompt.media,
        item.accepted.opened.traceparent,
        item.entry.origin,
    )


def _prompt_of(parent: _Parent, token_ids: Collection[int], fork: Fork) -> _Prompt:
    before = 0 if parent.origin is None else parent.origin.num_generated
    origin = ForkOrigin(
        request_id=fork.request_id,
        entry_id=parent.entry_id,
        at=fork.at,
        sample_index=fork.sample_index,
        num_generated=before + fork.at,
    )
    path = (*parent.token_ids, *tuple(token_ids)[: fork.at])
    return _Prompt(origin, path, parent.model, parent.images, parent.trace)


def _check_sample(fork: Fork, samples: int, tokens: int) -> None:
    """Raise RequestError, invalid_fork, for a place that the parent doesn't reach."""
    name, index = shown(fork.request_id), fork.sample_index
    if index >= samples:
        raise invalid_fork(f"sample_index is {shown(index)}, and request {name} has {samples}")
    if fork.at > tokens:
        raise invalid_fork(
            f"at is {shown(fork.at)}, and sample {index} of request {name} has {tokens} tokens at "
            "most"
        )


def _unknown(fork: Fork) -> RequestError:
    return RequestError(
        f"there is no request {shown(fork.request_id)} of this tenant to fork: it has not begun, "
        "its result has expired (bus.results_ttl_s), or the id is another one",
        code="unknown_request",
        remedy="wait until it runs, or name another",
    )
