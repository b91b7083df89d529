"""Checks of a request without its text. One error code per cause."""

from __future__ import annotations

import struct
from collections.abc import Collection
from itertools import chain, compress
from operator import attrgetter, ne

from ...bus.control import ReplicaCapacity
from ...bus.entries import (
    MAX_REQUEST_ID_LENGTH,
    Malformed,
    RequestEntry,
    is_unicode,
    is_usable_request_id,
)
from ...bus.parts.experts import ExpertCapacity
from ...bus.public import GenerateRequest, mask_ids
from ...config import MAX_INT64, RequestError, SamplingParams, shown
from ...config.sampling import MAX_PROMPT_TARGETS, RANGES

_values_of = attrgetter(*RANGES)
_DEFAULTS = _values_of(SamplingParams())

MAX_TENANT_LENGTH = 128
MAX_CACHE_SALT_LENGTH = 256
MAX_PRIORITY = 1000
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_LOGIT_BIAS = 100
MAX_BIASED_TOKENS = 1024

# Of a result as JSON, commas included: the most characters that each can have.
COMPLETION_BYTES = 5120
TOKEN_ID_BYTES = 8
LOGPROB_BYTES = 25
TEXT_BYTES = 16
TARGET_BYTES = 6
TOP_LOGPROB_BYTES = len('{"token_id":,"logprob":},') + TOKEN_ID_BYTES + LOGPROB_BYTES


def request_id_of(entry: RequestEntry) -> str:
    """Return the id under which an entry runs: its own if usable, else the entry's."""
    own = entry.request.request_id
    # As `is_usable_request_id`, inline: this is called six times for each request.
    usable = 0 < len(own) <= MAX_REQUEST_ID_LENGTH and own.isprintable()
    return own if usable else entry.entry_id


def check_owner(entry: RequestEntry, owner: str | None) -> None:
    """Check that an entry may use its request id; `owner` as in `AdmissionCore.admit`.

    This check comes first: any other refusal is written to the result stream of that id, which
    would be another request's.

    Raises:
        RequestError: duplicate_request.
    """
    if owner not in (None, entry.entry_id):
        raise RequestError(
            f"a request {request_id_of(entry)!r} is in flight or has its output still stored; "
            f"choose another request_id, or leave it empty",
            code="duplicate_request",
        )


def readable(entry: RequestEntry) -> GenerateRequest:
    """Return an entry's request.

    Raises:
        RequestError: It can't be read, or its id can't be used.
    """
    request = entry.request
    if isinstance(request, Malformed):
        raise RequestError(request.message, code=request.code)
    if request.request_id and not is_usable_request_id(request.request_id):
        raise RequestError(
            f"request_id must be 1 to {MAX_REQUEST_ID_LENGTH} printable characters, or empty",
            code="invalid_request_id",
        )
    return request


def check_request(request: GenerateRequest, *, max_samples: int) -> None:
    """Check all fields but the model, the prompt and those of `sampling`.

    Raises:
        RequestError: invalid_tenant, invalid_priority, invalid_budget,
            invalid_cache_salt, invalid_n.
    """
    if not (0 < len(request.tenant) <= MAX_TENANT_LENGTH and request.tenant.isprintable()):
        raise RequestError(
            f"tenant is {shown(request.tenant)}; it must be 1 to {MAX_TENANT_LENGTH} printable "
            f"characters",
            code="invalid_tenant",
        )
    if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        raise _outside("priority", request.priority, f"from {-MAX_PRIORITY} to {MAX_PRIORITY}")
    if request.budget_ns is not None and request.budget_ns > MAX_INT64:
        raise RequestError(
            f"budget_ns is {shown(request.budget_ns)}; it must fit 64 bits. Leave it out for no "
            f"deadline",
            code="invalid_budget",
        )
    if len(request.cache_salt) > MAX_CACHE_SALT_LENGTH or not is_unicode(request.cache_salt):
        raise RequestError(
            f"cache_salt is {shown(request.cache_salt)}; it must be text of at most "
            f"{MAX_CACHE_SALT_LENGTH} characters",
            code="invalid_cache_salt",
        )
    if not 1 <= request.n <= max_samples:
        raise _outside("n", request.n, f"from 1 to {max_samples} (admission.max_samples)")


def check_sample_seeds(request: GenerateRequest) -> tuple[int, ...]:
    """Return the seeds that a request gives its samples.

    Raises:
        RequestError: invalid_sample_seeds.
    """
    seeds = request.sample_seeds
    if len(seeds) != request.n:
        raise RequestError(
            f"sample_seeds has {len(seeds)} seeds and n is {request.n}; give one for each sample, "
            "or none",
            code="invalid_sample_seeds",
        )
    if (least := min(seeds)) < 0:
        raise _outside("sample_seeds", least, "seeds of a completion's recipe, 0 or more")
    return seeds


def check_no_text(request: GenerateRequest) -> None:
    """Refuse fields that need a tokenizer, for a model without one.

    Raises:
        RequestError: no_tokenizer.
    """
    given = {
        "prompt": request.prompt is not None,
        "messages": request.messages is not None,
        "sampling.stop": bool(request.sampling.stop),
        "sampling.constraint": request.sampling.constraint is not None,
        "prediction": isinstance(request.prediction, str),
    }
    for name, is_given in given.items():
        if is_given:
            raise RequestError(
                f"{name} takes a tokenizer, and the model has none; leave it out, and give the "
                "prompt as prompt_token_ids, and what is predicted as token ids",
                code="no_tokenizer",
            )


def check_sampling(sampling: SamplingParams, *, vocab_size: int) -> None:
    """Check every range of SamplingParams; most are in the table of `config/sampling.py`.

    Raises:
        RequestError: invalid_max_tokens, invalid_temperature, invalid_top_k, invalid_top_p,
            invalid_min_p, invalid_seed, invalid_stop, invalid_stop_token_ids,
            invalid_repetition_penalty, invalid_presence_penalty, invalid_frequency_penalty,
            invalid_logit_bias, invalid_min_tokens, invalid_logprobs, invalid_prompt_logprobs,
            invalid_constraint, invalid_max_draft_tokens, invalid_forced_tokens.
    """
    p = sampling
    # NaN differs from every default.
    for name in compress(RANGES, map(ne, _values_of(p), _DEFAULTS)):
        value, allowed = getattr(p, name), RANGES[name]
        if value is not None and not allowed.holds(value):
            raise _outside(name, value, allowed.wanted)
        if name in ("logprobs", "prompt_logprobs") and value > vocab_size:
            raise _outside(name, value, f"from 0 to {vocab_size}")
    if p.stop:
        _check_stop(p.stop)
    check_token_ids("stop_token_ids", p.stop_token_ids, vocab_size, "invalid_stop_token_ids")
    if p.forced_tokens:
        check_token_ids("forced_tokens", p.forced_tokens, vocab_size, "invalid_forced_tokens")
    if p.logit_bias:
        _check_logit_bias(p.logit_bias, vocab_size)
    if not 0 <= p.min_tokens <= p.max_tokens:
        wanted = f"from 0 to max_tokens ({shown(p.max_tokens)})"
        raise _outside("min_tokens", p.min_tokens, wanted)
    if p.constraint is not None and (p.ignore_eos or p.min_tokens):
        raise RequestError(
            "a constraint ends with the model's end-of-sequence token, which ignore_eos and "
            "min_tokens forbid; leave these out",
            code="invalid_constraint",
        )


def check_targets(sampling: SamplingParams, num_prompt_tokens: int, vocab_size: int) -> None:
    """Check the targets of a prompt, and where its logprobs begin.

    Raises:
        RequestError: invalid_prompt_logprob_token_ids, invalid_prompt_logprob_start.
    """
    start, targets = sampling.prompt_logprob_start, sampling.prompt_logprob_token_ids
    if start and not sampling.scores_prompt:
        raise RequestError(
            f"prompt_logprob_start is {start}, and no logprobs of the prompt are asked for; give "
            "prompt_logprobs or prompt_logprob_token_ids, or leave it out",
            code="invalid_prompt_logprob_start",
        )
    if targets is None:
        return
    code = "invalid_prompt_logprob_token_ids"
    if len(targets) != (number := max(num_prompt_tokens - 1 - start, 0)):
        raise RequestError(
            f"prompt_logprob_token_ids has {len(targets)} lists; a prompt of {num_prompt_tokens} "
            f"tokens has {number} positions after prompt_logprob_start ({start}), and one list is "
            "for each: give an empty one where nothing is asked for",
            code=code,
        )
    if (most := max(map(len, targets), default=0)) > MAX_PROMPT_TARGETS:
        raise RequestError(
            f"prompt_logprob_token_ids has a list of {most} ids; at most {MAX_PROMPT_TARGETS} are "
            "taken at a position",
            code=code,
        )
    ids = [*chain.from_iterable(targets)]
    if ids and (min(ids) < -1 or max(ids) >= vocab_size):
        bad = min(ids) if min(ids) < -1 else max(ids)
        raise RequestError(
            f"prompt_logprob_token_ids holds token id {shown(bad)}; the model's are 0 to "
            f"{vocab_size - 1}, and -1 asks for nothing",
            code=code,
        )


def check_experts(sampling: SamplingParams, capacity: ReplicaCapacity) -> int:
    """Check that routed experts can be returned; return the bytes of one token's, as packed.

    Raises:
        RequestError: no_routed_experts, invalid_routed_experts_prompt_start.
    """
    if not sampling.return_routed_experts:
        raise RequestError(
            f"routed_experts_prompt_start is {sampling.routed_experts_prompt_start} without "
            "return_routed_experts; give both, or leave it out",
            code="invalid_routed_experts_prompt_start",
        )
    experts = ExpertCapacity.find(capacity.parts)
    why = "the model is no mixture of experts" if experts is None else experts.why_not_reported
    if experts is None or why:
        raise RequestError(
            f"return_routed_experts is not possible here: {why}; leave it out",
            code="no_routed_experts",
        )
    return 2 * experts.layers * experts.top_k


def packed_masks(
    sampling: SamplingParams, num_prompt_tokens: int, vocab_size: int
) -> tuple[bytes, ...] | None:
    """Check the sampling masks of a prompt, and return them packed.

    Raises:
        RequestError: invalid_prompt_sampling_masks.
    """
    masks, code = sampling.prompt_sampling_masks, "invalid_prompt_sampling_masks"
    if masks is None:
        return None
    if not sampling.scores_prompt:
        raise RequestError(
            "prompt_sampling_masks are given, and no logprobs of the prompt are asked for; give "
            "prompt_logprobs as well",
            code=code,
        )
    if len(masks) >= num_prompt_tokens:
        raise RequestError(
            f"prompt_sampling_masks has {len(masks)} masks, and a prompt of {num_prompt_tokens} "
            "tokens has a logprob for each but the first; give those of the last tokens",
            code=code,
        )
    if any(isinstance(mask, bytes) and len(mask) % 4 for mask in masks):
        raise RequestError(
            "prompt_sampling_masks has a packed mask that isn't of 4 bytes for each id", code=code
        )
    lists = [mask_ids(mask) if isinstance(mask, bytes) else mask for mask in masks]
    for ids in lists:
        check_token_ids("prompt_sampling_masks", ids, vocab_size, code)
    return tuple([struct.pack(f"<{len(ids)}i", *ids) for ids in lists])


def check_token_ids(name: str, ids: Collection[int], vocab_size: int, code: str) -> None:
    """Raise RequestError with this code if an id is outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = min(ids) if min(ids) < 0 else max(ids)
        raise RequestError(
            f"{name} holds token id {shown(bad)}; the model's are 0 to {vocab_size - 1}", code=code
        )


def check_min_tokens(min_tokens: int, stop_token_ids: frozenset[int], *, vocab_size: int) -> None:
    """Check that a token can be sampled while `min_tokens` forbids the stop tokens.

    Args:
        min_tokens: The request's.
        stop_token_ids: Its own and the model's.
        vocab_size: Rows of the output layer.

    Raises:
        RequestError: invalid_min_tokens.
    """
    if min_tokens and sum(0 <= token_id < vocab_size for token_id in stop_token_ids) == vocab_size:
        raise RequestError(
            f"min_tokens is {min_tokens}, but every token is a stop token, so that none could be "
            f"sampled; lower it to 0, or give fewer stop_token_ids",
            code="invalid_min_tokens",
        )


def check_forced_tokens(sampling: SamplingParams) -> None:
    """Check the forced tokens of a request, whose other parameters are resolved.

    Raises:
        RequestError: invalid_forced_tokens.
    """
    forced, stops = sampling.forced_tokens, sampling.stop_token_ids
    wrong, end = "", len(forced) - 1
    if len(forced) > sampling.max_tokens:
        wrong = f"they are {len(forced)}, and at most max_tokens ({sampling.max_tokens}) can follow"
    elif (first := next((i for i, each in enumerate(forced) if each in stops), end)) < end:
        wrong = (
            f"token {forced[first]} at position {first} is a stop token, which would end the "
            "sample before the rest; leave out the rest, or set ignore_eos"
        )
    elif forced[end] in stops and end < sampling.min_tokens:
        wrong = f"the last one is a stop token, and min_tokens ({sampling.min_tokens}) forbids it"
    if wrong:
        raise RequestError(
            f"forced_tokens can't follow the prompt: {wrong}", code="invalid_forced_tokens"
        )


def result_bytes(
    sampling: SamplingParams,
    n: int,
    num_prompt_tokens: int,
    *,
    reference: bool = False,
    experts_bytes: int = 0,
) -> int:
    """Return the largest expected size of a Completion's JSON.

    Numbers count with their most characters, text with `TEXT_BYTES` per token, more than readable
    text has; a larger Completion the bus replaces by an error. `reference`: whether there is a
    reference model, which adds a second logprob to each.
    """
    logprob = LOGPROB_BYTES * (2 if reference else 1)
    token = TOKEN_ID_BYTES + logprob + TEXT_BYTES + _tops_bytes(sampling.logprobs)
    if sampling.is_limited:
        token += LOGPROB_BYTES
    size = COMPLETION_BYTES + num_prompt_tokens * TOKEN_ID_BYTES + n * sampling.max_tokens * token
    if sampling.prompt_logprobs is not None:
        ranks = TOKEN_ID_BYTES if sampling.prompt_logprobs else 0
        size += num_prompt_tokens * (logprob + ranks + _tops_bytes(sampling.prompt_logprobs))
    if (targets := sampling.prompt_logprob_token_ids) is not None:
        # The recipe repeats them.
        size += sum(map(len, targets)) * (TARGET_BYTES + TOKEN_ID_BYTES) + len("[],") * len(targets)
    if experts_bytes:
        size += (num_prompt_tokens + n * sampling.max_tokens) * (experts_bytes * 4 // 3 + 7)
    return size


def check_result_size(
    sampling: SamplingParams,
    n: int,
    num_prompt_tokens: int,
    max_bytes: int,
    *,
    reference: bool = False,
    experts_bytes: int = 0,
) -> None:
    """Check that the bus carries a request's result; `max_tokens` is cut to what fits already.

    Raises:
        RequestError: result_too_large.
    """
    size = result_bytes(
        sampling, n, num_prompt_tokens, reference=reference, experts_bytes=experts_bytes
    )
    if size > max_bytes:
        raise RequestError(
            f"the result may have {size} bytes and at most {max_bytes} are carried "
            f"(bus.max_result_bytes); lower n ({n}), max_tokens ({sampling.max_tokens}), logprobs "
            f"({sampling.logprobs}) or prompt_logprobs ({sampling.prompt_logprobs}), or give a "
            f"shorter prompt ({num_prompt_tokens} tokens)",
            code="result_too_large",
        )


def _tops_bytes(number: int) -> int:
    """Size of the top logprobs at one position."""
    return len("[],") + number * TOP_LOGPROB_BYTES if number else 0


def _check_logit_bias(logit_bias: dict[int, float], vocab_size: int) -> None:
    wrong = ""
    if len(logit_bias) > MAX_BIASED_TOKENS:
        wrong = f"it holds {len(logit_bias)} tokens; at most {MAX_BIASED_TOKENS} are taken"
    elif bad := [i for i in logit_bias if not 0 <= i < vocab_size]:
        wrong = f"it holds token {shown(bad[0])}; the model's token ids are 0 to {vocab_size - 1}"
    else:
        for token_id, bias in logit_bias.items():
            if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                wrong = (
                    f"the bias of token {token_id} is {shown(bias)}; it must be from "
                    f"{-MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}"
                )
                break
    if wrong:
        raise RequestError(f"logit_bias can't be used: {wrong}", code="invalid_logit_bias")


def _check_stop(stop: tuple[str, ...]) -> None:
    wrong = ""
    if len(stop) > MAX_STOP_STRINGS:
        wrong = f"it holds {len(stop)} strings; at most {MAX_STOP_STRINGS} are taken"
    elif not all(stop):
        wrong = "it holds an empty string, which would stop at once; leave that out"
    elif not all(map(is_unicode, stop)):
        wrong = "it holds a lone surrogate, which no text of the model's can match"
    elif any(len(string.encode()) > MAX_STOP_BYTES for string in stop):
        wrong = f"a string in it is longer than {MAX_STOP_BYTES} bytes"
    if wrong:
        raise RequestError(f"stop can't be used: {wrong}", code="invalid_stop")


def _outside(name: str, value: float, wanted: str) -> RequestError:
    """Return the error for a number outside its range."""
    return RequestError(f"{name} is {shown(value)}; it must be {wanted}", code=f"invalid_{name}")
