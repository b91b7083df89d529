"""Checks of sampling parameters that few requests have; the first of these loads them."""

from __future__ import annotations

import struct
from itertools import chain

from ...bus.control import ReplicaCapacity
from ...bus.parts.experts import ExpertCapacity
from ...bus.public import mask_ids
from ...config import RequestError, SamplingParams, shown
from ...config.sampling import MAX_PROMPT_TARGETS
from .checks import check_token_ids


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
            f"{vocab_size - 1}, and -1 asks for nothing; give only those",
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
            "prompt_sampling_masks has a packed mask that isn't of 4 bytes for each id",
            code=code,
            remedy="pack 4 bytes for each id",
        )
    lists = [mask_ids(mask) if isinstance(mask, bytes) else mask for mask in masks]
    for ids in lists:
        check_token_ids("prompt_sampling_masks", ids, vocab_size, code)
    return tuple([struct.pack(f"<{len(ids)}i", *ids) for ids in lists])


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
