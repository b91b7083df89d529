"""The streaming stage's state: what each request in flight has produced so far.

    RequestOpened ──► open ────►
    StepResult ─────► absorb ──► Deliveries: chunks and completions for clients, halts for batching,
    Cancel ─────────► end ─────►             finished requests for admission and for telemetry,
    SampleScored ───► scored ──►             finished samples for the reference model

Every request ends with exactly one Completion. A request is open from its RequestOpened until its
Completion, and has begun with its first StartedSequence. Over Redis a step may overtake the
RequestOpened: the request's share of such steps is held back until it comes, or until the next
epoch. With a reference model, the Completion waits until all samples are scored.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from itertools import compress, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ...bus.control import Cancel
from ...bus.messages import (
    PromptLogprobs,
    Recovered,
    RecoveredSample,
    RecoveryItem,
    RequestFinished,
    RequestOpened,
    RowFinish,
    StartedSequence,
    StepResult,
    TopLogprobs,
    VerifiedDraft,
)
from ...bus.pooling import PooledPrompt
from ...bus.public import (
    Completion,
    CompletionChunk,
    ErrorInfo,
    Output,
    StageTime,
    Timings,
    Usage,
)
from ...bus.scoring import SampleScored, ScoreSample
from ...text.detokenizer import Pieces, TokenPieces
from .samples import RequestState, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

REMEMBERED_ENDS = 4096
"""Requests that were cut short and are remembered, the last ones."""

_SEQ_ID = itemgetter(0)

_Part = TypeVar("_Part", StartedSequence, PromptLogprobs, PooledPrompt, VerifiedDraft)

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-")


class EndedRequest(msgspec.Struct, frozen=True):
    """What telemetry needs of a request that has ended; times are in the completion.

    Attributes:
        info: None for a request that was refused before any of its sequences ran.
        restored: It was begun by a predecessor of this stage, so that of its times only
            `received_ns` and `finished_ns` mean what they say.
        last_token_ns: When its last token was delivered, which is before the completion where that
            waited for the reference model; 0 where this object has delivered none.
    """

    info: RequestOpened | None
    completion: Completion
    restored: bool = False
    last_token_ns: int = 0


class Deliveries(msgspec.Struct, frozen=True):
    """What one message led to.

    Attributes:
        outputs: (key of the result stream, what to append to it), in order; a key comes once.
        halts: Sequences that met a stop string while the executor goes on with them.
        finished: One for each Completion in `outputs`.
        ended: As `finished`, for telemetry.
        to_score: Samples that have finished and that the reference model is to score.
        replica: That of the step.
    """

    outputs: list[tuple[str, list[Output]]]
    halts: tuple[int, ...]
    finished: tuple[RequestFinished, ...]
    ended: tuple[EndedRequest, ...]
    to_score: tuple[ScoreSample, ...] = ()
    replica: int = 0


class StreamingCore:
    """Requests by id, and running samples by sequence id."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None) -> None:
        """Without a tokenizer all texts are empty.

        Raises:
            ModelError: The tokenizer's decoder can't be streamed (TokenPieces).
        """
        self._pieces: Pieces = defaultdict(str)
        if tokenizer is not None:
            self._pieces = TokenPieces(tokenizer.backend_tokenizer)
        self._requests: dict[str, RequestState] = {}
        self._running: dict[int, Sample] = {}
        # Entries of requests that were cut short in this epoch: a request may be in several
        # replicas, and what comes from the slower ones counts for nothing.
        self._cut_short: OrderedDict[str, None] = OrderedDict()
        # By entry: requests of which a step came before the RequestOpened.
        self._early: dict[str, _Early] = {}

    def __len__(self) -> int:
        """Requests that have begun and not ended."""
        return sum(bool(request.samples) for request in self._requests.values())

    def open(self, opened: RequestOpened, now_ns: int) -> list[Deliveries]:
        """Add a request; an open one is left as it is. Its steps that came before are absorbed."""
        request = self._requests.get(opened.request_id)
        known = request is not None and request.info.entry_id == opened.entry_id
        if not known and opened.entry_id not in self._cut_short:
            self._requests[opened.request_id] = RequestState(opened)
        early = self._early.pop(opened.entry_id, None)
        results = early.results if early is not None else []
        return [self._absorb(result, now_ns, replica) for result, replica in results]

    def absorb(self, result: StepResult, now_ns: int, replica: int = 0) -> Deliveries:
        """Takes a step: first the sequences that started, then requests that failed, then its
        tokens, then requests cut short.

        Rows of sequences that are not running (a stop string has ended them) are dropped. Rows of
        one sequence that follow each other are one chunk.
        """
        if self._early or not all(map(self._is_open, result.started)):
            self._hold_back(result, replica)
        return self._absorb(result, now_ns, replica)

    def _absorb(self, result: StepResult, now_ns: int, replica: int) -> Deliveries:
        batch = _Batch(now_ns, replica)
        for started in result.started:
            self._start(started, result.end_ns)
        for prompt in result.prompt_logprobs:
            if prompt.seq_id in self._running:
                self._running[prompt.seq_id].request.absorb_prompt(prompt)
        for draft in result.drafts:
            if (sample := self._running.get(draft.seq_id)) is not None:
                sample.num_draft_tokens += draft.num_tokens
                sample.num_accepted_draft_tokens += draft.num_accepted
        for cancel in result.failed:
            request = self._requests.get(cancel.request_id)
            if request is not None:
                # Batching does not know of it.
                batch.halts += [
                    each.seq_id
                    for each in request.samples.values()
                    if self._running.get(each.seq_id) is each
                ]
            self._end(cancel, batch)
        self._take(result, batch)
        for pooled in result.pooled:
            sample = self._running.pop(pooled.seq_id, None)
            if sample is not None:
                sample.pool(pooled, result.weight_version)
                sample.request.step_end_ns = sample.request.first_step_end_ns = result.end_ns
                sample.request.finish(sample)
                self._complete_if_done(sample.request, batch)
        for cancel in result.ended:
            self._end(cancel, batch)
        return batch.deliveries()

    def end(self, cancel: Cancel, now_ns: int) -> Deliveries:
        """Ends a request early, with what it has made so far.

        A known request gets its Completion, unfinished samples as "abort"; one that never was
        known (`cancel.unstarted`) gets one without samples; one that has ended gets nothing.
        """
        batch = _Batch(now_ns)
        self._end(cancel, batch)
        return batch.deliveries()

    def scored(self, scored: SampleScored, now_ns: int) -> Deliveries:
        """Takes what the reference model makes of a sample; the last of a request completes it."""
        batch = _Batch(now_ns)
        request = self._requests.get(scored.request_id)
        if request is not None and request.info.entry_id == scored.entry_id:
            request.absorb_scored(scored)
            self._complete_if_done(request, batch)
        return batch.deliveries()

    def to_score(self, item: RecoveryItem) -> tuple[ScoreSample, ...]:
        """What the reference model is still to be asked of a request, in a new epoch."""
        if not self.knows(item):
            return ()
        request = self._requests[item.key]
        return tuple(map(request.to_score, sorted(request.unscored)))

    def reset(self) -> None:
        """A new epoch: no sequence of the old one will report again.

        Requests that have begun stay, until each is ended by a Cancel or goes on with new
        sequences, which start behind the tokens that `recovered` returns. Admission opens the
        others again.
        """
        self._running.clear()
        self._cut_short.clear()
        self._early.clear()
        self._requests = {key: each for key, each in self._requests.items() if each.samples}

    def knows(self, item: RecoveryItem) -> bool:
        """Whether the request has begun and not ended, as far as this object can tell."""
        request = self._requests.get(item.key)
        return bool(request and request.samples and request.info.entry_id == item.entry_id)

    def agrees(self, item: RecoveryItem, chunks: Sequence[CompletionChunk]) -> bool:
        """Whether a known request's stream holds just what is known here to be delivered of it.

        It may hold less, when the server has lost some. It holds more when this object is a
        successor that was told of a sample by a step which was meant for its predecessor.
        """
        request = self._requests[item.key]
        delivered: Counter[int] = Counter()
        for chunk in chunks:
            delivered[chunk.sample_index] += len(chunk.token_ids)
        known = Counter(
            {sample.index: len(sample.token_ids) for sample in request.samples.values()}
        )
        return not request.info.stream or known == delivered

    def restore(
        self, item: RecoveryItem, chunks: Sequence[CompletionChunk]
    ) -> RequestOpened | None:
        """Rebuild an open request from the chunks delivered of it, in order, and from nothing else.

        Returns:
            The request; None if it is not open, or there are no chunks.
        """
        before = self._requests.get(item.key)
        if before is None or before.info.entry_id != item.entry_id:
            return None
        self._stop(before)
        request = self._requests[item.key] = RequestState(before.info)
        request.restored = bool(chunks)
        request.executed_ns = request.info.received_ns
        for chunk in chunks:
            index = chunk.sample_index
            sample = request.samples.get(index) or request.add(index, self._pieces)
            sample.restore(chunk)
            if chunk.prompt_logprobs is not None:
                request.restore_prompt(chunk)
            if chunk.finish_reason is not None:
                request.finish(sample)
        return request.info if chunks else None

    def recovered(self, item: RecoveryItem) -> Recovered:
        """What there is of a request; nothing of one that `knows` does not know."""
        samples = self._requests[item.key].samples.values() if self.knows(item) else ()
        return Recovered(
            item.entry_id,
            tuple(
                RecoveredSample(
                    sample.index, tuple(sample.token_ids), sample.finish_reason is not None
                )
                for sample in samples
            ),
        )

    def _start(self, started: StartedSequence, end_ns: int) -> None:
        """Adds a sequence, or lets it go on after a preemption, when nothing is counted again."""
        request = self._requests.get(started.request_id)
        if request is None or request.info.entry_id != started.entry_id:
            return  # it has ended, or is held back
        sample = request.samples.get(started.sample_index)
        if sample is None:
            if started.num_generated:
                return  # it met a stop string before it was preempted, and the halt is on its way
            if not request.samples:
                request.executed_ns, request.queued = started.executed_ns, started.queued
            request.executed_ns = min(request.executed_ns, started.executed_ns)
            request.cached_tokens += started.num_cached
            sample = request.add(started.sample_index, self._pieces)
        if sample.finish_reason is not None:
            return
        request.step_end_ns = end_ns
        sample.seq_id = started.seq_id
        self._running[started.seq_id] = sample

    def _is_open(self, started: StartedSequence) -> bool:
        request = self._requests.get(started.request_id)
        return request is not None and request.info.entry_id == started.entry_id

    def _hold_back(self, result: StepResult, replica: int) -> None:
        """Keep a step's share of each request that has begun and is not open yet.

        A sequence of an unknown request that has generated already was preempted: its request has
        ended, unless it is held back.
        """
        for started in result.started:
            entry_id = started.entry_id
            if self._is_open(started) or entry_id in self._cut_short:
                continue
            if not started.num_generated:
                self._early.setdefault(entry_id, _Early(started.request_id))
            if (early := self._early.get(entry_id)) is not None:
                early.seq_ids.add(started.seq_id)
        for early in self._early.values():
            if (share := early.share_of(result)) is not None:
                early.results.append((share, replica))

    def _take(self, result: StepResult, batch: _Batch) -> None:
        """Takes the tokens of a step, of each sample up to the one with which it ends."""
        running, now_ns, end_ns = self._running, batch.now_ns, result.end_ns
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
                self._tell(sample, offset, text, batch)
            if sample.finish_reason is not None:
                # What was accepted behind a stop string is no part of the answer.
                lost = len(rows) - (len(sample.token_ids) - offset)
                sample.num_accepted_draft_tokens -= lost
                self._finish(sample, batch, halt=not reason)

    def _tell(self, sample: Sample, offset: int, text: str, batch: _Batch) -> None:
        """A chunk with the tokens of a sample from `offset` on, for a client that streams."""
        request = sample.request
        info = request.info
        prompt_logprobs, prompt_tops = None, None
        if not offset and not sample.index:
            prompt_logprobs, prompt_tops = request.scored_prompt()
        chunk = CompletionChunk(
            request_id=info.request_id,
            entry_id=info.entry_id,
            sample_index=sample.index,
            token_offset=offset,
            token_ids=tuple(sample.token_ids[offset:]),
            logprobs=tuple(sample.logprobs[offset:]),
            text=text,
            finish_reason=sample.finish_reason,
            weight_version=sample.weight_version,
            top_logprobs=sample.top_logprobs(offset) if info.logprobs else None,
            prompt_logprobs=prompt_logprobs,
            prompt_top_logprobs=prompt_tops,
            adapter_version=sample.adapter_version,
        )
        batch.add(info.request_id, chunk)

    def _finish(self, sample: Sample, batch: _Batch, *, halt: bool) -> None:
        """A sample has ended with its last token; `halt`: and the executor does not know."""
        request = sample.request
        del self._running[sample.seq_id]
        if halt:
            batch.halts.append(sample.seq_id)
        request.finish(sample)
        if sample.index in request.unscored:
            batch.to_score.append(request.to_score(sample.index))
        self._complete_if_done(request, batch)

    def forget(self, request_id: str, entry_id: str) -> None:
        """Drops what there is of a request, without a word to its client."""
        self._early.pop(entry_id, None)
        request = self._requests.get(request_id)
        if request is not None and request.info.entry_id == entry_id:
            del self._requests[request_id]
            self._stop(request)

    def _stop(self, request: RequestState) -> None:
        """Take no more rows of a request's samples."""
        for sample in request.samples.values():
            if self._running.get(sample.seq_id) is sample:
                del self._running[sample.seq_id]

    def _end(self, cancel: Cancel, batch: _Batch) -> None:
        if cancel.elsewhere:
            self.forget(cancel.request_id, cancel.entry_id)
            return
        if cancel.entry_id in self._cut_short:
            return
        request = self._requests.get(cancel.request_id)
        is_open = request is not None and cancel.entry_id in ("", request.info.entry_id)
        if request is not None and is_open and request.samples:
            for sample in request.samples.values():
                if sample.finish_reason is None:
                    self._abort(sample, batch)
            self._complete(request, batch, cancel)
            self._remember_end(request.info.entry_id)
        elif is_open or cancel.unstarted:
            if is_open:
                del self._requests[cancel.request_id]
            self._remember_end(cancel.entry_id)
            completion = Completion(
                request_id=cancel.request_id,
                entry_id=cancel.entry_id,
                status=cancel.status,
                error=ErrorInfo(code=cancel.code, message=cancel.message),
                timings=Timings(finished_ns=batch.now_ns),
            )
            batch.finish(cancel.result_key, EndedRequest(None, completion))

    def _remember_end(self, entry_id: str) -> None:
        self._cut_short[entry_id] = None
        if len(self._cut_short) > REMEMBERED_ENDS:
            self._cut_short.popitem(last=False)

    def _abort(self, sample: Sample, batch: _Batch) -> None:
        """Ends a sample where it is; a streaming client gets the text that was held back."""
        if self._running.get(sample.seq_id) is sample:
            del self._running[sample.seq_id]
        text = sample.abort()
        info = sample.request.info
        if info.stream:
            chunk = CompletionChunk(
                request_id=info.request_id,
                entry_id=info.entry_id,
                sample_index=sample.index,
                token_offset=len(sample.token_ids),
                token_ids=(),
                logprobs=(),
                text=text,
                finish_reason=sample.finish_reason,
                weight_version=max(0, sample.weight_version),
                top_logprobs=sample.top_logprobs(len(sample.token_ids)),
                adapter_version=sample.adapter_version,
            )
            batch.add(info.request_id, chunk)

    def _complete_if_done(self, request: RequestState, batch: _Batch) -> None:
        if not request.unfinished and not request.unscored:
            self._complete(request, batch)

    def _complete(self, request: RequestState, batch: _Batch, cancel: Cancel | None = None) -> None:
        info = request.info
        del self._requests[info.request_id]
        samples = tuple(sample.result() for _, sample in sorted(request.samples.items()))
        prompt_logprobs, prompt_top_logprobs = request.scored_prompt()
        traced = _TRACEPARENT.match(info.traceparent)
        drafted = sum(sample.num_draft_tokens for sample in samples)
        accepted = sum(sample.num_accepted_draft_tokens for sample in samples)
        completion = Completion(
            request_id=info.request_id,
            entry_id=info.entry_id,
            model=info.model,
            status=cancel.status if cancel else "done",
            error=ErrorInfo(code=cancel.code, message=cancel.message) if cancel else None,
            samples=samples,
            usage=Usage(
                prompt_tokens=len(info.prompt_token_ids),
                cached_tokens=request.cached_tokens,
                completion_tokens=sum(len(sample.token_ids) for sample in samples),
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=drafted - accepted,
            ),
            timings=_timings(request, batch.now_ns),
            trace_id=traced[1] if traced else "",
            prompt_logprobs=prompt_logprobs,
            prompt_top_logprobs=prompt_top_logprobs,
            prompt_token_ids=info.prompt_token_ids,
            prompt_ref_logprobs=request.prompt_ref_logprobs,
        )
        ended = EndedRequest(info, completion, request.restored, request.last_token_ns)
        batch.finish(info.request_id, ended)


class _Early:
    """A request of which steps came before its RequestOpened."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.seq_ids: set[int] = set()
        # Each with its replica.
        self.results: list[tuple[StepResult, int]] = []

    def share_of(self, result: StepResult) -> StepResult | None:
        """The part of a step that is about this request; None if there is none."""
        own = [seq_id in self.seq_ids for seq_id in result.seq_ids]
        ended, failed = map(self._cancels, (result.ended, result.failed))
        started = self._parts(result.started)
        prompt_logprobs, pooled = self._parts(result.prompt_logprobs), self._parts(result.pooled)
        if not (any(own) or ended or failed or started or prompt_logprobs or pooled):
            return None
        return msgspec.structs.replace(
            result,
            started=started,
            seq_ids=tuple(compress(result.seq_ids, own)),
            token_ids=tuple(compress(result.token_ids, own)),
            logprobs=tuple(compress(result.logprobs, own)),
            finish_reasons=tuple(compress(result.finish_reasons, own)),
            ended=ended,
            top_logprobs=tuple(compress(result.top_logprobs, own)),
            prompt_logprobs=prompt_logprobs,
            adapter_versions=tuple(compress(result.adapter_versions, own)),
            pooled=pooled,
            drafts=self._parts(result.drafts),
            failed=failed,
        )

    def _parts(self, parts: tuple[_Part, ...]) -> tuple[_Part, ...]:
        return tuple(part for part in parts if part.seq_id in self.seq_ids)

    def _cancels(self, cancels: tuple[Cancel, ...]) -> tuple[Cancel, ...]:
        return tuple(cancel for cancel in cancels if cancel.request_id == self.request_id)


_Row = tuple[int, float, RowFinish, TopLogprobs, int]
"""Of a StepResult: token, logprob, finish reason, likeliest tokens, version of the adapter."""


def _rows_by_sequence(result: StepResult) -> Iterable[tuple[int, Sequence[_Row]]]:
    """What each sequence got in a step; only with drafts may that be several tokens."""
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
    return [(seq_id, [pair[1] for pair in made]) for seq_id, made in groupby(pairs, _SEQ_ID)]


class _Batch:
    """Collects deliveries, those of one key together."""

    __slots__ = ("ended", "halts", "now_ns", "outputs", "replica", "to_score")

    def __init__(self, now_ns: int, replica: int = 0) -> None:
        self.now_ns = now_ns
        self.replica = replica
        self.outputs: dict[str, list[Output]] = {}
        self.halts: list[int] = []
        self.ended: list[EndedRequest] = []
        self.to_score: list[ScoreSample] = []

    def add(self, key: str, output: Output) -> None:
        outputs = self.outputs.get(key)
        if outputs is None:
            self.outputs[key] = [output]
        else:
            outputs.append(output)

    def finish(self, key: str, ended: EndedRequest) -> None:
        self.add(key, ended.completion)
        self.ended.append(ended)

    def deliveries(self) -> Deliveries:
        return Deliveries(
            outputs=list(self.outputs.items()),
            halts=tuple(self.halts),
            finished=tuple(
                RequestFinished(ended.completion.request_id, ended.completion.entry_id)
                for ended in self.ended
            ),
            ended=tuple(self.ended),
            to_score=tuple(self.to_score),
            replica=self.replica,
        )


def _timings(request: RequestState, now_ns: int) -> Timings:
    """Stages of samples that ran at different times are joined: earliest start, latest end."""
    info = request.info
    stages = [StageTime(stage="admission", start_ns=info.received_ns, end_ns=info.admitted_ns)]
    if request.queued is not None:
        stages.append(request.queued)
    executed_ns = request.executed_ns
    stages += [
        StageTime(stage="batching", start_ns=stages[-1].end_ns, end_ns=executed_ns),
        StageTime(stage="executor", start_ns=executed_ns, end_ns=request.step_end_ns),
    ]
    if request.first_step_end_ns:
        stages.append(
            StageTime(stage="streaming", start_ns=request.first_step_end_ns, end_ns=now_ns)
        )
    return Timings(
        received_ns=info.received_ns,
        first_token_ns=request.first_token_ns,
        finished_ns=now_ns,
        stages=tuple(stages),
    )
