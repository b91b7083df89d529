"""Small random embedding models of several architectures."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 211
MOST = 130
PADDING = 1

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MOST,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": PADDING,
}

_GROUPED = {"num_key_value_heads": 2, "head_dim": 16}

ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "xlm-roberta": {},
    "modernbert": {
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
        "cls_token_id": None,
        "sep_token_id": None,
    },
    "distilbert": {"dim": 48, "hidden_dim": 64, "n_layers": 2, "n_heads": 4},
    "mpnet": {},
    "electra": {"embedding_size": 32},
    "albert": {"embedding_size": 32},
    "deberta-v2": {},
    "nomic_bert": {},
    # Padding shows in these: no prompts of different length may be in one pass.
    "convbert": {},
    "nystromformer": {},
    # Decoders configured to look ahead.
    "llama": {"is_causal": False, **_GROUPED},
    "gemma3_text": {"use_bidirectional_attention": True, "sliding_window": 8, **_GROUPED},
}

CAUSAL: dict[str, dict[str, Any]] = {
    "qwen3": _GROUPED,
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": MOST},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16, **_GROUPED},
}
"""Base models of decoders, without an output layer."""


def make_base(kind: str, *, seed: int = 0, **changes: Any) -> Any:
    """A random base model in float32, in which a token's state depends well on its neighbours."""
    torch.manual_seed(seed)
    settings = (ENCODERS | CAUSAL)[kind]
    config = CONFIG_MAPPING[kind](**{**_COMMON, **settings, **changes})
    model = AutoModel.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model


@lru_cache(maxsize=32)  # of one model or two, each pooled in several ways
@torch.no_grad()
def _states(base: Any, prompt: tuple[int, ...]) -> Tensor:
    """The last hidden states, `[tokens, hidden_size]` float32."""
    tokens = torch.tensor([prompt])
    output = base(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    states: Tensor = output.last_hidden_state[0].float()
    return states


def vector_of(
    base: Any,
    prompt: list[int],
    kind: str,
    *,
    normalize: bool = True,
    dimensions: int | None = None,
) -> Tensor:
    """The vector that Transformers' base model gives of a prompt alone, `[dimensions]` float32."""
    states = _states(base, tuple(prompt))
    pooled = {"mean": states.mean(0), "last": states[-1], "cls": states[0]}[kind]
    pooled = pooled[:dimensions]
    return torch.nn.functional.normalize(pooled, dim=0) if normalize else pooled
