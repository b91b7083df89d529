"""What a trainer and an engine agree on: what the engine does, and the samples that it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from ..bus.public import FinishReason, TokenLogprob
from ..config import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

Prompt = str | Sequence[int]

RequestId = str | int


class TrainingSample(msgspec.Struct, frozen=True):
    """One completion, with what training needs.

    Attributes:
        prompt_tokens: `[prompt]`.
        completion_tokens: `[completion]`, the stop token included.
        logprobs: `[completion]`, float32; docs/sampling.md says of which distribution.
        ref_logprobs: `[completion]`, the same by the reference model; None when there is none.
        weight_version: Of the weights that made the oldest of these tokens.
        finish_reason: "stop" for a stop token or string, "length" for a limit, "abort".
        weight_versions: (version, index of its first token) for each run of tokens that one
            version made.
        top_logprobs: `[completion]`, the likeliest tokens at each place, when asked for.
        prompt_logprobs: `[prompt]`, None for the first token, when asked for.
        prompt_top_logprobs: `[prompt]`, the likeliest tokens at each place, when asked for.
        request_id: Of the request, as `add_request` gave it back; None where the order of the
            samples tells, as it does for `generate`.
        adapter_version: Of the adapter that made the oldest of these tokens; 0 without one.
        embedding: The prompt's vector, of a request for one.
        num_draft_tokens: Drafted tokens that were verified for it, where the engine speculates.
        num_accepted_draft_tokens: Those of them that were what was sampled.
    """

    prompt_tokens: tuple[int, ...]
    completion_tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ref_logprobs: tuple[float, ...] | None
    weight_version: int
    finish_reason: FinishReason
    weight_versions: tuple[tuple[int, int], ...] = ()
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    prompt_logprobs: tuple[float | None, ...] | None = None
    prompt_top_logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    request_id: RequestId | None = None
    adapter_version: int = 0
    embedding: tuple[float, ...] | None = None
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0


@runtime_checkable
class RolloutEngine(Protocol):
    """The contract between a trainer and what generates for it. `InferenceEngine` fulfils it.

    A training loop that is written against this runs with anything that has these methods: an
    engine of its own process, a client of one elsewhere, a fake in a test. Calls are made from one
    thread, and block until they are done.
    """

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        num_samples_per_prompt: int = 1,
    ) -> list[TrainingSample]:
        """Completes prompts with the weights in place.

        Args:
            prompts: Token ids, at least one for each prompt.
            sampling_params: One for all prompts, or one for each.
            num_samples_per_prompt: At least 1.

        Returns:
            `[prompts * num_samples_per_prompt]`, in the order of the prompts, then of the samples.
            Each has a logprob (float32, natural logarithm, of the policy at its temperature) and a
            weight version for every token of its completion.

        Raises:
            RequestError: A prompt or parameter is refused; nothing was generated.
        """
        ...

    def update_weights(self, state_dict: Mapping[str, Tensor], blocking: bool = False) -> None:
        """Replaces all weights; tokens sampled from then on carry the next version.

        KV that older weights have computed is never used for a request that starts later.

        Args:
            state_dict: By parameter name, in the shapes of the model, on any device and in any
                floating-point dtype.
            blocking: In place when this returns, and the tensors may change then; otherwise before
                the next step, and they must not change till then.

        Raises:
            WeightsError: They don't fit the model, or are not finite numbers; weights and version
                are as they were.
        """
        ...

    def get_weight_version(self) -> int:
        """Of the weights in place: 0 are those that were loaded, and updates only count up."""
        ...

    def flush_cache(self) -> None:
        """Forgets all cached prefixes. No update needs it; requests under way are not disturbed."""
        ...

    def shutdown(self) -> None:
        """Gives all memory back. A second call does nothing, and others are not allowed then."""
        ...
