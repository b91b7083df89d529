"""A model's folder with the weights of its linear layers as codes, in compressed-tensors' format.

Transformers, vLLM and this package read it. The weights of one shard are in memory at a time.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from .....config import EngineConfig, ModelError
from ..checkpoint import INDEX, WEIGHTS, tensor_files
from ..kernels.codes import Codes, PlainCodes, unpack_plain
from ..linear.choose import method_of
from ..linear.dense import DenseLinear
from ..linear.experts import is_other_mixture
from ..linear.rounding import Rounding, round_rows
from ..model import check_architecture, load_config, takes_images
from ..quantization.loading import roundings_of, stored_config

_SHARD_BYTES = 1 << 30
_SLAB = 1 << 22
"""Numbers of a weight that are rounded at a time, 16 MiB in float32."""

_FLOATS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""Bytes of safetensors' floating-point dtypes that can be rounded."""

_OUTPUT = "output layer"

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that vLLM computes in one product."""

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf"}


class Wanted(msgspec.Struct, frozen=True):
    """How weights are quantised.

    Attributes:
        rounding: The form of the codes.
        ignore: Names of layers that stay as they are, or patterns such as "*.down_proj".
        activation_bits: 8 declares activations of 8 bits, one scale per token, which vLLM computes.
    """

    rounding: Rounding
    ignore: tuple[str, ...] = ()
    activation_bits: Literal[16, 8] = 16


class LayerReport(msgspec.Struct, frozen=True):
    """One layer that was quantised.

    Attributes:
        name: Its name in the checkpoint.
        error: Norm of the differences of its weights, over the norm of the weights.
        bytes_before: Bytes of the weights.
        bytes_after: Bytes of codes, scales and zero points.
        weights: Their number.
    """

    name: str
    error: float
    bytes_before: int
    bytes_after: int
    weights: int


class Plan(NamedTuple):
    """What becomes of each tensor of a folder.

    Attributes:
        folder: The folder.
        files: The file of each tensor.
        quantized: Names of layers that are quantised.
        kept: Why other layers stay as they are, by name.
        ignore: The same layers under all names that readers of the folder may have for them.
        dtype: The dtype that weights have when the model is loaded; None for that of the file.
        wanted: How they are quantised.
        num_bytes: Bytes of all tensors.
        bytes_after: Bytes of all tensors in the new folder.
    """

    folder: Path
    files: Mapping[str, Path]
    quantized: frozenset[str]
    kept: Mapping[str, str]
    ignore: Sequence[str]
    dtype: torch.dtype | None
    wanted: Wanted
    num_bytes: int
    bytes_after: int

    @property
    def splits(self) -> str:
        """The first layers that vLLM computes as one, and of which only some are quantised; "" if
        there are none."""
        for name in sorted(self.quantized):
            parent, _, last = name.rpartition(".")
            for fused in _FUSED:
                names = [f"{parent}.{each}" for each in fused]
                if last in fused and any(each in self.kept for each in names):
                    return ", ".join(names)
        return ""


class _Stored(NamedTuple):
    """A tensor in the header of a file. `kind`: safetensors' name of the dtype."""

    shape: tuple[int, ...]
    kind: str

    @property
    def num_bytes(self) -> int:
        bits = {"F4": 4, "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16}
        size = _FLOATS.get(self.kind, 0) * 8 or bits.get(self.kind, 8)
        return math.prod(self.shape) * size // 8


def plan_folder(folder: Path, wanted: Wanted) -> Plan:
    """Return what becomes of each tensor of a folder, from headers alone.

    Raises:
        ModelError: The folder can't be read or quantised.
    """
    hf_config = load_config(folder)
    if (config := stored_config(hf_config)) is not None:
        method = config.get("quant_method", "unknown")
        raise ModelError(
            f"{folder} is quantised already (quant_method {method}); give the unquantised model"
        )
    check_architecture(hf_config)
    files = tensor_files(folder)
    if not files:
        raise ModelError(
            f"{folder} has no weights in safetensors' format; load the model with Transformers and "
            "save it by save_pretrained()"
        )
    stored = _read_headers(files)
    choice = _choose(folder, hf_config, stored, wanted)
    dtype = hf_config.dtype if isinstance(hf_config.dtype, torch.dtype) else None
    after = sum(
        _bytes_after(each, dtype, wanted)
        if name.removesuffix(".weight") in choice.quantized
        else each.num_bytes
        for name, each in stored.items()
    )
    before = sum(each.num_bytes for each in stored.values())
    return Plan(folder, files, *choice, dtype, wanted, before, after)


def write_folder(plan: Plan, target: Path, advance: Callable[[int], None]) -> list[LayerReport]:
    """Write a plan's folder; return the layers that were quantised, in the checkpoint's order.

    Args:
        plan: The plan.
        target: An existing, empty folder.
        advance: Called with the bytes of each tensor that was read.

    Raises:
        ModelError: A weight can't be read or rounded.
        OSError: The folder can't be written.
    """
    _copy_files(plan.folder, target)
    reports: list[LayerReport] = []
    writer = _Writer(target)
    for name, tensor in _read_tensors(plan.files):
        size = tensor.nbytes
        layer = name.removesuffix(".weight")
        if layer in plan.quantized:
            weight = tensor if plan.dtype is None else tensor.to(plan.dtype)
            tensors, error = _quantize(layer, weight, plan.wanted)
            after = sum(each.nbytes for each in tensors.values())
            reports.append(LayerReport(layer, error, weight.nbytes, after, weight.numel()))
            for part, each in tensors.items():
                writer.add(f"{layer}.{part}", each)
        else:
            writer.add(name, tensor)
        advance(size)
    writer.finish()
    config = _read_config(plan.folder) | {"quantization_config": _describe(plan)}
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (target / "config.json").write_text(text, encoding="utf-8")
    return reports


# --- the choice of layers -----------------------------------------------------------------------


class _Target(NamedTuple):
    """The parameter that Transformers makes from a stored tensor.

    Attributes:
        name: The parameter's name in the model.
        is_part: Whether it is stacked or concatenated with others, as the matrices of experts are.
    """

    name: str
    is_part: bool


class _Choice(NamedTuple):
    """Layers by their names in the checkpoint: see `Plan`."""

    quantized: frozenset[str]
    kept: dict[str, str]
    ignore: list[str]


def _choose(
    folder: Path, hf_config: PreTrainedConfig, stored: Mapping[str, _Stored], wanted: Wanted
) -> _Choice:
    auto: Any = AutoModelForImageTextToText if takes_images(hf_config) else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(hf_config)
    modules, output = dict(model.named_modules()), model.get_output_embeddings()
    methods = ((name, method_of(each)) for name, each in modules.items())
    # Another layout, such as GPT-2's, isn't compressed-tensors'.
    linear = {
        name: modules[name]
        for name, method in methods
        if isinstance(method, DenseLinear) and not method.transposed
    }
    rest, kept = dict(linear), dict[str, str]()
    rounding = wanted.rounding
    config = EngineConfig(
        quantization="int8" if rounding.bits == 8 else "int4",
        # Experts of these kinds are stored in one tensor, see `_targets`.
        quantization_ignore=tuple(key for key, each in modules.items() if is_other_mixture(each)),
    )
    chosen = roundings_of(model, config)
    quantized: dict[str, None] = {}
    parts: dict[str, set[bool]] = {}
    matched, seen = set(), set()
    for name, target in _targets(folder, model, stored, wanted.ignore).items():
        layer, own = _layer_of(name), target.name.removesuffix(".weight")
        module = modules.get(own)
        if isinstance(module, nn.Embedding):
            continue
        patterns = {
            each for each in wanted.ignore if fnmatchcase(name.removesuffix(".weight"), each)
        }
        matched |= patterns
        if module is not None and module is output:
            why = _OUTPUT
        elif patterns:
            why = "--ignore"
        elif not target.is_part and own not in linear:
            why = "no linear layer"
        elif not target.is_part and own not in chosen:
            why = "router, gate or other small layer, or outside the decoder"
        else:
            why = _misfit(folder, name, stored[name], wanted)
        parts.setdefault(target.name, set()).add(not why)
        if why:
            kept[layer] = why
        else:
            quantized[layer] = None
            rest.pop(own, None)
        seen.add(own)
        if target.is_part and not why and rounding.zero_points:
            raise ModelError(
                f"{layer} in {folder} is an expert's, whose zero points Transformers can't read; "
                "leave out --zero-points"
            )
    for name, states in parts.items():
        if len(states) > 1:
            raise ModelError(
                f"some of the matrices of {name} would be quantised and others not, which "
                "Transformers can't load; give a pattern that matches all or none"
            )
    for name in rest.keys() - seen:
        kept[name] = _OUTPUT if rest[name] is output else "stored otherwise"
    _check_choice(folder, quantized, kept, [each for each in wanted.ignore if each not in matched])
    return _Choice(frozenset(quantized), kept, sorted(kept.keys() | rest))


def _layer_of(name: str) -> str:
    """Return a tensor's entry of `ignore`: its module, or a pattern for all experts of a layer."""
    if name.endswith(".weight"):
        return name.removesuffix(".weight")
    return f"re:{re.escape(name.rpartition('.')[0])}\\..*"


def _targets(
    folder: Path, model: Any, stored: Mapping[str, _Stored], ignore: tuple[str, ...]
) -> dict[str, _Target]:
    """Return the parameter of each matrix, without those that Transformers makes in other ways.

    Raises:
        ModelError: Experts are stored in one tensor, for which the format has no names.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    own = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    targets = {}
    for name, each in stored.items():
        found, converter = rename_source_key(
            name, renamings, converters, model.base_model_prefix, own
        )
        dimensions = own[found].ndim if found in own else 0
        if len(each.shape) == 2 and name.endswith(".weight"):
            if converter is None:
                targets[name] = _Target(found, is_part=False)
            elif dimensions == 3:
                targets[name] = _Target(found, is_part=True)
        elif dimensions == 3 and ".experts." in name and "bias" not in name:
            if not any(fnmatchcase(name, pattern) for pattern in ignore):
                raise ModelError(
                    f"{name} in {folder} holds all experts of a layer in one tensor, for which "
                    "compressed-tensors has no names; leave them as they are by --ignore "
                    "'*.experts.*', or give engine.quantization, which quantises them at load"
                )
            targets[name] = _Target(found, is_part=True)
    return targets


def _misfit(folder: Path, name: str, stored: _Stored, wanted: Wanted) -> str:
    """Return why a weight can't be quantised; "" if it can. Raises ModelError."""
    if stored.kind not in _FLOATS:
        raise ModelError(
            f"{name} in {folder} has the dtype {stored.kind}: the model is quantised already; give "
            "the unquantised one"
        )
    group, inputs = wanted.rounding.group, stored.shape[1]
    if group and inputs % group:
        return f"{inputs} inputs are no multiple of {group}"
    if inputs * wanted.rounding.bits % 32:
        return f"{inputs} inputs fill no whole words of 32 bits"
    return ""


def _check_choice(
    folder: Path, quantized: Iterable[str], kept: Mapping[str, str], unmatched: list[str]
) -> None:
    if unmatched:
        example = next(iter(quantized), next(iter(kept), "none"))
        raise ModelError(
            f"--ignore {unmatched[0]!r} matches no linear layer of {folder}; their names are such "
            f"as {example}"
        )
    if not quantized:
        reasons = ", ".join(sorted({*kept.values()})[:3]) or "there is none of torch's"
        raise ModelError(
            f"{folder} has no linear layer to quantise ({reasons}); choose another --group, or "
            "another model"
        )


# --- codes --------------------------------------------------------------------------------------


def _quantize(layer: str, weight: Tensor, wanted: Wanted) -> tuple[dict[str, Tensor], float]:
    """Return a layer's tensors by the last part of their names, and the relative error.

    Raises:
        ModelError: The weight can't be rounded.
    """
    rows = max(_SLAB // weight.shape[1], 1)
    parts: list[dict[str, Tensor]] = []
    squares = torch.zeros(2, dtype=torch.float64)
    for start in range(0, len(weight), rows):
        slab = weight[start : start + rows]
        try:
            plain = round_rows(slab, wanted.rounding)
        except ValueError as error:
            raise ModelError(
                f"{layer}.weight can't be quantised: {error}",
                remedy=f"leave it as it is by --ignore {layer}",
            ) from None
        form = wanted.rounding.form(*slab.shape)
        wide = slab.float()
        squares[0] += (unpack_plain(form, plain) - wide).double().square().sum()
        squares[1] += wide.double().square().sum()
        parts.append(_tensors_of(layer, form, plain, wanted, weight.dtype))
    tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if "weight_zero_point" in tensors:
        # Packed along outputs, whose slabs may end within a word.
        points = _pack(tensors["weight_zero_point"].T, wanted.rounding.bits)
        tensors["weight_zero_point"] = points.T.contiguous()
    if "weight_packed" in tensors:
        tensors["weight_shape"] = torch.tensor(weight.shape)
    return tensors, float((squares[0] / squares[1]).sqrt()) if squares[1] else 0.0


def _tensors_of(
    layer: str, form: Codes, plain: PlainCodes, wanted: Wanted, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the tensors of some outputs; zero points are not packed yet."""
    scales = plain.scales.wide()
    tensors = {"weight_scale": scales.to(dtype)}
    if not tensors["weight_scale"].float().equal(scales):
        raise ModelError(
            f"scales of {layer} are too small for {str(dtype).removeprefix('torch.')}; save the "
            "model in bfloat16 first"
        )
    if wanted.activation_bits == 8:
        tensors["weight"] = (plain.codes.short() - form.zero).to(torch.int8)
        return tensors
    tensors["weight_packed"] = _pack(plain.codes, form.bits)
    if plain.offsets is not None:
        distances = plain.offsets.wide() / torch.where(scales == 0, 1, scales)
        tensors["weight_zero_point"] = (distances.round() + form.zero).to(torch.uint8)
    return tensors


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes as words of 32 bits, the first in the lowest: `[rows, words]`."""
    codes = F.pad(codes, (0, -codes.shape[1] % (32 // bits)))
    if bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    # Of one column, a transposed tensor counts as contiguous with other strides.
    return codes.clone(memory_format=torch.contiguous_format).view(torch.int32)


def _bytes_after(stored: _Stored, dtype: torch.dtype | None, wanted: Wanted) -> int:
    """Return the bytes of a weight's tensors once it is quantised."""
    outputs, inputs = stored.shape
    rounding = wanted.rounding
    groups = inputs // rounding.group if rounding.group else 1
    size = _FLOATS[stored.kind] if dtype is None else dtype.itemsize
    points = -(-outputs * rounding.bits // 32) * 4 * groups * rounding.zero_points
    shape = 0 if wanted.activation_bits == 8 else 16
    return outputs * inputs * rounding.bits // 8 + outputs * groups * size + points + shape


def _describe(plan: Plan) -> dict[str, Any]:
    """Return the quantization_config of config.json."""
    rounding, own = plan.wanted.rounding, plan.wanted.activation_bits == 8
    layout = "int-quantized" if own else "pack-quantized"
    weights = {
        "num_bits": rounding.bits,
        "type": "int",
        "symmetric": not rounding.zero_points,
        "strategy": "group" if rounding.group else "channel",
        "group_size": rounding.group or None,
        "dynamic": False,
    }
    tokens = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": tokens if own else None,
        "output_activations": None,
        "format": layout,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*plan.ignore],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


# --- files --------------------------------------------------------------------------------------


def _read_headers(files: Mapping[str, Path]) -> dict[str, _Stored]:
    stored = {}
    for path in sorted({*files.values()}):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                stored[name] = _Stored(tuple(part.get_shape()), str(part.get_dtype()))
    return {name: stored[name] for name in files}


def _read_tensors(files: Mapping[str, Path]) -> Iterator[tuple[str, Tensor]]:
    for path in sorted({*files.values()}):
        try:
            with safe_open(path, framework="pt") as file:
                for name in (each for each, held in files.items() if held == path):
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"can't read {path}: {error}; copy or download it again") from error


def _read_config(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return content


def _copy_files(folder: Path, target: Path) -> None:
    """Copy what is neither weights nor config.json: tokenizer, templates, processors."""

    def skipped(_: str, names: list[str]) -> list[str]:
        return [
            name
            for name in names
            if name.startswith(".")
            or Path(name).suffix in _WEIGHTS
            or name.endswith(".index.json")
            or name in ("config.json", "__pycache__")
        ]

    shutil.copytree(folder, target, ignore=skipped, dirs_exist_ok=True)


class _Writer:
    """Writes tensors to shards, and an index where there are several."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, Tensor] = {}
        self._num_bytes = self._total = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        if self._tensors and self._num_bytes + tensor.nbytes > _SHARD_BYTES:
            self._write()
        self._tensors[name] = tensor
        self._num_bytes += tensor.nbytes
        self._total += tensor.nbytes

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.part"

    def _write(self) -> None:
        path = self._path(len(self._shards))
        path.touch()
        mode = path.stat().st_mode
        save_file(self._tensors, path, metadata={"format": "pt"})
        path.chmod(mode)  # safetensors makes a file for this user alone
        self._shards.append([*self._tensors])
        self._tensors, self._num_bytes = {}, 0

    def finish(self) -> None:
        """Write the last shard, and name all by their number."""
        self._write()
        if len(self._shards) == 1:
            self._path(0).rename(self._folder / WEIGHTS)
            return
        index: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            name = f"model-{number + 1:05}-of-{len(self._shards):05}.safetensors"
            self._path(number).rename(self._folder / name)
            index |= dict.fromkeys(names, name)
        content = {"metadata": {"total_size": self._total}, "weight_map": index}
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        (self._folder / INDEX).write_text(text, encoding="utf-8")
