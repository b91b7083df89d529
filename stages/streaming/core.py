"""State of the streaming stage: the results so far of each request in flight.

    RequestOpened ──► open ────►
    StepResult ─────► absorb ──► Deliveries: chunks and completions for clients, halts for batching,
    Cancel ─────────► end ─────►             ended requests for admission and telemetry,
    others ─────────► handle ──►             messages for executors

A request, and below it each of its samples:

    (unknown) ──RequestOpened──► open ──first StartedSequence──► begun ──all samples──► completed
        │                         │                                │   and no part waits
        └─────────Cancel──────────┴─────────────Cancel─────────────┴────────────────────► completed

    (waits) ──StartedSequence──► running ──finish reason, stop string, Cancel──► finished
                                    └──preemption, new epoch──► (waits)

Every request ends with exactly one Completion. Over Redis a step may arrive before the
RequestOpened: the request's share of such steps is held back until the RequestOpened arrives or the
next epoch begins.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ...bus.control import Cancel, ScoreSample
from ...bus.entries import entry_key
from ...bus.messages import RequestOpened
from ...bus.public import CompletionChunk
from ...bus.recovery import Recovered, RecoveryItem
from ...bus.sections import name_of
from ...bus.steps import StartedSequence, StepResult
from ...config import Config
from ...text.detokenizer import Pieces, TokenPieces
from ..parts import Kind
from .deliveries import Deliveries, Ending
from .early import EarlySteps
from .parts import Part, StreamingParts, make_parts
from .samples import RequestState, Sample
from .step import Step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

REMEMBERED_ENDS = 4096
"""Requests that were cut short and are remembered; the oldest are dropped."""


class StreamingCore:
    """Requests by id, and running samples by sequence id."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast | None,
        now_ns: int = 0,
        config: Config = Config(),  # noqa: B008
    ) -> None:
        """Without a tokenizer all texts are empty. `config` decides on the parts.

        Raises:
            ModelError: The tokenizer's decoder can't be streamed (TokenPieces).
        """
        self._pieces: Pieces = defaultdict(str)
        if tokenizer is not None:
            self._pieces = TokenPieces(tokenizer.backend_tokenizer)
        self._requests: dict[str, RequestState] = {}
        self._running: dict[int, Sample] = {}
        # Entries cut short in this epoch, by `entry_key`. A request may run in several replicas:
        # later reports of the slower ones are ignored.
        self._cut_short: OrderedDict[str, None] = OrderedDict()
        self._early = EarlySteps()
        self._parts = StreamingParts(Part, make_parts(config, now_ns))

    def use(self, parts: Sequence[Part]) -> None:
        """Set the parts, in the order in which their hooks run."""
        self._parts.use(parts)

    def part(self, kind: type[Kind]) -> Kind:
        """Return the part of a class. Raises KeyError if it is not configured."""
        return self._parts.get(kind)

    def __len__(self) -> int:
        """Return the number of requests that have begun and not ended."""
        return sum(bool(request.samples) for request in self._requests.values())

    def entries(self) -> tuple[str, ...]:
        """Return the entries of all requests that have not ended, by `entry_key`."""
        return tuple(request.key for request in self._requests.values())

    # --- messages -----------------------------------------------------------------------------

    def open(self, opened: RequestOpened, now_ns: int) -> list[Deliveries]:
        """Add a request, unless it is open already, and absorb its steps that came before."""
        key, results = entry_key(opened.entry_id, opened.request_id), []
        self._parts.make_for(opened)
        if self._find(opened.request_id, opened.entry_id) is None and key not in self._cut_short:
            request = self._requests[opened.request_id] = RequestState(opened, self._pieces)
            deliveries = Deliveries(now_ns)
            for hook in self._parts.opened:
                hook(request, deliveries)
            if request.samples:
                self._complete_if_done(request, deliveries)
                results.append(deliveries)
        return [*results, *self._absorb_held(self._early.pop(key), now_ns)]

    def caught_up(self, now_ns: int) -> list[Deliveries]:
        """Absorb steps that parts have held back and now release.

        Call it after `open` and `absorb`.
        """
        deliveries: list[Deliveries] = []
        for hook in self._parts.release:
            deliveries += self._absorb_held(hook(self._find), now_ns)
        return deliveries

    def absorb(self, result: StepResult, now_ns: int, replica: int = 0) -> Deliveries:
        """Absorb a step: started sequences, failed requests, tokens, then requests cut short.

        Rows of sequences that don't run (a stop string has ended them) are dropped. Consecutive
        rows of a sequence give one chunk.
        """
        ends = result.failed, result.ended
        step = Step(result, replica, now_ns, self._running.get, result.started, *ends)
        for section in result.parts:
            if (reader := self._parts.readers.get(name_of(section))) is not None:
                decode, part = reader
                step.sections.append((part.read, decode(section)))
        for hook in self._parts.received:
            hook(step)
        if self._early or not all(map(self._is_open, result.started)):
            self._early.hold(step, self._is_open, self._cut_short)
        return self._absorb(step)

    def end(self, cancel: Cancel, now_ns: int) -> Deliveries:
        """End a request early, with what it has produced so far.

        A request that has begun gets its Completion, with unfinished samples as "abort"; one that
        has not (`cancel.unstarted`) gets a Completion without samples; one that has ended, nothing.
        """
        deliveries = Deliveries(now_ns)
        self._end(cancel, deliveries)
        return deliveries

    def handle(self, message: Any, now_ns: int) -> Deliveries | None:
        """Handle a part's message about a request; None if no part has such messages."""
        if not (handlers := self._parts.handlers(message)):
            return None
        deliveries = Deliveries(now_ns)
        request = self._find(message.request_id, message.entry_id)
        if request is not None:
            for part in handlers:
                part.handle(message, request, deliveries)
            self._complete_if_done(request, deliveries)
        return deliveries

    # --- epochs -------------------------------------------------------------------------------

    def reset(self) -> None:
        """Begin a new epoch: no sequence of the old one will report again.

        Requests that have begun stay, until a Cancel ends them or new sequences continue after the
        tokens that `recovered` returns. Admission opens the others again.
        """
        for hook in self._parts.reset:
            hook([*self._requests.values()])
        self._running.clear()
        self._cut_short.clear()
        self._early.clear()
        self._requests = {key: each for key, each in self._requests.items() if each.samples}
        for request in self._requests.values():
            request.unasked = True

    def knows(self, item: RecoveryItem) -> bool:
        """Return whether the request has begun and not ended, by the messages so far."""
        request = self._find(item.stream, item.entry_id)
        return request is not None and bool(request.samples)

    def agrees(self, item: RecoveryItem, chunks: Sequence[CompletionChunk]) -> bool:
        """Return whether a known request's stream holds exactly its delivered tokens.

        It holds less if the server has lost some. It holds more if this object is a successor that
        has absorbed a step which was meant for its predecessor.
        """
        request = self._requests[item.stream]
        delivered: Counter[int] = Counter()
        for chunk in chunks:
            delivered[chunk.sample_index] += len(chunk.token_ids)
        known = {each.sample_index: len(each.token_ids) for each in request.progress()}
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
        request = self._requests[item.stream] = RequestState(before.info, self._pieces)
        request.restored = bool(chunks)
        request.executed_ns = request.info.received_ns
        for chunk in chunks:
            index = chunk.sample_index
            sample = request.samples.get(index) or request.add(index)
            sample.restore(chunk)
        for hook in self._parts.restored:
            hook(request, before, chunks, now_ns)
        return request.info if chunks else None

    def recovered(self, item: RecoveryItem) -> Recovered:
        """Return a request's tokens so far; none of a request that is not known."""
        if not self.knows(item):
            return Recovered(item.key, ())
        request = self._requests[item.stream]
        request.unasked = False
        return Recovered(item.key, request.progress())

    def unanswered(self, item: RecoveryItem) -> list[ScoreSample]:
        """Return the messages about a request that executors have to get again in a new epoch."""
        request = self._find(item.stream, item.entry_id)
        hooks = self._parts.unanswered if request is not None else ()
        return [message for hook in hooks for message in hook(request)]

    def forget(self, request_id: str, entry_id: str) -> None:
        """Drop a request without an output."""
        self._early.pop(entry_key(entry_id, request_id))
        request = self._find(request_id, entry_id)
        if request is not None:
            del self._requests[request_id]
            for hook in self._parts.dropped:
                hook(request)
            self._stop(request)

    # --- steps --------------------------------------------------------------------------------

    def _find(self, request_id: str, entry_id: str) -> RequestState | None:
        request = self._requests.get(request_id)
        return request if request is not None and request.info.entry_id == entry_id else None

    def _is_open(self, started: StartedSequence) -> bool:
        return self._find(started.request_id, started.entry_id) is not None

    def _absorb_held(self, steps: Iterable[Step], now_ns: int) -> list[Deliveries]:
        deliveries = []
        for step in steps:
            step.now_ns = now_ns
            deliveries.append(self._absorb(step))
        return deliveries

    def _absorb(self, step: Step) -> Deliveries:
        """Absorb a step, or a share that was held back."""
        for hook in self._parts.hold:
            step = hook(step, self._find)
        deliveries = Deliveries(step.now_ns, step.replica)
        for started in step.started:
            self._start(started, step, deliveries)
        for hook in self._parts.stepped:
            hook(step)
        for cut in self._parts.cut:
            for sample in cut(step, deliveries):
                if sample.finish_reason is not None:
                    self._finish(sample, 0, deliveries)
                else:
                    self._stop_sample(sample)
        for cancel in step.failed:
            # Batching has no report of the failure.
            if (request := self._requests.get(cancel.request_id)) is not None:
                deliveries.halts += [sample.seq_id for sample in self._running_of(request)]
            self._end(cancel, deliveries)
        for read, section in step.sections:
            for sample in read(section, step):
                self._finish(sample, 0, deliveries)
        self._advance(step, deliveries)
        for cancel in step.ended:
            self._end(cancel, deliveries)
        return deliveries

    def _start(self, started: StartedSequence, step: Step, deliveries: Deliveries) -> None:
        """Start a sequence, or continue it after a preemption, when nothing is counted again."""
        request = self._find(started.request_id, started.entry_id)
        key = entry_key(started.entry_id, started.request_id)
        if request is None:  # ended, or held back
            if started.handed_over and key not in self._early:
                deliveries.halts.append(started.seq_id)
            return
        sample = request.samples.get(started.sample_index)
        if sample and request.unasked and started.num_generated < len(sample.token_ids):
            # Admission takes it for a new request: a server has lost that it was begun.
            deliveries.unasked.append(key)
            return
        if sample is None:
            if started.num_generated:
                return  # a stop string ended it before the preemption; its halt is in flight
            if not request.samples:
                request.executed_ns, request.queued = started.executed_ns, started.queued
            request.executed_ns = min(request.executed_ns, started.executed_ns)
            request.cached_tokens += started.num_cached
            sample = request.add(started.sample_index)
        if sample.finish_reason is None:
            request.step_end_ns = step.result.end_ns
            sample.seq_id = started.seq_id
            self._running[started.seq_id] = sample
            for hook in self._parts.started:
                hook(sample, started, step)
        elif started.handed_over:
            # The first replica no longer had it when a stop string ended it.
            deliveries.halts.append(started.seq_id)

    def _advance(self, step: Step, deliveries: Deliveries) -> None:
        """Add a step's tokens, of each sample up to the token with which it ends."""
        find, now_ns, end_ns = step.find, step.now_ns, step.result.end_ns
        version = step.result.weight_version
        for seq_id, rows in step.rows():
            sample = find(seq_id)
            if sample is None:
                continue
            request = sample.request
            request.step_end_ns, request.last_token_ns = end_ns, now_ns
            if not request.first_token_ns:
                request.first_token_ns, request.first_step_end_ns = now_ns, end_ns
            offset = len(sample.token_ids)
            token_id, logprob, reason, top = rows[0]
            text = sample.advance(token_id, logprob, reason, version, top)
            if len(rows) > 1:
                for token_id, logprob, reason, top in rows[1:]:
                    # A stop string may have ended it in this step.
                    if sample.finish_reason is None:
                        text += sample.advance(token_id, logprob, reason, version, top)
            if request.info.stream:
                deliveries.add(request.info.request_id, sample.chunk(offset, text))
            if sample.finish_reason is not None:
                if not reason:
                    deliveries.halts.append(seq_id)
                self._finish(sample, len(rows) - len(sample.token_ids) + offset, deliveries)

    def _finish(self, sample: Sample, unused: int, deliveries: Deliveries) -> None:
        """Finish a sample with a step. `unused`: tokens of it that are not part of the answer."""
        del self._running[sample.seq_id]
        for hook in self._parts.finished:
            hook(sample, unused, deliveries)
        self._complete_if_done(sample.request, deliveries)

    def _running_of(self, request: RequestState) -> list[Sample]:
        samples = request.samples.values()
        return [sample for sample in samples if self._running.get(sample.seq_id) is sample]

    def _stop(self, request: RequestState) -> None:
        """Drop later rows of a request's samples."""
        for sample in self._running_of(request):
            self._stop_sample(sample)

    def _stop_sample(self, sample: Sample) -> None:
        del self._running[sample.seq_id]
        for hook in self._parts.stopped:
            hook(sample)

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
            self._complete(request, cancel, deliveries)
            self._remember_end(request.key)
        elif request is not None or cancel.unstarted:
            if request is not None:
                del self._requests[cancel.request_id]
            self._remember_end(cancel.key)
            ended = self._ending(request, cancel, deliveries).unstarted(request, cancel)
            deliveries.end(cancel.result_key, ended)

    def _remember_end(self, key: str) -> None:
        self._cut_short[key] = None
        if len(self._cut_short) > REMEMBERED_ENDS:
            self._cut_short.popitem(last=False)

    def _complete_if_done(self, request: RequestState, deliveries: Deliveries) -> None:
        if request.is_done:
            self._complete(request, None, deliveries)

    def _complete(
        self, request: RequestState, cancel: Cancel | None, deliveries: Deliveries
    ) -> None:
        del self._requests[request.info.request_id]
        if request.info.stop:
            # Another replica may be about to start a sequence that a stop string has ended.
            self._remember_end(request.key)
        ended = self._ending(request, cancel, deliveries).of(request, cancel)
        deliveries.end(request.info.request_id, ended)

    def _ending(
        self, request: RequestState | None, cancel: Cancel | None, deliveries: Deliveries
    ) -> Ending:
        ending = Ending(deliveries.now_ns)
        for hook in self._parts.completed:
            hook(request, cancel, ending)
        return ending
