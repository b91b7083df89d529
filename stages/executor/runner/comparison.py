"""Comparison at load with Transformers' own forward pass, on a small model of the same class.

Attention through the paged cache, layers of a pipeline stage and shards of a layer rely on rules
about a model's structure. A class that breaks one gives other tokens, not an error. So a model is
built from the same configuration with few layers, small widths and random weights in float32. It
runs both ways over a few tokens, and a difference beyond rounding is a refusal. The model itself
may be larger than this process's memory, and in bfloat16 rounding hides what is wrong.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from .sharded_model import make_layout, shard_model
from .small_config import WIDTHS, small_config
from .whole_model import make_whole

_TOKENS = 200
_LARGEST = 1 << 27
"""Parameters, 512 MiB in float32."""
_MOST_LEN = 64

_STEPS = ((4, 0, 0), (2, 5, 0), (1, 1, 6), (2, 1, 1), (1, 4, 1))
"""Tokens of the sequences in each step: whole prompts and chunks, beside others and alone, so that
in every sequence a token's place in the batch is another one than its position."""

_TOLERANCE = 1e-3
"""The largest relative difference of a token's logits; rounding in float32 makes about 1e-5."""

_passed: set[str] = set()
"""Comparisons that this process has made."""


def compare_with_transformers(config: EngineConfig, model: LoadedModel) -> None:
    """Compare attention through the cache with Transformers' own.

    Args:
        config: The settings.
        model: A model that generates, as a whole.

    Raises:
        ModelError: The logits differ, or the settings ask for codes of a module that a caller has
            given without.
    """
    if config.quantization != "auto" and not model.forms:
        raise ModelError(
            "engine.quantization is for models that are loaded: codes would not follow the weights "
            "of a module in memory; set it to 'auto', or give model_path"
        )
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
    # Beside what all tokens have in common, such as a bias of the output layer.
    size = (wanted - wanted.mean(0)).norm(dim=-1)
    difference = ((found - wanted).norm(dim=-1) / size).max()
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
    for width in WIDTHS:
        try:
            config = small_config(hf_config, width, size, stages)
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
            with torch.inference_mode(), _no_advice():
                for ids in map(torch.from_numpy, _sequences()):
                    found = plain(input_ids=ids[None], use_cache=False).logits[0]
                    logits.append(found)
            # An output layer that is zero would make all logits equal, and the comparison void.
            if all(each.isfinite().all() and each.std(0).any() for each in logits):
                return make, logits
        # Sizes that don't fit each other fail in many ways, in Transformers' code.
        except Exception as failure:  # noqa: BLE001
            error = failure
    raise ModelError(
        f"{name} can't be served: no small model of its configuration can be compared with "
        f"Transformers' own forward pass ({error!s:.200}); choose another model"
    )


@contextmanager
def _no_advice() -> Iterator[None]:
    """Silence Transformers' advice to install kernels, which our mixers don't use."""
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


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
    parts: tuple[Any, ...] = (inner, decoder.get_output_embeddings())
    if decoder.config.get_text_config() is decoder.config:
        parts = (decoder,)  # an output may have further layers
    used = {id(each) for part in parts for each in _own(part)}
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
