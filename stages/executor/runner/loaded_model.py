"""A loaded model, and the facts of its attention layers and experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from torch import nn
from transformers import PreTrainedConfig

from .attention_options import AttentionOptions, Span
from .shards import ShardedWeights
from .state.kinds import IndexKeys, LayerState, StateTensor

if TYPE_CHECKING:
    from .media import MediaEncoder
    from .mixers.find import Mixers
    from .ranks.pipelining import PipelineRank

# Names in Transformers' configurations, the commonest first.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "moe_top_k")


SCALES = torch.bfloat16
"""Dtype of the scales of keys and values that are kept as codes."""


class Dtypes(NamedTuple):
    """The dtypes of a model, one for each kind of tensor."""

    weights: torch.dtype
    activations: torch.dtype
    kv_cache: torch.dtype

    @classmethod
    def of(cls, dtype: torch.dtype) -> Dtypes:
        """One dtype for all tensors."""
        return cls(dtype, dtype, dtype)


class LayerSpec(msgspec.Struct, frozen=True):
    """One attention layer.

    Attributes:
        num_kv_heads: Heads of keys and values.
        key_dim: Width of one key head.
        value_dim: Width of one value head.
        window: As in Span.
        chunk: Likewise.
        source: The `layer_idx` of the layer whose keys and values it reads; None if it has its own.
        is_latent: Whether values are the first numbers of the keys, and not kept again.
        codes: Dtype of the codes that keys and values are kept as, with a scale for each token and
            head (`kv_codes`); None for numbers in the cache's dtype.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    chunk: int | None = None
    source: int | None = None
    is_latent: bool = False
    codes: torch.dtype | None = None

    @property
    def span(self) -> Span:
        """The positions that a query sees."""
        return Span(self.window, self.chunk)

    def tensors(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """Return the state: keys, and values unless they are in the keys, then the scales of codes;
        nothing for another layer's."""
        if self.source is not None:
            return ()
        heads, kept = self.num_kv_heads, self.codes or dtype
        widths = (self.key_dim,) if self.is_latent else (self.key_dim, self.value_dim)
        numbers = tuple(StateTensor((heads, each), kept, True) for each in widths)
        if self.codes is None:
            return numbers
        return (*numbers, *(StateTensor((heads,), SCALES, True) for _ in widths))


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        module: The causal language model, or one without an output layer, which makes embeddings
            only; in eval mode, without gradients.
        hf_config: Its configuration.
        device: The device of the weights.
        dtypes: Dtypes of weights, activations, and keys and values as attention reads them.
        max_model_len: The configured limit, at most the model's own, in tokens.
        vocab_size: Rows of the output layer, or of the input layer without one.
        layers: The attention layers in order; none of an encoder. A pipeline stage has its own.
        attention_options: Options of these layers.
        layer_indices: The `layer_idx` of each of them.
        other_states: State that other layers keep of a sequence, such as a recurrent state.
        mixers: The layers' mixers with recurrent state; None if all mix by attention.
        generates: Whether there is an output layer.
        is_encoder: Whether tokens see later ones, so that prompts run as a whole, with
            Transformers' own attention.
        may_pad: Whether an encoder's states are the same in a padded batch.
        is_shared: Whether a caller shares the module and may replace its weights between steps.
        shards: The whole model's tensors, if the module is one rank's shard, or some of its tensors
            are codes; else None.
        pipeline: This rank's place among several stages; None if there is one.
        latent_attention: "in use", or why latent attention runs with the keys and values of all
            heads; "" for a model without it.
        index_keys: Of layers whose indexers choose the tokens that a query sees.
        encoders: Encoders of the media that the model takes, one for each kind.
        checkpoint_format: The format of quantised weights that were read, for people.
        checkpoint_notes: Sentences about what of such a checkpoint is ignored or changed.
    """

    module: nn.Module
    hf_config: PreTrainedConfig
    device: torch.device
    dtypes: Dtypes
    max_model_len: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    attention_options: tuple[AttentionOptions, ...] = ()
    layer_indices: tuple[int, ...] = ()
    other_states: tuple[LayerState, ...] = ()
    mixers: Mixers | None = None
    generates: bool = True
    is_encoder: bool = False
    may_pad: bool = True
    is_shared: bool = False
    shards: ShardedWeights | None = None
    pipeline: PipelineRank | None = None
    encoders: tuple[MediaEncoder, ...] = ()
    latent_attention: str = ""
    index_keys: tuple[IndexKeys, ...] = ()
    checkpoint_format: str = ""
    checkpoint_notes: tuple[str, ...] = ()

    @property
    def states(self) -> tuple[LayerState, ...]:
        """The state that layers keep of a sequence: attention first, in the order of `layers`."""
        return (*self.layers, *self.other_states, *self.index_keys)

    @cached_property
    def index_of(self) -> dict[int, int]:
        """The index in `layers` by `layer_idx`."""
        return {layer: index for index, layer in enumerate(self.layer_indices)}

    @cached_property
    def shares_kv(self) -> frozenset[int]:
        """The `layer_idx` of the layers that read another's keys and values, and of these."""
        pairs = zip(self.layer_indices, (spec.source for spec in self.layers), strict=True)
        found = {index for pair in pairs if pair[1] is not None for index in pair}
        return frozenset(index for index in found if index is not None)

    @property
    def whole(self) -> nn.Module:
        """The whole model with plain tensors, on the meta device if `module` isn't."""
        return self.module if self.shards is None else self.shards.whole

    @property
    def is_shard(self) -> bool:
        """Whether `module` is one rank's shard."""
        return self.shards is not None and self.shards.by_rank

    @property
    def num_parameters(self) -> int:
        """The number of the whole model's parameters."""
        return sum(each.numel() for each in self.whole.parameters())

    @cached_property
    def forms(self) -> str:
        """The forms of its codes, such as "int4-128+int8"; "" for plain weights."""
        names = set[str]()
        for each in self.module.modules():
            if (form := getattr(each, "form", None)) is not None:
                names.add(form.name + ("-zero-points" if "offsets" in each._parameters else ""))
        return "+".join(sorted(names))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole model's parameters."""
        module = self.whole if self.is_shard else self.module
        return sum(each.nbytes for each in module.parameters())

    @property
    def base(self) -> nn.Module:
        """The part that returns the last hidden states."""
        module: Any = self.module
        base: nn.Module = module.get_decoder() if self.is_part else module.base_model
        return base

    @property
    def is_part(self) -> bool:
        """Whether tokens pass through a part of the module, beside others such as for images."""
        return self.hf_config.get_text_config() is not self.hf_config

    @property
    def vision(self) -> MediaEncoder | None:
        """The encoder of images; None if the model takes none."""
        return next((each for each in self.encoders if each.kind == "image"), None)


def with_codes(module: nn.Module, dtype: torch.dtype) -> ShardedWeights | None:
    """Return `LoadedModel.shards` of a whole model; None, without imports, if it has no codes."""
    if not any(getattr(each, "holds_codes", False) for each in module.modules()):
        return None
    from .whole_model import places_of_codes

    return places_of_codes(module, dtype)


def experts_of(hf_config: Any) -> tuple[int, int]:
    """Return the experts of a layer and how many a token uses; (0, 0) without experts."""
    text = hf_config.get_text_config()
    # DBRX has them in a part of its own.
    parts = [part for part in (text, getattr(text, "ffn_config", None)) if part is not None]
    experts = _first(parts, _EXPERTS)
    # A configuration may have the field for a model without experts, as 0 or 1.
    return (experts, _first(parts, _ACTIVE)) if experts > 1 else (0, 0)


def _first(parts: list[Any], names: tuple[str, ...]) -> int:
    found = (getattr(part, name, None) for name in names for part in parts)
    # Some models have a number for each layer.
    numbers = (max(each, default=0) if isinstance(each, list) else each for each in found)
    return next((each for each in numbers if isinstance(each, int) and each > 0), 0)
