"""Whether a model has experts, of which each token asks some."""

from __future__ import annotations

from typing import Any

# What configurations in Transformers call them, the commonest first.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "moe_top_k")


def experts_of(hf_config: Any) -> tuple[int, int]:
    """How many experts a layer has, and how many of them a token asks; 0 and 0 without any."""
    text = hf_config.get_text_config()
    # DBRX has them in a part of its own.
    parts = [part for part in (text, getattr(text, "ffn_config", None)) if part is not None]
    experts = _first(parts, _EXPERTS)
    # A configuration class may have the field where the model has no experts, as 0 or 1.
    return (experts, _first(parts, _ACTIVE)) if experts > 1 else (0, 0)


def _first(parts: list[Any], names: tuple[str, ...]) -> int:
    found = (getattr(part, name, None) for name in names for part in parts)
    # Some have a number for each layer.
    numbers = (max(each, default=0) if isinstance(each, list) else each for each in found)
    return next((each for each in numbers if isinstance(each, int) and each > 0), 0)
