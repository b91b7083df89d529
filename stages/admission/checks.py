"""Checks of a request without its text. One error code per cause."""

from __future__ import annotations

from collections.abc import Collection

from ...bus.entries import (
    MAX_REQUEST_ID_LENGTH,
    Malformed,
    RequestEntry,
    is_usable_request_id,
)
from ...bus.public import GenerateRequest
from ...config import MAX_INT64, MAX_PRIORITY, RequestError, SamplingParams, shown
from ...config.quoting import is_unicode
from ...config.sampling import check_ranges
from ...config.sampling import outside as _outside

MAX_TENANT_LENGTH = 128
MAX_CACHE_SALT_LENGTH = 256

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
        most = f"from 1 to {max_samples} (admission.max_samples); raise that, or send more requests"
        raise _outside("n", request.n, most)


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
    """Check every range of SamplingParams, and token ids by the vocabulary.

    Raises:
        RequestError: As `config.sampling.check_ranges`; invalid_stop_token_ids,
            invalid_forced_tokens, invalid_logit_bias, invalid_logprobs, invalid_prompt_logprobs.
    """
    p = sampling
    check_ranges(p)
    if p.logprobs > vocab_size:
        raise _outside("logprobs", p.logprobs, f"from 0 to {vocab_size}")
    if p.prompt_logprobs and p.prompt_logprobs > vocab_size:
        raise _outside("prompt_logprobs", p.prompt_logprobs, f"from 0 to {vocab_size}")
    check_token_ids("stop_token_ids", p.stop_token_ids, vocab_size, "invalid_stop_token_ids")
    if p.forced_tokens:
        check_token_ids("forced_tokens", p.forced_tokens, vocab_size, "invalid_forced_tokens")
    if p.logit_bias:
        check_token_ids("logit_bias", p.logit_bias, vocab_size, "invalid_logit_bias")


def check_token_ids(name: str, ids: Collection[int], vocab_size: int, code: str) -> None:
    """Raise RequestError with this code if an id is outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = min(ids) if min(ids) < 0 else max(ids)
        raise RequestError(
            f"{name} holds token id {shown(bad)}; the model's are 0 to {vocab_size - 1}",
            code=code,
            remedy="tokenise by the model's tokenizer",
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
