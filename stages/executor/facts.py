"""What is told of a model that is loaded: how large it is, and whether it has experts."""

from __future__ import annotations

from .core import ExecutorCore
from .runner.experts import experts_of
from .runner.kv_cache import block_bytes


def model_facts(core: ExecutorCore) -> dict[str, int | float | str]:
    """Numbers and names for reports; the memory is what the model takes when none is released."""
    model = core.model
    parameters = list(model.module.parameters())
    experts, active = experts_of(model.hf_config)
    return {
        "parameters": sum(each.numel() for each in parameters),
        "weight_bytes": sum(each.numel() * each.element_size() for each in parameters),
        "kv_bytes": (core.cache.num_blocks + 1) * block_bytes(model, core.cache.block_size),
        "vocab_size": model.vocab_size,
        "max_batch_size": core.max_batch_size,
        "dtype": str(model.dtype).removeprefix("torch."),
        "deterministic": int(not core.without_determinism),
        "experts": experts,
        "active_experts": active,
    }
