"""What one forward pass takes, and the pass itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from .attention.tiled import TiledBatch
from .batch import (
    AttentionBatch,
    IntArray,
    Rows,
    Uploader,
    ViewKey,
    build_attention_batch,
    flatten_rows,
    slot_mapping,
)
from .kv_cache import KVCache
from .model import LoadedModel


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One forward pass over rows of different sequences, flattened.

    Attributes:
        input_ids: `[1, tokens]`.
        position_ids: `[1, tokens]`, each token's position in its own sequence.
        logits_index: `[samples]`, the tokens of the batch whose logits are wanted.
        attention: Slot mapping, context and masks, or tiles in deterministic mode.
    """

    input_ids: Tensor
    position_ids: Tensor
    logits_index: Tensor
    attention: AttentionBatch | TiledBatch


@torch.inference_mode()
def model_forward(model: nn.Module, inputs: StepInputs, cache: KVCache) -> Tensor:
    """Runs the model over one step. Keys and values of its tokens are written to the cache.

    Args:
        model: A Transformers causal language model with our attention.
        inputs: The step.
        cache: The KV cache; nothing else is changed.

    Returns:
        Logits, `[samples, vocab]` in float32, in the order of `inputs.logits_index`.
    """
    # A mask of four dimensions is taken as it is: without one, Transformers would search the
    # positions for packed sequences at every step (on CUDA with a wait for the device).
    placeholder = inputs.position_ids.new_empty(1, 1, 1, 1)
    output = model(
        input_ids=inputs.input_ids,
        position_ids=inputs.position_ids,
        attention_mask=placeholder,
        use_cache=False,
        logits_to_keep=inputs.logits_index,
        attention_batch=inputs.attention,
        kv_cache=cache,
    )
    logits: Tensor = output.logits[0].float()
    return logits


class InputBuilder:
    """Turns the rows of a step into StepInputs on the device.

    Attributes:
        paged: Whether a kernel reads the KV cache for the rows of one token.
    """

    def __init__(self, model: LoadedModel, block_size: int, *, deterministic: bool = False) -> None:
        self.paged = False
        self._deterministic = deterministic
        self._block_size = block_size
        self._dtype = model.dtype
        self._kinds: tuple[ViewKey, ...] = tuple(
            sorted(
                {(spec.window, spec.num_kv_heads) for spec in model.layers},
                key=lambda kind: (kind[0] or 0, kind[1]),
            )
        )
        self._upload = Uploader(model.device)

    def build(self, rows: Rows, input_ids: IntArray, logits_index: IntArray) -> StepInputs:
        """Prepares a pass.

        Args:
            rows: The rows in batch order.
            input_ids: `[tokens]`.
            logits_index: `[samples]`.
        """
        row_of_token, positions = flatten_rows(rows.starts, rows.num_tokens)
        slots = slot_mapping(rows.tables, row_of_token, positions, self._block_size)
        on_device = self._upload(
            input_ids,
            positions,
            logits_index,
            slots,
            np.ascontiguousarray(rows.tables),
            rows.contexts,
        )
        attention: AttentionBatch | TiledBatch
        if self._deterministic:
            attention = TiledBatch(on_device[3], rows, self._block_size)
        else:
            attention = build_attention_batch(
                rows,
                *on_device[3:],
                block_size=self._block_size,
                kinds=self._kinds,
                dtype=self._dtype,
                paged=self.paged,
            )
        return StepInputs(on_device[0][None], on_device[1][None], on_device[2], attention)
