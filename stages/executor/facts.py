"""Facts of a loaded model, and what its ranks use."""

from __future__ import annotations

from .core import ExecutorCore
from .runner.kv_cache import slot_bytes
from .runner.loaded_model import experts_of
from .runner.ranks.commands import Reply


def facts_of_model(core: ExecutorCore) -> dict[str, int | float | str]:
    """Return the model's size for reports; memory counts as if none were released."""
    model = core.model
    experts, active = experts_of(model.hf_config)
    sizes = () if model.pipeline is None else model.pipeline.sizes
    kept_as = model.layers[0].codes if model.layers else None
    kv_dtype = str(kept_as or model.dtypes.kv_cache).removeprefix("torch.")
    return {
        "parameters": model.num_parameters,
        "weight_bytes": model.weight_bytes,
        "kv_bytes": core.cache.num_bytes,
        "kv_token_bytes": core.cache.token_bytes,
        "kv_dtype": kv_dtype,
        "vocab_size": model.vocab_size,
        "max_batch_size": core.max_batch_size,
        "dtype": str(model.dtypes.weights).removeprefix("torch."),
        "deterministic": int("deterministic" not in core.off),
        "experts": experts,
        "active_experts": active,
        **({"quantization": model.forms} if model.forms else {}),
        **({} if model.mixers is None else {"state_bytes": slot_bytes(model)}),
        # Of each pipeline stage.
        **({"stage_layers": "+".join(map(str, sizes))} if sizes else {}),
    }


def report_ranks(core: ExecutorCore) -> list[Reply]:
    """Return what each rank uses, this one first; [] if there are no others.

    Raises:
        RankError: A rank has ended, or doesn't answer.
    """
    return [] if core.ranks is None else [core.runner.report(), *core.ranks.report()]
