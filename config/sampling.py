"""Sampling parameters: one table of their types, defaults, ranges, and names in each interface."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain, compress, takewhile
from operator import attrgetter, is_not, ne
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec

from .base import FrozenDict, Range, Settings, SettingsMeta
from .errors import ParameterError
from .quoting import shown

MAX_INT64 = 2**63 - 1

Int64 = Annotated[int, msgspec.Meta(ge=-MAX_INT64 - 1, le=MAX_INT64)]
"""An integer that fits 64 bits, signed. JSON has larger ones, which MessagePack can't carry."""

MAX_LOGPROBS = 100
MAX_PROMPT_LOGPROBS = 100
MAX_PROMPT_TARGETS = 1024
"""Most targets at a position of a prompt."""


class _CheckedWhenCalled(SettingsMeta):
    """Checks the parameters that Python callers make. Decoding and `msgspec.structs.replace` don't
    call the class, so admission checks them again."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        made = super().__call__(*args, **fields)
        made.check_call()
        return made


class Constraint(Settings, frozen=True, omit_defaults=True, metaclass=_CheckedWhenCalled):
    """Constrained decoding: exactly one of these, or ParameterError. docs/constraints.md.

    Attributes:
        json_object: Any JSON object.
        json_schema: JSON that this schema describes; an object, or its text.
        regex: Text that this regular expression matches as a whole (Rust's `regex` crate).
        choice: One of these texts.
        lark: Text of this grammar, in llguidance's form of Lark.
        gbnf: Text of this grammar, in llama.cpp's form.
    """

    json_object: bool = False
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    lark: str | None = None
    gbnf: str | None = None

    def check_call(self) -> None:
        """Raises ParameterError: a type is wrong, or not exactly one kind is given."""
        from .sampling_checks import check_constraint

        check_constraint(self)


class Parameter(NamedTuple):
    """A row of the table, beside the parameter's name, type and default.

    Attributes:
        meaning: Its line in the documents of the HTTP interfaces.
        range: None where admission has a check of its own, or every value is accepted.
        vllm, sglang, anthropic: Its name in an interface: None for the same name, "" for none.
            vLLM's names are those of OpenAI's and KServe's interfaces.
    """

    meaning: str
    range: Range | None = None
    vllm: str | None = None
    sglang: str | None = None
    anthropic: str | None = ""


_ANY_PENALTY = Range("from -2 to 2; 0 is off", -2, 2)
_NO_BIAS: FrozenDict[int, float] = FrozenDict()


class SamplingParams(Settings, frozen=True, omit_defaults=True, metaclass=_CheckedWhenCalled):
    """Sampling of one request. Immutable. A wrong value raises ParameterError, a RequestError and
    ValueError; what depends on the model, such as the size of the vocabulary, is checked where it
    is used.

    The steps from logits to a token, and the definition of the reported logprobs, are in
    docs/sampling.md.

    Attributes:
        temperature: 0 is greedy.
        max_tokens: Most tokens to generate; the model's length limit applies too.
        stop_token_ids: Generation ends when one of these is sampled. The model's own
            end-of-sequence ids are added unless `ignore_eos`.
        top_k: Sample among the k likeliest tokens; 0 is off, and so is -1.
        top_p: Sample among the fewest tokens whose probabilities reach this sum; 1 is off.
        min_p: Drop tokens below this share of the likeliest token's probability; 0 is off.
        seed: Makes the samples repeatable, in any batch.
        stop: Generation ends before the first of these strings, which is not delivered.
        ignore_eos: Go on past the model's end-of-sequence ids.
        repetition_penalty: Logits of tokens in the prompt or generated so far are divided by this
            when positive and multiplied when negative; 1 is off.
        presence_penalty: Subtracted from the logits of tokens generated so far; 0 is off.
        frequency_penalty: The same, times how often each was generated; 0 is off.
        logit_bias: Added to the logits of these token ids.
        min_tokens: No stop token is sampled, and no stop string searched for, before so many.
        logprobs: Report so many of the likeliest tokens at each place, beside the sampled one's
            logprob, which is always reported.
        prompt_logprobs: Report the logprobs of the prompt's tokens, and so many of the likeliest
            at each place; None is off. The prompt is then computed from `prompt_logprob_start` on.
        constraint: The form of the text; None for any. A sample that ends with "stop" is
            complete, one that ends with "length" was cut off.
        max_draft_tokens: Most drafted tokens of a sample in one step, where the engine speculates;
            None for as many as it takes, 0 for none. It changes no token and no logprob.
        response_cache: Whether the response may come from the response cache, and be kept there,
            where the engine has one. It changes no token and no logprob.
        return_sampling_mask: Report each position's support, the tokens that could be sampled
            there, as their ids.
        prompt_sampling_masks: Sampling masks of the prompt's last tokens, packed or as lists of
            ids; an empty one stands for all tokens. Their logprobs are of the distribution within
            these supports: that of a sample that was drawn under limits.
        return_routed_experts: Report the experts that the routers of a mixture chose for each
            token, in each layer. The prompt is computed from `routed_experts_prompt_start` on.
        routed_experts_prompt_start: Report them from this position of the prompt on; the KV of what
            comes before may be cached.
        forced_tokens: The first tokens of each sample, in place of sampled ones: computed and
            reported as if they had been sampled. Sampling goes on after them.
        prompt_logprob_token_ids: Targets: token ids whose logprobs are reported at positions of the
            prompt. List i is for position `prompt_logprob_start + 1 + i`; there is one for each
            position from there to the prompt's end. An empty list asks for nothing at its position,
            and neither does an id of -1.
        prompt_logprob_start: Report no logprobs of the prompt up to this position, whose KV may
            then come from the prefix cache.
    """

    # Between 0 and 1e-4, and above 1e4, scaled logits leave float32: logprobs would be NaN.
    temperature: Annotated[
        float,
        Parameter(
            "1; 0 is greedy, and so is less than 0.000001",
            Range("0 (greedy) or from 0.0001 to 10000", 1e-4, 1e4, also=0),
            anthropic=None,
        ),
    ] = 1.0
    max_tokens: Annotated[
        Int64,
        Parameter(
            "most tokens of a sample; each call has its own default",
            Range("at least 1", 1),
            sglang="max_new_tokens",
            anthropic=None,
        ),
    ] = 256
    stop_token_ids: Annotated[frozenset[Int64], Parameter("these tokens end a sample as well")] = (
        frozenset()
    )
    top_k: Annotated[
        Int64,
        Parameter(
            "0 and -1 are off", Range("0 (off) or a number of tokens", 0, MAX_INT64), anthropic=None
        ),
    ] = 0
    top_p: Annotated[
        float,
        Parameter(
            "1 is off", Range("above 0 and at most 1 (off)", math.ulp(0.0), 1), anthropic=None
        ),
    ] = 1.0
    min_p: Annotated[float, Parameter("0 is off", Range("from 0 (off) to 1", 0, 1))] = 0.0
    seed: Annotated[
        Int64 | None,
        Parameter(
            "the same samples each time; signed, 64 bits",
            Range("a signed 64-bit integer, or absent", -MAX_INT64 - 1, MAX_INT64),
            sglang="sampling_seed",
            anthropic=None,
        ),
    ] = None
    stop: Annotated[
        tuple[str, ...],
        Parameter("a text or up to 16; the text ends before it", anthropic="stop_sequences"),
    ] = ()
    ignore_eos: Annotated[bool, Parameter("goes on past the model's own stop tokens")] = False
    # Below 1e-4 scaled logits leave float32, as with the temperature.
    repetition_penalty: Annotated[
        float, Parameter("1 is off", Range("from 0.0001 to 10; 1 is off", 1e-4, 10))
    ] = 1.0
    presence_penalty: Annotated[float, Parameter("-2 to 2", _ANY_PENALTY)] = 0.0
    frequency_penalty: Annotated[float, Parameter("-2 to 2", _ANY_PENALTY)] = 0.0
    logit_bias: Annotated[dict[Int64, float], Parameter("by token id, -100 to 100")] = _NO_BIAS
    min_tokens: Annotated[
        Int64, Parameter("no stop before so many tokens", sglang="min_new_tokens")
    ] = 0
    logprobs: Annotated[
        Int64,
        Parameter(
            "how many of the likeliest tokens to show at each place, up to 100",
            Range(f"from 0 to {MAX_LOGPROBS}", 0, MAX_LOGPROBS),
            sglang="",
        ),
    ] = 0
    prompt_logprobs: Annotated[
        Int64 | None,
        Parameter(
            "as vLLM's: for each token of the prompt the likeliest tokens, up to 100, and itself, "
            "by id; not in a stream",
            Range(f"from 0 to {MAX_PROMPT_LOGPROBS}, or absent", 0, MAX_PROMPT_LOGPROBS),
            sglang="",
        ),
    ] = None
    constraint: Annotated[Constraint | None, Parameter("", vllm="", sglang="")] = None
    max_draft_tokens: Annotated[
        Int64 | None,
        Parameter(
            "not vLLM's: most drafted tokens of a sample in one step; 0 for none "
            "([speculation.md](speculation.md))",
            Range("0 (none) or a number of tokens, or absent", 0, MAX_INT64),
        ),
    ] = None
    response_cache: Annotated[
        bool,
        Parameter(
            "ours: false computes the response anew and keeps it out of the response cache "
            "([response-cache.md](response-cache.md))",
            anthropic=None,
        ),
    ] = True
    return_sampling_mask: Annotated[
        bool,
        Parameter(
            "returns for each token the ids that could be sampled there "
            "([sampling.md](sampling.md#sampling-masks))"
        ),
    ] = False
    forced_tokens: Annotated[
        tuple[Int64, ...],
        Parameter(
            "ours: the first tokens of each sample, reported as if they had been sampled "
            "([sampling.md](sampling.md#forced-tokens))"
        ),
    ] = ()
    prompt_logprob_token_ids: Annotated[
        tuple[tuple[Int64, ...], ...] | None,
        Parameter(
            "as vLLM's: for each position of the prompt after `prompt_logprob_start` a list of "
            "token ids whose logprobs are returned there as `prompt_token_id_logprobs`; -1 is "
            "padding; not in a stream",
            sglang="",
        ),
    ] = None
    prompt_logprob_start: Annotated[
        Int64,
        Parameter(
            "logprobs of the prompt begin after this position; 0 is all of them",
            Range("0 or a position of the prompt", 0, MAX_INT64),
            sglang="",
        ),
    ] = 0
    prompt_sampling_masks: Annotated[
        tuple[bytes | tuple[Int64, ...], ...] | None,
        Parameter(
            "ours: for each of the prompt's last tokens the ids among which it was sampled, as a "
            "list or as `sampling_masks` has them: its logprobs are of these alone"
        ),
    ] = None

    return_routed_experts: Annotated[
        bool,
        Parameter(
            "returns the experts that the routers of a mixture chose for each token as "
            "`routed_experts`",
            sglang="",
        ),
    ] = False
    routed_experts_prompt_start: Annotated[
        Int64,
        Parameter(
            "as vLLM's: the position of the prompt from which on `routed_experts` are returned",
            Range("0 or a position of the prompt", 0, MAX_INT64),
            sglang="",
        ),
    ] = 0

    @property
    def is_limited(self) -> bool:
        """Whether top_k, top_p or min_p restricts the choice."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def concerns_prompt(self) -> bool:
        """Whether a parameter is about logprobs of the prompt."""
        start, masks = self.prompt_logprob_start, self.prompt_sampling_masks
        return self.scores_prompt or bool(start) or masks is not None

    @property
    def scores_prompt(self) -> bool:
        """Whether logprobs at positions of the prompt are wanted."""
        return self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None

    @property
    def first_scored(self) -> int:
        """The first position of the prompt whose logits are read."""
        if self.prompt_logprobs is not None or self.prompt_logprob_token_ids is None:
            return self.prompt_logprob_start
        rows = takewhile(asks_for_nothing, self.prompt_logprob_token_ids)
        return self.prompt_logprob_start + sum(1 for _ in rows)

    @property
    def num_targets(self) -> int | None:
        """The number of targets in the prompt, padding not counted; None if none were given."""
        if self.prompt_logprob_token_ids is None:
            return None
        return sum(each >= 0 for each in chain.from_iterable(self.prompt_logprob_token_ids))

    def check_call(self) -> None:
        """Check types and ranges. Raises ParameterError."""
        for name in compress(_FIELDS, map(is_not, _all_of(self), _ALL_DEFAULTS)):
            from .sampling_checks import take

            take(self, name, TYPES[name], RANGES.get(name))
        check_ranges(self)

    def __post_init__(self) -> None:
        """Copy collections, so that a caller who changes its own does not change these.

        Values of a wrong type stay, for the check of types.
        """
        if type(self.stop_token_ids) is not frozenset:
            self._freeze("stop_token_ids", frozenset, list | tuple | set)
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        elif type(self.stop) is not tuple:
            self._freeze("stop", tuple, list | set | frozenset)
        if type(self.forced_tokens) is not tuple:
            self._freeze("forced_tokens", tuple, list)
        if type(self.logit_bias) is not FrozenDict:
            self._freeze("logit_bias", FrozenDict, dict)
        for name in ("prompt_logprob_token_ids", "prompt_sampling_masks"):
            if (lists := getattr(self, name)) is not None:
                if hasattr(lists, "tolist"):  # an array or a tensor
                    lists = lists.tolist()
                if isinstance(lists, list | tuple):
                    rows = [tuple(row) if isinstance(row, list) else row for row in lists]
                    msgspec.structs.force_setattr(self, name, tuple(rows))

    def _freeze(self, name: str, kind: type, taken: Any) -> None:
        given = getattr(self, name)
        if isinstance(given, taken):
            with suppress(TypeError):  # elements without a hash
                msgspec.structs.force_setattr(self, name, kind(given))


def asks_for_nothing(targets: Sequence[int]) -> bool:
    """Return whether targets of a position are padding alone."""
    return max(targets, default=-1) < 0


_HINTS = get_type_hints(SamplingParams, include_extras=True)
_FIELDS = SamplingParams.__struct_fields__

PARAMETERS: Mapping[str, Parameter] = {name: _HINTS[name].__metadata__[-1] for name in _FIELDS}
"""The rows of the table, by the names of `SamplingParams`."""

TYPES: Mapping[str, Any] = {name: _HINTS[name] for name in _FIELDS}
"""The types of the parameters, as msgspec takes them."""

RANGES: Mapping[str, Range] = {
    name: each.range for name, each in PARAMETERS.items() if each.range is not None
}

_all_of = attrgetter(*_FIELDS)
_numbers_of = attrgetter(*RANGES)
_DEFAULTS = msgspec.convert({}, SamplingParams)
_ALL_DEFAULTS, _NUMBERS = _all_of(_DEFAULTS), _numbers_of(_DEFAULTS)


def check_ranges(params: SamplingParams) -> None:
    """Check all that needs no model, of parameters of the right types.

    Raises:
        ParameterError: invalid_max_tokens, invalid_temperature, invalid_top_k, invalid_top_p,
            invalid_min_p, invalid_seed, invalid_stop, invalid_repetition_penalty,
            invalid_presence_penalty, invalid_frequency_penalty, invalid_logit_bias,
            invalid_min_tokens, invalid_logprobs, invalid_prompt_logprobs, invalid_constraint,
            invalid_max_draft_tokens.
    """
    # NaN differs from every default.
    wrong = [
        outside(name, value, RANGES[name].wanted)
        for name in compress(RANGES, map(ne, _numbers_of(params), _NUMBERS))
        if (value := getattr(params, name)) is not None and not RANGES[name].holds(value)
    ]
    if wrong or params.min_tokens or params.stop or params.logit_bias or params.constraint:
        from .sampling_checks import check_rare

        check_rare(params, wrong)


def outside(name: str, value: object, wanted: str) -> ParameterError:
    """Return the error for a number outside its range."""
    message = f"{name} is {shown(value)}; it must be {wanted}"
    return ParameterError(message, param=name, code=f"invalid_{name}")
