"""What one forward pass takes, and the pass itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .adapters import AdapterStep
from .attention.backend import AttentionBackend
from .attention.gather import GatherBackend
from .batch import IntArray, Rows, Uploader
from .device import chooses_tokens
from .kv_cache import KVCache
from .loaded_model import LoadedModel


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One forward pass over rows of different sequences, flattened.

    Attributes:
        input_ids: `[1, tokens]`.
        position_ids: `[1, tokens]`, each token's position in its own sequence.
        logits_index: `[samples]`, the tokens of the batch whose logits are wanted.
        attention: The step, as the back end prepared it.
        backend: Computes attention.
        adapters: Which tokens have which adapter; None when none has one.
    """

    input_ids: Tensor
    position_ids: Tensor
    logits_index: Tensor
    attention: Any
    backend: AttentionBackend[Any]
    adapters: AdapterStep | None = None


@torch.inference_mode()
def model_forward(model: nn.Module, inputs: StepInputs, cache: KVCache) -> Tensor:
    """Runs the model over one step. Keys and values of its tokens are written to the cache.

    Args:
        model: A Transformers causal language model with our attention.
        inputs: The step.
        cache: The KV cache; nothing else is changed.

    Returns:
        Logits, `[samples, vocab]` in float32, in the order of `inputs.logits_index`, where tokens
        are chosen of them (`chooses_tokens`). Of a model without an output layer the last hidden
        states, `[samples, hidden]`.
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
        attention_backend=inputs.backend,
        attention_batch=inputs.attention,
        kv_cache=cache,
    )
    if "logits" not in output:
        states: Tensor = output.last_hidden_state[0, inputs.logits_index]
        return states.float()
    logits: Tensor = output.logits[0].float()
    return logits if chooses_tokens(logits.device) else logits.cpu()


class InputBuilder:
    """Turns the rows of a step into StepInputs on the device."""

    def __init__(
        self, model: LoadedModel, block_size: int, backend: AttentionBackend[Any] | None = None
    ) -> None:
        """For a model, blocks of so many tokens, and a back end: GatherBackend if none is given."""
        self._block_size = block_size
        self._backend = GatherBackend(model, block_size) if backend is None else backend
        self._upload = Uploader(model.device)

    def build(self, rows: Rows, input_ids: IntArray, logits_index: IntArray) -> StepInputs:
        """Prepares a pass.

        Args:
            rows: The rows in batch order.
            input_ids: `[tokens]`.
            logits_index: `[samples]`.
        """
        ids, places, index, *layout = self._upload(
            input_ids,
            rows.flat[1],
            logits_index,
            rows.slots(self._block_size),
            np.ascontiguousarray(rows.tables),
            rows.contexts,
        )
        attention = self._backend.prepare(rows, *layout)
        return StepInputs(ids[None], places[None], index, attention, self._backend)
