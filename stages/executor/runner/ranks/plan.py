"""The tensor-parallel plan of a model: Transformers' plans, as data, made explicit and checked.

A plan of Transformers names a style for modules and parameters of a model; the styles are its own
DTensor classes, of which nothing is used here. This module merges the plans of a configuration and
a class, adds the input embedding and shared experts, and says by name what can't be sharded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, NoReturn

from torch import nn

from .....config import ModelError
from ..linear.choose import method_of

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""A layer's number in a module's name; Transformers writes it as `*` in plans."""


class Style(Enum):
    """The way in which a module is sharded.

    Rows and columns are those of a matrix that is multiplied from the right, as in the literature:
    a column of it is a row of a linear layer's weight.
    """

    COLUMNS = "output features are sharded"
    COLUMNS_GATHERED = "output features are sharded, and the outputs gathered"
    COLUMNS_PACKED = "two fused layers, each sharded by output features"
    ROWS = "input features are sharded, as the input is; outputs are summed"
    ROWS_OF_WHOLE = "input features are sharded, and the input is whole; outputs are summed"
    VOCABULARY = "the vocabulary of an embedding is sharded; its vectors are summed"
    EXPERT_WIDTH = "the intermediate features of each expert are sharded"
    WHOLE_EXPERTS = "each expert belongs to a rank"


_STYLES: Mapping[str, Style | None] = {
    "colwise": Style.COLUMNS,
    "colwise_gather_output": Style.COLUMNS_GATHERED,
    "colwise_rep": Style.COLUMNS_GATHERED,
    "packed_colwise": Style.COLUMNS_PACKED,
    "rowwise": Style.ROWS,
    "rowwise_split_input": Style.ROWS_OF_WHOLE,
    "rowwise_rep": Style.ROWS_OF_WHOLE,
    "embedding_rowwise": Style.VOCABULARY,
    "moe_tp_experts": Style.EXPERT_WIDTH,
    "ep_dispatch_experts": Style.WHOLE_EXPERTS,
    "replicate": None,
    "replicated_with_grad_allreduce": None,
}
"""By Transformers' names; None: every rank has the whole module."""

_PARAMETER_STYLES = ("packed_colwise", "rowwise", "grouped_gemm")
"""Styles of the fused parameters of experts, which follow from the module's."""

_SHARED_EXPERT = re.compile(r"\.shared_experts?\.(gate|up|down)_proj$")


def parallel_plan(module: Any, *, expert_parallel: bool = False) -> dict[str, Style]:
    """Return the style of every sharded module.

    Args:
        module: A Transformers model, on any device.
        expert_parallel: Experts belong to ranks as a whole.

    Returns:
        Styles by the names of modules.

    Raises:
        ModelError: The model has no plan, or one with a style that is not supported.
    """
    named = dict(module.named_modules())
    styles = _merged(module, expert_parallel=expert_parallel)
    plan: dict[str, Style] = {}
    for name, child in named.items():
        their_style = styles.get(_NUMBER.sub("*", name))
        if their_style is None:
            continue
        if their_style not in _STYLES:
            refuse(module, f"its plan has the style {their_style!r}, which is not supported")
        style = _STYLES[their_style]
        if style is not None:
            _check_kind(module, name, child, style)
            plan[name] = style
    for name, child in named.items():
        if name not in plan and _can_shard(child) and (m := _SHARED_EXPERT.search(name)):
            # Transformers' plans leave them whole.
            plan[name] = Style.ROWS if m[1] == "down" else Style.COLUMNS
    text = module.config.get_text_config()
    heads = {text.num_attention_heads, getattr(text, "num_key_value_heads", None)}
    for name, child in named.items():
        for weight in child.parameters(recurse=False):
            # Norms of Cohere, whose plan has none for them.
            if name not in plan and "norm" in name and weight.ndim == 2 and len(weight) in heads:
                refuse(module, f"{name} has numbers for each head, which its plan doesn't share")
    for end, usual in (("input", Style.VOCABULARY), ("output", Style.COLUMNS_GATHERED)):
        layer = getattr(module, f"get_{end}_embeddings")()
        found = [name for name, child in named.items() if child is layer]
        if not found:
            refuse(module, f"it has no {end} layer")
        plan.setdefault(found[0], usual)
    if expert_parallel and Style.WHOLE_EXPERTS not in plan.values():
        refuse(
            module,
            "Transformers has no plan for its experts, or it has none",
            "set engine.expert_parallel to 1",
        )
    return plan


def _merged(module: Any, *, expert_parallel: bool) -> dict[str, str]:
    """Return Transformers' plan of this model: names with `*` for numbers, and styles."""
    # Transformers merges them when it builds a model.
    tensor_plan = dict(getattr(module, "_tp_plan", None) or {})
    expert_plan = dict(getattr(module, "_ep_plan", None) or {})
    if not module.config.get_text_config().base_model_tp_plan:
        refuse(module, "Transformers has no tensor-parallel plan for it")
    if expert_parallel:
        tensor_plan |= expert_plan
    fused = {
        name
        for name in tensor_plan
        if tensor_plan.get(name.rpartition(".")[0]) in ("moe_tp_experts", "ep_dispatch_experts")
    }
    for name in fused:
        if tensor_plan.pop(name) not in _PARAMETER_STYLES:
            refuse(module, f"its plan has experts with parameters ({name}) that are not supported")
    return tensor_plan


def _check_kind(module: Any, name: str, child: nn.Module, style: Style) -> None:
    """Raises ModelError if a module is of another kind than its style is for."""
    if style in (Style.EXPERT_WIDTH, Style.WHOLE_EXPERTS):
        _check_experts(module, name, child)
        return
    right = isinstance(child, nn.Embedding) if style is Style.VOCABULARY else _can_shard(child)
    if not right:
        refuse(module, f"its plan shards {name}, a {type(child).__name__}")


def _can_shard(child: nn.Module) -> bool:
    """Whether ranks can share a linear layer."""
    method = method_of(child)
    return method is not None and method.can_shard


def _check_experts(module: Any, name: str, child: Any) -> None:
    shapes = {key: parameter.shape for key, parameter in child.named_parameters()}
    gate_up, down = shapes.pop("gate_up_proj", ()), shapes.pop("down_proj", ())
    usual = not shapes and len(gate_up) == len(down) == 3
    if usual:
        count, hidden, width = down
        usual = tuple(gate_up) == (count, 2 * width, hidden)
    gate = getattr(type(child), "_apply_gate", None)
    usual &= gate is None or gate.__name__ == "_default_apply_gate"
    usual &= callable(getattr(child, "act_fn", None))
    usual &= getattr(child, "is_concatenated", True) and not getattr(child, "is_transposed", False)
    usual &= not getattr(child, "has_post_expert_norm", False)
    if not usual:
        refuse(module, f"the experts in {name} ({type(child).__name__}) are of an unusual form")


def check_divisible(module: Any, plan: Mapping[str, Style], size: int, parts: int) -> None:
    """Check that ranks can share heads, experts and widths evenly.

    Args:
        module: The model.
        plan: Its plan.
        size: Ranks.
        parts: Parts of each sharded dimension, a multiple of `size`.

    Raises:
        ModelError: They can't; the message has the number.
    """
    config = module.config.get_text_config()
    shards_heads = any(
        style is Style.COLUMNS and name.endswith(("q_proj", "k_proj", "v_proj"))
        for name, style in plan.items()
    )
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if shards_heads:
        for count, what in ((kv_heads, "KV heads"), (heads, "attention heads")):
            if count % size:
                _refuse_number(module, count, what, size, size)
    for name, style in plan.items():
        child: Any = module.get_submodule(name)
        if style is Style.VOCABULARY or child is module.get_output_embeddings():
            rows = child.weight.shape[0]
            if -(-rows // parts) * (parts - 1) >= rows:
                refuse(module, f"a vocabulary of {rows} is too small for {parts} parts")
        elif style is Style.WHOLE_EXPERTS:
            if child.down_proj.shape[0] % size:
                _refuse_number(module, child.down_proj.shape[0], f"experts in {name}", size, size)
        else:
            width = sharded_width(child, style)
            if width % parts:
                _refuse_number(module, width, f"features to shard in {name}", parts, size)


def sharded_width(child: Any, style: Style) -> int:
    """Return the size of a module's sharded dimension; of one of the two in a packed layer."""
    if style in (Style.EXPERT_WIDTH, Style.WHOLE_EXPERTS):
        width: int = child.down_proj.shape[2]
    elif style in (Style.ROWS, Style.ROWS_OF_WHOLE):
        width = child.in_features
    elif style is Style.COLUMNS_PACKED:
        width = child.out_features // 2
    else:
        width = child.weight.shape[0]
    return width


def _refuse_number(module: Any, count: int, what: str, parts: int, size: int) -> NoReturn:
    possible = [str(each) for each in range(1, parts) if count % each == 0 and parts % each == 0]
    change = f"set engine.tensor_parallel to {' or '.join(possible)}"
    if parts != size:
        change += " and engine.rank_invariant to false"
    sharers = "ranks" if parts == size else "parts"
    refuse(module, f"it has {count} {what}, which {parts} {sharers} can't share evenly", change)


def refuse(module: Any, why: str, change: str = "set engine.tensor_parallel to 1") -> NoReturn:
    """Raises ModelError."""
    raise ModelError(f"{type(module).__name__} can't run on several ranks: {why}; {change}")
