"""Loading of a model's shard: no rank ever holds the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ....config import EngineConfig, ModelError, WeightsError
from ....text.gguf_facts import LINK
from ....text.model_folder import embeds_only, folder_of
from .attention.interface import register_attention
from .checkpoint import INDEX, WEIGHTS, tensor_files, tensors_missing, wrong_shape
from .device import resolve_device, trim
from .fixed_tiles import require_cpu
from .linear.choose import method_of
from .loaded_model import LoadedModel
from .model import check_architecture, load_config, load_mixers, takes_images, wrap_model
from .ranks.group import PARTS, Layout, RankGroup
from .ranks.layers import ParallelExperts, VocabParallelEmbedding, shard_module
from .ranks.pipelining import PipelineRank
from .ranks.plan import Style, check_divisible, parallel_plan
from .shards import Box, Shard, ShardedWeights, boxes_in
from .system_memory import zeros
from .weights.conversion import as_parameters, split_converted
from .whole_model import make_whole

_ALONE = "set engine.tensor_parallel to 1, and engine.rank_invariant to false"


def load_sharded(
    config: EngineConfig, group: RankGroup, pipeline: PipelineRank | None = None
) -> LoadedModel:
    """Load this rank's shard of the model of the settings. All ranks call this at the same time.

    Args:
        config: The settings, the same on each rank.
        group: The ranks that share the layers.
        pipeline: This rank's place among several stages.

    Raises:
        ModelError: As `load_model`, or the model can't be sharded over these ranks.
        RankError: Another rank has failed, such as by a ModelError.
    """
    folder = folder_of(config.model_folder)
    device = resolve_device(config.device)
    if config.deterministic is True:
        require_cpu(device)
    if device.type != "cpu":
        raise ModelError(
            f"ranks run on CPUs only, not on {device}; set device to 'cpu', or {_ALONE}"
        )
    register_attention()
    hf_config = load_config(folder)
    _check_supported(folder, hf_config)
    check_architecture(hf_config)
    files = tensor_files(folder)
    whole = make_whole(hf_config, _dtype_of(config, hf_config, files))
    _check_no_mixers(whole)
    layout = make_layout(config, group)
    expert_parallel = config.expert_parallel > 1
    huge = config.huge_pages == "auto"
    try:
        module, weights = shard_model(
            whole,
            layout,
            device,
            pipeline,
            expert_parallel=expert_parallel,
            huge_pages=huge,
            config=config,
        )
    except RuntimeError as error:
        raise ModelError(
            f"the weights in {folder} don't fit: {error}",
            remedy="give the process more memory, or choose a smaller model",
        ) from None
    _load(folder, files, weights)
    trim(torch.device("cpu"))
    return wrap_sharded(
        module, weights, config.max_model_len, pipeline, latent_attention=config.latent_attention
    )


def make_layout(config: EngineConfig, group: RankGroup) -> Layout:
    """Return how dimensions are cut.

    Raises:
        ModelError: The number of ranks excludes the same bits.
    """
    if config.rank_invariant and PARTS % group.size:
        raise ModelError(
            f"{group.size} ranks can't give the same bits as one: sums have {PARTS} parts; set "
            "engine.tensor_parallel to 1, 2 or 4, or engine.rank_invariant to false"
        )
    return Layout(group, config.rank_invariant)


def wrap_sharded(
    module: Any,
    weights: ShardedWeights,
    max_model_len: int,
    pipeline: PipelineRank | None = None,
    *,
    latent_attention: str = "auto",
) -> LoadedModel:
    """Wrap a rank's model, as `wrap_model`. All ranks call this at the same time."""
    model = wrap_model(module, max_model_len, pipeline, latent_attention=latent_attention)
    if pipeline is not None and pipeline.is_first:
        pipeline.check_model(module)
    for experts in experts_in(module):
        experts.read_counts(reset=True)  # of the probing pass
    output: Any = weights.whole
    vocab_size = output.get_output_embeddings().weight.shape[0]
    return replace(model, vocab_size=vocab_size, is_shared=False, shards=weights)


def experts_in(module: nn.Module) -> list[ParallelExperts]:
    """Return the routed experts of a rank's model, layer by layer."""
    return [child for child in module.modules() if isinstance(child, ParallelExperts)]


def move_experts(module: nn.Module, owners: Sequence[int]) -> None:
    """Give the experts of every layer other owners. All ranks call this between the same two steps.

    Args:
        module: This rank's shard.
        owners: As `ParallelExperts.set_owners`.

    Raises:
        ValueError: As `ParallelExperts.set_owners`.
        RankError: A rank has failed.
    """
    for experts in experts_in(module):
        experts.set_owners(owners)


def _check_no_mixers(whole: nn.Module) -> None:
    if (mixers := load_mixers(whole)) is not None:
        raise ModelError(
            f"{type(whole).__name__} has {len(mixers)} layers with recurrent state, which can't be "
            f"shared among ranks; {_ALONE}, and engine.pipeline_parallel and "
            "engine.expert_parallel to 1"
        )


def _check_supported(folder: Path, hf_config: PreTrainedConfig) -> None:
    reason = ""
    if (folder / LINK).is_file():
        reason = "is a GGUF file, which is read as a whole"
    elif embeds_only(folder):
        reason = "makes embeddings only"
    elif takes_images(hf_config):
        reason = "takes images, which one rank alone encodes"
    elif getattr(hf_config, "quantization_config", None) is not None:
        reason = "has quantized weights"
    elif not (folder / WEIGHTS).is_file() and not (folder / INDEX).is_file():
        reason = "has no weights in safetensors' format"
    if reason:
        raise ModelError(f"{folder} {reason}, so it can't be sharded; {_ALONE}")


def _dtype_of(
    config: EngineConfig, hf_config: PreTrainedConfig, files: dict[str, Path]
) -> torch.dtype:
    if config.dtype != "auto":
        return cast(torch.dtype, getattr(torch, config.dtype))
    given: object = hf_config.dtype
    if isinstance(given, torch.dtype):
        return given
    # As Transformers: that of the first number with a point.
    for name, path in files.items():
        with safe_open(path, framework="pt") as file:
            dtype = file.get_slice(name)[:0].dtype if file.get_slice(name).get_shape() else None
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            return dtype
    return torch.float32


def shard_model(
    whole: Any,
    layout: Layout,
    device: torch.device,
    pipeline: PipelineRank | None = None,
    *,
    expert_parallel: bool = False,
    huge_pages: bool = False,
    config: EngineConfig | None = None,
) -> tuple[Any, ShardedWeights]:
    """Return a model of this rank's shard, with memory for its weights, and their places.

    Args:
        whole: As of `make_whole`. Kept for names and shapes.
        layout: Cuts of the dimensions.
        device: For the shard.
        pipeline: As in `load_sharded`.
        expert_parallel: Experts belong to ranks as a whole.
        huge_pages: Allocate in large pages, if available.
        config: The settings of codes to make; None for none.

    Raises:
        ModelError: The model has no plan, or can't be shared evenly.
    """
    plan: dict[str, Style] = {}
    if layout.parts > 1:
        plan = parallel_plan(whole, expert_parallel=expert_parallel)
        check_divisible(whole, plan, layout.group.size, layout.parts)
    module = copy.deepcopy(whole)
    absent: Collection[str] = ()
    if pipeline is not None:
        pipeline.take_layers(whole)
        absent = pipeline.remove_others(module)
    _compute_buffers(module, device)
    for name, style in plan.items():
        if _is_in(name, absent):
            continue
        parent_name, _, own_name = name.rpartition(".")
        sharded = shard_module(module.get_submodule(name), style, layout)
        setattr(module.get_submodule(parent_name), own_name, sharded)
    if config is not None and config.quantization != "auto":
        from .quantization.shards import put_empty_codes

        put_empty_codes(module, whole, config, absent)
    output, embedding = method_of(module.get_output_embeddings()), module.get_input_embeddings()
    tied = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    plain = isinstance(embedding, VocabParallelEmbedding) and embedding.is_plain
    if tied and output is not None and plain:
        output.local.weight = embedding.inner.weight
    _allocate(module, device, huge=huge_pages)
    state = whole.state_dict(keep_vars=True)
    here: dict[str, Callable[[], list[Box]]] = {
        name: partial(boxes_in, module, name) for name in state if not _is_in(name, absent)
    }
    # A tied tensor may be here under another of its names.
    by_tensor = {id(state[name]): places for name, places in here.items()}
    shards = {
        name: Shard(
            tuple(tensor.shape),
            tensor.dtype,
            here.get(name) or by_tensor.get(id(tensor), list),
        )
        for name, tensor in state.items()
    }
    module.requires_grad_(False)
    return module.eval(), ShardedWeights(whole, shards)


def _is_in(name: str, modules: Collection[str]) -> bool:
    """Whether a module or tensor is one of these modules, or in one."""
    return any(name == each or name.startswith(f"{each}.") for each in modules)


def _compute_buffers(module: Any, device: torch.device) -> None:
    """Compute buffers that are not in checkpoints, such as rotary frequencies."""
    owners: list[tuple[Any, nn.Module]] = []
    own: dict[str, Any] = {}
    for path, child in module.named_modules():
        # The language part of a model with images may have settings that the whole lacks.
        is_model = isinstance(child, PreTrainedModel)
        own[path] = owner = child if is_model else own[path.rpartition(".")[0]]
        # Models set buffers of their layers.
        if child._buffers or is_model:
            owners.append((owner, child))
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = torch.empty_like(buffer, device=device)
    # Transformers' way for models that it builds on the meta device.
    with torch.no_grad():
        for owner, child in owners:
            owner._init_weights(child)


def _allocate(module: nn.Module, device: torch.device, *, huge: bool) -> None:
    # By the identity of parameters, so that tied ones stay tied.
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                if parameter not in allocated:
                    empty = zeros(parameter.shape, parameter.dtype, device, huge=huge)
                    allocated[parameter] = nn.Parameter(empty, requires_grad=False)
                child._parameters[name] = allocated[parameter]


def _load(folder: Path, files: dict[str, Path], weights: ShardedWeights) -> None:
    """Read this rank's parts of a checkpoint.

    Beside them at most one tensor is in memory, or one layer up to three times where Transformers
    fuses its tensors.
    """
    direct, groups = split_converted(weights, files)
    loaded = set(direct)
    for prefix in list(groups):
        own = {name for name in weights.shards if name.startswith(f"{prefix}.")}
        if own and not any(weights.shards[name].boxes() for name in own):
            # Another stage reads the layer, and checks it.
            loaded |= own
            del groups[prefix]
    for name in direct:
        _read(folder, files[name], name, weights.shards[name])
    for names in groups.values():
        tensors = {name: _read_whole(files[name], name) for name in names}
        try:
            parameters = as_parameters(weights.whole, tensors, checkpoint=True)
        except WeightsError as error:
            raise ModelError(f"can't load the model in {folder}: {error.message}") from None
        for name, tensor in parameters.items():
            _check_shape(folder, name, tuple(tensor.shape), weights.shards[name])
            weights.shards[name].write(tensor)
        loaded |= parameters.keys()
    if missing := weights.missing(loaded):
        raise tensors_missing(folder, missing)


def _read(folder: Path, path: Path, name: str, shard: Shard) -> None:
    # Opened for each tensor, since pages that were read stay resident while a file is mapped.
    with safe_open(path, framework="pt") as file:
        part = file.get_slice(name)
        _check_shape(folder, name, tuple(part.get_shape()), shard)
        for box in shard.boxes():
            box.write(part[box.place] if box.place else file.get_tensor(name))


def _read_whole(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _check_shape(folder: Path, name: str, shape: tuple[int, ...], shard: Shard) -> None:
    if shape != shard.shape:
        raise wrong_shape(folder, name, shape, shard.shape)
