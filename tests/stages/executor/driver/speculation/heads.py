"""Checkpoints with random draft heads, and the drafts that follow from their definition."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ...models import VOCAB, make_model

DRAFT_VOCAB = 150


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * scale


def write_mtp(folder: Path, name: str, **changes: Any) -> None:
    """Write a model with an MTP head, in the layout of its family."""
    model = make_model(name)
    model.save_pretrained(folder)
    experts = {"mlp_layer_types": ["sparse"], "first_k_dense_replace": 0}
    deepseek = not hasattr(model.config, "linear_num_key_heads")
    kinds = experts if deepseek else {"layer_types": ["full_attention"]}
    one = make_model(name, seed=4, num_hidden_layers=1, **kinds)
    one.save_pretrained(folder / "one")
    prefix = f"model.layers.{model.config.num_hidden_layers}." if deepseek else "mtp."
    layer = prefix if deepseek else "mtp.layers.0."
    names = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    if not deepseek:
        names = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    found = {
        layer + key.removeprefix("model.layers.0."): each
        for key, each in load_file(folder / "one" / "model.safetensors").items()
        if key.startswith("model.layers.0.")
    }
    width = model.config.hidden_size
    found[f"{prefix}{names[0]}.weight"] = random(width, 2 * width, seed=1, scale=0.15)
    for seed, each in enumerate(names[1:], 2):
        found[f"{prefix}{each}.weight"] = random(width, seed=seed, scale=0.2) + deepseek
    if deepseek:
        # In a checkpoint each expert has tensors of its own.
        for key in [each for each in found if each.endswith(("gate_up_proj", "down_proj"))]:
            if found[key].dim() < 3:
                continue
            stem, fused = key.rsplit(".", 1)
            for expert, weight in enumerate(found.pop(key)):
                parts = {fused: weight}
                if fused == "gate_up_proj":
                    parts = dict(zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True))
                for part, own in parts.items():
                    found[f"{stem}.{expert}.{part}.weight"] = own.clone()
        output = model.get_output_embeddings().weight.detach().clone()
        found[f"{prefix}shared_head.head.weight"] = output
    path = folder / "model.safetensors"
    save_file(load_file(path) | found | changes, path, metadata={"format": "pt"})


def write_eagle3(folder: Path, **changes: Any) -> None:
    """Write an EAGLE-3 head for `make_model("llama")`."""
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        "pad_token_id": 0,
    }
    shapes = {
        "fc": (48, 3 * 48),
        "midlayer.self_attn.q_proj": (64, 96),
        "midlayer.self_attn.k_proj": (32, 96),
        "midlayer.self_attn.v_proj": (32, 96),
        "midlayer.self_attn.o_proj": (48, 64),
        "midlayer.mlp.gate_proj": (80, 48),
        "midlayer.mlp.up_proj": (80, 48),
        "midlayer.mlp.down_proj": (48, 80),
        "lm_head": (DRAFT_VOCAB, 48),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors = {
        f"{name}.weight": random(*shape, seed=seed, scale=1.5 * shape[1] ** -0.5)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    for seed, name in enumerate((*(f"midlayer.{each}" for each in norms), "norm"), 20):
        tensors[f"{name}.weight"] = 1 + random(48, seed=seed, scale=0.2)
    kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(9))[:DRAFT_VOCAB].sort()
    tensors["d2t"] = kept.values - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    own = {name: each for name, each in changes.items() if isinstance(each, Tensor)}
    fields |= {name: each for name, each in changes.items() if name not in own}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors | own, folder / "model.safetensors")


class Definition:
    """A head, written down without the engine: a whole sequence at a time."""

    def __init__(self, folder: Path, head: Path | None = None) -> None:
        """`head`: of EAGLE-3; an MTP head if None."""
        self.target = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        self._known: list[tuple[list[int], Tensor]] = []
        self.eagle = None if head is None else load_file(head / "model.safetensors")
        if head is None:
            tensors = load_file(folder / "model.safetensors")
            prefix = "mtp." if "mtp.fc.weight" in tensors else ""
            depth = self.target.config.num_hidden_layers
            prefix = prefix or f"model.layers.{depth}."
            names = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
            if prefix != "mtp.":
                names = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
            weights = [tensors[f"{prefix}{name}.weight"] for name in names]
            one = AutoModelForCausalLM.from_pretrained(folder / "one", attn_implementation="eager")
            self.one: Any = one
            self.fc, *norms = weights
            self.norms = [copy.deepcopy(one.model.norm) for _ in norms]
            for module, weight in zip(self.norms, norms, strict=True):
                module.weight = nn.Parameter(weight)
            one.model.norm = self.norms[2]

    @torch.no_grad()
    def behind_best(self, tokens: Sequence[int], drafted: Sequence[int]) -> list[float]:
        """Return how far the logit of each drafted token is below the largest one."""
        states = self._states(list(tokens[:-1]))
        found: list[float] = []
        given = torch.tensor([tokens[1:]])
        for token in drafted:
            embeddings = self.target.get_input_embeddings()(given)
            after, logits = self._step(embeddings, states)
            found.append(float(logits.max() - logits[token]))
            states = torch.cat((states, after), 1)
            given = torch.cat((given, torch.tensor([[token]])), 1)
        return found

    def _states(self, tokens: list[int]) -> Tensor:
        """Return what the head reads of the target; of a sequence's beginning, from its whole."""
        for known, states in self._known:
            if known[: len(tokens)] == tokens:
                return states[:, : len(tokens)]
        keep: list[Tensor] = []
        # The last state is normalised there: the layer's own output is in no tuple.
        hook = self.target.base_model.layers[-1].register_forward_hook(
            lambda *call: keep.append(call[2])
        )
        output = self.target.base_model(input_ids=torch.tensor([tokens]), output_hidden_states=True)
        hook.remove()
        states = output.last_hidden_state
        if self.eagle is not None:
            read = torch.cat([*output.hidden_states[1:3], *keep], -1)
            states = F.linear(read, self.eagle["fc.weight"])
        self._known.append((tokens, states))
        return states

    def _step(self, embeddings: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        if self.eagle is not None:
            return self._eagle_step(embeddings, states)
        both = self.norms[0](embeddings), self.norms[1](states)
        entered = F.linear(torch.cat(both, -1), self.fc)
        after = self.one.model(inputs_embeds=entered, use_cache=False).last_hidden_state[:, -1:]
        return after, self.target.get_output_embeddings()(after)[0, 0]

    def _eagle_step(self, embeddings: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        own = self.eagle
        assert own is not None

        def norm(rows: Tensor, name: str) -> Tensor:
            return F.rms_norm(rows, (48,), own[f"{name}.weight"], 1e-6)

        def linear(rows: Tensor, name: str) -> Tensor:
            return F.linear(rows, own[f"midlayer.{name}.weight"])

        both = norm(embeddings, "midlayer.input_layernorm"), norm(states, "midlayer.hidden_norm")
        rows, length = torch.cat(both, -1), states.shape[1]
        queries, keys, values = (
            linear(rows, f"self_attn.{name}_proj").view(1, length, -1, 16).transpose(1, 2)
            for name in "qkv"
        )
        factors = self.target.base_model.rotary_emb(rows, torch.arange(length)[None])
        queries, keys = apply_rotary_pos_emb(queries, keys, *factors)
        attended = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )
        rows = states + linear(attended.transpose(1, 2).flatten(2), "self_attn.o_proj")
        normed = norm(rows, "midlayer.post_attention_layernorm")
        gated = F.silu(linear(normed, "mlp.gate_proj")) * linear(normed, "mlp.up_proj")
        after = (rows + linear(gated, "mlp.down_proj"))[:, -1:]
        logits = F.linear(norm(after, "norm"), own["lm_head.weight"])[0, 0]
        ids = torch.arange(DRAFT_VOCAB) + own["d2t"]
        return after, torch.full((VOCAB,), float("-inf")).scatter(0, ids, logits)
