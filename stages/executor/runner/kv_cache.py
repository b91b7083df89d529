"""The KV cache and other state of sequences. The batching stage allocates the blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
from torch import Tensor

from ....config import EngineConfig, ModelError
from ....config.engine import DEFAULT_BATCH_SIZE
from .attention_options import AttentionOptions
from .batch import DecodeRows
from .device import free_memory
from .loaded_model import LoadedModel
from .state.kinds import StateTensor, sequence_bytes, token_bytes
from .state.memory import StateMemory

if TYPE_CHECKING:
    from .kv_codes import CacheCodes

MAX_GATHERED_TOKENS = 1 << 16
"""The most context tokens, padding included, in one gather for rows of one token."""


_SPARE_SLOTS = 2
"""State slots beside those of `max_batch_size` sequences, such as for an audit."""


class PagedLayer(Protocol):
    """Reads and writes one layer's blocks in place, as `kernels.cpu.PagedAttention`."""

    def store(self, keys: Tensor, values: Tensor, slots: Tensor) -> None: ...

    def decode(self, queries: Tensor, rows: DecodeRows) -> Tensor: ...

    def find_tensors(self) -> None: ...


DecodeKernel = Callable[..., PagedLayer]


class KVCache(StateMemory):
    """The state of all layers of a model; keys and values are what attention reads of it.

    `keys[layer]` is `[num_blocks + 1, block_size, kv_heads, key_dim]`, `values[layer]` likewise;
    those of a latent layer are a view of the keys. The last block is `padding_block`. Call `moved`
    after the tensors' memory has changed.

    Attributes:
        codes: The same tensors with their scales, if they are codes; else None.
        index_of: As of LoadedModel.
        specs: The attention layers.
        recurrent: The states of other layers.
        index_keys: The keys of layers' indexers, `[num_blocks + 1, block_size, width]`, by
            `layer_idx`.
    """

    def __init__(
        self,
        model: LoadedModel,
        num_blocks: int,
        block_size: int,
        *,
        num_slots: int = 0,
        num_snapshots: int = 0,
        huge_pages: bool = False,
    ) -> None:
        """Allocate the blocks, and the slots of a model that keeps a state per sequence.

        Args:
            model: The model.
            num_blocks: Blocks.
            block_size: Tokens of a block.
            num_slots: Sequences.
            num_snapshots: Copies of their states.
            huge_pages: Allocate in large pages, if available.
        """
        super().__init__(
            model.states,
            model.dtypes.kv_cache,
            model.device,
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=num_slots,
            num_snapshots=num_snapshots,
            huge_pages=huge_pages,
        )
        self.padding_block = num_blocks
        self.index_of = model.index_of
        self.specs = model.layers
        attention = [
            self.layers[index if spec.source is None else model.index_of[spec.source]]
            for index, spec in enumerate(model.layers)
        ]
        own = len(model.layers) + len(model.other_states)
        self.recurrent = self.layers[len(model.layers) : own]
        self.index_keys = {
            each.layer: tensors[0]
            for each, tensors in zip(model.index_keys, self.layers[own:], strict=True)
        }
        self.keys, self.values = ([each[:2][which] for each in attention] for which in (0, -1))
        self._dtype = model.dtypes.kv_cache
        self.codes: CacheCodes | None = None
        if any(spec.codes for spec in model.layers):
            from .kv_codes import CacheCodes

            self.codes = CacheCodes(attention, self._dtype)
        self._latents = [layer for layer, spec in enumerate(model.layers) if spec.is_latent]
        for layer in self._latents:
            self.values[layer] = self.keys[layer][..., : model.layers[layer].value_dim]
        self._paged: dict[int, PagedLayer] = {}
        self._followers: list[Callable[[], None]] = []
        self.moved()

    def paged_layer(
        self, layer: int, kernel: DecodeKernel, heads: int, options: AttentionOptions
    ) -> PagedLayer:
        """Return the kernel that reads one layer in place, made at the first call.

        Args:
            layer: The layer.
            kernel: Makes the kernel. All arguments are the same in each call for a layer.
            heads: Query heads.
            options: Options of the layer.
        """
        attention = self._paged.get(layer)
        if attention is None:
            tensors = self.keys[layer], self.values[layer]
            attention = kernel(*tensors, heads, options, **self._scales_of(layer))
            self._paged[layer] = attention
        return attention

    def store(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write keys and values of one layer, `[tokens, kv_heads, dim]` each, to `[tokens]`.

        Does nothing for a layer that reads another's.
        """
        if self.specs[layer].source is not None:
            return
        if self.codes is not None:
            self.codes.store(layer, keys, values, slots)
            return
        self.keys[layer].view(-1, *keys.shape[1:]).index_copy_(0, slots, keys)
        if layer not in self._latents:
            self.values[layer].view(-1, *values.shape[1:]).index_copy_(0, slots, values)

    def as_kept(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return new keys and values of a layer as attention reads them from the cache."""
        if self.codes is None:
            return keys, values
        return self.codes.as_kept(layer, 0, keys), self.codes.as_kept(layer, 1, values)

    def _scales_of(self, layer: int) -> dict[str, Any]:
        if self.codes is None:
            return {}
        return {"scales": self.codes.layers[layer][2:], "dtype": self._dtype}

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, over all layers."""
        return sum(each[0, 0].numel() * each.itemsize for each in self.in_blocks)

    def follow(self, find: Callable[[], None]) -> None:
        """Call a function, too, whenever tensors have `moved`."""
        self._followers.append(find)

    def moved(self) -> None:
        """Find the tensors' new memory, or the model's, and drop scratch buffers."""
        for index in self._latents:
            values = self.values[index]
            values.data = self.keys[index][..., : values.shape[-1]]
        # Scratch for gathered keys and values, kept between calls: the allocator would map, and the
        # kernel clear, a new tensor of some megabytes for every layer of every step.
        self._gathered = [
            tensors[0].new_empty(0, dtype=self._dtype)
            for tensors in (self.keys, self.values)
            if tensors
        ]
        for paged in self._paged.values():
            paged.find_tensors()
        for find in self._followers:
            find()

    def gather(self, layer: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values of one layer at `index`, `[len(index), dim]` each.

        Args:
            layer: The layer.
            index: Rows of the flat cache `[slots * kv_heads, dim]`.

        Returns:
            Buffers that the next call overwrites.
        """
        gathered = []
        latent = layer in self._latents
        for which, cache in enumerate((self.keys[layer], self.values[layer])[: 2 - latent]):
            dim = cache.shape[-1]
            if self._gathered[which].numel() < index.numel() * dim:
                self._gathered[which] = cache.new_empty(2 * index.numel() * dim, dtype=self._dtype)
            buffer = self._gathered[which][: index.numel() * dim].view(-1, dim)
            if self.codes is None:
                torch.index_select(cache.view(-1, dim), 0, index, out=buffer)
            else:
                self.codes.gather(layer, which, index, buffer)
            gathered.append(buffer)
        keys = gathered[0]
        return keys, keys[:, : self.values[layer].shape[-1]] if latent else gathered[1]


def with_kv_dtype(config: EngineConfig, model: LoadedModel) -> LoadedModel:
    """Return the model with keys and values kept as `kv_dtype` says.

    Raises:
        ModelError: The device or the model doesn't allow it.
    """
    if config.kv_dtype == "auto":
        return model
    from .kv_codes import keep_codes

    return keep_codes(model, config.kv_dtype)


def block_bytes(model: LoadedModel, block_size: int) -> int:
    """Return the bytes of one block, over all layers."""
    return block_size * token_bytes(_tensors_of(model))


def slot_bytes(model: LoadedModel) -> int:
    """Return the bytes of one sequence, besides its blocks, over all layers."""
    return sequence_bytes(_tensors_of(model))


def _tensors_of(model: LoadedModel) -> list[StateTensor]:
    kept = model.dtypes.kv_cache
    return [tensor for state in model.states for tensor in state.tensors(kept)]


def count_slots(config: EngineConfig, model: LoadedModel) -> int:
    """Return the sequences that the executor has at most.

    Of a model without recurrent state more than run, since a finished sequence may stay until a
    plan names it. State slots are large, and plans name sequences before they start others.
    """
    return config.max_batch_size + (16 if model.mixers is None else _SPARE_SLOTS)


def count_scratch(config: EngineConfig, model: LoadedModel) -> int:
    """Return the state slots for states before drafted tokens, which a step verifies at most so
    many of; they follow those of sequences."""
    drafts = model.mixers is not None and config.speculation != "off"
    return config.max_draft_tokens if drafts else 0


def count_snapshots(config: EngineConfig, model: LoadedModel, num_blocks: int) -> int:
    """Return the snapshots of recurrent states that fit `state_snapshots_bytes`, at most one for
    each block."""
    if model.mixers is None:
        return 0
    return min(config.state_snapshots_bytes // max(slot_bytes(model), 1), num_blocks)


def fit_batch_size(config: EngineConfig, model: LoadedModel) -> int:
    """Return `max_batch_size`. If it is the default, recurrent states of so many sequences take at
    most half of the memory for the KV cache."""
    most = config.batch_size_on(model.device.type)
    if model.mixers is None or config.max_batch_size != DEFAULT_BATCH_SIZE:
        return most
    available = _available(msgspec.structs.replace(config, max_batch_size=most), (model,))
    spare = _SPARE_SLOTS + count_scratch(config, model)
    fitting = available // (2 * max(slot_bytes(model), 1)) - spare
    return max(min(most, fitting), 1)


def count_blocks(config: EngineConfig, model: LoadedModel, draft: LoadedModel | None = None) -> int:
    """Return the number of blocks of the cache, and of the draft model's cache, if any.

    On a device with its own memory: what `gpu_memory_utilization` leaves beside the weights,
    snapshots and a margin for activations. Otherwise: what fits `kv_cache_bytes`. At most what
    `max_batch_size` sequences of full length fill.

    Raises:
        ModelError: One sequence of `max_model_len` would not fit.
    """
    models = (model,) if draft is None else (model, draft)
    per_block = sum(block_bytes(each, config.block_size) for each in models)
    per_sequence = -(-model.max_model_len // config.block_size)
    most = config.max_batch_size * per_sequence
    if model.is_encoder:
        # An encoder's blocks hold nothing.
        return most
    available = _available(config, models)
    per_model = count_slots(config, model) + count_scratch(config, model)
    slots = per_model * sum(map(slot_bytes, models))
    available -= slots
    # Without attention blocks hold nothing.
    num_blocks = min(available // per_block, most) if per_block else most
    if num_blocks < per_sequence or available < 0:
        on_device = free_memory(model.device) is not None
        setting = "gpu_memory_utilization" if on_device else "kv_cache_bytes"
        fitting = max(num_blocks, 0) * config.block_size
        alternative = f", or set max_model_len to at most {fitting}" if fitting > 1 else ""
        states = ""
        if slots:
            states = f" beside {slots} of recurrent states of {config.max_batch_size} sequences"
            alternative = f", or lower max_batch_size{alternative}"
        raise ModelError(
            f"one sequence of max_model_len {model.max_model_len} needs "
            f"{per_sequence * per_block} bytes of KV cache{states} and there are "
            f"{max(available, 0)}; raise {setting}{alternative}"
        )
    return num_blocks


def _available(config: EngineConfig, models: Sequence[LoadedModel]) -> int:
    """Return the bytes for blocks and slots."""
    memory = free_memory(models[0].device)
    if memory is None:
        return config.kv_cache_bytes
    most = config.max_batch_size * -(-models[0].max_model_len // config.block_size)
    snapshots = count_snapshots(config, models[0], most) * slot_bytes(models[0])
    return _left_bytes(config, models, *memory) - snapshots


def _left_bytes(config: EngineConfig, models: Sequence[LoadedModel], free: int, total: int) -> int:
    """Return the bytes for the KV cache beside loaded weights and estimated activations."""
    margin = 256 << 20
    # Passes of both models alternate, and each leaves its buffers with the allocator.
    for each in models:
        activations, logits = _pass_bytes(config, each, config.max_tokens_per_batch)
        widths = (spec.num_kv_heads * (spec.key_dim + spec.value_dim) for spec in each.layers)
        widest = max(widths, default=0)
        margin += (
            activations + logits + 2 * MAX_GATHERED_TOKENS * widest * each.dtypes.kv_cache.itemsize
        )
    if models[0].encoders:
        margin += config.image_cache_bytes
    # CUDA graphs keep memory of their own, for the largest batch that decodes.
    if config.cuda_graphs == "auto":
        margin += sum(_pass_bytes(config, models[0], config.max_batch_size))
    return int(total * config.gpu_memory_utilization) - (total - free) - margin


def _pass_bytes(config: EngineConfig, model: LoadedModel, num_tokens: int) -> tuple[int, int]:
    """Estimate the bytes of a pass over so many tokens: activations, and logits of a batch."""
    text: Any = model.hf_config.get_text_config()
    hidden: int = text.hidden_size
    inner: int = getattr(text, "intermediate_size", None) or 4 * hidden
    activations = num_tokens * (8 * hidden + 4 * inner) * model.dtypes.activations.itemsize
    # In float32: logits, weights, masks.
    return activations, config.max_batch_size * model.vocab_size * 4 * 3
