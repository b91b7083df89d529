"""The reference model of an engine: an engine of its own, which scores finished samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from ..config import EngineConfig, SamplingParams
from ..stages.executor.core import ExecutorCore
from ..stages.executor.parts.weights import WeightChanges
from ..stages.executor.runner.weights.sync_manager import weights_lost
from ..stages.executor.runner.whole_model import add_unquantized
from .engine_requests import Finished
from .rollouts import TrainingSample

Scores = list[tuple[float, ...]]


class Scorer(Protocol):
    """The methods of an engine that are used here."""

    @property
    def _executor(self) -> ExecutorCore: ...

    def score(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = False,
    ) -> Scores: ...

    def flush_cache(self) -> None: ...

    def shutdown(self) -> None: ...


def reference_settings(config: EngineConfig) -> EngineConfig:
    """Return the settings of the reference model that `config` names."""
    alone: dict[str, Any] = {"speculation": "off", "kv_host_bytes": 0, "kv_disk_path": ""}
    return msgspec.structs.replace(config.of_reference(), **alone)


class EngineReference:
    """A reference model; the engine's own weights before they became codes, if it shares updates.

    Attributes:
        shutdown: Frees its memory.
    """

    def __init__(self, engine: Scorer) -> None:
        self._engine = engine
        self._shared: WeightChanges | None = None
        self.shutdown = engine.shutdown

    def share_updates(self, core: ExecutorCore) -> None:
        """Have updates of a model with codes replace the weights here, too.

        Raises:
            ModelError: The model has no codes.
        """
        add_unquantized(core.model.shards, self._engine._executor.model.module)
        self._shared = core.part(WeightChanges)

    def score(self, *args: Any, show_progress: bool = False) -> Scores:
        """Score completions, as the engine's `score`.

        Raises:
            WeightsError: An update failed midway.
        """
        if self._shared is not None:
            if lost := self._shared.manager.lost:
                raise weights_lost(lost)
            # Its prefixes may be of former weights.
            self._engine.flush_cache()
        return self._engine.score(*args, show_progress=show_progress)

    def with_scores(self, finished: Sequence[Finished]) -> list[TrainingSample]:
        """Return samples with their `ref_logprobs`."""
        begun = [pair for pair in finished if pair[0].completion_tokens]
        if not begun:
            return [sample for sample, _ in finished]
        scores = self.score(
            [sample.prompt_tokens for sample, _ in begun],
            [sample.completion_tokens for sample, _ in begun],
            [params for _, params in begun],
        )
        by_sample = {id(sample): each for (sample, _), each in zip(begun, scores, strict=True)}
        return [
            msgspec.structs.replace(sample, ref_logprobs=by_sample.get(id(sample), ()))
            for sample, _ in finished
        ]
