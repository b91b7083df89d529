"""State of the streaming stage: what each request in flight has produced so far.

    RequestOpened ──► open ────►
    StepResult ─────► absorb ──► Deliveries: chunks and completions for clients, halts for batching,
    Cancel ─────────► end ─────►             ended requests for admission and telemetry,
    SampleScored ───► scored ──►             finished samples for the reference model

Every request ends with exactly one Completion. A request is open from its RequestOpened until its
Completion, and has begun with its first StartedSequence. Over Redis a step may overtake the
RequestOpened: the request's share of such steps is held back until the RequestOpened arrives or the
next epoch begins. So may a step of the replica that continues a sequence overtake the last one of
the replica that handed it over. With a reference model, the Completion waits until all samples are
scored. A request with a response from the response cache ends with its RequestOpened.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ...bus.control import Cancel, SampleScored, ScoreSample
from ...bus.entries import entry_key
from ...bus.messages import RequestInfo, RequestOpened, RowFinish, StoredResponse, TopLogprobs
from ...bus.parts.adapters import AdaptersResult
from ...bus.parts.embeddings import PooledResult
from ...bus.parts.scoring import PromptScores
from ...bus.parts.sessions import SessionGrant
from ...bus.parts.speculation import DraftsResult
from ...bus.public import Completion, CompletionChunk, ErrorInfo, Output, StageTime, Timings, Usage
from ...bus.recovery import Recovered, RecoveredSample, RecoveryItem
from ...bus.sections import Section
from ...bus.steps import StartedSequence, StepResult
from ...text.detokenizer import Pieces, TokenPieces
from .accounts import RequestTime, StepCost, TimeAccounts
from .samples import RequestState, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

REMEMBERED_ENDS = 4096
"""Requests that were cut short and are remembered; the oldest are dropped."""

SERVED_TOKENS = 16
"""Tokens in a chunk of a cached response: clients limit the length of a line of a stream."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-")


class EndedRequest(NamedTuple):
    """A request that has ended, as telemetry needs it.

    Attributes:
        opened: None for a request that ended before any of its sequences ran.
        restored: Begun by a predecessor of this stage: of its times only `received_ns` and
            `finished_ns` are known.
        last_token_ns: When its last token was delivered, before the Completion if that waited for
            the reference model; 0 if this object has delivered none.
        response: For the response cache, if the request is to be kept there.
        tenant: Of the request; "" if unknown.
    """

    opened: RequestOpened | None
    completion: Completion
    restored: bool = False
    last_token_ns: int = 0
    response: StoredResponse | None = None
    tenant: str = ""


@dataclass(slots=True)
class Deliveries:
    """Results of one message.

    Attributes:
        now_ns: When it was absorbed.
        replica: Of the step.
        outputs: New outputs by the key of their result stream, in order.
        halts: Sequences that met a stop string, which the executor still runs.
        ended: Requests that have ended, one for each Completion in `outputs`.
        to_score: Finished samples that the reference model is to score.
        unasked: Entries, by `entry_key`, that run anew though an older epoch has begun them.
    """

    now_ns: int
    replica: int = 0
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    halts: list[int] = field(default_factory=list)
    ended: list[EndedRequest] = field(default_factory=list)
    to_score: list[ScoreSample] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)

    def add(self, key: str, output: Output) -> None:
        """Add an output of a request."""
        outputs = self.outputs.get(key)
        if outputs is None:
            self.outputs[key] = [output]
        else:
            outputs.append(output)

    def end(self, key: str, ended: EndedRequest) -> None:
        """Add a Completion."""
        self.add(key, ended.completion)
        self.ended.append(ended)


class StreamingCore:
    """Requests by id, and running samples by sequence id."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None, now_ns: int = 0) -> None:
        """Without a tokenizer all texts are empty.

        Raises:
            ModelError: The tokenizer's decoder can't be streamed (TokenPieces).
        """
        self._pieces: Pieces = defaultdict(str)
        if tokenizer is not None:
            self._pieces = TokenPieces(tokenizer.backend_tokenizer)
        self._requests: dict[str, RequestState] = {}
        self._running: dict[int, Sample] = {}
        # Entries cut short in this epoch, by `entry_key`. A request may run in several replicas:
        # what the slower ones report afterwards is ignored.
        self._cut_short: OrderedDict[str, None] = OrderedDict()
        # Requests with a step before their RequestOpened, by entry.
        self._early: dict[str, _EarlyRequest] = {}
        # Sequences with a step before one of the replica that handed them over.
        self._ahead: dict[int, _AheadSequence] = {}
        self.accounts = TimeAccounts(now_ns)

    def __len__(self) -> int:
        """Return the number of requests that have begun and not ended."""
        return sum(bool(request.samples) for request in self._requests.values())

    def entries(self) -> tuple[str, ...]:
        """Return the entries of all requests that have not ended, by `entry_key`."""
        return tuple(_key(request.info) for request in self._requests.values())

    # --- messages -----------------------------------------------------------------------------

    def open(self, opened: RequestOpened, now_ns: int) -> list[Deliveries]:
        """Add a request, unless it is open already, and absorb its steps that came before.

        One with a response is completed at once.
        """
        is_open = self._find(opened.request_id, opened.entry_id) is not None
        if not is_open and _key(opened) not in self._cut_short:
            request = self._requests[opened.request_id] = RequestState(opened)
            request.time = self.accounts.open(opened, now_ns)
            if opened.response is not None:
                return [self._serve(request, opened.response, now_ns)]
        early = self._early.pop(_key(opened), None)
        results = early.results if early is not None else []
        return [self._absorb(*held, now_ns) for held in results]

    def caught_up(self, now_ns: int) -> list[Deliveries]:
        """Absorb steps that came before one of another replica, which has come now.

        Call it after `open` and `absorb`.
        """
        deliveries: list[Deliveries] = []
        for ahead in [*self._ahead.values()] if self._ahead else ():
            if not self._is_ahead(ahead.started):
                del self._ahead[ahead.started.seq_id]
                deliveries += [self._absorb(*held, now_ns) for held in ahead.results]
        return deliveries

    def absorb(self, result: StepResult, now_ns: int, replica: int = 0) -> Deliveries:
        """Absorb a step: started sequences, failed requests, tokens, then requests cut short.

        Rows of sequences that don't run (a stop string has ended them) are dropped. Consecutive
        rows of a sequence give one chunk.
        """
        device = self.accounts.step(result, replica, now_ns)
        if self._early or not all(map(self._is_open, result.started)):
            self._hold_back(result, replica, device.cost)
        return self._absorb(result, replica, None, now_ns)

    def end(self, cancel: Cancel, now_ns: int) -> Deliveries:
        """End a request early, with what it has produced so far.

        A request that has begun gets its Completion, with unfinished samples as "abort"; one that
        has not (`cancel.unstarted`) gets a Completion without samples; one that has ended, nothing.
        """
        deliveries = Deliveries(now_ns)
        self._end(cancel, deliveries)
        return deliveries

    def scored(self, scored: SampleScored, now_ns: int) -> Deliveries:
        """Set the reference model's scores of a sample; the last sample completes its request."""
        deliveries = Deliveries(now_ns)
        request = self._find(scored.request_id, scored.entry_id)
        if request is not None:
            request.absorb_scored(scored)
            self._complete_if_done(request, deliveries)
        return deliveries

    # --- epochs -------------------------------------------------------------------------------

    def reset(self) -> None:
        """Begin a new epoch: no sequence of the old one will report again.

        Requests that have begun stay, until a Cancel ends them or new sequences go on behind the
        tokens that `recovered` returns. Admission opens the others again.
        """
        times = {
            _key(each.info): (each.time, bool(each.samples))
            for each in self._requests.values()
            if each.time is not None
        }
        unbegun = {key: time for key, (time, begun) in times.items() if not begun}
        self.accounts.reset(unbegun, [time for time, begun in times.values() if begun])
        self._running.clear()
        self._cut_short.clear()
        self._early.clear()
        self._ahead.clear()
        self._requests = {key: each for key, each in self._requests.items() if each.samples}
        for request in self._requests.values():
            request.unasked = True

    def knows(self, item: RecoveryItem) -> bool:
        """Return whether the request has begun and not ended, as far as this object knows."""
        request = self._find(item.stream, item.entry_id)
        return request is not None and bool(request.samples)

    def agrees(self, item: RecoveryItem, chunks: Sequence[CompletionChunk]) -> bool:
        """Return whether a known request's stream holds exactly what was delivered of it.

        It holds less if the server has lost some. It holds more if this object is a successor that
        has absorbed a step which was meant for its predecessor.
        """
        request = self._requests[item.stream]
        delivered: Counter[int] = Counter()
        for chunk in chunks:
            delivered[chunk.sample_index] += len(chunk.token_ids)
        known = {sample.index: len(sample.token_ids) for sample in request.samples.values()}
        return not request.info.stream or Counter(known) == delivered

    def restore(
        self, item: RecoveryItem, chunks: Sequence[CompletionChunk], now_ns: int
    ) -> RequestOpened | None:
        """Rebuild an open request from the chunks delivered of it, in order, and from nothing else.

        Returns:
            The request; None if it is not open, or there are no chunks.
        """
        before = self._find(item.stream, item.entry_id)
        if before is None:
            return None
        self._stop(before)
        request = self._requests[item.stream] = RequestState(before.info)
        request.restored = bool(chunks)
        request.executed_ns = request.info.received_ns
        for chunk in chunks:
            index = chunk.sample_index
            sample = request.samples.get(index) or request.add(index, self._pieces)
            sample.restore(chunk)
            if chunk.prompt_logprobs is not None:
                request.prompt_logprobs = list(chunk.prompt_logprobs)
                request.prompt_top_logprobs = list(chunk.prompt_top_logprobs or ())
            if chunk.finish_reason is not None:
                request.finish(sample)
        if not chunks:
            request.time = before.time
            return None
        self.accounts.drop(before.time)
        ended = {each.index: each.finish_reason is not None for each in request.samples.values()}
        request.time = RequestTime.restored(request.info, ended, now_ns)
        return request.info

    def recovered(self, item: RecoveryItem) -> Recovered:
        """Return a request's tokens so far; none of a request that is not known."""
        samples: Iterable[Sample] = ()
        if self.knows(item):
            self._requests[item.stream].unasked = False
            samples = self._requests[item.stream].samples.values()
        return Recovered(
            item.key,
            tuple(
                RecoveredSample(
                    sample.index, tuple(sample.token_ids), sample.finish_reason is not None
                )
                for sample in samples
            ),
        )

    def to_score(self, item: RecoveryItem) -> tuple[ScoreSample, ...]:
        """Return what the reference model still has to score of a request, in a new epoch."""
        request = self._find(item.stream, item.entry_id)
        return tuple(map(request.to_score, sorted(request.unscored))) if request else ()

    def forget(self, request_id: str, entry_id: str) -> None:
        """Drop a request without an output."""
        self._early.pop(entry_key(entry_id, request_id), None)
        request = self._find(request_id, entry_id)
        if request is not None:
            del self._requests[request_id]
            self.accounts.drop(request.time)
            self._stop(request)

    # --- steps --------------------------------------------------------------------------------

    def _find(self, request_id: str, entry_id: str) -> RequestState | None:
        request = self._requests.get(request_id)
        return request if request is not None and request.info.entry_id == entry_id else None

    def _is_open(self, started: StartedSequence) -> bool:
        return self._find(started.request_id, started.entry_id) is not None

    def _hold_back(self, result: StepResult, replica: int, cost: StepCost) -> None:
        """Keep a step's share of each request that has begun and is not open yet.

        A sequence of an unknown request that has generated already was preempted, if no other
        replica has handed it over: its request has ended, unless it is held back.
        """
        for started in result.started:
            key = _key(started)
            if self._is_open(started) or key in self._cut_short:
                continue
            if not started.num_generated or started.handed_over:
                self._early.setdefault(key, _EarlyRequest(started.request_id))
            if (early := self._early.get(key)) is not None:
                early.seq_ids.add(started.seq_id)
        for early in self._early.values():
            share = _part(result, early.seq_ids.__contains__, early.request_id.__eq__)
            if _concerns(share):
                early.results.append((share, replica, cost))

    def _is_ahead(self, started: StartedSequence) -> bool:
        """Whether tokens are missing that another replica has made of an open request."""
        request = self._find(started.request_id, started.entry_id)
        if request is None:
            return False
        sample = request.samples.get(started.sample_index)
        return sample is None or len(sample.token_ids) < started.num_generated

    def _hold_ahead(self, result: StepResult, replica: int, cost: StepCost) -> StepResult:
        """Keep the rows of sequences that are ahead; return the rest of the step."""
        for started in result.started:
            if started.handed_over and self._is_ahead(started):
                self._ahead[started.seq_id] = _AheadSequence(started, replica, [])
        for seq_id, ahead in self._ahead.items():
            if ahead.replica != replica:
                continue  # the step may be the missing one
            share = _part(result, seq_id.__eq__, lambda request_id: False)
            if _concerns(share):
                ahead.results.append((share, replica, cost))
                result = _part(result, seq_id.__ne__, lambda request_id: True)
        return result

    def _absorb(
        self, result: StepResult, replica: int, cost: StepCost | None, now_ns: int
    ) -> Deliveries:
        """Absorb a step, or a part of one that was held back, with the step's cost."""
        deliveries = Deliveries(now_ns, replica)
        if self._ahead or any(started.handed_over for started in result.started):
            cost = cost or self.accounts.cost(replica)
            result = self._hold_ahead(result, replica, cost)
        for started in result.started:
            self._start(started, result.end_ns, deliveries)
        self.accounts.count(result, replica, cost, now_ns)
        for prompt in result.prompt_logprobs:
            if prompt.seq_id in self._running:
                self._running[prompt.seq_id].request.absorb_prompt(prompt)
        for draft in result.drafts:
            if (sample := self._running.get(draft.seq_id)) is not None:
                sample.num_draft_tokens += draft.num_tokens
                sample.num_accepted_draft_tokens += draft.num_accepted
        for cancel in result.failed:
            # Batching doesn't know that the request has failed.
            if (request := self._requests.get(cancel.request_id)) is not None:
                deliveries.halts += [sample.seq_id for sample in self._running_of(request)]
            self._end(cancel, deliveries)
        self._advance(result, deliveries)
        for pooled in result.pooled:
            if (sample := self._running.pop(pooled.seq_id, None)) is not None:
                request = sample.request
                sample.pool(pooled, result.weight_version)
                request.step_end_ns = request.first_step_end_ns = result.end_ns
                self.accounts.ended(sample.seq_id, result.end_ns, now_ns)
                request.finish(sample)
                self._complete_if_done(request, deliveries)
        for cancel in result.ended:
            self._end(cancel, deliveries)
        return deliveries

    def _start(self, started: StartedSequence, end_ns: int, deliveries: Deliveries) -> None:
        """Start a sequence, or continue it after a preemption, when nothing is counted again."""
        request = self._find(started.request_id, started.entry_id)
        if request is None:  # ended, or held back
            if started.handed_over and _key(started) not in self._early:
                deliveries.halts.append(started.seq_id)
            return
        if started.parts:
            request.session = SessionGrant.find(started.parts) or request.session
        sample = request.samples.get(started.sample_index)
        if sample and request.unasked and started.num_generated < len(sample.token_ids):
            # Admission takes it for a new request: a server has lost that it was begun.
            deliveries.unasked.append(_key(started))
            return
        if sample is None:
            if started.num_generated:
                return  # a stop string ended it before the preemption; its halt is in flight
            if not request.samples:
                request.executed_ns, request.queued = started.executed_ns, started.queued
            request.executed_ns = min(request.executed_ns, started.executed_ns)
            request.cached_tokens += started.num_cached
            sample = request.add(started.sample_index, self._pieces)
        if sample.finish_reason is None:
            request.step_end_ns = end_ns
            sample.seq_id = started.seq_id
            self._running[started.seq_id] = sample
            if request.time is not None:
                about = len(request.info.prompt_token_ids), deliveries.replica, deliveries.now_ns
                self.accounts.started(request.time, started, *about)
        elif started.handed_over:
            # The first replica no longer had it when a stop string ended it.
            deliveries.halts.append(started.seq_id)

    def _advance(self, result: StepResult, deliveries: Deliveries) -> None:
        """Add a step's tokens, of each sample up to the token with which it ends."""
        running, now_ns, end_ns = self._running, deliveries.now_ns, result.end_ns
        version = result.weight_version
        for seq_id, rows in _rows_by_sequence(result):
            sample = running.get(seq_id)
            if sample is None:
                continue
            request = sample.request
            request.step_end_ns, request.last_token_ns = end_ns, now_ns
            if not request.first_token_ns:
                request.first_token_ns, request.first_step_end_ns = now_ns, end_ns
            text, offset = "", len(sample.token_ids)
            for token_id, logprob, reason, top, adapter in rows:
                # A stop string may have ended it in this step.
                if sample.finish_reason is None:
                    text += sample.advance(token_id, logprob, reason, version, top, adapter)
            if request.info.stream:
                deliveries.add(request.info.request_id, sample.chunk(offset, text))
            if sample.finish_reason is not None:
                # Tokens accepted behind a stop string are not part of the answer.
                lost = len(rows) - (len(sample.token_ids) - offset)
                sample.num_accepted_draft_tokens -= lost
                self._finish(sample, deliveries, halt=not reason)

    def _serve(self, request: RequestState, response: StoredResponse, now_ns: int) -> Deliveries:
        """Deliver a response from the response cache, as a step's tokens are delivered."""
        deliveries, info = Deliveries(now_ns), request.info
        request.first_token_ns = request.last_token_ns = now_ns
        request.cached_tokens = info.n * len(info.prompt_token_ids)
        versions = response.weight_version, response.adapter_version
        for index, stored in enumerate(response.samples):
            sample = request.add(index, self._pieces)
            for first in range(0, len(stored.token_ids), SERVED_TOKENS):
                text = sample.repeat(stored, first, first + SERVED_TOKENS, *versions)
                if info.stream:
                    deliveries.add(info.request_id, sample.chunk(first, text))
        self._complete(request, deliveries)
        return deliveries

    def _finish(self, sample: Sample, deliveries: Deliveries, *, halt: bool) -> None:
        """Finish a sample with its last token. `halt`: the executor still runs the sequence."""
        request = sample.request
        del self._running[sample.seq_id]
        self.accounts.ended(sample.seq_id, request.step_end_ns, deliveries.now_ns)
        if halt:
            deliveries.halts.append(sample.seq_id)
        request.finish(sample)
        if sample.index in request.unscored:
            deliveries.to_score.append(request.to_score(sample.index))
        self._complete_if_done(request, deliveries)

    def _running_of(self, request: RequestState) -> list[Sample]:
        samples = request.samples.values()
        return [sample for sample in samples if self._running.get(sample.seq_id) is sample]

    def _stop(self, request: RequestState) -> None:
        """Drop later rows of a request's samples."""
        for sample in self._running_of(request):
            del self._running[sample.seq_id]
            self.accounts.forget(sample.seq_id)

    # --- ends ---------------------------------------------------------------------------------

    def _end(self, cancel: Cancel, deliveries: Deliveries) -> None:
        if cancel.elsewhere:
            self.forget(cancel.request_id, cancel.entry_id)
            return
        if cancel.key in self._cut_short:
            return
        request = self._requests.get(cancel.request_id)
        if request is not None and cancel.entry_id not in ("", request.info.entry_id):
            request = None
        if request is not None and request.samples:
            self._stop(request)
            for sample in request.samples.values():
                if sample.finish_reason is None:
                    text = sample.abort()
                    if request.info.stream:
                        chunk = sample.chunk(len(sample.token_ids), text)
                        deliveries.add(request.info.request_id, chunk)
            self._complete(request, deliveries, cancel)
            self._remember_end(_key(request.info))
        elif request is not None or cancel.unstarted:
            time = self.accounts.pop_unbegun(cancel.key)
            if request is not None:
                del self._requests[cancel.request_id]
                time = request.time
            self._remember_end(cancel.key)
            now_ns = deliveries.now_ns
            time = time or RequestTime.ended_by_admission(cancel, now_ns)
            completion = Completion(
                request_id=cancel.request_id,
                entry_id=cancel.entry_id,
                status=cancel.status,
                error=_error_of(cancel),
                usage=Usage(time=time.finish(now_ns), billed_ns=time.billed_ns),
                timings=Timings(finished_ns=now_ns, published_ns=time.start_ns),
            )
            tenant = request.info.tenant if request is not None else ""
            deliveries.end(cancel.result_key, EndedRequest(None, completion, tenant=tenant))

    def _remember_end(self, key: str) -> None:
        self._cut_short[key] = None
        if len(self._cut_short) > REMEMBERED_ENDS:
            self._cut_short.popitem(last=False)

    def _complete_if_done(self, request: RequestState, deliveries: Deliveries) -> None:
        if request.is_done:
            self._complete(request, deliveries)

    def _complete(
        self, request: RequestState, deliveries: Deliveries, cancel: Cancel | None = None
    ) -> None:
        info, time = request.info, request.time
        del self._requests[info.request_id]
        samples = tuple(sample.result() for _, sample in sorted(request.samples.items()))
        prompt_logprobs, prompt_top_logprobs = request.reported_prompt()
        traced = _TRACEPARENT.match(info.traceparent)
        completed = sum(len(sample.token_ids) for sample in samples)
        drafted = sum(sample.num_draft_tokens for sample in samples)
        accepted = sum(sample.num_accepted_draft_tokens for sample in samples)
        completion = Completion(
            request_id=info.request_id,
            entry_id=info.entry_id,
            model=info.model,
            status=cancel.status if cancel else "done",
            error=_error_of(cancel) if cancel else None,
            samples=samples,
            usage=Usage(
                prompt_tokens=len(info.prompt_token_ids),
                cached_tokens=request.cached_tokens,
                completion_tokens=completed,
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=drafted - accepted,
                cached_completion_tokens=0 if info.response is None else completed,
                time=time.finish(deliveries.now_ns) if time is not None else None,
                billed_ns=time.billed_ns if time is not None else None,
            ),
            timings=_timings(request, deliveries.now_ns),
            trace_id=traced[1] if traced else "",
            prompt_logprobs=prompt_logprobs,
            prompt_top_logprobs=prompt_top_logprobs,
            prompt_token_ids=info.prompt_token_ids,
            prompt_ref_logprobs=request.prompt_ref_logprobs,
            kv_session=request.session_result(),
            recipe=None if info.recipe is None else info.recipe.recipe(),
        )
        if info.stop:
            # Another replica may be about to start a sequence that a stop string has ended.
            self._remember_end(_key(info))
        response = request.stored() if info.keeps else None
        last_ns = request.last_token_ns
        ended = EndedRequest(info, completion, request.restored, last_ns, response, info.tenant)
        deliveries.end(info.request_id, ended)


def _key(about: RequestOpened | StartedSequence | RequestInfo) -> str:
    """Return the identity of an entry."""
    return entry_key(about.entry_id, about.request_id)


class _EarlyRequest:
    """A request with steps before its RequestOpened.

    Attributes:
        seq_ids: Its sequences so far.
        results: Its shares of those steps, each with its replica and cost.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.seq_ids: set[int] = set()
        self.results: list[tuple[StepResult, int, StepCost]] = []


class _AheadSequence(NamedTuple):
    """A sequence with steps of a replica before a step of the replica that handed it over.

    Attributes:
        started: Its start on this replica.
        replica: The replica.
        results: Its shares of those steps, each with the replica and cost.
    """

    started: StartedSequence
    replica: int
    results: list[tuple[StepResult, int, StepCost]]


def _part(
    result: StepResult, has: Callable[[int], bool], ends: Callable[[str], bool]
) -> StepResult:
    """Return the part of a step about some sequences, and about the ends of some requests."""
    own = list(map(has, result.seq_ids))
    part: dict[str, tuple[Any, ...]] = {
        name: tuple(compress(getattr(result, name), own)) for name in _ROWS
    }
    part["started"] = tuple(each for each in result.started if has(each.seq_id))
    for name in _ENDS:
        part[name] = tuple(each for each in getattr(result, name) if ends(each.request_id))
    prefills = tuple(row for row in result.times.prefills if has(row[0]))
    parts: list[Section] = [msgspec.structs.replace(result.times, prefills=prefills)]
    if versions := tuple(compress(result.adapter_versions, own)):
        parts.append(AdaptersResult(versions))
    if prompts := tuple(each for each in result.prompt_logprobs if has(each.seq_id)):
        parts.append(PromptScores(prompts))
    if pooled := tuple(each for each in result.pooled if has(each.seq_id)):
        parts.append(PooledResult(pooled))
    if drafts := tuple(each for each in result.drafts if has(each.seq_id)):
        parts.append(DraftsResult(drafts))
    return msgspec.structs.replace(result, parts=tuple(parts), **part)


def _concerns(part: StepResult) -> bool:
    """Whether a part of a step is not empty."""
    names = (*_ROWS, "started", *_ENDS, "prompt_logprobs", "pooled", "drafts")
    return any(getattr(part, name) for name in names)


_ROWS = ("seq_ids", "token_ids", "logprobs", "finish_reasons", "top_logprobs")
"""Fields of a StepResult with a value for each of its rows."""

_ENDS = ("ended", "failed")
"""Fields of a StepResult whose parts name a request that ends."""

_Row = tuple[int, float, RowFinish, TopLogprobs, int]
"""Of a StepResult: token, logprob, finish reason, top logprobs, version of the adapter."""


def _rows_by_sequence(result: StepResult) -> Iterable[tuple[int, Sequence[_Row]]]:
    """Return each sequence's rows of a step; only with drafts may it have several."""
    number = len(result.seq_ids)
    rows = zip(
        result.token_ids,
        result.logprobs,
        result.finish_reasons,
        result.top_logprobs or ((),) * number,
        result.adapter_versions or (0,) * number,
        strict=True,
    )
    if not result.drafts:
        return zip(result.seq_ids, zip(rows), strict=True)
    pairs = zip(result.seq_ids, rows, strict=True)
    return [(seq_id, [pair[1] for pair in some]) for seq_id, some in groupby(pairs, itemgetter(0))]


def _error_of(cancel: Cancel) -> ErrorInfo:
    return ErrorInfo(code=cancel.code, message=cancel.message, retry_after_s=cancel.retry_after_s)


def _timings(request: RequestState, now_ns: int) -> Timings:
    """Join the stages of samples that ran at different times: earliest start, latest end."""
    info, executed_ns = request.info, request.executed_ns
    stages = [StageTime(stage="admission", start_ns=info.received_ns, end_ns=info.admitted_ns)]
    streamed_ns = request.first_step_end_ns
    if info.response is not None:
        streamed_ns = info.admitted_ns
    else:
        if request.queued is not None:
            stages.append(request.queued)
        stages += [
            StageTime(stage="batching", start_ns=stages[-1].end_ns, end_ns=executed_ns),
            StageTime(stage="executor", start_ns=executed_ns, end_ns=request.step_end_ns),
        ]
    if streamed_ns:
        stages.append(StageTime(stage="streaming", start_ns=streamed_ns, end_ns=now_ns))
    return Timings(
        received_ns=info.received_ns,
        first_token_ns=request.first_token_ns,
        finished_ns=now_ns,
        stages=tuple(stages),
        published_ns=request.time.start_ns if request.time is not None else 0,
    )
