"""Model loading: Transformers' own code with our attention in it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from ....config import EngineConfig, ModelError, missing_model
from ....text.context_length import longest_context
from ....text.gguf_facts import LINK
from ....text.model_folder import embeds_only, folder_of
from .attention.carried import KeywordsLost, carry_keywords
from .attention.interface import (
    IMPLEMENTATION,
    PROBING,
    LayerProbe,
    register_attention,
)
from .attention.lengths import provide_lengths
from .checkpoint import is_coded, tensor_files, tensors_missing, wrong_shape
from .device import resolve_device, trim
from .fixed_tiles import require_cpu
from .loaded_model import Dtypes, LoadedModel, with_codes
from .media import SUPPORTED
from .mixers.marks import has_mixers
from .progress import counted_progress
from .ranks.rank_error import RankError
from .system_memory import use_huge_pages

if TYPE_CHECKING:
    from .media import MediaEncoder
    from .mixers.find import Mixers
    from .quantization.loading import Plan
    from .ranks.pipelining import PipelineRank
    from .state.kinds import IndexKeys


def prepare_loading() -> None:
    """Have Transformers compile its table of checkpoint conversions, for all architectures.

    A process does so when it loads its first model, which takes longer than loading a small one;
    forks of this process have the table.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("")


def load_model(config: EngineConfig) -> LoadedModel:
    """Load the model of the settings.

    Raises:
        ModelError: The folder is missing or incomplete, the model is not supported, or the device
            is missing or can't be deterministic.
    """
    folder = folder_of(config.model_folder)
    device = resolve_device(config.device)
    if config.deterministic is True:
        require_cpu(device)
    register_attention()
    hf_config = load_config(folder)
    without_output = embeds_only(folder)
    if without_output:
        _check_no_decoder_beside(hf_config)
    else:
        check_architecture(hf_config)
    module, plan = _load_weights(folder, hf_config, config, without_output=without_output)
    try:
        module = module.to(device)
    except torch.OutOfMemoryError:
        raise ModelError(
            f"{folder} exceeds the memory of {device}; set engine.quantization"
        ) from None
    except RuntimeError as error:
        reason = _first_line(error)
        raise ModelError(f"can't use {device}: {reason}; set engine.device to another") from error
    if config.huge_pages == "auto":
        try:
            use_huge_pages(module)
        except RuntimeError as error:
            raise ModelError(
                f"{folder} doesn't fit: {error}; set engine.huge_pages to 'off'"
            ) from None
    # Loading leaves unused memory behind; after a GGUF file as much as the model.
    trim(torch.device("cpu"))
    if without_output:
        from .encoder import looks_ahead, wrap_encoder

        if looks_ahead(module, device):
            if plan is not None:
                raise ModelError(
                    f"{type(module).__name__} is an encoder, whose weights can't be codes; set "
                    "engine.quantization to 'auto', and choose a checkpoint of plain weights"
                )
            return wrap_encoder(module, config)
    processor = None
    if not without_output and hf_config.model_type in SUPPORTED:
        from .vision import find_image_processor

        processor = find_image_processor(folder)
    model = wrap_model(
        module,
        config.max_model_len,
        image_processor=processor,
        latent_attention=config.latent_attention,
    )
    if plan is not None:
        trim(torch.device("cpu"))  # of weights that the probing pass unpacked
        model = replace(model, checkpoint_format=plan.label, checkpoint_notes=plan.notes)
    if device.type == "cuda" and config.kernels != "off":
        from .fast_modules.calls import join_weights

        join_weights(module)
    return replace(model, is_shared=False)


def wrap_model(
    module: Any,
    max_model_len: int,
    pipeline: PipelineRank | None = None,
    *,
    image_processor: Any = None,
    latent_attention: str = "auto",
) -> LoadedModel:
    """Wrap a Transformers model that is already in memory, such as a trainer's.

    Without an output layer it makes embeddings only. Sets its attention implementation to ours and
    its mode to eval; `requires_grad` stays as it is.

    Args:
        module: The model.
        max_model_len: As in EngineConfig.
        pipeline: As of LoadedModel.
        image_processor: Transformers' own; None for text alone.
        latent_attention: As in EngineConfig.

    Raises:
        ModelError: The model is not supported.
    """
    hf_config: PreTrainedConfig = module.config
    check_architecture(hf_config, type(module))
    register_attention()
    module.eval()
    text = hf_config.get_text_config()
    names = ("max_position_embeddings", "rope_parameters", "original_max_position_embeddings")
    own_limit = longest_context({name: getattr(text, name, None) for name in names})
    limit = min(max_model_len, own_limit or max_model_len)
    output: nn.Module | None = module.get_output_embeddings()
    generates = output is not None
    end = output or module.get_input_embeddings()
    # Of codes, a tensor without numbers.
    name = "placeholder" if hasattr(end, "placeholder") else "weight"
    weight = getattr(end, name, None)
    if pipeline is not None:
        weight = next(module.parameters())
    if not isinstance(weight, torch.Tensor):
        raise ModelError(f"{type(module).__name__} has no output layer; choose another model")
    latents = _keep_latents(module, latent_attention, weight.device)
    mixers = load_mixers(module)
    index_keys = _take_indexers(module)
    probe = _probe_layers(module, limit, weight.device, pipeline, mixers, indexed=bool(index_keys))
    own = range(text.num_hidden_layers) if pipeline is None else pipeline.layers
    # Of a model that generates, the comparison at load shows whether other layers mix tokens.
    indices = probe.finish(own, others=mixers is not None and generates)
    encoders: tuple[MediaEncoder, ...] = ()
    if image_processor is not None:
        from .vision import VisionModel, look_ahead

        encoders = (VisionModel(module, image_processor, look_ahead(module)),)
    module.set_attn_implementation(_attention_of(hf_config, IMPLEMENTATION))
    provide_lengths(module)
    # A stage's first tensor may be one that is kept in float32.
    dtype = weight.dtype if pipeline is None else pipeline.dtype
    return LoadedModel(
        module=module,
        hf_config=hf_config,
        device=weight.device,
        dtypes=Dtypes.of(dtype),
        max_model_len=limit,
        vocab_size=weight.shape[0],
        layers=tuple(probe.layers[index] for index in indices),
        attention_options=tuple(probe.options[index] for index in indices),
        layer_indices=indices,
        other_states=() if mixers is None else mixers.states,
        mixers=mixers,
        generates=generates,
        is_shared=True,
        shards=with_codes(module, dtype),
        pipeline=pipeline,
        encoders=encoders,
        latent_attention=latents,
        index_keys=index_keys,
    )


def _attention_of(hf_config: PreTrainedConfig, name: str) -> str | dict[str, str]:
    """Return `attn_implementation` with our attention in the language part alone."""
    text = hf_config.get_text_config()
    if not takes_images(hf_config) or text is hf_config:
        return name
    return {part: name for part in hf_config.sub_configs if getattr(hf_config, part, None) is text}


def takes_images(hf_config: PreTrainedConfig) -> bool:
    """Return whether the model is loaded with a part for images, supported here or not."""
    if hf_config.model_type in SUPPORTED:
        return True
    kind = type(hf_config)
    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING


def load_config(folder: Path) -> PreTrainedConfig:
    if not folder.is_dir():
        raise ModelError(f"there is no model folder {folder}; {missing_model(folder)}")
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json; model_path must name a folder in Transformers' format"
        )
    try:
        hf_config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        advice = ""
        if _names_own_code(folder / "config.json"):
            advice = "; code in a model's folder is never run here, so choose a model that "
            advice += "Transformers has in itself"
        raise ModelError(
            f"can't read {folder / 'config.json'}: {_first_line(error)}{advice}"
        ) from error
    return hf_config


def _names_own_code(path: Path) -> bool:
    try:
        return "auto_map" in json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def _check_no_decoder_beside(hf_config: PreTrainedConfig) -> None:
    if hf_config.is_encoder_decoder:
        kind = hf_config.model_type
        raise ModelError(f"{kind} is an encoder-decoder model; choose a decoder-only one")


def check_architecture(hf_config: PreTrainedConfig, model_class: type | None = None) -> None:
    kind = hf_config.model_type
    _check_no_decoder_beside(hf_config)
    if model_class is None:
        mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
        if takes_images(hf_config):
            mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        elif type(hf_config) not in mapping:
            raise ModelError(f"{kind} is not a causal language model; choose one that is")
        model_class = _class_of(mapping, hf_config)
    text, text_class = hf_config.get_text_config(), model_class
    if text is not hf_config and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        text_class = _class_of(MODEL_FOR_CAUSAL_LM_MAPPING, text)
        check_architecture(text, text_class)
    if has_mixers(model_class) or has_mixers(text_class):
        return  # only the model shows whether its layers can be taken
    if getattr(model_class, "_is_stateful", False):
        raise ModelError(
            f"{model_class.__name__} has recurrent layers of a kind that is not known here; choose "
            "another model"
        )
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelError(
            f"{model_class.__name__} does not use Transformers' attention interface "
            "(_supports_attention_backend), so the attention can't be replaced; choose another"
        )


def _class_of(mapping: Any, hf_config: PreTrainedConfig) -> type:
    mapped: Any = mapping[type(hf_config)]
    found: type = mapped[0] if isinstance(mapped, tuple) else mapped
    return found


def _load_weights(
    folder: Path, hf_config: PreTrainedConfig, config: EngineConfig, *, without_output: bool = False
) -> tuple[nn.Module, Plan | None]:
    """Return the model, and how its layers became codes."""
    # An encoder runs with Transformers' own attention, and may be one.
    options: dict[str, Any] = {}
    if not without_output:
        options["attn_implementation"] = _attention_of(hf_config, IMPLEMENTATION)
    auto: Any = AutoModel if without_output else AutoModelForCausalLM
    if not without_output and takes_images(hf_config):
        auto = AutoModelForImageTextToText
    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    source: Path | None = folder
    if (folder / LINK).is_file():
        from .quantization.gguf import options_of

        dtype = hf_config.dtype if dtype == "auto" else dtype
        plan, own = options_of(folder, hf_config, config, auto, dtype)  # type: ignore[arg-type]
        options |= own
    else:
        files = tensor_files(folder)
        plan = _plan_of(config, hf_config, folder, files)
        if plan is not None:
            options |= plan.options(hf_config)
            dtype = plan.dtype(hf_config.dtype) if dtype == "auto" else dtype
        elif (
            config.huge_pages == "auto"
            and hasattr(os, "preadv")
            and resolve_device(config.device).type == "cpu"
        ):
            from .file_tensors import options_of as options_of_files

            options |= options_of_files(files, hf_config, auto)
    if "state_dict" in options:
        # The class itself: the automatic one takes no tensors without a folder.
        auto, source = _class_of(auto._model_mapping, hf_config), None
    if plan is not None:
        plan.activation_bits = config.activation_bits
    try:
        with counted_progress():
            loaded: Any = auto.from_pretrained(
                source,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                # Otherwise the error only refers to a logged report.
                ignore_mismatched_sizes=True,
                **options,
            )
    except BaseException as error:
        if plan is not None and plan.error is not None:
            raise plan.error from None
        if not isinstance(error, Exception):
            raise
        reason = _first_line(error)
        raise ModelError(f"can't load the model in {folder}: {reason}; copy it again") from error
    module, info = loaded
    _check_loaded(folder, module, info)
    frozen: nn.Module = module.requires_grad_(False)
    return frozen, plan


def _plan_of(
    config: EngineConfig, hf_config: PreTrainedConfig, folder: Path, files: Mapping[str, Path]
) -> Plan | None:
    """Return the plan of quantised layers; None, without importing them, if there are none."""
    parts = (hf_config, hf_config.get_text_config())
    stored = any(getattr(each, "quantization_config", None) is not None for each in parts)
    if config.quantization == "auto" and not stored and not any(map(is_coded, files)):
        return None
    from .quantization.stored import plan_of

    return plan_of(config, hf_config, folder, files)


def _check_loaded(folder: Path, module: Any, info: dict[str, Any]) -> None:
    # A pooler is behind the states that are pooled here.
    missing = sorted(key for key in info["missing_keys"] if not key.startswith("pooler."))
    if len(missing) < len(info["missing_keys"]):
        # It would have random weights.
        module.pooler = None
    if missing:
        # Transformers would initialise these at random and only warn.
        raise tensors_missing(folder, missing)
    for name, shape, wanted in sorted(info["mismatched_keys"]):
        raise wrong_shape(folder, name, shape, wanted)


def load_mixers(module: nn.Module) -> Mixers | None:
    """Return the mixers with recurrent state of a model; None, without importing them, if none."""
    if not any(map(has_mixers, {type(each) for each in module.modules()})):
        return None
    from .mixers.find import find_mixers

    return find_mixers(module)


def _keep_latents(module: nn.Module, setting: str, device: torch.device) -> str:
    if not any(hasattr(each, "kv_b_proj") for each in module.modules()):
        return ""
    from .attention.latent import keep_latents

    unwanted = "engine.latent_attention is off" if setting == "off" else ""
    if setting == "auto" and device.type != "cpu":
        unwanted = "it is for CPU unless engine.latent_attention is on"
    return keep_latents(module, unwanted)


def _take_indexers(module: nn.Module) -> tuple[IndexKeys, ...]:
    if all(getattr(each, "indexer", None) is None for each in module.modules()):
        return ()
    from .attention.indexers import take_indexers

    return take_indexers(module)


@torch.no_grad()
def _probe_layers(
    module: Any,
    max_model_len: int,
    device: torch.device,
    pipeline: PipelineRank | None,
    mixers: Mixers | None,
    *,
    indexed: bool,
) -> LayerProbe:
    name = type(module).__name__
    probe = LayerProbe(name, max_model_len, indexed=indexed)
    module.set_attn_implementation(_attention_of(module.config, PROBING))
    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
    positions = torch.arange(2, device=device)[None]
    call = {"position_ids": positions, "use_cache": False, "layer_probe": probe}
    # A number of logits may cut the last layers' masks, which are no tensors here.
    call["logits_to_keep"] = positions[0, 1:]
    quick: AbstractContextManager[None] = nullcontext()
    if any(getattr(each, "holds_codes", False) for each in module.modules()):
        from .linear.quantized import without_products

        quick = without_products()
    try:
        if pipeline is None:
            with quick, nullcontext() if mixers is None else mixers.probing():
                try:
                    output = module(input_ids=tokens, **call)
                except KeywordsLost as lost:
                    carry_keywords(module, lost.layer)
                    output = module(input_ids=tokens, **call)
            if "logits" in output and output.logits.shape[1] != 1:
                raise ModelError(
                    f"{name} can't be served: it returns logits of all tokens, where those of some "
                    "are asked for (logits_to_keep); choose another model"
                )
        else:
            hidden = pipeline.empty_states(2, device)[None].zero_()
            output = pipeline.run(module, tokens, hidden, call)
            if not pipeline.is_last:
                pipeline.check_states(module, output.last_hidden_state)
    except (ModelError, RankError):
        raise
    except Exception as error:
        raise ModelError(
            f"{name} can't be served: its forward pass of two tokens fails ({_first_line(error)})",
            remedy="choose another model",
        ) from error
    return probe


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
