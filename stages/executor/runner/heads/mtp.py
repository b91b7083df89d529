"""MTP heads (multi-token prediction) in a model's own checkpoint, which Transformers ignores.

A head is a model of the family with one layer, its input a token's embedding and a hidden state in
one product. There are two layouts, in any family: `mtp.*` (Qwen3-Next, Qwen3.5), and a layer
after the last with `eh_proj` (DeepSeek V3, GLM-4.5). Of several heads, the first is used.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from .....config import EngineConfig, ModelError
from .....text.model_folder import folder_of
from ..checkpoint import tensor_files
from ..loaded_model import LoadedModel
from ..whole_model import make_whole
from .head import DraftHead, finish_head, read_tensors

_ENTRY = {
    "mtp.": {
        "fc": "entry.fc",
        "pre_fc_norm_embedding": "entry.embedding_norm",
        "pre_fc_norm_hidden": "entry.state_norm",
        "norm": "model.norm",
        "layers.0": "model.layers.0",
    },
    "model.layers.": {
        "eh_proj": "entry.fc",
        "enorm": "entry.embedding_norm",
        "hnorm": "entry.state_norm",
        "shared_head.norm": "model.norm",
        # The target's own, again.
        "shared_head.head": "",
        "embed_tokens": "",
        "": "model.layers.0",
    },
}
"""By layout, the beginnings of names after its prefix, and this module's."""


class _Entry(nn.Module):
    """A token's embedding and a hidden state, normalised, in one product."""

    def __init__(self, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.embedding_norm, self.state_norm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.fc = nn.Linear(2 * width, width, bias=False)

    def forward(self, embeddings: Tensor, states: Tensor) -> Tensor:
        both = self.embedding_norm(embeddings), self.state_norm(states)
        output: Tensor = self.fc(torch.cat(both, -1))
        return output


class MtpHead(DraftHead):
    """An MTP head. Derived from beside a family's causal language model (`_head_class`)."""

    in_model = True
    config: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        model: Any = self
        self.entry = _Entry(model.model.norm, config.hidden_size)

    def forward(self, input_ids: Tensor, states: Tensor | None = None, **call: Any) -> Any:
        model: Any = self
        embeddings = model.get_input_embeddings()(input_ids)
        entered = self.entry(embeddings, embeddings if states is None else states)
        return super().forward(inputs_embeds=entered, **call)

    def owns(self, name: str) -> bool:
        # Those too that are the target's, again.
        return name.startswith(self.config.draft_prefix)

    def rename(self, name: str) -> str:
        prefix: str = self.config.draft_prefix
        if not name.startswith(prefix):
            return ""
        rest = name.removeprefix(prefix)
        layout = next(each for each in _ENTRY if prefix.startswith(each))
        for begin, own in _ENTRY[layout].items():
            if not begin:
                return f"{own}.{rest}"
            if rest.startswith(f"{begin}."):
                return own and own + rest.removeprefix(begin)
        return ""

    def rotary_of(self, target: LoadedModel) -> Any:
        return target.base.rotary_emb


def load_mtp(config: EngineConfig, target: LoadedModel) -> LoadedModel:
    """Load the head of the model's own checkpoint.

    Raises:
        ModelError: There is none that can draft for the model.
    """
    folder = folder_of(config.model_folder)
    files = tensor_files(folder)
    text: Any = target.hf_config.get_text_config()
    prefix = next(
        (
            prefix
            for prefix, mark in (("mtp.", "fc"), (f"model.layers.{_depth(text)}.", "eh_proj"))
            if f"{prefix}{mark}.weight" in files
        ),
        None,
    )
    if prefix is None:
        raise ModelError(
            f"{folder} has no MTP head: neither mtp.fc.weight nor model.layers.{_depth(text)}."
            "eh_proj.weight; set draft_model_path to ''"
        )
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    if kind is None or not hasattr(target.base, "rotary_emb"):
        raise ModelError(
            f"an MTP head of {text.model_type} is not supported; set draft_model_path to ''"
        )
    own = _config_of(text, prefix, [name for name in files if name.startswith(prefix)])
    head = make_whole(own, target.dtypes.activations, _head_class(kind))
    return finish_head(head, read_tensors(files, head), config, target, folder)


def _depth(text: Any) -> int:
    return int(text.num_hidden_layers)


def _config_of(text: PreTrainedConfig, prefix: str, names: Iterable[str]) -> PreTrainedConfig:
    """Return the configuration of a model of one layer, with attention and, if the checkpoint has
    them, experts."""
    own: Any = copy.deepcopy(text)
    sparse = any(".experts." in name for name in names)
    own.num_hidden_layers, own.draft_prefix = 1, prefix
    own.tie_word_embeddings = False
    changes = {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "mlp_only_layers": [] if sparse else [0],
        "first_k_dense_replace": 0 if sparse else 1,
        "decoder_sparse_step": 1,
    }
    for name, value in changes.items():
        if getattr(own, name, None) is not None:
            setattr(own, name, value)
    return own


def _head_class(kind: type) -> type:
    # Its module is the family's, where its parts are looked up.
    return type(f"{kind.__name__}Head", (MtpHead, kind), {"__module__": kind.__module__})
