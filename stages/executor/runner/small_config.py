"""Small configurations of the kind of a model, for the comparison at load."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY = 256

_HEAD_DIM = 16

WIDTHS = (_HEAD_DIM, None, 0)
"""Widths of heads to try, the smallest model first; None is the model's own, and 0 keeps all its
widths."""

_WINDOW = 4

_MOST_LAYERS = 6
"""Most layers of the small model, unless a pipeline has more stages: a period of mixed kinds of
layers.
"""

_SPANS = ("sliding_window", "sliding_window_size", "attention_chunk_size", "floor_scale")
"""Names of widths in tokens: of windows, chunks, and steps of a temperature by position."""

_DEPTHS = ("num_hidden_layers", "depth", "num_layers")
_MLA = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

_KINDS = ("layer_types", "layers_block_type")
_MAMBA_2 = (
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups"),
    ("n_mamba_heads", "mamba_headdim", "mamba_ngroups"),
    ("mamba_num_heads", "mamba_head_dim", "n_groups"),
    ("num_heads", "head_dim", "n_groups"),
)
"""Names of Mamba-2's heads, their width, and groups of them."""


def small_config(
    hf_config: PreTrainedConfig, head_dim: int | None, size: int, stages: int
) -> PreTrainedConfig:
    """Return the configuration of a small model.

    Names of widths are the common ones; a configuration with others keeps its own widths.

    Args:
        hf_config: The model's.
        head_dim: One of WIDTHS.
        size: Ranks that share a layer.
        stages: Number of the pipeline's stages.
    """
    config = copy.deepcopy(hf_config)
    text: Any = config.get_text_config()
    kept = _kept_layers(text, min(text.num_hidden_layers, max(_MOST_LAYERS, stages)))
    own = _take_overrides(text)
    _cut_layers(text, kept)
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig) and part is not text:
            for depth in filter(partial(hasattr, part), _DEPTHS):
                setattr(part, depth, 1)
    for part in {id(each): each for each in (config, text)}.values():
        _cut_vocabulary(part)
    for name in _SPANS:
        if isinstance(tokens := getattr(text, name, None), int) and tokens:
            setattr(text, name, min(tokens, _WINDOW))
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("llama_4_scaling_beta"):
        text.rope_parameters = rope | {"original_max_position_embeddings": _WINDOW}
    before = {name: getattr(text, name) for name in own[0]} if own else {}
    if head_dim != 0:
        _cut_widths(text, size, head_dim)
    _cut_indexers(text)
    if own:
        # In the proportions of the model.
        text.per_layer_config = {
            place: {
                name: max(value * getattr(text, name) // before[name], 1)
                for name, value in own[index].items()
            }
            for place, index in enumerate(kept)
        }
    return config


def _kept_layers(text: Any, count: int) -> list[int]:
    """Return the numbers of the layers to keep: the first ones, with the first of each kind.

    Where the last layers read the keys and values of others, it is some of either part, with all
    kinds of layers.
    """
    shared: int = getattr(text, "num_kv_shared_layers", None) or 0
    if not shared:
        return _of_all_kinds(text, count)
    kinds, first = text.layer_types, text.num_hidden_layers - shared
    kept: list[int] = []
    for part in (range(first), range(first, first + shared)):
        new = {kinds[layer]: layer for layer in reversed(part)}.values()
        others = (layer for layer in part if layer not in new)
        kept += sorted([*new, *others][: max(count // 2, len(new))])
    text.num_kv_shared_layers = sum(layer >= first for layer in kept)
    return kept


def _of_all_kinds(text: Any, count: int) -> list[int]:
    lists = (vars(text).get(name) or [] for name in _KINDS)
    kinds: list[str] = next((each for each in lists if len(each) == text.num_hidden_layers), [])
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    # Layers that share attention need another one to share it with.
    firsts += [layer for layer, kind in enumerate(kinds) if kind == "hybrid"][1:2]
    others = (layer for layer in range(text.num_hidden_layers) if layer not in firsts)
    return sorted([*firsts, *others][: max(count, len(firsts))])


def _cut_indexers(text: Any) -> None:
    """Let indexers choose among few tokens, without equal scores, of which any may be chosen."""
    if getattr(text, "index_topk", None):
        text.index_topk = min(text.index_topk, _WINDOW)
        # Sums over fewer heads are often equal.
        text.index_n_heads = max(text.index_n_heads, 32)
    if getattr(text, "index_topk_blocks", None):
        text.index_topk_blocks, text.index_block_size, text.index_local_blocks = 3, 2, 1
        text.index_n_heads = text.num_key_value_heads


def _take_overrides(text: Any) -> list[dict[str, int]]:
    """Return the numbers in which layers differ, of each layer, and remove them."""
    if not (names := getattr(text, "per_layer_attributes", None)):
        return []
    own = [{name: getattr(layer, name) for name in names} for layer in text.per_layer_config]
    text.per_layer_config = None
    return own


def _cut_layers(text: Any, kept: list[int]) -> None:
    before = text.num_hidden_layers
    for name, value in [*vars(text).items()]:
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, [value[layer] for layer in kept])
        elif isinstance(value, list) and name.endswith(("layer_indices", "layer_ids")):
            # Some kinds of layers, the first of which is among the first layers.
            found = [kept.index(layer) for layer in value if layer in kept]
            setattr(text, name, found or [len(kept) // 2])
    text.num_hidden_layers = len(kept)


def _cut_vocabulary(part: Any) -> None:
    for name, value in [*vars(part).items()]:
        if isinstance(value, int) and "vocab_size" in name:
            setattr(part, name, VOCABULARY)
        elif isinstance(value, int) and name.endswith(("_token_id", "_token_index")):
            setattr(part, name, min(value, VOCABULARY - 1))


def _cut_widths(text: Any, size: int, head_dim: int | None) -> None:
    """Cut the widths of layers; `head_dim`: None to keep that of the heads."""
    if not hasattr(text, "num_attention_heads"):
        text.hidden_size = 4 * (head_dim or _HEAD_DIM)
        _cut_mixers(text)
        return
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    own = getattr(text, "head_dim", None)
    width = head_dim or own or text.hidden_size // heads
    few = size if size > 1 else min(2, kv_heads)
    text.num_attention_heads = few * (heads // kv_heads)
    if getattr(text, "num_key_value_heads", None):
        text.num_key_value_heads = few
    if own:
        text.head_dim = width
    is_mla = getattr(text, "kv_lora_rank", None) is not None
    text.hidden_size = text.num_attention_heads * width
    for name in _MLA if is_mla and head_dim else ():
        if getattr(text, name, None):
            setattr(text, name, head_dim)
    if is_mla and head_dim and hasattr(text, "qk_head_dim"):
        text.qk_head_dim = 2 * head_dim
    for name, value in [*vars(text).items()]:
        if name.endswith(("intermediate_size", "ffn_hidden_size")) and value is not None:
            small = 16 * size
            setattr(text, name, [small] * len(value) if isinstance(value, list) else small)
    _cut_rotation(text, width)
    _cut_mixers(text)


def _cut_mixers(text: Any) -> None:
    """Cut the widths of recurrent layers, which follow from each other."""
    if (keys := getattr(text, "linear_num_key_heads", None)) is not None:
        text.linear_num_value_heads = 2 * (text.linear_num_value_heads // keys)
        text.linear_num_key_heads = 2
    if getattr(text, "linear_num_heads", None) is not None:
        text.linear_num_heads = 2
    expand = getattr(text, "mamba_expand", None) or getattr(text, "expand", None)
    if expand is None:
        return
    inner = int(expand * text.hidden_size)
    for heads, width, groups in _MAMBA_2:
        if hasattr(text, heads) and hasattr(text, width):
            setattr(text, width, _HEAD_DIM)
            setattr(text, heads, inner // _HEAD_DIM)
            setattr(text, groups, min(getattr(text, groups), 2))
    if hasattr(text, "mamba_d_ssm"):
        text.mamba_d_ssm = inner
    if hasattr(text, "attention_hidden_size"):
        text.attention_hidden_size = 2 * text.hidden_size
        text.attention_head_dim = text.attention_hidden_size // text.num_attention_heads
    if not hasattr(text, "num_attention_heads") and hasattr(text, "intermediate_size"):
        text.intermediate_size = inner


def _cut_rotation(text: Any, width: int) -> None:
    """Cut the parts of a head that rotate by time, height and width, in their proportions."""
    rope = getattr(text, "rope_parameters", None) or {}
    if "rope_type" not in rope:
        return  # none, or one for each kind of layer
    pairs = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
    before = rope.get("mrope_section") or [1, 1, 1]
    sections = [max(part * pairs // sum(before), 1) for part in before[:-1]]
    text.rope_parameters = rope | {"mrope_section": [*sections, pairs - sum(sections)]}
