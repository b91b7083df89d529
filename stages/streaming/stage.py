"""The streaming stage's shell."""

from __future__ import annotations

from typing import ClassVar

import anyio.to_thread

from ...bus.links import FINISHED, HALTS
from ...bus.messages import Cancel, Envelope, StepResult, StopSequences
from ...telemetry import TraceContext, names, now_ns
from ..actor import Actor, StageContext
from ..tokenizer import load_tokenizer
from .core import Deliveries, EndedRequest, StreamingCore


class StreamingStage(Actor):
    """Turns step results into text, and writes what clients read."""

    name: ClassVar[str] = "streaming"

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._core: StreamingCore
        self._deliveries: list[Deliveries] = []

    async def open(self) -> None:
        folder = self.config.engine.model_folder
        self._core = StreamingCore(await anyio.to_thread.run_sync(load_tokenizer, folder))

    async def reset(self) -> None:
        self._core.reset()

    async def handle(self, envelope: Envelope) -> None:
        match envelope.body:
            case StepResult() as result:
                self._deliveries.append(self._core.absorb(result, now_ns()))
            case Cancel() as cancel:
                self._deliveries.append(self._core.end(cancel, now_ns()))
            case other:
                self.log.warning("message_not_understood", type=type(other).__name__)

    async def settle(self) -> None:
        """Delivers what a batch of messages gave, in one go."""
        deliveries, self._deliveries = self._deliveries, []
        # First, since it frees the device from work that nobody needs.
        if halts := tuple(seq_id for delivery in deliveries for seq_id in delivery.halts):
            await self.send(HALTS, StopSequences(halts))
        if outputs := [pair for delivery in deliveries for pair in delivery.outputs]:
            await self.bus.results.deliver(outputs)
        for delivery in deliveries:
            for finished in delivery.finished:
                # Of no epoch: what is delivered stays delivered when a new epoch has begun.
                await self.send(FINISHED, finished, epoch=0)
            for ended in delivery.ended:
                self._trace(ended)

    def _trace(self, ended: EndedRequest) -> None:
        info, completion = ended.info, ended.completion
        if info is None or not self.tracing.enabled:
            return
        timings = completion.timings
        held = next((time for time in timings.stages if time.stage == self.name), None)
        self.span(
            info.request_id,
            TraceContext(info.traceparent, info.tracestate),
            held.start_ns if held else timings.finished_ns,
            {
                names.REQUEST_MODEL: info.model,
                names.STATUS: completion.status,
                names.INPUT_TOKENS: completion.usage.prompt_tokens,
                names.CACHED_TOKENS: completion.usage.cached_tokens,
                names.OUTPUT_TOKENS: completion.usage.completion_tokens,
                names.FINISH_REASONS: [sample.finish_reason for sample in completion.samples],
            },
            events=((names.FIRST_TOKEN, timings.first_token_ns),) if timings.first_token_ns else (),
            error=completion.error.code if completion.error else "",
        )
