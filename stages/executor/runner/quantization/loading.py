"""Codes in place of weights, as these come from a checkpoint's files.

Transformers' loader hands each tensor, or the stored tensors of one layer, to an operation of a
quantizer, here ours. It puts a quantised layer in the place of the plain one, so that the whole
model is never in memory beside its codes. Two kinds of plans decide what is quantised:
`MadeAtLoad`, from a checkpoint of plain weights, and `StoredCodes`, a format of quantised
checkpoints. A format is pure functions from stored tensors to `LayerCodes`.
"""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .....config import EngineConfig, ModelError
from ..device import trim
from ..kernels.codes import Codes, PlainCodes, pack_plain
from ..linear.choose import method_of
from ..linear.dense import DenseLinear
from ..linear.experts import (
    ExpertCodes,
    expert_products,
    is_other_mixture,
    put_codes,
    round_experts,
)
from ..linear.quantized import QuantizedEmbedding, QuantizedLinear, ReorderedLinear
from ..linear.rounding import Rounding, round_weight
from ..system_memory import drop_pages, mapped_files
from ..whole_model import widen

_LEAST_SHARE = 16
"""Layers with fewer inputs or outputs than this share of the hidden size, such as for a state's
decay, have 8 bits: they are small, and other numbers depend on theirs."""

KEPT = re.compile(r"router|(^|[._])gate$|indexer|kv_b_proj$")
"""Names of layers that are not quantised: routers, indexers, and the layer that latent attention
multiplies into queries and outputs."""

_CODES = ("F8", "F4", "U8", "I8")
"""Beginnings of the names of dtypes, in files, that no plain weight has."""

_GROUP = 128
"""Inputs that share a scale of 4-bit codes by default."""

METHOD = "nano-inference"
"""The name of our quantizer among Transformers'."""


# --- what formats implement ----------------------------------------------------------------------


class LayerCodes(NamedTuple):
    """The weight of one linear layer as a format stores it.

    Attributes:
        form: The form of the codes.
        plain: The codes.
        order: The layer's input of each input of the codes, `[inputs]` int64, where groups are of
            inputs in another order (GPTQ's act-order); None for the layer's own.
    """

    form: Codes
    plain: PlainCodes
    order: Tensor | None = None


class CodedLayer(NamedTuple):
    """The weight of one linear layer, or of one product of all experts, packed for kernels.

    Attributes:
        form: The form of the codes, of one expert.
        tensors: As `pack_plain` returns them; of experts as `stack_codes`.
        order: As of `LayerCodes`.
        rounding: Makes codes of new weights; None if a format stores the codes.
    """

    form: Codes
    tensors: Mapping[str, Tensor]
    order: Tensor | None = None
    rounding: Rounding | None = None


class Plan(ABC):
    """Decides which layers are quantised, and makes their codes.

    Attributes:
        error: Why loading ended early, for a person.
        activation_bits: As in EngineConfig.
        label: The format of codes, for people.
    """

    error: ModelError | None = None
    activation_bits: Literal[16, 8] = 16
    label: str

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what of the checkpoint is ignored or changed; after loading."""
        return ()

    def options(self, hf_config: PreTrainedConfig) -> dict[str, Any]:
        """Return arguments for `from_pretrained`, by which our quantizer loads the model."""
        plain = copy.deepcopy(hf_config)
        for each in (plain, plain.get_text_config()):
            if hasattr(each, "quantization_config"):
                del each.quantization_config
        return {"config": plain, "quantization_config": Loading(self)}

    def dtype(self, own: torch.dtype | None) -> torch.dtype | Literal["auto"]:
        """Return the dtype of what isn't quantised, and of activations, if the settings name none.

        Args:
            own: That of config.json.
        """
        return "auto"

    def prepare(self, model: Any) -> None:  # noqa: B027
        """Called with the whole model on the meta device, before tensors are loaded."""

    def conversions(self, own: list[Any], model: Any, collect: ConversionOps) -> list[Any]:
        """Return the conversions of tensors by which a model is loaded.

        Args:
            own: Transformers' own for the model.
            model: The model, on the meta device.
            collect: The operation that makes codes.
        """
        return own

    @abstractmethod
    def handles(self, name: str) -> bool:
        """Return whether a linear layer, or embedding, is quantised; by the module's name.

        Stacked weights of experts count as modules by the parameter's name.
        """

    stored: Sequence[str] = ()
    """Stored tensors of a quantised layer by the ends of their names, beside "bias": such as
    ("qweight", "qzeros", "scales", "g_idx"). Empty: "weight", in the model's dtype."""


class MadeAtLoad(Plan):
    """Codes of a checkpoint's plain weights, by the settings.

    Attributes:
        roundings: By the names of modules.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.roundings: dict[str, Rounding] = {}
        self.label = config.quantization
        self._config = config

    def prepare(self, model: Any) -> None:
        try:
            self.roundings = roundings_of(model, self._config)
        except ModelError as error:
            self.error = error
            raise

    def handles(self, name: str) -> bool:
        return name in self.roundings


class StoredCodes(Plan):
    """A format of quantised checkpoints."""

    @abstractmethod
    def read(
        self, name: str, stored: Mapping[str, Tensor], shape: tuple[int, int]
    ) -> LayerCodes | CodedLayer | Tensor:
        """Return a layer's codes; or its weight, `[outputs, inputs]`, to keep it plain.

        Args:
            name: Name of the module.
            stored: Those tensors of `stored` that the checkpoint has, in their own dtypes.
            shape: Outputs and inputs of the layer, by the configuration.

        Raises:
            ValueError: The tensors don't fit, with the reason.
        """

    def read_experts(self, name: str, stored: Mapping[str, list[Tensor]]) -> CodedLayer | None:
        """Return the codes of a stacked parameter of experts; None for any other tensor.

        Args:
            name: Name of the parameter.
            stored: The stored tensors by the patterns of `conversions`, of the experts in order.
        """
        return None


def plan_for(config: EngineConfig, hf_config: PreTrainedConfig) -> Plan | None:
    """Return the plan for a checkpoint of plain weights, by the settings; None to load it without
    ours.

    Raises:
        ModelError: The settings ask for codes of weights that are codes already.
    """
    if config.quantization == "auto":
        return None
    stored = stored_config(hf_config)
    if stored is not None:
        raise quantized_already(config, stored)
    return MadeAtLoad(config)


def quantized_already(config: EngineConfig, stored: Mapping[str, Any]) -> ModelError:
    """Return the error for settings that ask for codes of weights that are codes."""
    return ModelError(
        f"engine.quantization {config.quantization}: the checkpoint is quantised already "
        f"({stored.get('quant_method', 'unknown')}); set it to 'auto', or choose a checkpoint of "
        "plain weights"
    )


def stored_config(hf_config: PreTrainedConfig) -> Mapping[str, Any] | None:
    """Return the `quantization_config` of a checkpoint's config.json; None without one."""
    for each in (hf_config, hf_config.get_text_config()):
        found: Any = getattr(each, "quantization_config", None)
        if found is not None:
            return found if isinstance(found, Mapping) else found.to_dict()
    return None


# --- loading -------------------------------------------------------------------------------------


class Loading(QuantizationConfigMixin):  # type: ignore[misc]
    """Brings a plan to our quantizer: `from_pretrained(..., quantization_config=Loading(plan))`."""

    def __init__(self, plan: Plan) -> None:
        self.quant_method = METHOD
        self.plan = plan

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": METHOD}

    def __deepcopy__(self, _: object) -> Loading:
        return self


@register_quantizer(METHOD)
class _Quantizer(HfQuantizer):  # type: ignore[misc]
    """Collects codes while tensors are loaded, and puts their layers in place at the end."""

    quantization_config: Loading

    def __init__(self, quantization_config: Loading, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.plan = quantization_config.plan
        self.pre_quantized = isinstance(self.plan, StoredCodes)
        self.collected: dict[str, CodedLayer] = {}

    def __deepcopy__(self, _: object) -> _Quantizer:
        return self  # a converter is copied for each layer

    def preprocess_model(self, model: Any, dtype: Any = None, **kwargs: Any) -> None:
        widen(model, dtype)
        self.plan.prepare(model)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return self.plan.handles(param_name.removesuffix(".weight"))

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        found = self.plan.conversions(weight_conversions, model, _Collect(self))
        return [*found, *self.get_weight_conversions()]

    def get_quantize_ops(self) -> ConversionOps:
        return _Collect(self)

    def get_weight_conversions(self) -> list[WeightConverter]:
        if not self.plan.stored:
            return []
        sources = [rf"\.{name}" for name in self.plan.stored]
        return [WeightConverter(sources, ".weight", [_Collect(self)])]

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        # Stored tensors keep theirs.
        operations = getattr(converter, "operations", ())
        if any(isinstance(each, _Collect) for each in operations):
            return None
        if self.pre_quantized and str(param.get_dtype()).startswith(_CODES):
            name = converter.source_patterns[0]
            self.plan.error = ModelError(
                f"{name} is stored as {param.get_dtype()}, of no layer that {self.plan.label} "
                "describes; give the unquantised checkpoint, with engine.quantization int8 or int4"
            )
            raise _Refused
        return super().get_new_dtype(converter, param, dtype)

    def postprocess_model(self, model: Any, **kwargs: Any) -> None:
        install(model, self.collected, self.plan.activation_bits)
        # Transformers keeps its operations, which have this object.
        self.collected.clear()
        self.remove_quantization_config(model)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _Collect(ConversionOps):  # type: ignore[misc]
    """Makes the codes of the layers among some tensors; other tensors stay as they are."""

    def __init__(self, quantizer: _Quantizer) -> None:
        self._quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        *,
        full_layer_name: str,
        model: Any,
        missing_keys: set[str] | None = None,
        **_: Any,
    ) -> dict[str, Tensor]:
        plan = self._quantizer.plan
        plain: dict[str, Tensor] = {}
        found: dict[str, CodedLayer | Tensor]
        try:
            if isinstance(plan, StoredCodes):
                layer = plan.read_experts(full_layer_name, input_dict)
                found = {full_layer_name: layer or _read(plan, full_layer_name, input_dict, model)}
            else:
                assert isinstance(plan, MadeAtLoad)
                given = {name: _single(each) for name, each in input_dict.items()}
                found = {name: _made(plan, name, each, model) for name, each in given.items()}
        except ModelError as error:
            plan.error = error
            raise _Refused from None
        for name, weight in found.items():
            if isinstance(weight, Tensor):
                plain[name] = weight
                continue
            self._quantizer.collected[name.removesuffix(".weight")] = weight
            if missing_keys is not None:
                missing_keys.discard(name)
        return plain


class _Refused(BaseException):
    """Ends loading at once: Transformers logs an Exception and loads the rest."""


def _single(tensors: Any) -> Tensor:
    tensor: Tensor = tensors[0] if isinstance(tensors, list) else tensors
    return tensor


def _made(plan: MadeAtLoad, name: str, weight: Tensor, model: Any) -> CodedLayer | Tensor:
    """Return the codes of a weight that the plan names."""
    owner = name.removesuffix(".weight")
    if (rounding := plan.roundings.get(owner)) is None:
        return weight
    try:
        if products := expert_products(model.get_submodule(name.rpartition(".")[0])):
            transposed = products[0].transposed
            made = round_experts(weight, rounding, transposed=transposed)
        else:
            rows = weight.T if _is_transposed(model, owner) else weight
            made = round_weight(rows, rounding)
    except ValueError as error:
        raise ModelError(
            f"{name} can't be quantised: {error}; name its module in engine.quantization_ignore, "
            "or choose another checkpoint"
        ) from None
    drop_pages(weight, mapped_files())
    return CodedLayer(*made, rounding=rounding)


def _read(
    plan: StoredCodes, name: str, given: Mapping[str, Any], model: Any
) -> CodedLayer | Tensor:
    """Return the codes of a layer that the plan handles."""
    stored = {each.removeprefix("\\."): _single(tensors) for each, tensors in given.items()}
    owner, weight = name.removesuffix(".weight"), model.get_parameter_or_buffer(name)
    if not plan.handles(owner):
        if [*stored] != ["weight"] or stored["weight"].dtype.itemsize == 1:
            raise ModelError(
                f"{owner} has the tensors {', '.join(sorted(stored))}, and isn't a quantised layer "
                "by config.json; copy or download the checkpoint again"
            )
        return stored["weight"].to(weight.dtype)
    shape: torch.Size = weight.shape[::-1] if _is_transposed(model, owner) else weight.shape
    try:
        layer = plan.read(owner, stored, (shape[0], shape[1]))
    except ValueError as error:
        raise ModelError(
            f"{owner} can't be read: {error}", remedy="copy or download the checkpoint again"
        ) from None
    if isinstance(layer, Tensor):
        return layer.to(weight.dtype)
    if (layer.form.outputs, layer.form.inputs) != tuple(shape):
        found = [layer.form.outputs, layer.form.inputs]
        raise ModelError(
            f"{owner} has codes {found}, and config.json makes it {list(shape)}; the two are not "
            "of one model; copy or download the folder again"
        )
    if isinstance(layer, LayerCodes):
        layer = CodedLayer(layer.form, pack_plain(layer.form, layer.plain), layer.order)
    files = mapped_files()
    for tensor in stored.values():
        drop_pages(tensor, files)
    trim(torch.device("cpu"))  # of what was converted
    return layer


def _is_transposed(model: Any, name: str) -> bool:
    method = method_of(model.get_submodule(name))
    return isinstance(method, DenseLinear) and method.transposed


def roundings_of(model: Any, config: EngineConfig) -> dict[str, Rounding]:
    """Return the codes to make of a model's layers by the settings; {} for none.

    They are for linear layers and experts of the text model, and for the output layer with an
    embedding that is tied to it. Layers that decide where tokens go stay as they are.

    Raises:
        ModelError: A pattern of the settings matches no module, there are no such layers, or there
            are experts of an unknown kind.
    """
    if config.quantization == "auto":
        return {}
    names = {name: module for name, module in model.named_modules() if name}
    stacked = {
        f"{name}.{each.name}": module
        for name, module in names.items()
        for each in expert_products(module)
    }
    _check_patterns(config.quantization_ignore, [*names, *stacked])
    bits: Literal[4, 8] = 8 if config.quantization == "int8" else 4
    group = config.quantization_group or (_GROUP if bits == 4 else 0)
    inner = Rounding(bits, group, config.quantization_zero_points)
    fine = Rounding(8, config.quantization_group, config.quantization_zero_points)
    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    text = model.config.get_text_config()
    decoder = model.get_decoder() if text is not model.config else model.base_model
    own = {id(each) for each in decoder.modules()}
    hidden: int = getattr(text, "hidden_size", 0)
    found = {}
    for name, module in [*names.items(), *stacked.items()]:
        if any(fnmatchcase(name, pattern) for pattern in config.quantization_ignore):
            continue
        method = method_of(module)
        layer = method if isinstance(method, DenseLinear) else None
        if layer is not None and module is ends[0]:
            found[name] = fine
        elif id(module) not in own:
            continue
        elif name in stacked:
            found[name] = inner
        elif layer is not None and not KEPT.search(name):
            small = _LEAST_SHARE * min(layer.inputs, layer.outputs) < hidden
            found[name] = fine if small else inner
        elif is_other_mixture(module):
            raise ModelError(
                f"engine.quantization {config.quantization}: {name} ({type(module).__name__}) has "
                "experts of a kind that can't be quantised; add "
                f"'*.{name.rpartition('.')[2]}*' to engine.quantization_ignore to keep them as "
                "they are"
            )
    pair = tied_pair(model)
    if pair and pair[0] in found:
        found[pair[1]] = fine
    if not found:
        raise ModelError(
            f"engine.quantization: {type(model).__name__} has no linear layers that can be "
            "quantised; set it to 'auto'"
        )
    return found


def _check_patterns(patterns: Sequence[str], names: Collection[str]) -> None:
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        near = get_close_matches(pattern, names, 3, 0.3)
        likely = f"; the closest are {', '.join(near)}" if near else ""
        raise ModelError(
            f"engine.quantization_ignore: {pattern!r} matches no module of the model{likely}"
        )


def install(
    model: Any, layers: Mapping[str, CodedLayer], activation_bits: Literal[16, 8] = 16
) -> None:
    """Put quantised layers in the place of a model's plain ones.

    An embedding that is tied to the output layer gets the output layer's codes, or these its; so
    do layers of blocks that a model uses several times.

    Args:
        model: A Transformers model, on the CPU; the weights of these layers may be on "meta".
        layers: By the names of the plain layers.
        activation_bits: As in EngineConfig.
    """
    layers = dict(layers)
    for pair in (tied_pair(model), *_tied_layers(model)):
        known = [layers[name] for name in pair if name in layers]
        if known and all(_same(each, known[0]) for each in known):
            # Of a checkpoint with both tensors, they are one only if they are equal.
            layers.update(dict.fromkeys(pair, known[0]))
    shared: dict[int, dict[str, nn.Parameter]] = {}
    for name, layer in layers.items():
        if name.rpartition(".")[2] in model.get_submodule(name.rpartition(".")[0])._parameters:
            put_codes(model, name, layer.form, layer.tensors, layer.rounding)
            continue
        if id(layer) not in shared:
            found = layer.tensors.items()
            shared[id(layer)] = {
                key: nn.Parameter(each, requires_grad=False) for key, each in found
            }
        new = coded_module(model.get_submodule(name), layer, shared[id(layer)])
        model.set_submodule(name, new, strict=True)
    for each in model.modules():
        if isinstance(each, (QuantizedLinear, ExpertCodes)):
            each.activation_bits = activation_bits


def _tied_layers(model: Any) -> Iterator[tuple[str, str]]:
    """Iterate over the names of layers that have one weight by Transformers' tables."""
    for name, source in getattr(model, "all_tied_weights_keys", {}).items():
        yield name.removesuffix(".weight"), source.removesuffix(".weight")


def _same(one: CodedLayer, other: CodedLayer) -> bool:
    return one.form == other.form and all(
        map(torch.equal, one.tensors.values(), other.tensors.values())
    )


def coded_module(plain: nn.Module, layer: CodedLayer, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a quantised layer, or embedding, for the place of a plain one."""
    dtype: torch.dtype = plain.get_parameter("weight").dtype
    if isinstance(plain, nn.Embedding):
        embedding = QuantizedEmbedding(layer.form, tensors, plain, dtype)
        embedding.rounding = layer.rounding
        return embedding
    bias: Tensor | None = plain.bias  # type: ignore[assignment]
    linear = QuantizedLinear(layer.form, tensors, bias, dtype=dtype)
    method = method_of(plain)
    linear.rounding = layer.rounding
    linear.transposed = isinstance(method, DenseLinear) and method.transposed
    return linear if layer.order is None else ReorderedLinear(linear, layer.order)


def tied_pair(model: Any) -> tuple[str, ...]:
    """Return the names of output layer and embedding if they have one weight; () if not."""
    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    names = {id(module): name for name, module in model.named_modules()}
    if ends[0] is None or ends[0] is ends[1] or any(id(each) not in names for each in ends):
        return ()
    output, embedding = (names[id(each)] for each in ends)
    # Before they are loaded, by the configuration alone.
    keys: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    said = keys.get(f"{output}.weight") == f"{embedding}.weight"
    same = ends[0].weight is ends[1].weight
    return (output, embedding) if said or same else ()
