"""A model that is loaded, and what is known of its attention layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer.

    Attributes:
        num_kv_heads: Heads of the keys and values.
        key_dim: Width of one key head.
        value_dim: Width of one value head.
        window: A query sees itself and the `window - 1` tokens before it; None sees all.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


class AttentionOptions(NamedTuple):
    """How one layer attends, the same in every step.

    Attributes:
        scale: Factor of the scores.
        window: As in LayerSpec.
        softcap: Scores become softcap * tanh(score / softcap) (Gemma 2).
        sinks: `[heads]`, attention sinks: a score without a value in each softmax (GPT-OSS).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        module: The causal language model, or one without an output layer, which makes embeddings
            only; in eval mode, without gradients.
        hf_config: Its configuration.
        device: Where the weights are.
        dtype: Of weights, activations and KV cache.
        max_model_len: The configured limit cut to the model's own, in tokens.
        vocab_size: Rows of the output layer, or of the input layer where there is none.
        layers: The attention layers in order; none of an encoder.
        attention_options: Of these layers.
        generates: Whether there is an output layer.
        is_encoder: Whether tokens see those behind them, so that prompts run as a whole, with
            Transformers' own attention.
        may_pad: Whether an encoder gives prompts of different length, filled up to one, the states
            that they have alone.
        is_shared: Whether somebody else has it too, who may put other weights in place of its own
            between two steps.
    """

    module: nn.Module
    hf_config: PreTrainedConfig
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    attention_options: tuple[AttentionOptions, ...] = ()
    generates: bool = True
    is_encoder: bool = False
    may_pad: bool = True
    is_shared: bool = False

    @property
    def base(self) -> nn.Module:
        """The part that gives the last hidden states."""
        module: Any = self.module
        base: nn.Module = module.base_model
        return base

    @property
    def hidden_size(self) -> int:
        """Numbers of a hidden state."""
        return int(self.hf_config.get_text_config().hidden_size)
