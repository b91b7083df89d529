"""Errors for arguments and attributes that a class or call does not have: its own names for those
of vLLM and SGLang, and the nearest name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

from .quoting import MOST_SHOWN, field_name, shown

if TYPE_CHECKING:
    from inspect import Signature

_SAME = {
    "model": "model_path",
    "model_name": "model_path",
    "model_name_or_path": "model_path",
    "tensor_parallel_size": "tensor_parallel",
    "tp_size": "tensor_parallel",
    "pipeline_parallel_size": "pipeline_parallel",
    "pp_size": "pipeline_parallel",
    "context_length": "max_model_len",
    "max_num_seqs": "max_batch_size",
    "max_running_requests": "max_batch_size",
    "max_num_batched_tokens": "max_tokens_per_batch",
    "chunked_prefill_size": "max_tokens_per_batch",
    "mem_fraction_static": "gpu_memory_utilization",
    "page_size": "block_size",
    "kv_cache_dtype": "kv_dtype",
    "random_seed": "seed",
    "served_model_name": "model_id",
    "max_loras": "max_adapters",
    "max_lora_rank": "max_adapter_rank",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "stop_sequences": "stop",
    "top_logprobs": "logprobs",
    "n": "num_samples_per_prompt num_samples n",
    "num_return_sequences": "num_samples_per_prompt num_samples n",
    "num_samples": "num_samples_per_prompt n",
    "num_samples_per_prompt": "num_samples n",
    "use_tqdm": "show_progress",
    "params": "sampling_params",
    "lora_request": "adapter",
    "lora_path": "adapter",
    "prompt": "prompts",
    "prompt_token_ids": "prompts prompt",
    "input_ids": "prompts prompt",
    "multi_modal_data": "images",
    "image_data": "images",
}
"""Names here for the same thing; the first that the call has is given."""

_SAMPLES = (
    "give num_samples_per_prompt to generate, num_samples to add_request, or n to AsyncEngine"
)
_FORM = "say constraint=Constraint({})"
_TEXT = "leave it out: text comes without special tokens, and tokens with them"
_OTHER = {
    "n": _SAMPLES,
    "num_return_sequences": _SAMPLES,
    "best_of": f"{_SAMPLES}, and choose by sum(sample.logprobs)",
    "skip_special_tokens": _TEXT,
    "spaces_between_special_tokens": _TEXT,
    "detokenize": _TEXT,
    "guided_json": _FORM.format("json_schema=…"),
    "json_schema": _FORM.format("json_schema=…"),
    "guided_regex": _FORM.format("regex=…"),
    "regex": _FORM.format("regex=…"),
    "guided_choice": _FORM.format("choice=…"),
    "guided_grammar": _FORM.format("lark=…"),
    "ebnf": _FORM.format("gbnf=…"),
    "guided_decoding": _FORM.format("…"),
    "structured_outputs": _FORM.format("…"),
    "do_sample": "say temperature=0 for the likeliest tokens",
    "return_logprob": "leave it out: each sample has logprobs",
    "enable_prefix_caching": "leave it out: prefixes are always cached",
    "enable_lora": "leave it out: call load_adapter, or give adapters",
}

_RENDERER = "ChatRenderer(model)"
_ATTRIBUTES = {
    "tokenizer": f"{_RENDERER} renders conversations by the model's own",
    "get_tokenizer": f"{_RENDERER} renders conversations by the model's own",
    "chat": f"pass {_RENDERER}.render(messages) to generate",
    "encode": "call embed(prompts)",
    "sleep": "call release_memory()",
    "wake_up": "call resume_memory()",
    "collective_rpc": "call update_weights(state_dict)",
    "update_weights_from_tensor": "call update_weights(state_dict)",
    "async_generate": "loop over AsyncEngine(model).generate(prompt)",
}
"""Attributes of other engines, each with what does the same here."""


def unknown_argument(
    what: str,
    given: Mapping[str, Any],
    known: Iterable[str],
    settings: Sequence[str] = (),
    sampling: Sequence[str] = (),
) -> TypeError | None:
    """Return the error for the first given argument that is not known; None if all are.

    Args:
        what: The class or call, for the message.
        given: The arguments by name.
        known: The names that it has.
        settings: Names that its argument `config` has.
        sampling: Names that its argument `sampling_params` has.
    """
    known = list(known)
    for name in given:
        if name not in known:
            instead = _instead(
                name, given[name], known, settings if "config" in known else (), sampling
            )
            return TypeError(f"{what} has no {field_name(name)}; {instead}")
    return None


def unknown_attribute(owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that an engine doesn't have."""
    instead = f"; {_ATTRIBUTES[name]}" if name in _ATTRIBUTES else ""
    message = f"{type(owner).__name__} has no {field_name(name)}{instead}"
    return AttributeError(message, name=name, obj=owner)


def plain_signature(kind: type, whole: Signature) -> Signature:
    """Return the signature of a struct without the ranges and texts in its annotations."""
    plain = get_type_hints(kind)
    parameters = [
        each.replace(annotation=plain.get(name, each.annotation))
        for name, each in whole.parameters.items()
    ]
    return whole.replace(parameters=parameters)


def _instead(
    name: str, value: Any, known: list[str], settings: Sequence[str], sampling: Sequence[str]
) -> str:
    names = _SAME.get(name, "").split()
    for same in names:
        if same in known:
            return f"say {same}={_shown(value)}"
    other = _OTHER.get(name, "")
    if "sampling_params" in known:
        for field in (name, *names):
            if field in sampling:
                return f"say sampling_params=SamplingParams({field}={_shown(value)})"
        if other.startswith("say constraint="):
            return f"say sampling_params=SamplingParams({other.removeprefix('say ')})"
    if other:
        return other
    for setting in (name, *names):
        if setting in settings:
            return f"pass EngineConfig({setting}={_shown(value)})"
    near = difflib.get_close_matches(name[:MOST_SHOWN], known, n=1)
    return f"did you mean {near[0]!r}?" if near else "leave it out"


def _shown(value: object) -> str:
    return shown(value) if isinstance(value, str | int | float) else "…"
