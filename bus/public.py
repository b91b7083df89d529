"""What crosses the bus between clients and a pipeline: requests, and their outputs.

JSON objects with a `type`, so that any language can take part. Times ending in `_ns` are integer
nanoseconds: stamps since the Unix epoch, budgets relative. Token ids are plain ints.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ..config import Int64, PoolingKind, SamplingParams

FinishReason = Literal["stop", "length", "abort", "content_filter"]
"""Why a sample ended. The last is a gateway's: behind it stood what may not be said there."""

Status = Literal["done", "error", "cancelled", "expired"]


class Public(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="type",
    forbid_unknown_fields=True,
):
    """A message that clients write."""


class PublicOutput(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """One that clients read; a newer pipeline may send them fields that they don't know."""


class PublicPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A piece of a message that clients write."""


class OutputPart(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one that clients read."""


# --- what clients write -----------------------------------------------------------------------


class ChatMessage(PublicPart, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class EmbedParams(PublicPart, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the vector of a prompt is made of its tokens' last hidden states. docs/embeddings.md.

    Attributes:
        pooling: "mean" over all tokens, the "last" one, or the first one ("cls"); "" for the
            model's own.
        normalize: Whether the vector gets the length 1; None for the model's own.
        dimensions: How many of its first numbers are wanted, taken before it is normalised; None
            for all.
    """

    pooling: PoolingKind | Literal[""] = ""
    normalize: bool | None = None
    dimensions: Int64 | None = None


class GenerateRequest(
    Public,
    frozen=True,
    kw_only=True,
    tag="generate",
    tag_field="type",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """A request for completions. Exactly one of prompt, prompt_token_ids and messages is given.

    With `embed` it is one for the prompt's vector, and nothing is generated.

    Attributes:
        request_id: The client's own name for the request, unique among those in flight or whose
            output is still readable. When empty, the id that the requests queue gave the entry.
        prompt: Text to be continued.
        prompt_token_ids: The same, already as tokens of the model.
        messages: A conversation, put through the model's chat template.
        model: The model's name, or the id of an adapter; any other name is refused. Empty takes
            the model without an adapter.
        n: Samples of this one prompt.
        sampling: How to sample; see SamplingParams.
        stream: Whether chunks are wanted as tokens come, or only the final completion.
        priority: Higher runs earlier; waiting adds to it.
        tenant: Whose request it is.
        budget_ns: Time that the answer may take from arrival on, relative, in nanoseconds.
            Zero or less is refused as expired; absent means no deadline.
        cache_salt: Prefixes are shared only among a tenant's requests of the same salt, so that
            nobody can learn from times or `cached_tokens` what others have asked. Empty shares with
            the tenant's others that are empty. Where `admission.share_prefixes_across_tenants` is
            set, tenants do not matter.
        embed: Asks for the prompt's vector, the `embedding` of the one sample. Then `n` is 1,
            `sampling` is left out, and nothing comes before the Completion.
        prediction: What is expected to come, as text or as tokens of the model. Where the engine
            speculates, it is a draft: the answer comes sooner where it agrees, and is the same in
            any case. Otherwise it is checked and has no effect.
    """

    request_id: str = ""
    prompt: str | None = None
    prompt_token_ids: tuple[Int64, ...] | None = None
    messages: tuple[ChatMessage, ...] | None = None
    model: str = ""
    n: Int64 = 1
    sampling: SamplingParams = SamplingParams()
    stream: bool = True
    priority: Int64 = 0
    tenant: str = "default"
    budget_ns: Int64 | None = None
    cache_salt: str = ""
    embed: EmbedParams | None = None
    prediction: str | tuple[Int64, ...] | None = None


# --- what clients read ------------------------------------------------------------------------


class ErrorInfo(OutputPart, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request did not end well: a stable code, and a sentence that says what to change.

    Attributes:
        retry_after_s: When trying again may help, seconds from the answer on.
    """

    code: str
    message: str
    retry_after_s: float | None = None


class Usage(OutputPart, frozen=True, kw_only=True):
    """Tokens of a request, summed over its samples.

    Attributes:
        cached_tokens: Those of the prompt that needed no computing.
        accepted_prediction_tokens: Drafted tokens that were what was sampled, wherever the drafts
            came from: `prediction` is one source of several (`engine.draft_sources`).
        rejected_prediction_tokens: Drafted tokens that were not, or stood behind the end of a
            sample: no part of the answer. Both count what was verified by steps that the process
            which completes the request was told of, so after a failure of the streaming stage only
            what came since.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class StageTime(OutputPart, frozen=True, kw_only=True):
    """When a stage held the request: from its arrival there to its leaving."""

    stage: str
    start_ns: int
    end_ns: int


class Timings(OutputPart, frozen=True, kw_only=True):
    """Where a request's time went. Stamps are wall-clock nanoseconds of the host that took them.

    Attributes:
        received_ns: Admission took the request.
        first_token_ns: The first token of any sample reached the streaming stage; 0 if none did.
        finished_ns: The terminal message was made.
        stages: The stages that the request came through, in order.
    """

    received_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
    stages: tuple[StageTime, ...] = ()

    def of(self, stage: str) -> StageTime | None:
        """When it was in a stage; None when it did not come there."""
        return next((time for time in self.stages if time.stage == stage), None)


class TokenLogprob(OutputPart, frozen=True, kw_only=True):
    """A token and its logprob."""

    token_id: int
    logprob: float


class CompletionSample(OutputPart, frozen=True, kw_only=True):
    """One finished sample.

    Attributes:
        token_ids: `[k]`, stop tokens included.
        logprobs: `[k]`, one per token; docs/sampling.md says of which distribution.
        weight_version: Of the weights that made the oldest of these tokens.
        weight_versions: The same for all tokens, as (version, index of its first token) spans.
        top_logprobs: `[k]`, for each place the likeliest tokens, likeliest first, as many as
            `sampling.logprobs` asked for; None when it asked for none.
        ref_logprobs: `[k]`, one per token by the reference model, at the sample's temperature. None
            where the pipeline has no such model, or the sample was cut short.
        adapter_version: Of the adapter's weights that made the oldest of these tokens; 0 without
            an adapter. What chunks say is true of each token.
        embedding: The prompt's vector, float32, where the request asked for it (`embed`). Then
            there are no tokens, and `weight_version` is of the weights that made it.
        num_draft_tokens: Drafted tokens that were verified for it, as far as Usage counts them.
        num_accepted_draft_tokens: Those of them that were what was sampled, and are part of it.
    """

    sample_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    weight_version: int = 0
    weight_versions: tuple[tuple[int, int], ...] = ()
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    ref_logprobs: tuple[float, ...] | None = None
    adapter_version: int = 0
    embedding: tuple[float, ...] | None = None
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0


class CompletionChunk(
    PublicOutput,
    frozen=True,
    kw_only=True,
    tag="chunk",
    tag_field="type",
):
    """New tokens of one sample: those that one step made, which are several where drafted tokens
    were accepted.

    `text` may lag behind `token_ids` while a character or a possible stop string is incomplete.

    Attributes:
        request_id: The request's id.
        entry_id: What the requests queue called the request; tells apart two requests that were
            given the same id.
        sample_index: Which of the n samples.
        token_offset: How many tokens of this sample came before these.
        token_ids: `[k]`, k at least 0.
        logprobs: `[k]`, one per token.
        text: Text that is now certain.
        finish_reason: Set on the sample's last chunk.
        weight_version: Of the weights that made these tokens.
        top_logprobs: `[k]`, as in CompletionSample.
        prompt_logprobs, prompt_top_logprobs: As in Completion, with the first chunk of the first
            sample; None with all others.
        adapter_version: Of the adapter's weights that made these tokens; 0 without an adapter.
    """

    request_id: str
    entry_id: str
    sample_index: int
    token_offset: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason | None = None
    weight_version: int = 0
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    prompt_logprobs: tuple[float | None, ...] | None = None
    prompt_top_logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    adapter_version: int = 0


class Completion(
    PublicOutput,
    frozen=True,
    kw_only=True,
    tag="completion",
    tag_field="type",
):
    """The terminal message: each request gets exactly one, whatever became of it.

    Attributes:
        request_id: The request's id.
        entry_id: What the requests queue called the request.
        status: "done", or why not.
        error: Set unless the status is "done".
        samples: All samples in order; after an error what had been made until then.
        trace_id: 32 hex digits, or empty when the request is not traced.
        prompt_logprobs: `[prompt]`, each prompt token's logprob given those before it; the first
            has none. None when `sampling.prompt_logprobs` did not ask for them, or the request
            ended before all were known.
        prompt_top_logprobs: `[prompt]`, as CompletionSample.top_logprobs; empty for the first.
        prompt_token_ids: `[prompt]`, the prompt as the model's tokens, however it was given. Empty
            when the request ended before any of its samples began.
        prompt_ref_logprobs: `[prompt]`, as `prompt_logprobs`, by the reference model. None where
            that is, or there is no such model.
    """

    request_id: str
    entry_id: str
    model: str = ""
    status: Status
    error: ErrorInfo | None = None
    samples: tuple[CompletionSample, ...] = ()
    usage: Usage = Usage()
    timings: Timings = Timings()
    trace_id: str = ""
    prompt_logprobs: tuple[float | None, ...] | None = None
    prompt_top_logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    prompt_token_ids: tuple[int, ...] = ()
    prompt_ref_logprobs: tuple[float | None, ...] | None = None


Output = CompletionChunk | Completion
