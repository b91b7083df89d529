"""The contract between trainers and engines: `RolloutEngine` and its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from ..bus.public import (
    Completion,
    CompletionSample,
    FinishReason,
    KVSessionResult,
    Recipe,
    TokenLogprob,
    VersionLag,
)
from ..config import RequestError, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

Prompt = str | Sequence[int]

RequestId = str | int


class TrainingSample(msgspec.Struct, frozen=True, eq=False, dict=True):
    """One completion, with what training needs. Equal samples may have taken different times, and
    come from copies of a model.

    Attributes:
        prompt_tokens: `[prompt]`.
        completion_tokens: `[completion]`, the stop token included.
        logprobs: `[completion]`, float32; docs/sampling.md says of which distribution.
        ref_logprobs: `[completion]`, by the reference model; None without one.
        weight_version: Version of the weights that sampled the oldest of these tokens.
        finish_reason: "stop" for a stop token or string, "length" for a limit, "abort".
        weight_versions: (version, index of its first token) for each run of tokens of one version.
        top_logprobs: `[completion]`, the likeliest tokens at each position, on request.
        prompt_logprobs: `[prompt]`, None for the first token, on request.
        prompt_top_logprobs: `[prompt]`, the likeliest tokens at each position, on request.
        request_id: The result of `add_request`; None for samples of `generate`.
        adapter_version: Version of the adapter for the oldest of these tokens; 0 without one.
        embedding: The prompt's vector, on request.
        num_draft_tokens: Draft tokens that were verified for this sample.
        num_accepted_draft_tokens: Draft tokens that were accepted.
        from_response_cache: Whether the tokens were computed for an equal request before.
        kv_session: Result of the request's `kv_session`; None without one.
        version_lag: Its age in versions, for a request with `max_version_lag`.
        recipe: Inputs that compute the sample again (`InferenceEngine.replay`).
        quantization: The forms of the codes that the weights are, such as "int4-128+int8"; "" for
            plain weights. `logprobs` are those of the codes.
        time: Nanoseconds of its request by cause (docs/time.md); samples of a request share it.
            None if unknown.
        billed_ns: The request's share of the device's busy time; None if unknown.
        support_logprobs: `[completion]`, log S: the log of the probability mass that top_k, top_p
            and min_p left at each position; `logprobs` minus it is of the distribution that was
            sampled from. None without such limits.
        sampling_masks: `[completion]`, on request: the ids of the tokens that could be sampled at
            each position, `numpy.frombuffer(mask, "<i4")`. Empty for a support of more than
            `max_sampling_mask` tokens.
        prompt_token_id_logprobs: `[positions, most targets at a position]`, on request: the logprob
            of each id in `prompt_logprob_token_ids`; minus infinity where nothing was asked for.
        prompt_token_ranks: `[prompt]`, with `prompt_top_logprobs`: each token's place among all.
        routed_experts: `[tokens - 1, layers, top_k]`, on request: the experts that routers chose
            for each token of prompt and completion but the last, which no pass has computed; 0 in
            layers without experts. Without the first `routed_experts_prompt_start` tokens.
        text: The completion as text, without special tokens and without a stop string; "" for a
            model without tokenizer.
        model_path: The engine's, whose tokenizer parses `message`.
        chat: The prompt, if it was a ChatPrompt: `message` has its tools' calls.
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
    from_response_cache: bool = False
    kv_session: KVSessionResult | None = None
    recipe: Recipe | None = None
    quantization: str = ""
    time: dict[str, int] | None = None
    billed_ns: int | None = None
    support_logprobs: tuple[float, ...] | None = None
    version_lag: VersionLag | None = None
    sampling_masks: tuple[bytes, ...] | None = None
    prompt_token_id_logprobs: npt.NDArray[np.float32] | None = None
    prompt_token_ranks: tuple[int | None, ...] | None = None
    routed_experts: npt.NDArray[np.uint16] | None = None
    text: str = ""
    model_path: str = ""
    chat: Any = None  # msgspec, which writes samples, resolves all types

    @cached_property
    def message(self) -> dict[str, Any]:
        """The model's message in OpenAI's form, as `ChatRenderer.read` returns it: role, content,
        and `reasoning_content` and `tool_calls` if there are any. Parsed once, on first use.

        Raises:
            RequestError: The sample has no `model_path`: no engine made it.
            ModelError: The model has no usable tokenizer.
        """
        from .chat_renderer import renderer_of

        if not self.model_path:
            raise RequestError(
                "this sample has no model_path, whose tokenizer parses the message; parse it with "
                "ChatRenderer(model_path).read"
            )
        renderer = renderer_of(self.model_path)
        chat = self.chat or renderer.prompt_of(self.prompt_tokens)
        return renderer.read(chat, self.completion_tokens, self.finish_reason)

    def __repr__(self) -> str:
        tokens = f"<{len(self.prompt_tokens)} + {len(self.completion_tokens)} tokens>"
        shown = [repr(self.text) if self.embedding is None else "<embedding>", tokens]
        shown += [f"{self.finish_reason!r}", f"weight_version={self.weight_version}"]
        if self.request_id is not None:
            shown.append(f"request_id={self.request_id!r}")
        return f"TrainingSample({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TrainingSample):
            return NotImplemented
        return self._numbers == other._numbers

    def __hash__(self) -> int:
        return hash(self._numbers[:6])

    @property
    def _numbers(self) -> tuple[object, ...]:
        return tuple([_comparable(getattr(self, name)) for name in _COMPARED])


_COMPARED = [
    name
    for name in TrainingSample.__struct_fields__
    if name not in ("time", "billed_ns", "model_path", "chat")
]


def _comparable(value: object) -> object:
    return (value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


SHARED_FIELDS = set(TrainingSample.__struct_fields__) & set(CompletionSample.__struct_fields__)
SHARED_FIELDS -= {"routed_experts"}  # packed there


def completion_of(*samples: TrainingSample, request_id: str = "") -> Completion:
    """Return the terminal message of a request that has these samples."""
    from ..bus.routed_experts import packed_experts
    from ..bus.targets import packed_targets

    first = samples[0]
    experts = [
        packed_experts(each.routed_experts, len(each.completion_tokens), len(each.prompt_tokens))
        for each in samples
    ]
    return Completion(
        request_id=request_id or ("" if first.request_id is None else str(first.request_id)),
        entry_id="",
        status="done",
        samples=tuple(
            CompletionSample(
                sample_index=index,
                token_ids=sample.completion_tokens,
                routed_experts=experts[index][1],
                **{name: getattr(sample, name) for name in SHARED_FIELDS},
            )
            for index, sample in enumerate(samples)
        ),
        prompt_token_ids=first.prompt_tokens,
        prompt_logprobs=first.prompt_logprobs,
        prompt_top_logprobs=first.prompt_top_logprobs,
        prompt_token_ranks=first.prompt_token_ranks,
        prompt_token_id_logprobs=packed_targets(first.prompt_token_id_logprobs),
        prompt_routed_experts=experts[0][0],
        recipe=first.recipe,
    )


@runtime_checkable
class RolloutEngine(Protocol):
    """The methods of an engine that a trainer calls. `InferenceEngine` implements them.

    A training loop against this protocol runs with an engine in its own process, a client of a
    remote one, or a fake in a test. All calls come from one thread, and block.
    """

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        num_samples_per_prompt: int = 1,
    ) -> list[TrainingSample]:
        """Complete prompts with the current weights.

        Args:
            prompts: Token ids, at least one for each prompt.
            sampling_params: One for all prompts, or one for each.
            num_samples_per_prompt: At least 1.

        Returns:
            `[prompts * num_samples_per_prompt]`, in the order of the prompts, then of the samples.
            Every token of a completion has a logprob (float32, natural logarithm, of the policy at
            its temperature) and a weight version.

        Raises:
            RequestError: A prompt or parameter is refused; nothing was generated.
        """
        ...

    def update_weights(self, state_dict: Mapping[str, Tensor], blocking: bool = False) -> None:
        """Replace all weights; tokens sampled from then on carry the next version.

        A request that starts later never uses KV of older weights.

        Args:
            state_dict: By parameter name, in the shapes of the model, on any device and in any
                floating-point dtype.
            blocking: Put in place before this returns; otherwise before the next step, and the
                tensors must not change until then.

        Raises:
            WeightsError: They don't fit the model, or are not finite; weights and version are
                unchanged.
        """
        ...

    def get_weight_version(self) -> int:
        """Return the version of the current weights: 0 at first; updates only count up."""
        ...

    def flush_cache(self) -> None:
        """Drop all cached prefixes. No update needs it; unfinished requests are not affected."""
        ...

    def shutdown(self) -> None:
        """Free all memory. A second call does nothing; other calls are not allowed afterwards."""
        ...
