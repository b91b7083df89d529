"""EAGLE-3 heads: a Llama layer over three hidden states of the target, in a checkpoint of its own.

The layer attends with queries, keys and values of a token's embedding beside the states; its
vocabulary may be a part of the target's, with `d2t`, the distance to each token's id there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from .....config import EngineConfig, ModelError
from ..checkpoint import tensor_files
from ..loaded_model import LoadedModel
from ..whole_model import make_whole
from .head import DraftHead, finish_head, read_tensors

_IDS = "eagle_aux_hidden_state_layer_ids"


class _Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, epsilon = config.hidden_size, config.rms_norm_eps
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            plain: nn.Linear = getattr(self.self_attn, name)
            bias = plain.bias is not None
            setattr(self.self_attn, name, nn.Linear(2 * width, plain.out_features, bias=bias))
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(width, epsilon)
        self.hidden_norm = LlamaRMSNorm(width, epsilon)
        self.post_attention_layernorm = LlamaRMSNorm(width, epsilon)
        self.norm_first = bool(getattr(config, "norm_before_residual", False))

    def forward(self, hidden_states: Tensor, *, token_embeddings: Tensor, **call: Any) -> Tensor:
        normed = self.hidden_norm(hidden_states)
        rows = normed if self.norm_first else hidden_states
        both = torch.cat((self.input_layernorm(token_embeddings), normed), -1)
        rows = rows + self.self_attn(hidden_states=both, **call)[0]
        output: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return output


class Eagle3Head(DraftHead, LlamaForCausalLM):  # type: ignore[misc]
    """An EAGLE-3 head. Its own states are the layer's output before the last norm."""

    config: Any
    model: Any
    get_input_embeddings: Any
    d2t: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width, tokens = config.hidden_size, config.draft_vocab_size
        self.model.layers[0] = _Layer(config)
        self.model.norm = nn.Identity()
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.fc = nn.Linear(len(config.draft_reads) * width, width, bias=False)
        self.lm_head = nn.Linear(width, tokens, bias=False)
        self.register_buffer("d2t", torch.zeros(tokens, dtype=torch.int64))
        self.reads = tuple(config.draft_reads)

    def forward(
        self,
        input_ids: Tensor,
        states: Tensor | None = None,
        logits_to_keep: Tensor | None = None,
        **call: Any,
    ) -> CausalLMOutputWithPast:
        embeddings = self.get_input_embeddings()(input_ids)
        if states is None:
            states = self.fold([embeddings] * len(self.reads))
        rows = self.model(inputs_embeds=states, token_embeddings=embeddings, **call)[0]
        if logits_to_keep is not None:
            rows = rows[:, logits_to_keep]
        return CausalLMOutputWithPast(logits=self.lm_head(self.norm(rows)))

    def fold(self, states: Sequence[Tensor]) -> Tensor:
        output: Tensor = self.fc(torch.cat(list(states), -1))
        return output

    def spread(self, logits: Tensor) -> Tensor:
        ids = torch.arange(logits.shape[1], device=logits.device) + self.d2t.to(logits.device)
        whole = logits.new_full((len(logits), self.config.vocab_size), float("-inf"))
        whole[:, ids] = logits
        return whole

    def rename(self, name: str) -> str:
        name = name.removeprefix("model.")
        if name == "t2d":
            return ""
        for begin in ("midlayer.", "layers.0."):
            if name.startswith(begin):
                return f"model.layers.0.{name.removeprefix(begin)}"
        return f"model.{name}" if name.startswith("embed_tokens.") else name

    def rotary_of(self, target: LoadedModel) -> Any:
        return LlamaRotaryEmbedding(self.config)


def load_eagle3(folder: Path, config: EngineConfig, target: LoadedModel) -> LoadedModel:
    """Load the head of a folder.

    Raises:
        ModelError: It can't be loaded, or can't draft for the model.
    """
    files = tensor_files(folder)
    if not files:
        raise ModelError(f"{folder} has no weights in safetensors' format; convert the draft head")
    text: Any = target.hf_config.get_text_config()
    fields = json.loads((folder / "config.json").read_text())
    own = _config_of(fields, text, target.vocab_size)
    head = make_whole(own, target.dtypes.activations, Eagle3Head)
    tensors = read_tensors(files, head)
    if "d2t" not in tensors and own.draft_vocab_size == own.vocab_size:
        tensors["d2t"] = torch.zeros(own.vocab_size, dtype=torch.int64)
    model = finish_head(head, tensors, config, target, folder)
    ids = torch.arange(own.draft_vocab_size) + tensors["d2t"]
    if ids.min() < 0 or ids.max() >= own.vocab_size or len({*ids.tolist()}) < len(ids):
        raise _misfit(f"its d2t leads to tokens that are none of the model's {own.vocab_size}")
    return model


def _config_of(fields: dict[str, Any], text: Any, vocab_size: int) -> Any:
    """Return the configuration of the module. Raises ModelError if it does not fit the target."""
    own: Any = LlamaConfig(**fields)
    if own.num_hidden_layers != 1:
        raise _misfit(f"it has {own.num_hidden_layers} layers, and one is supported")
    wanted = text.hidden_size
    for width in (own.hidden_size, fields.get("target_hidden_size") or own.hidden_size):
        if width != wanted:
            raise _misfit(f"it has hidden states of {width} numbers, and the model of {wanted}")
    if own.vocab_size != vocab_size:
        raise _misfit(f"it has {own.vocab_size} tokens, and the model {vocab_size}")
    own.draft_vocab_size = fields.get("draft_vocab_size") or vocab_size
    own.tie_word_embeddings = False
    depth = text.num_hidden_layers
    reads = [2, depth // 2, depth - 3]
    if ids := fields.get(_IDS):
        reads = ids
    elif ids := (fields.get("eagle_config") or {}).get(_IDS):
        # Layers whose outputs are read, where the field above means inputs.
        reads = [each + 1 for each in ids]
    own.draft_reads = reads
    return own


def _misfit(why: str) -> ModelError:
    return ModelError(
        f"the draft head does not fit the model: {why}; set draft_model_path to a head that was "
        "trained for it"
    )
