"""vLLM's sampling parameters, which several interfaces take: their fields, and what they become."""

from __future__ import annotations

from typing import Any

import msgspec

from ...config import Constraint, SamplingParams
from ..server.http import Int64
from .fields import Body, Field, read_known_fields

CALL = "sampling_params"
"""What the table calls them."""

_GREEDY_BELOW = 1e-6
_ALL_TOKENS = 1 << 30


class SamplerFields(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample, but for what has other shapes or defaults in each call."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int64 = 0
    min_p: float = 0.0
    seed: Int64 | None = None
    stop: str | list[str] = ""
    stop_token_ids: list[Int64] = []
    ignore_eos: bool = False
    min_tokens: Int64 = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[Int64, float] = {}
    structured_outputs: dict[str, Any] = {}
    max_draft_tokens: Int64 | None = None


class SamplingFields(SamplerFields, frozen=True, kw_only=True):
    """The same, and what calls have that answer with several samples."""

    n: Int64 = 1
    prompt_logprobs: Int64 | None = None


class SamplingBody(SamplingFields, frozen=True, kw_only=True):
    """All of them, as an object of their own."""

    max_tokens: Int64 | None = None
    logprobs: Int64 | None = None


def _honoured(name: str, what: str) -> Field:
    return Field(name, (CALL,), "honoured", what)


def _harmless(name: str, what: str) -> Field:
    return Field(name, (CALL,), "harmless", what)


def _refused(name: str, why: str) -> Field:
    return Field(name, (CALL,), "refused", why)


FIELDS = (
    _honoured("max_tokens", "tokens that a sample may have; each call has its own default"),
    _honoured("n", "choices of each prompt (1)"),
    _honoured("temperature", "1; 0 is greedy, and so is less than 0.000001"),
    _honoured("top_p", "1 is off"),
    _honoured("top_k", "0 and -1 are off"),
    _honoured("min_p", "0 is off"),
    _honoured("seed", "the same samples each time; signed, 64 bits"),
    _honoured("stop", "a text or up to 16; the text ends before it"),
    _honoured("stop_token_ids", "these tokens end it as well"),
    _honoured("ignore_eos", "goes on past the model's own stop tokens"),
    _honoured("min_tokens", "nothing stops it before so many"),
    _honoured("presence_penalty", "-2 to 2"),
    _honoured("frequency_penalty", "-2 to 2"),
    _honoured("repetition_penalty", "1 is off"),
    _honoured("logit_bias", "by token id, -100 to 100"),
    _honoured("logprobs", "how many of the likeliest tokens to show at each place, up to 20"),
    _honoured(
        "prompt_logprobs",
        "as vLLM's: for each token of the prompt the likeliest tokens and itself, by id; not in a "
        "stream",
    ),
    _honoured(
        "structured_outputs",
        "as vLLM's: one of `json`, `regex`, `choice`, `grammar` and `json_object`",
    ),
    _honoured(
        "max_draft_tokens",
        "ours: most drafted tokens of a sample in one step; 0 for none ([speculation.md]"
        "(speculation.md))",
    ),
    _harmless("spaces_between_special_tokens", "of slow tokenizers"),
    _harmless("detokenize", "the answer has no text"),
    _harmless("skip_special_tokens", "the answer has no text"),
    _harmless("include_stop_str_in_output", "the answer has no text"),
    _harmless("output_kind", "`stream` says it"),
    _harmless("flat_logprobs", "of vLLM's memory"),
    _refused("truncate_prompt_tokens", "prompts are taken whole"),
    _refused("allowed_token_ids", "ask by `logit_bias`"),
    _refused("bad_words", "ask by `logit_bias`"),
)
"""All that are known by name, where the answer is tokens. Any other is refused when it asks for
something."""


def read_sampling_params(given: Body, where: str) -> SamplingBody:
    """The parameters that count.

    Args:
        given: An object of them.
        where: What stands before their names in errors.

    Raises:
        FieldError: One is of the wrong type, or asks for what is not there.
    """
    return read_known_fields(FIELDS, given, SamplingBody, CALL, where)


def sampling_of(
    fields: SamplerFields,
    max_tokens: int,
    constraint: Constraint | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """How to sample.

    Args:
        fields: Those that every call has by these names.
        max_tokens: Of one sample.
        constraint: What the text has to be, by `structured_outputs` or by a field of the call's.
        logprobs: How many of the likeliest tokens to tell of at each place; None for none.
        prompt_logprobs: The same of the prompt; None tells no logprobs of it.
    """
    stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
    return SamplingParams(
        temperature=temperature_of(fields.temperature),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(fields.stop_token_ids),
        top_k=top_k_of(fields.top_k),
        top_p=fields.top_p,
        min_p=fields.min_p,
        seed=fields.seed,
        stop=tuple(text for text in stop if text),
        ignore_eos=fields.ignore_eos,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        logit_bias=fields.logit_bias,
        min_tokens=fields.min_tokens,
        logprobs=logprobs or 0,
        prompt_logprobs=prompt_logprobs,
        constraint=constraint,
        max_draft_tokens=fields.max_draft_tokens,
    )


def temperature_of(given: float) -> float:
    """A client's: next to nothing is greedy."""
    return 0.0 if 0 <= given < _GREEDY_BELOW else given


def top_k_of(given: int) -> int:
    """A client's: -1, and more than any vocabulary has, is off."""
    return 0 if given == -1 or given >= _ALL_TOKENS else given
