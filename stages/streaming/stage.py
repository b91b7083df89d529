"""The streaming stage's shell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import ClassVar

import anyio.to_thread

from ...bus.control import Cancel, ScoreSample, StopSequences
from ...bus.entries import entry_key
from ...bus.envelope import Envelope
from ...bus.links import CONTROL, FINISHED, HALTS, at
from ...bus.messages import RequestFinished, RequestOpened
from ...bus.public import Completion, CompletionChunk, Output, OutputBatch
from ...bus.recovery import Fenced, Recover, RecoveryItem, Retracted
from ...bus.steps import StepResult
from ...config import role_of_sender, split_role
from ...telemetry import TraceContext, instruments, now_ns
from ...text.model_folder import embeds_only
from ...text.tokenizer import find_tokenizer
from ..actor import Actor, StageContext
from .core import StreamingCore
from .deliveries import Deliveries, EndedRequest
from .measures import RequestTimes, Throughput, TokenIntervals, measure_end, trace_end
from .parts.accounts import TimeAccounts


class StreamingStage(Actor):
    """Turns step results into text, and writes results for clients."""

    name: ClassVar[str] = "streaming"

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._core: StreamingCore
        self._accounts: TimeAccounts
        self._deliveries: list[Deliveries] = []
        # The epoch of `_deliveries`.
        self._made_in = 0
        # Keys of streams that another lane has taken over, or that have lost outputs.
        self._fenced: set[str] = set()
        # The last step of each replica in this epoch; -1 once one was missing.
        self._steps: dict[int, int] = {}
        self._intervals = TokenIntervals()
        self._throughput = Throughput(now_ns())
        self._times = RequestTimes()
        self._unbilled_ns = 0  # measured
        # Of the weights of the last step.
        self._weight_version = 0

    async def open(self) -> None:
        folder = self.config.engine.model_folder
        # A model without text may have a tokenizer that can't be streamed.
        tokenizer = None
        if not embeds_only(folder):
            tokenizer = await anyio.to_thread.run_sync(
                find_tokenizer, folder, limiter=anyio.CapacityLimiter(1)
            )
        self._core = StreamingCore(tokenizer, now_ns(), self.config)
        self._accounts = self._core.part(TimeAccounts)

    async def reset(self) -> None:
        # In their own epoch: they must not overwrite outputs of another lane that has the request
        # now.
        await self._write(self._made_in)
        self._made_in = self.epoch
        self._core.reset()
        self._steps.clear()
        self._intervals.clear()

    def load(self) -> dict[str, int | float | str]:
        if not self.opened:
            return {}
        throughput, times = self._throughput.load(now_ns()), self._times.load()
        bills = self._accounts.load()
        return {"open": len(self._core), **throughput, **times, **bills}

    async def measure(self) -> None:
        for measurement in self._times.take():
            self.metrics.record(*measurement)
        self.metrics.record(instruments.WEIGHT_TOKENS, self._throughput.version_tokens)
        accounts = self._accounts
        unbilled_ns = max(accounts.busy_ns - accounts.billed_ns, self._unbilled_ns)
        seconds = (unbilled_ns - self._unbilled_ns) / 1e9
        self.metrics.record(instruments.STEP_UNBILLED, seconds)
        self._unbilled_ns = unbilled_ns

    def begun(self) -> int | None:
        return len(self._core)

    async def handle(self, envelope: Envelope) -> None:
        match envelope.body:
            case StepResult() as result:
                replica = split_role(role_of_sender(envelope.sender))[1]
                if not await self._is_next(result, replica):
                    return
                now = now_ns()
                self._deliveries.append(self._core.absorb(result, now, replica))
                self._deliveries += self._core.caught_up(now)
                self._throughput.add(len(result.seq_ids), now, result.weight_version)
                self._weight_version = result.weight_version
                if self.metrics.enabled:
                    for interval_ns in self._intervals.step(result.seq_ids, result.end_ns):
                        self.metrics.record(instruments.TOKEN_INTERVAL, interval_ns / 1e9)
            case RequestOpened() as opened:
                self._deliveries += self._core.open(opened, now_ns())
                self._deliveries += self._core.caught_up(now_ns())
            case Recover(requests, replica):
                await self._recover(requests, replica)
            case Cancel() as cancel:
                if cancel.elsewhere:
                    self._fenced.discard(cancel.request_id)
                self._deliveries.append(self._core.end(cancel, now_ns()))
            case other:
                if (deliveries := self._core.handle(other, now_ns())) is not None:
                    self._deliveries.append(deliveries)
                else:
                    self.log.warning("message_not_understood", type=type(other).__name__)

    async def _is_next(self, result: StepResult, replica: int) -> bool:
        """Return whether no step of a replica is missing.

        A server that comes back with old data has lost some. Without their tokens, later ones would
        be in the wrong places. The requests continue in a new epoch, which admission begins.
        """
        last = self._steps.get(replica, 0)
        if result.step_id == last + 1 and last >= 0:
            self._steps[replica] = result.step_id
            return True
        self._steps[replica] = -1
        if last >= 0:
            self.log.warning("steps_lost", replica=replica, last=last, step=result.step_id)
            if keys := self._core.entries():
                await self.send(FINISHED, Fenced(keys))
        return False

    async def tick(self) -> None:
        """Deliver the results of a batch of messages at once."""
        await self._write(self.epoch)

    async def _write(self, epoch: int) -> None:
        deliveries, self._deliveries = self._deliveries, []
        halts: defaultdict[int, list[int]] = defaultdict(list)
        outputs: list[tuple[str, list[Output]]] = []
        retracted: list[tuple[str, Sequence[int]]] = []
        all_ended: list[EndedRequest] = []
        unasked: dict[str, None] = {}
        for each in deliveries:
            if each.halts:
                halts[each.replica] += each.halts
            outputs += each.outputs.items()
            if each.unasked:
                unasked |= dict.fromkeys(each.unasked)
            if each.retracted:
                retracted += each.retracted.items()
            for ended in each.ended:
                all_ended.append(ended)
                timings = ended.completion.timings
                if timings.first_token_ns and timings.of("executor") is not None:
                    self._throughput.first_token(timings.first_token_ns - timings.received_ns)
        if unasked:  # in a new epoch, admission recovers what there is
            await self.send(FINISHED, Fenced(tuple(unasked)), epoch=epoch)
        for key, indices in retracted:
            await self.send(FINISHED, Retracted(key, tuple(indices)), epoch=epoch)
        # First, since they free the device from work without use.
        for replica, seq_ids in halts.items():
            await self.send(at(HALTS, replica), StopSequences(tuple(seq_ids)), epoch=epoch)
        for each in deliveries:
            await self._score(each.to_score, each.replica, epoch)
        if all_ended:
            await self._keep_turns(all_ended, epoch)
        lost = await self._deliver(outputs, epoch) if outputs else frozenset()
        if lost:
            await self._keep_turns(all_ended, epoch, lost)
        for ended in all_ended:
            completion = ended.completion
            if entry_key(completion.entry_id, completion.request_id) not in lost:
                # Of no epoch: a delivered Completion stays delivered in the next epoch.
                ids = completion.request_id, completion.entry_id
                await self.send(FINISHED, RequestFinished(*ids, ended.response), epoch=0)
                self._times.add_last(completion.usage)
                if self.metrics.enabled:
                    self._times.add(ended.tenant, completion.usage)
                    measure_end(self.metrics, ended, self._weight_version)
            else:
                self._accounts.unbill(completion.usage.billed_ns or 0)
            trace_end(self, ended)

    async def _keep_turns(
        self, ended: Sequence[EndedRequest], epoch: int, lost: Collection[str] = ()
    ) -> None:
        """Keep completions in the token trees of their sessions; delete those that are `lost`."""
        turns = [each.completion for each in ended if each.completion.session is not None]
        if not turns:
            return
        from ...bus.trees import forget, keep

        trees = self.bus.store.trees
        if not lost:
            await keep(trees, turns, epoch)
        else:
            keys = {entry_key(each.entry_id, each.request_id): each for each in turns}
            await forget(trees, [keys[key] for key in keys.keys() & set(lost)], epoch)

    async def _deliver(self, outputs: OutputBatch, epoch: int) -> frozenset[str]:
        """Write outputs; return the entries whose streams accept nothing from this epoch."""
        fenced = await self.bus.results.deliver(outputs, epoch)
        if not fenced:
            return frozenset()
        entries = {
            stream: entry_key(some[0].entry_id, some[0].request_id)
            for stream, some in outputs
            if stream in fenced and some
        }
        if new := tuple(entries[each] for each in fenced - self._fenced if each in entries):
            await self.send(FINISHED, Fenced(new), epoch=epoch)
        self._fenced |= fenced
        return frozenset(entries.values())

    async def _score(self, samples: Sequence[ScoreSample], replica: int, epoch: int) -> None:
        """Request the reference model's scores of samples from an executor."""
        for sample in samples:
            await self.send(at(CONTROL["executor"], replica), sample, epoch=epoch)

    async def _recover(self, items: Sequence[RecoveryItem], replica: int) -> None:
        """Report to admission the tokens so far of requests that continue in this epoch."""
        await self.tick()  # requests that have ended must have their Completion in the stream
        streams = await self.bus.results.recover([item.stream for item in items], self.epoch)
        for item, outputs in zip(items, streams, strict=True):
            ids = item.request_id, item.entry_id
            own = [each for each in outputs if (each.request_id, each.entry_id) == ids]
            fenced = item.stream in self._fenced
            self._fenced.discard(item.stream)
            if own and isinstance(own[-1], Completion):
                self._core.forget(item.stream, item.entry_id)
                await self.send(FINISHED, RequestFinished(*ids), epoch=0)
                continue
            chunks = [output for output in own if isinstance(output, CompletionChunk)]
            # Only what readers can find counts: outputs were dropped, or both differ.
            keeps = self._core.knows(item) and not fenced
            if keeps and not self._core.agrees(item, chunks):
                keeps = False
                self.log.warning("outputs_differ_from_the_stream", key=item.stream)
            if not keeps and (opened := self._core.restore(item, chunks, now_ns())) is not None:
                trace = TraceContext(opened.traceparent, opened.tracestate)
                self.log_of(item.stream, trace).info("request_restored")
            await self._score(self._core.unanswered(item), replica, self.epoch)
            await self.send(FINISHED, self._core.recovered(item))
