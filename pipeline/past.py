"""An engine with a past version of the weights, from the log of weights."""

from __future__ import annotations

from msgspec.structs import replace

from ..config import EngineConfig, WeightsError
from ..stages.executor.runner.weights.delta import digest
from ..stages.executor.runner.weights.log import WeightLog
from .engine import InferenceEngine


def engine_at(config: EngineConfig, version: int, *, run: str = "") -> InferenceEngine:
    """Return an engine that has the weights of a past version, under that version.

    Args:
        config: The settings, with `weight_log`. The engine itself doesn't write to the log.
        version: The version.
        run: Its run in the log; "" for the newest run.

    Raises:
        WeightsError: The log doesn't have it (`weights_unlogged`), it is damaged, or it is of
            another model or dtype.
    """
    state = WeightLog(config.weight_log).weights(version, run)
    engine = InferenceEngine(replace(config, weight_log=""))
    try:
        own = engine.state_dict()
        for name, tensor in state.items():
            if name not in own or own[name].dtype != tensor.dtype:
                raise WeightsError(
                    f"the log has {name!r} as {tensor.dtype}, unlike this engine; give the "
                    "model_path and engine.dtype that it was written with"
                )
        if version:
            engine.update_weights(state, blocking=True, version=version)
        elif any(digest(own[name]) != digest(tensor) for name, tensor in state.items()):
            raise WeightsError(
                "the weights of model_path are not those of version 0 in the log; give the model "
                "that it began with",
                code="weights_base",
            )
    except BaseException:
        engine.shutdown()
        raise
    return engine
