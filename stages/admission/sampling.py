"""Sampling parameters of admitted requests, within the limits of the lane."""

from __future__ import annotations

import itertools

import msgspec
import xxhash

from ...bus.control import ReplicaCapacity
from ...bus.public import GenerateRequest
from ...config import Config, RequestError, SamplingParams, prompt_too_long
from .checks import (
    check_min_tokens,
    check_result_size,
    check_sample_seeds,
)


class SamplingLimits:
    """Cuts max_tokens to what fits, adds the model's stop ids, and normalises a constraint."""

    def __init__(self, config: Config, stop_token_ids: frozenset[int]) -> None:
        """`stop_token_ids`: the model's own."""
        self._stop_token_ids = stop_token_ids
        self._max_result_bytes = config.bus.max_result_bytes
        self._has_reference = bool(config.engine.reference_model_path)
        self._returns_experts = config.engine.return_routed_experts

    def __call__(
        self, request: GenerateRequest, num_prompt_tokens: int, capacity: ReplicaCapacity
    ) -> SamplingParams:
        """Return a request's sampling parameters.

        Raises:
            RequestError: prompt_too_long, exceeds_kv_capacity, invalid_min_tokens,
                result_too_large, invalid_forced_tokens, invalid_prompt_logprob_token_ids,
                invalid_prompt_logprob_start, invalid_prompt_sampling_masks, no_routed_experts,
                invalid_routed_experts_prompt_start.
        """
        sampling = request.sampling
        most = capacity.max_model_len - num_prompt_tokens
        if most < 1:
            raise prompt_too_long(
                capacity.max_model_len,
                f"the prompt has {num_prompt_tokens}",
                f"shorten it to {capacity.max_model_len - 1} or fewer",
            )
        max_tokens = min(sampling.max_tokens, most)
        slots = capacity.num_blocks * capacity.block_size
        if num_prompt_tokens + max_tokens > slots:
            fitting = slots - num_prompt_tokens
            advice = f"lower max_tokens to {fitting}" if fitting >= 1 else "shorten the prompt"
            raise RequestError(
                f"prompt and completion may need {num_prompt_tokens + max_tokens} tokens of KV "
                f"cache and the lane has {slots}; {advice}, or give the engine more memory",
                code="exceeds_kv_capacity",
            )
        if sampling.concerns_prompt:
            from .special_checks import check_targets, packed_masks

            check_targets(sampling, num_prompt_tokens, capacity.vocab_size)
            masks = packed_masks(sampling, num_prompt_tokens, capacity.vocab_size)
            sampling = msgspec.structs.replace(sampling, prompt_sampling_masks=masks)
        stop_token_ids = sampling.stop_token_ids
        if not sampling.ignore_eos:
            stop_token_ids |= self._stop_token_ids
        if sampling.min_tokens:
            check_min_tokens(sampling.min_tokens, stop_token_ids, vocab_size=capacity.vocab_size)
        if (constraint := sampling.constraint) is not None:
            from ...text.grammar import plain

            constraint = plain(constraint)
        resolved = msgspec.structs.replace(
            sampling,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            constraint=constraint,
            return_routed_experts=sampling.return_routed_experts or self._returns_experts,
        )
        experts_bytes = 0
        if resolved.return_routed_experts or resolved.routed_experts_prompt_start:
            from .special_checks import check_experts

            experts_bytes = check_experts(resolved, capacity)
        if resolved.forced_tokens:
            from .special_checks import check_forced_tokens

            check_forced_tokens(resolved)
        check_result_size(
            resolved,
            request.n,
            num_prompt_tokens,
            self._max_result_bytes,
            reference=self._has_reference,
            experts_bytes=experts_bytes,
        )
        return resolved


def seeds_of(request: GenerateRequest, request_id: str, engine_seed: int) -> tuple[int, ...]:
    """Return the seed of each sample.

    Raises:
        RequestError: invalid_sample_seeds.
    """
    if request.sample_seeds:
        return check_sample_seeds(request)
    seed = request.sampling.seed
    base = f"{engine_seed}/{request_id}" if seed is None else str(seed)
    return tuple(map(derive_seed, itertools.repeat(base), range(request.n)))


def derive_seed(base: str, sample_index: int) -> int:
    """Return a sample's seed, 0 to 2**63 - 1: the same on every machine and in every release."""
    return xxhash.xxh3_64_intdigest(f"{base}/{sample_index}".encode()) >> 1
