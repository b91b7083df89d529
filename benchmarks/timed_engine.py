"""An engine for benchmarks. The module imports no torch; an engine does when it is made."""

from __future__ import annotations

from typing import Any

from nano_inference import EngineConfig, InferenceEngine
from nano_inference.bus.public import Completion
from nano_inference.stages.streaming.deliveries import EndedRequest


class TimedEngine(InferenceEngine):
    """An engine that keeps its completions, whose timings its methods don't return."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.completions: dict[str, Completion] = {}

    def _finished(self, ended: EndedRequest) -> Any:
        self.completions[ended.completion.request_id] = ended.completion
        return super()._finished(ended)
