"""What int8 and int4 gain here: instructions, and the bytes of a model by its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from .....config import EngineConfig
from ..kernels import cpu
from ..kernels.compile import processor_flags
from ..linear.formats.choose import format_of
from ..model import check_architecture, load_config, takes_images
from ..quantization.loading import roundings_of, stored_config

_KINDS: tuple[Literal["int8", "int4"], ...] = ("int8", "int4")


class Sizes(NamedTuple):
    """The bytes of a model's weights.

    Attributes:
        bfloat16: In bfloat16.
        quantized: As `engine.quantization` makes them, by its values.
        ratios: How many times fewer bytes of matrices a token reads than in bfloat16, likewise.
    """

    bfloat16: int
    quantized: dict[str, int]
    ratios: dict[str, float]


def codes_instructions(dtype: torch.dtype) -> str:
    """Return the instructions by which kernels multiply rows of a dtype by codes.

    Raises:
        KernelsUnavailable: There are no kernels here.
    """
    narrow = cpu.instructions(dtype) == "AVX2"
    name, flag = ("AVX-VNNI", "avx_vnni") if narrow else ("AVX512-VNNI", "avx512_vnni")
    return name if flag in processor_flags().split() else "AVX2"


def stored_format(folder: Path) -> str:
    """Return the format of a checkpoint's quantised weights; "" for plain ones.

    Raises:
        ModelError: The format isn't read here.
    """
    config = stored_config(load_config(folder))
    return "" if config is None else format_of(config).label


def sizes_of(folder: Path) -> Sizes:
    """Return the bytes of the weights of a folder's model.

    Raises:
        ModelError: The model can't be quantised.
    """
    hf_config = load_config(folder)
    check_architecture(hf_config)
    auto: Any = AutoModelForImageTextToText if takes_images(hf_config) else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(hf_config)
    weights = {id(each): each for each in model.parameters()}
    whole = 2 * sum(each.numel() for each in weights.values())
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    looked_up = 0 if output.weight is embedding.weight else 2 * embedding.weight.numel()
    sizes: dict[str, int] = {}
    ratios: dict[str, float] = {}
    for kind in _KINDS:
        saved = _saved(model, EngineConfig(quantization=kind))
        sizes[kind] = whole - saved
        ratios[kind] = (whole - looked_up) / (whole - looked_up - saved)
    return Sizes(whole, sizes, ratios)


def _saved(model: Any, config: EngineConfig) -> int:
    """Return the bytes that quantisation saves; a tied embedding counts once."""
    modules, saved = dict(model.named_modules()), {}
    for name, rounding in roundings_of(model, config).items():
        # Of experts it is a parameter.
        weight = modules[name].weight if name in modules else model.get_parameter(name)
        inputs = weight.shape[-1]
        groups = rounding.form(1, inputs).groups
        after = weight.numel() * rounding.bits // 8 + weight.numel() // inputs * groups * 2
        saved[id(weight)] = 2 * weight.numel() - after
    return sum(saved.values())
