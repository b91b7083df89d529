"""Sampling parameters of a body, by the names of its interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec
from msgspec.structs import replace

from ...config import Int64, SamplingParams
from ...config.sampling import PARAMETERS, TYPES
from .constraints import of_structured_outputs, the_one
from .fields import Body, RefusedField, convert_part, note_field, read_part


def _names_in(interface: Literal["vllm", "sglang", "anthropic"]) -> dict[str, str]:
    """Return an interface's names of the parameters that it has, each with ours."""
    given = {name: getattr(each, interface) for name, each in PARAMETERS.items()}
    return {name if own is None else own: name for name, own in given.items() if own != ""}


VLLM, SGLANG, ANTHROPIC = _names_in("vllm"), _names_in("sglang"), _names_in("anthropic")
"""The parameters of an interface: its names, each with that of `SamplingParams`."""

_SAME_IN_OLLAMA = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "stop"),
    *("presence_penalty", "frequency_penalty"),
)
OLLAMA = dict(zip(_SAME_IN_OLLAMA, _SAME_IN_OLLAMA, strict=True)) | {
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}
"""The same of Ollama's options, which are those of its own samplers."""

_OF_PROMPTS = ("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start")
_OF_EXPERTS = ("return_routed_experts", "routed_experts_prompt_start")
_PER_CALL = ("max_tokens", "logprobs", *_OF_PROMPTS, *_OF_EXPERTS)
TEXT_SAMPLING = {name: own for name, own in VLLM.items() if own not in _PER_CALL}
"""Those that have one meaning in all of OpenAI's calls; the others are fields of each body."""

_OF_CHOICES = ("return_sampling_mask", "prompt_sampling_masks")
RESPONSE_SAMPLING = {name: own for name, own in TEXT_SAMPLING.items() if own not in _OF_CHOICES}
"""Those of them that responses have."""

_DEFAULTS = SamplingParams()
_GREEDY_BELOW = 1e-6
_ALL_TOKENS = 1 << 30
_BODY_TYPES = {**TYPES, "stop": str | list[str]}

REFUSED = {
    "allowed_token_ids": RefusedField("ask by `logit_bias`"),
    "bad_words": RefusedField("ask by `logit_bias`"),
    "logits_processors": RefusedField(
        "no program of a caller runs here; ask by `logit_bias` or `structured_outputs`"
    ),
}
"""vLLM's parameters that no call obeys."""

WHOLE = {"truncate_prompt_tokens": RefusedField("prompts are taken whole")}

_NO_TEXT = "the answer has no text"


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's sampling parameters as an object of their own, for answers in tokens."""

    SAMPLING: ClassVar = VLLM
    NEUTRAL: ClassVar = {
        "detokenize": _NO_TEXT,
        "flat_logprobs": "only about vLLM's memory",
        "include_stop_str_in_output": _NO_TEXT,
        "output_kind": "`stream` decides",
        "skip_special_tokens": _NO_TEXT,
        "spaces_between_special_tokens": "only for slow tokenizers",
    }
    REFUSED: ClassVar = REFUSED | WHOLE

    n: Int64 = 1
    logprobs: Int64 | None = None
    structured_outputs: dict[str, Any] = {}


def read_sampling_params(
    given: Body, where: str, max_tokens: int
) -> tuple[SamplingBody, SamplingParams]:
    """Read an object of vLLM's sampling parameters.

    Args:
        where: Its path in the body.
        max_tokens: The default.

    Returns:
        What `SamplingParams` does not have, and the parameters.

    Raises:
        FieldError: A parameter is unknown, unsupported, or of the wrong type.
    """
    fields = read_part(given, SamplingBody, where)
    path = f"{where}.structured_outputs"
    constraint = the_one({path: of_structured_outputs(fields.structured_outputs, path)})
    sampling = read_sampling(given, VLLM, where, max_tokens=max_tokens, constraint=constraint)
    return fields, sampling


def read_sampling(
    given: Body, names: Mapping[str, str], where: str = "", **others: Any
) -> SamplingParams:
    """Read the sampling parameters of a body. Null is a default.

    Args:
        names: The body's names, each with that of `SamplingParams`.
        where: Their path in the body.
        others: Parameters by our names; those of the body have precedence.

    Raises:
        FieldError: A value is of the wrong type.
    """
    for name, own in names.items():
        value = given.get(name)
        if value is not None:
            path = f"{where}.{name}" if where else name
            note_field(own, path)
            others[own] = _adjusted(own, convert_part(value, _BODY_TYPES[own], path))
    return replace(_DEFAULTS, **others)


def _adjusted(parameter: str, value: Any) -> Any:
    """Map the values that clients use for "off" and "greedy" to ours."""
    if parameter == "temperature":
        return 0.0 if 0 <= value < _GREEDY_BELOW else value
    if parameter == "top_k":
        return 0 if value == -1 or value >= _ALL_TOKENS else value
    if parameter == "stop":
        return tuple(text for text in ([value] if isinstance(value, str) else value) if text)
    return value
