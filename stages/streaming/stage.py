"""The streaming stage's shell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import anyio.to_thread

from ...bus.control import Cancel, StopSequences
from ...bus.links import CONTROL, FINISHED, HALTS, at
from ...bus.messages import (
    Envelope,
    Fenced,
    Recover,
    RecoveryItem,
    RequestFinished,
    RequestOpened,
    StepResult,
)
from ...bus.public import Completion, CompletionChunk, Output
from ...bus.scoring import SampleScored, ScoreSample
from ...config import role_of_sender, split_role
from ...telemetry import TraceContext, instruments, now_ns
from ...text.pooling_config import embeds_only
from ...text.tokenizer import find_tokenizer
from ..actor import Actor, StageContext
from .core import Deliveries, StreamingCore
from .intervals import TokenIntervals
from .measures import measure_end
from .spans import trace_end
from .throughput import Throughput


class StreamingStage(Actor):
    """Turns step results into text, and writes what clients read."""

    name: ClassVar[str] = "streaming"

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._core: StreamingCore
        self._deliveries: list[Deliveries] = []
        # In which `_deliveries` were made.
        self._made_in = 0
        # Streams that another lane goes on with, as far as this one can tell, or that have a gap.
        self._fenced: set[str] = set()
        self._intervals = TokenIntervals()
        self._throughput = Throughput(now_ns())
        # Of the weights that made the last step.
        self._weight_version = 0

    async def open(self) -> None:
        folder = self.config.engine.model_folder
        # What makes no text need not be able to.
        tokenizer = None
        if not embeds_only(folder):
            tokenizer = await anyio.to_thread.run_sync(find_tokenizer, folder)
        self._core = StreamingCore(tokenizer)

    async def reset(self) -> None:
        # In the epoch in which it was made: another lane may have the request by now, and it must
        # not be written over what that one writes.
        await self._write(self._made_in)
        self._made_in = self.epoch
        self._core.reset()
        self._intervals.clear()

    def load(self) -> dict[str, int | float | str]:
        return {"open": len(self._core), **self._throughput.load(now_ns())} if self.opened else {}

    def begun(self) -> int | None:
        return len(self._core)

    async def handle(self, envelope: Envelope) -> None:
        match envelope.body:
            case StepResult() as result:
                replica = split_role(role_of_sender(envelope.sender))[1]
                self._deliveries.append(self._core.absorb(result, now_ns(), replica))
                self._throughput.add(len(result.seq_ids))
                self._weight_version = result.weight_version
                if self.metrics.enabled:
                    for waited_ns in self._intervals.step(result.seq_ids, result.end_ns):
                        self.metrics.record(instruments.TOKEN_INTERVAL, waited_ns / 1e9)
            case RequestOpened() as opened:
                self._deliveries += self._core.open(opened, now_ns())
            case SampleScored() as scored:
                self._deliveries.append(self._core.scored(scored, now_ns()))
            case Recover(requests, replica):
                await self._recover(requests, replica)
            case Cancel() as cancel:
                if cancel.elsewhere:
                    self._fenced.discard(cancel.request_id)
                self._deliveries.append(self._core.end(cancel, now_ns()))
            case other:
                self.log.warning("message_not_understood", type=type(other).__name__)

    async def tick(self) -> None:
        """Delivers what a batch of messages gave, in one go."""
        await self._write(self.epoch)

    async def _write(self, epoch: int) -> None:
        deliveries, self._deliveries = self._deliveries, []
        # First, since it frees the device from work that nobody needs.
        halts: dict[int, tuple[int, ...]] = {}
        for delivery in deliveries:
            if delivery.halts:
                halts[delivery.replica] = (*halts.get(delivery.replica, ()), *delivery.halts)
        for replica, seq_ids in halts.items():
            await self.send(at(HALTS, replica), StopSequences(seq_ids), epoch=epoch)
        for delivery in deliveries:
            await self._ask_for_scores(delivery.to_score, delivery.replica, epoch)
        for delivery in deliveries:
            for ended in delivery.ended:
                timings = ended.completion.timings
                if timings.first_token_ns:
                    self._throughput.first_token(timings.first_token_ns - timings.received_ns)
        outputs = [pair for delivery in deliveries for pair in delivery.outputs]
        lost = await self._deliver(outputs, epoch) if outputs else frozenset()
        for delivery in deliveries:
            for finished in delivery.finished:
                # Of no epoch: what is delivered stays delivered when a new epoch has begun.
                if finished.entry_id not in lost:
                    await self.send(FINISHED, finished, epoch=0)
            for ended in delivery.ended:
                trace_end(self, ended)
                if self.metrics.enabled and ended.completion.entry_id not in lost:
                    measure_end(self.metrics, ended, self._weight_version)

    async def _deliver(
        self, outputs: Sequence[tuple[str, Sequence[Output]]], epoch: int
    ) -> frozenset[str]:
        """Writes outputs; returns the entries of which another lane has the stream by now, or whose
        stream has to be written anew."""
        fenced = await self.bus.results.deliver(outputs, epoch)
        if not fenced:
            return frozenset()
        entry_ids = {
            key: some[0].entry_id for key, some in outputs if key in fenced and len(some) > 0
        }
        if new := tuple(entry_ids[key] for key in fenced - self._fenced if key in entry_ids):
            await self.send(FINISHED, Fenced(new), epoch=epoch)
        self._fenced |= fenced
        return frozenset(entry_ids.values())

    async def _ask_for_scores(
        self, samples: Sequence[ScoreSample], replica: int, epoch: int
    ) -> None:
        """Asks an executor what its reference model makes of samples."""
        for sample in samples:
            await self.send(at(CONTROL["executor"], replica), sample, epoch=epoch)

    async def _recover(self, items: Sequence[RecoveryItem], replica: int) -> None:
        """Tells admission what there is of these requests, which go on in this epoch."""
        await self.tick()  # what is known to have ended must be seen to have ended
        keys = [item.key for item in items]
        for item, outputs in zip(
            items, await self.bus.results.recover(keys, self.epoch), strict=True
        ):
            own = [output for output in outputs if output.entry_id == item.entry_id]
            if own and isinstance(own[-1], Completion):
                self._fenced.discard(item.key)
                self._core.forget(item.key, item.entry_id)
                finished = RequestFinished(own[-1].request_id, item.entry_id)
                await self.send(FINISHED, finished, epoch=0)
                continue
            chunks = [output for output in own if isinstance(output, CompletionChunk)]
            # After dropped outputs, and where both differ, only what readers can find counts.
            keeps = self._core.knows(item) and item.key not in self._fenced
            self._fenced.discard(item.key)
            if keeps and not self._core.agrees(item, chunks):
                keeps = False
                self.log.warning("outputs_differ_from_the_stream", key=item.key)
            if not keeps and (opened := self._core.restore(item, chunks)) is not None:
                trace = TraceContext(opened.traceparent, opened.tracestate)
                self.log_of(item.key, trace).info("request_restored")
            await self._ask_for_scores(self._core.to_score(item), replica, self.epoch)
            await self.send(FINISHED, self._core.recovered(item))
