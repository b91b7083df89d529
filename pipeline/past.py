"""Past versions of the weights, from the log of weights: in an engine, or as a model's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from msgspec.structs import replace

from ..config import EngineConfig, WeightsError
from ..stages.executor.runner.weights.delta import digest
from ..stages.executor.runner.weights.log import WeightLog
from ..text.model_folder import folder_of
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


def export_version(config: EngineConfig, version: int, folder: Path, *, run: str = "") -> None:
    """Write a past version as a model's folder, in Transformers' format.

    Args:
        config: The settings, with `weight_log` and the model that the log is of.
        version: The version.
        folder: A new folder, which appears when it is whole.
        run: As for `engine_at`.

    Raises:
        WeightsError: As `engine_at`; or the folder exists.
    """
    import transformers

    if folder.exists():
        raise WeightsError(f"{str(folder)!r} exists; name a new folder")
    state = WeightLog(config.weight_log).weights(version, run)
    source = folder_of(config.model_folder)
    hf_config = transformers.AutoConfig.from_pretrained(source)
    kind = getattr(transformers, hf_config.architectures[0])
    dtype = next(each.dtype for each in state.values() if each.is_floating_point())
    model = kind.from_pretrained(source, dtype=dtype)
    own = model.state_dict(keep_vars=True)
    covered = {id(own[name]) for name in state if name in own}
    if state.keys() - own.keys() or any(id(each) not in covered for each in own.values()):
        raise WeightsError(
            f"the log is of another model than {str(source)!r}",
            remedy="give the model_path that it was written with",
        )
    model.load_state_dict(state, strict=False)
    beside = folder.with_name(f".{folder.name}.part")
    try:
        # Under the names that checkpoints have.
        model.save_pretrained(beside)
        for path in source.iterdir():
            weights = ".safetensors" in path.suffixes or path.suffix in (".bin", ".gguf")
            if path.is_file() and not weights and not (beside / path.name).exists():
                shutil.copyfile(path, beside / path.name)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
