"""Comparison at load with Transformers' own forward pass, on a small model of the same class.

Attention through the paged cache, layers of a pipeline stage and shards of a layer rely on rules
about a model's structure. A class that breaks one gives other tokens, not an error. So a model is
built from the same configuration with few layers, small widths and random weights in float32. It
runs both ways over a few tokens, and a difference beyond rounding is a refusal. The model itself
may be larger than this process's memory, and in bfloat16 rounding hides what is wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ....config import EngineConfig, ModelError
from .attention.choose import choose_backend
from .batch import IntArray, Rows, order_rows
from .fast_modules.modules import FastModules
from .inputs import InputBuilder, model_forward
from .kv_cache import KVCache
from .loaded_model import LoadedModel
from .model import wrap_model
from .ranks.group import Layout, OneRank, RankGroup
from .ranks.pipelining import PipelineRank
from .sharded_model import make_layout, make_whole, shard_model

_MOST_LAYERS = 6
"""Most layers of the small model, unless a pipeline has more stages: a period of mixed kinds of
layers.
"""

_TOKENS, _VOCABULARY, _HEAD_DIM = 200, 256, 16
_WINDOW = 4
_LARGEST = 1 << 27
"""Parameters, 512 MiB in float32."""
_MOST_LEN = 64

_STEPS = ((4, 0, 0), (2, 5, 0), (1, 1, 6), (2, 1, 1), (1, 4, 1))
"""Tokens of the sequences in each step: whole prompts and chunks, beside others and alone, so that
in every sequence a token's place in the batch is another one than its position."""

_TOLERANCE = 1e-3
"""The largest relative difference of a token's logits; rounding in float32 makes about 1e-5."""

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

_passed: set[str] = set()
"""Comparisons that this process has made."""


def compare_with_transformers(config: EngineConfig, model: LoadedModel) -> None:
    """Compare attention through the cache with Transformers' own.

    Args:
        config: The settings.
        model: A model that generates, as a whole.

    Raises:
        ModelError: The logits differ.
    """
    kernels = config.kernels
    if model.device.type != "cpu" or model.dtypes.weights != torch.float32:
        kernels = "off"  # not loaded here; they are compared module by module
    name = type(model.module).__name__
    sizes = model.hf_config.to_json_string(use_diff=False)
    key = f"{id(type(model.module))} {kernels} {model.latent_attention} {sizes}"
    if key in _passed:
        return
    kind = type(model.module)
    small, logits = _small_model(name, model.hf_config, kind)
    block_size = 4
    settings = EngineConfig(kernels=kernels, block_size=block_size, deterministic=False)
    latents = "auto" if any(spec.is_latent for spec in model.layers) else "off"
    own = wrap_model(small(Layout(OneRank(), False)), _MOST_LEN, latent_attention=latents)
    count = len(_STEPS[0])
    blocks = count * -(-_MOST_LEN // block_size)
    cache = KVCache(own, blocks, block_size, num_slots=count)
    backend, without_kernels = choose_backend(settings, own)
    if not without_kernels and own.mixers is not None:
        own.mixers.use_kernels(own.dtypes.activations, own.device)
    builder = InputBuilder(own, block_size, backend)
    fast = FastModules(own, cache, builder) if not without_kernels else None
    for found, wanted in zip(_stepwise(own, cache, builder, fast), logits, strict=True):
        _check(name, found, wanted, "it gives other logits with its keys and values in a cache")
    _passed.add(key)


def compare_shards(config: EngineConfig, model: LoadedModel, group: RankGroup) -> None:
    """Compare a model that is cut over ranks with the whole one. All ranks call it together.

    Args:
        config: The settings.
        model: This rank's part.
        group: The ranks that share its layers.

    Raises:
        ModelError: The logits differ, which the ranks of the last stage see.
        RankError: A rank has failed.
    """
    place, layout = copy.copy(model.pipeline), make_layout(config, group)
    stages, by_expert = config.pipeline_parallel, config.expert_parallel > 1
    kind = type(model.whole)
    name = kind.__name__
    small, logits = _small_model(
        name, model.hf_config, kind, layout, stages, expert_parallel=by_expert
    )
    module = small(layout, place, expert_parallel=by_expert)
    ids = torch.from_numpy(_sequences()[0])[None]
    call = {"position_ids": torch.arange(ids.shape[1])[None], "use_cache": False}
    with torch.inference_mode():
        if place is None:
            found = module(input_ids=ids, **call).logits
        else:
            output = place.run(module, ids, place.receive(ids.shape[1]), call)
            if not place.is_last:
                place.check_states(module, output.last_hidden_state)
                place.send(output.last_hidden_state[0])
                return
            found = output.logits
    _check(name, found[0], logits[0], "it gives other logits when it is cut over ranks")


def _check(name: str, found: Tensor, wanted: Tensor, what: str) -> None:
    difference = ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()
    if not difference <= _TOLERANCE:
        raise ModelError(
            f"{name} can't be served: {what} (by {difference:.2g} of their size, in a small model "
            "of its configuration); choose another model, or set engine.tensor_parallel and "
            "engine.pipeline_parallel to 1"
        )


def _sequences() -> list[IntArray]:
    generator = np.random.default_rng(0)
    return [generator.integers(1, _TOKENS, sum(each)) for each in zip(*_STEPS, strict=True)]


Maker = Callable[..., Any]


def _small_model(
    name: str,
    hf_config: PreTrainedConfig,
    kind: Any,
    layout: Layout | None = None,
    stages: int = 1,
    *,
    expert_parallel: bool = False,
) -> tuple[Maker, list[Tensor]]:
    """Return a function that makes a small model, or a shard of it, with the same weights each
    time; and the logits of Transformers' own forward pass for each sequence.

    Raises:
        ModelError: None can be built.
    """
    error: Exception | None = None
    size = 1 if layout is None else layout.group.size
    for config in _small_configs(hf_config, size, stages):
        try:
            whole = make_whole(config, torch.float32, kind)
            if (count := sum(each.numel() for each in whole.get_decoder().parameters())) > _LARGEST:
                raise ValueError(f"it has {count} parameters")
            make = partial(_filled, whole)
            if layout is not None:
                shard_model(
                    whole, layout, torch.device("meta"), None, expert_parallel=expert_parallel
                )
            plain = make(Layout(OneRank(), False))
            logits = []
            with torch.inference_mode():
                for ids in map(torch.from_numpy, _sequences()):
                    found = plain(input_ids=ids[None], use_cache=False).logits[0]
                    logits.append(found)
            if all(each.isfinite().all() and each.any() for each in logits):
                return make, logits
        # Sizes that don't fit each other fail in many ways, in Transformers' code.
        except Exception as failure:  # noqa: BLE001
            error = failure
    raise ModelError(
        f"{name} can't be served: no small model of its configuration can be compared with "
        f"Transformers' own forward pass ({error!s:.200}); choose another model"
    )


def _filled(
    whole: nn.Module,
    layout: Layout,
    pipeline: PipelineRank | None = None,
    *,
    expert_parallel: bool = False,
) -> Any:
    """Return a shard with random weights, and with Transformers' own attention."""
    module, weights = shard_model(
        whole, layout, torch.device("cpu"), pipeline, expert_parallel=expert_parallel
    )
    generator = torch.Generator().manual_seed(0)
    decoder: Any = whole
    inner = decoder.get_decoder()
    used = {id(each) for part in (inner, decoder.get_output_embeddings()) for each in _own(part)}
    # Numbers that the model computes itself, such as decays that depend on each other; but not a
    # router's bias, which begins as zeros.
    computed = {
        name
        for name, each in module.named_buffers()
        if each.dtype.is_floating_point and each.numel() > 1 and each.std() > 0
    }
    seen: dict[int, Tensor] = {}
    for name, tensor in whole.state_dict(keep_vars=True).items():
        if id(tensor) not in used or not tensor.dtype.is_floating_point or name in computed:
            continue
        if id(tensor) not in seen:
            numbers = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            scale = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.2
            seen[id(tensor)] = numbers * scale + (tensor.dim() == 1 and "norm" in name)
        weights.shards[name].write(seen[id(tensor)].to(tensor.dtype))
    module.set_attn_implementation("eager")
    return module


def _own(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _stepwise(
    model: LoadedModel, cache: KVCache, builder: InputBuilder, fast: FastModules | None
) -> list[Tensor]:
    """Return the logits of all tokens of each sequence, computed in steps of several."""
    sequences, size = _sequences(), cache.block_size
    tables = np.arange(cache.num_blocks).reshape(len(sequences), -1)
    done = np.zeros(len(sequences), dtype=np.int64)
    logits: list[list[Tensor]] = [[] for _ in sequences]
    for step in _STEPS:
        counts = np.array(step)
        chosen = np.flatnonzero(counts)
        order, num_decodes = order_rows(done[chosen], counts[chosen])
        rows = chosen[order]
        ids = [sequences[row][done[row] : done[row] + counts[row]] for row in rows]
        last = -(-int((done + counts).max()) // size)
        states = None if model.mixers is None else rows
        batch = Rows(done[rows], counts[rows], tables[rows, :last], num_decodes, states=states)
        flat = np.concatenate(ids)
        inputs = builder.build(batch, flat, np.arange(len(flat)))
        if fast is None:
            found = model_forward(model.module, inputs, cache)
        else:
            with fast.active():
                found = model_forward(model.module, inputs, cache)
        for row, part in zip(rows, torch.split(found, counts[rows].tolist()), strict=True):
            logits[row].append(part)
        done += counts
    return [torch.cat(parts) for parts in logits]


def _small_configs(
    hf_config: PreTrainedConfig, size: int, stages: int
) -> Iterator[PreTrainedConfig]:
    """Yield configurations of small models, the smallest first.

    Names of widths are the common ones; a configuration with others keeps its own widths.

    Args:
        hf_config: The model's.
        size: Ranks that share a layer.
        stages: Number of the pipeline's stages.
    """
    for head_dim in (_HEAD_DIM, None, 0):
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
        yield config


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
            setattr(part, name, _VOCABULARY)
        elif isinstance(value, int) and name.endswith(("_token_id", "_token_index")):
            setattr(part, name, min(value, _VOCABULARY - 1))


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
        if isinstance(value, int) and name.endswith(("intermediate_size", "ffn_hidden_size")):
            setattr(text, name, 16 * size)
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
