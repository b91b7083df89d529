"""Step inputs, and the forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from .attention.backend import AttentionBackend
from .attention.gather import GatherBackend
from .batch import IntArray, Rows, Uploader
from .device import chooses_tokens
from .kv_cache import KVCache
from .loaded_model import LoadedModel

if TYPE_CHECKING:
    from .adapters.layers import AdapterStep
    from .mixers.step import StateStep
    from .ranks.pipelining import PipelineRank


class StepInputs(msgspec.Struct, frozen=True):
    """The inputs of one forward pass over rows of different sequences, flattened.

    Attributes:
        input_ids: `[1, tokens]`.
        position_ids: `[1, tokens]`, each token's position in its own sequence; or `[3, 1, tokens]`,
            in time, height and width.
        logits_index: `[samples]`, the tokens of the batch to return logits for.
        attention: The step, prepared by the back end.
        backend: Computes attention.
        adapters: The tokens' adapters; None for none.
        source: The arguments of `InputBuilder.build`, for other ranks.
        pipeline: As of LoadedModel.
        media: Arguments of the forward call in place of `input_ids`, by name; None if no token is
            of an image.
    """

    input_ids: Tensor
    position_ids: Tensor
    logits_index: Tensor
    attention: Any
    backend: AttentionBackend[Any]
    adapters: AdapterStep | None = None
    source: tuple[Rows, IntArray, IntArray] | None = None
    pipeline: PipelineRank | None = None
    media: Mapping[str, Any] | None = None
    states: StateStep | None = None


@torch.inference_mode()
def model_forward(model: nn.Module, inputs: StepInputs, cache: KVCache) -> Tensor:
    """Run the model over one step, and write keys and values of its tokens to the cache.

    Args:
        model: A Transformers causal language model with our attention.
        inputs: The step.
        cache: The KV cache; nothing else changes.

    Returns:
        Logits, `[samples, vocab]` float32, in the order of `inputs.logits_index`, on the device
        that chooses tokens (`chooses_tokens`). Without an output layer, the last hidden states,
        `[samples, hidden]`. A pipeline stage that is not the last returns those of its layers, and
        sends them to the next one.
    """
    # Transformers uses a mask of four dimensions as it is. Without one it would search the
    # positions for packed sequences at every step, and wait for the device.
    placeholder = inputs.position_ids.new_empty(1, 1, 1, 1)
    call = {
        "position_ids": inputs.position_ids,
        "attention_mask": placeholder,
        "use_cache": False,
        "logits_to_keep": inputs.logits_index,
        "attention_backend": inputs.backend,
        "attention_batch": inputs.attention,
        "kv_cache": cache,
    }
    if cache.index_keys and inputs.source is not None:
        call["step_rows"] = inputs.source[0]
    if (pipeline := inputs.pipeline) is None:
        output: Any
        if inputs.media is None:
            call["input_ids"] = inputs.input_ids
        else:
            call |= inputs.media
        if inputs.states is None:
            output = model(**call)
        else:
            with inputs.states.active(cache):
                output = model(**call)
    else:
        before = pipeline.receive(inputs.position_ids.shape[1])
        output = pipeline.run(model, inputs.input_ids, before, call)
        if not pipeline.is_last:
            pipeline.send(output.last_hidden_state[0])
    if "logits" not in output:
        states: Tensor = output.last_hidden_state[0, inputs.logits_index]
        return states.float()
    logits: Tensor = output.logits[0].float()
    return logits if chooses_tokens(logits.device) else logits.cpu()


class InputBuilder:
    """Builds StepInputs on the device from the rows of a step."""

    def __init__(
        self, model: LoadedModel, block_size: int, backend: AttentionBackend[Any] | None = None
    ) -> None:
        """`backend`: GatherBackend if None."""
        self._block_size = block_size
        self._backend = GatherBackend(model, block_size) if backend is None else backend
        self._upload = Uploader(model.device)
        self._pipeline = model.pipeline
        self._mixers = model.mixers

    def build(self, rows: Rows, input_ids: IntArray, logits_index: IntArray) -> StepInputs:
        """Build the inputs of a pass.

        Args:
            rows: The rows in batch order.
            input_ids: `[tokens]`.
            logits_index: `[samples]`.
        """
        source = rows, input_ids, logits_index
        if self._pipeline is not None and not self._pipeline.is_last:
            rows = replace(rows, read=None)  # the next stage reads all
        ids, places, index, *layout = self._upload(
            input_ids,
            rows.flat[1],
            logits_index,
            rows.slots(self._block_size),
            np.ascontiguousarray(rows.tables),
            rows.contexts,
        )
        attention = self._backend.prepare(rows, *layout)
        states = None
        if self._mixers is not None:
            from .mixers.step import StateStep

            states = StateStep.of(self._mixers, rows)
        return StepInputs(
            ids[None],
            places[None],
            index,
            attention,
            self._backend,
            source=source,
            pipeline=self._pipeline,
            states=states,
        )
