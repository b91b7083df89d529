"""Messages between clients and a pipeline: requests, and their outputs.

JSON objects with a `type`, for any language. Times ending in `_ns` are integer nanoseconds:
timestamps since the Unix epoch, budgets relative. Token ids are plain ints.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Literal

from ..config import Int64, PoolingKind, SamplingParams
from .kv_sessions import AfterTurn as AfterTurn
from .kv_sessions import KVSession as KVSession
from .kv_sessions import KVSessionResult as KVSessionResult
from .kv_sessions import SessionAction as SessionAction
from .kv_sessions import SessionOutcome as SessionOutcome
from .kv_sessions import SessionTier as SessionTier
from .public_base import OutputPart as OutputPart
from .public_base import PublicOutput as PublicOutput
from .public_base import PublicPart as PublicPart
from .times import StageTime as StageTime

FinishReason = Literal["stop", "length", "abort", "content_filter"]
"""Why a sample ended. "content_filter" is set by a gateway's guardrail."""

Status = Literal["done", "error", "cancelled", "expired"]


DEFAULT_TENANT = "default"
"""Tenant of requests that name none."""


# --- written by clients -----------------------------------------------------------------------


class TextPart(PublicPart, frozen=True, kw_only=True, tag="text", tag_field="type"):
    """A text in a message."""

    text: str


class ImagePart(PublicPart, frozen=True, kw_only=True, tag="image", tag_field="type"):
    """The place in a message of the next of the request's `images`."""


class ChatMessage(PublicPart, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | tuple[TextPart | ImagePart, ...]

    @property
    def text(self) -> str:
        """All its texts."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


class ImageInput(PublicPart, frozen=True, kw_only=True, omit_defaults=True):
    """An image of a prompt: a file, or an image that a request in flight or before has brought.

    Attributes:
        data: A file in PNG, JPEG, WebP or GIF; base64 in JSON.
        id: SHA-256 of its decoded size and pixels in hex, instead of `data`. docs/images.md.
    """

    data: bytes = b""
    id: str = ""


class EmbedParams(PublicPart, frozen=True, kw_only=True):
    """Pooling of a prompt's last hidden states. docs/embeddings.md.

    Attributes:
        pooling: "mean" over all tokens, the "last" one, or the first one ("cls"); "" for the
            model's own.
        normalize: Scale the vector to length 1; None for the model's own.
        dimensions: Number of leading components, taken before normalisation; None for all.
    """

    pooling: PoolingKind | Literal[""] = ""
    normalize: bool | None = None
    dimensions: Int64 | None = None


class Fork(PublicPart, frozen=True, kw_only=True, omit_defaults=True):
    """A token of another request's sample, after which a request goes on. docs/forks.md.

    Attributes:
        request_id: The other request's id, of the same tenant and model.
        at: Number of leading tokens of its sample that the prompt has.
        sample_index: The sample.
    """

    request_id: str
    at: Int64
    sample_index: Int64 = 0


class Session(PublicPart, frozen=True, kw_only=True, omit_defaults=True):
    """A session, whose token tree keeps what its requests render and sample. docs/token-tree.md.

    Attributes:
        id: Its name, 1 to 128 printable characters, within the tenant.
        note: Kept with the turn, unread.
    """

    id: str
    note: str = ""


OnVersionLag = Literal["flag", "cut", "retract"]
"""What becomes of a sample whose oldest token is more than `max_version_lag` versions behind."""


class GenerateRequest(
    PublicPart, frozen=True, kw_only=True, tag="generate", tag_field="type", omit_defaults=True
):
    """A request for completions, with exactly one of prompt, prompt_token_ids, messages and fork.

    With `embed` it computes the prompt's embedding, and generates nothing.

    Attributes:
        request_id: The client's id for the request, unique among requests in flight or with
            readable output. If empty, the entry's id on the requests queue.
        prompt: Text to continue.
        prompt_token_ids: The prompt as token ids.
        messages: A conversation, rendered by the model's chat template.
        model: The model's name, or an adapter's id; any other name is refused. Empty is the model
            without an adapter.
        n: Number of samples.
        sampling: See SamplingParams.
        stream: Send chunks as tokens are generated, or only the final completion.
        priority: Higher runs earlier; waiting adds to it.
        tenant: The unit of fair sharing.
        budget_ns: Time limit from arrival, in nanoseconds. Zero or less is refused as expired;
            absent means no deadline.
        cache_salt: Prefixes are shared only among a tenant's requests with equal salts, since
            timing and `cached_tokens` reveal shared prompts. With
            `admission.share_prefixes_across_tenants`, tenants don't matter.
        embed: Return the prompt's `embedding` in the one sample. Then `n` is 1, `sampling` is
            absent, and only the Completion is sent.
        prediction: The expected output, as text or token ids. If the engine speculates, it is a
            draft, which speeds up the request where it matches and never changes the output.
            Otherwise it is validated and ignored.
        kv_session: The conversation that this request continues; then `n` is 1. No output depends
            on it.
        images: The prompt's images, in order. Text and token ids have the model's placeholder where
            each belongs; `messages` have parts of the type "image". docs/images.md.
        add_special_tokens: Whether `prompt` gets the tokens that the tokenizer adds by default; a
            rendered conversation has its own.
        sample_seeds: The seed of each sample as a `Recipe` has it, in place of `sampling.seed`:
            computes samples again whose request had no seed. docs/replay.md.
        fork: The prompt is that of another request and the first tokens of one of its samples; its
            images are that request's, and so is its model if it names none.
        session: The session of which the request is a turn. No output depends on it.
        max_version_lag: Most versions of the weights that a sample's oldest token may be behind the
            newest while the sample is generated; None for no limit. docs/rl.md.
        on_version_lag: Beyond that: the sample goes on and is flagged; it ends with the tokens that
            it has; or its tokens are dropped and it begins anew, which takes `stream: false`.
        is_chat: `prompt` or `prompt_token_ids` is a conversation that the client has rendered: the
            operation `chat` in traces and metrics. No output depends on it.
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
    tenant: str = DEFAULT_TENANT
    budget_ns: Int64 | None = None
    cache_salt: str = ""
    embed: EmbedParams | None = None
    prediction: str | tuple[Int64, ...] | None = None
    kv_session: KVSession | None = None
    images: tuple[ImageInput, ...] = ()
    add_special_tokens: bool = True
    sample_seeds: tuple[Int64, ...] = ()
    fork: Fork | None = None
    session: Session | None = None
    max_version_lag: Int64 | None = None
    on_version_lag: OnVersionLag = "flag"
    is_chat: bool = False


# --- read by clients --------------------------------------------------------------------------


AnyRequest = GenerateRequest | dict[str, Any] | bytes
"""A request, the same as a dict, or its JSON."""


class ErrorInfo(OutputPart, frozen=True, kw_only=True, omit_defaults=True):
    """The cause of a failure: a stable code, and a sentence with the remedy.

    Attributes:
        retry_after_s: Seconds after which a retry may succeed.
    """

    code: str
    message: str
    retry_after_s: float | None = None


class Usage(OutputPart, frozen=True, kw_only=True):
    """Tokens of a request, summed over its samples.

    Attributes:
        cached_tokens: Prompt tokens found in the prefix cache.
        accepted_prediction_tokens: Drafted tokens equal to the sampled ones, from every source of
            `engine.draft_sources`, of which `prediction` is one.
        rejected_prediction_tokens: Drafted tokens that differed, or were after a sample's end: not
            part of the output. After a failure of the streaming stage both count only later steps.
        cached_completion_tokens: Completion tokens from the response cache: all or none. Then
            nothing was computed, and `cached_tokens` counts the prompt once for each sample.
        time: The request's life in nanoseconds by cause (docs/time.md), without causes of 0. The
            values add up to its time from its publication to the terminal message. None if unknown.
        billed_ns: Its share of the device's busy time; None if unknown.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    cached_completion_tokens: int = 0
    time: dict[str, int] | None = None
    billed_ns: int | None = None


class Fingerprint(OutputPart, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that the bits of an executor's results depend on, besides requests and later
    weights.

    Attributes:
        digest: Digest of all other fields: equal for equal fingerprints only. 16 hexadecimal
            digits.
        package, torch, transformers: Versions.
        machine: Model name of the CPU or GPU.
        threads: Torch's on a CPU; 0 on other devices.
        dtype: Dtype of the weights, or of those that codes stand for.
        quantization: The forms of codes, such as "int4-128+int8"; "" for plain weights.
        kernels: Instructions or language of the kernels; "none" without kernels.
        code: Digest of the kernels' code, compiled where they are; "" without kernels.
        attention: The attention back end.
        deterministic: "on"; "without adapters"; "off".
        config: Digest of the configuration of the model, and of its image processor.
        weights: Digest of the weights as loaded, by a part of each tensor.
        weight_version: Version of the weights as loaded.
        settings: Settings of `engine` that change numbers, where they differ from the defaults.
    """

    digest: str = ""
    package: str = ""
    torch: str = ""
    transformers: str = ""
    machine: str = ""
    threads: int = 0
    dtype: str = ""
    quantization: str = ""
    kernels: str = ""
    code: str = ""
    attention: str = ""
    deterministic: Literal["on", "without adapters", "off"] = "off"
    config: str = ""
    weights: str = ""
    weight_version: int = 0
    settings: dict[str, Any] = {}  # noqa: RUF012  (msgspec copies it)

    def __hash__(self) -> int:
        return hash(self.digest)


class Recipe(OutputPart, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that computes a request's samples again, beside its prompt's tokens.
    docs/replay.md.

    Attributes:
        tenant: The request's.
        adapter: Id of its LoRA adapter.
        sampling: As resolved: `max_tokens` as limited, `stop_token_ids` with the model's own.
        seeds: Seeds of each sample, as in `GenerateRequest.sample_seeds`; empty at temperature 0.
        images: Ids of the prompt's images.
        embed: Pooling of a request for its prompt's vector.
        executors: Each kind of executor that the lane had; one of them computed each sample.
    """

    tenant: str = DEFAULT_TENANT
    adapter: str = ""
    sampling: SamplingParams = SamplingParams()
    seeds: tuple[int, ...] = ()
    images: tuple[str, ...] = ()
    embed: EmbedParams | None = None
    executors: tuple[Fingerprint, ...] = ()


class ForkOrigin(OutputPart, frozen=True, kw_only=True, omit_defaults=True):
    """The place at which a request began as a fork.

    Attributes:
        request_id, sample_index, at: As in Fork.
        entry_id: The other request's.
        num_generated: Number of tokens at the end of the prompt that were sampled, by the other
            request or by those of which it was a fork itself.
    """

    request_id: str
    entry_id: str
    at: int
    sample_index: int = 0
    num_generated: int = 0


class TreeSession(OutputPart, frozen=True, kw_only=True, omit_defaults=True):
    """The session whose token tree keeps a request, as in its `session`.

    Attributes:
        id: The session's.
        tenant: The session's.
        note: As in the request.
        images: Ids of the prompt's images.
    """

    id: str
    tenant: str = DEFAULT_TENANT
    note: str = ""
    images: tuple[str, ...] = ()


class Timings(OutputPart, frozen=True, kw_only=True):
    """Times of a request. Timestamps are wall-clock nanoseconds of the host that took them.

    Attributes:
        received_ns: Arrival at admission.
        published_ns: Arrival on the requests queue, as far as known; `Usage.time` begins here. 0 if
            unknown.
        first_token_ns: Arrival of any sample's first token at streaming; 0 without tokens.
        finished_ns: Creation of the terminal message.
        stages: The stages of the request, in order.
    """

    received_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
    stages: tuple[StageTime, ...] = ()
    published_ns: int = 0

    def of(self, stage: str) -> StageTime | None:
        """Return the times in a stage; None if the request never reached it."""
        return next((time for time in self.stages if time.stage == stage), None)


class TokenLogprob(OutputPart, frozen=True, kw_only=True):
    """A token and its logprob."""

    token_id: int
    logprob: float


class VersionLag(OutputPart, frozen=True, kw_only=True, omit_defaults=True):
    """The age of a sample of a request with `max_version_lag`, at its end.

    Attributes:
        versions: Versions of the weights that its oldest token is behind those in place.
        outcome: "within" the limit; "flagged": beyond it; "cut": it ended with the finish reason
            "abort" when it would have been; "retracted": within, begun anew at least once.
        num_retractions: Times that it was begun anew.
    """

    versions: int
    outcome: Literal["within", "flagged", "cut", "retracted"] = "within"
    num_retractions: int = 0


class RoutedExperts(OutputPart, frozen=True, kw_only=True):
    """The experts that the routers of a mixture chose at positions of a prompt.

    Attributes:
        first: The first position.
        layers: Layers of the model; 0 stands for each expert of one without experts.
        top_k: Experts of a token.
        data: `[positions, layers, top_k]`, 16-bit unsigned, little-endian; base64 in JSON. The
            prompt's last position is in the samples, with their first token.
    """

    first: int
    layers: int
    top_k: int
    data: bytes


class CompletionSample(OutputPart, frozen=True, kw_only=True):
    """One finished sample.

    Attributes:
        token_ids: `[k]`, stop tokens included.
        logprobs: `[k]`, one per token; docs/sampling.md defines the distribution.
        weight_version: Version of the oldest token's weights.
        weight_versions: Spans of (version, index of its first token).
        top_logprobs: `[k]`, per position the `sampling.logprobs` likeliest tokens, likeliest first;
            None if not requested.
        ref_logprobs: `[k]`, by the reference model, at the sample's temperature. None without such
            a model, or if the sample was cut short.
        adapter_version: Version of the oldest token's adapter weights; 0 without an adapter. Chunks
            have it for each token.
        embedding: The prompt's vector, float32, for `embed`. Then there are no tokens, and
            `weight_version` is of the vector's weights.
        num_draft_tokens: Drafted tokens verified for the sample, counted as in Usage.
        num_accepted_draft_tokens: Drafted tokens equal to the sampled ones, within the sample.
        support_logprobs: `[k]`, log S: the log of the probability mass that top_k, top_p and min_p
            left at each position. None without such limits. docs/sampling.md.
        version_lag: Its age, for a request with `max_version_lag`; None for any other.
        sampling_masks: `[k]`, the support at each position: the ids of the tokens that could be
            sampled, rising, int32, little-endian, base64 in JSON. Empty for a support of more than
            `engine.max_sampling_mask` tokens. None if not requested.
        routed_experts: `[k]`, on request: the experts chosen in the pass that gave the token, which
            computed the token before it; each `[layers, top_k]` as in RoutedExperts.
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
    support_logprobs: tuple[float, ...] | None = None
    version_lag: VersionLag | None = None
    sampling_masks: tuple[bytes, ...] | None = None
    routed_experts: tuple[bytes, ...] | None = None


class CompletionChunk(PublicOutput, frozen=True, kw_only=True, tag="chunk"):
    """New tokens of one sample from one step; several if drafted tokens were accepted.

    `text` may lag behind `token_ids` while a character or a possible stop string is incomplete.

    Attributes:
        request_id: The request's id.
        entry_id: The entry's id on the requests queue; distinguishes requests with the same id.
        sample_index: Index of the sample, below n.
        token_offset: Number of earlier tokens of the sample.
        token_ids: `[k]`, k at least 0.
        logprobs: `[k]`, one per token.
        text: Text that is now final.
        finish_reason: Set on the sample's last chunk.
        weight_version: Version of these tokens' weights.
        top_logprobs: `[k]`, as in CompletionSample.
        prompt_logprobs, prompt_top_logprobs, prompt_token_id_logprobs, prompt_token_ranks,
            prompt_routed_experts: As in Completion, in the first chunk of the first sample; None in
            all others.
        adapter_version: Of these tokens' adapter weights; 0 without an adapter.
        support_logprobs, sampling_masks, routed_experts: `[k]`, as in CompletionSample.
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
    support_logprobs: tuple[float, ...] | None = None
    sampling_masks: tuple[bytes, ...] | None = None
    routed_experts: tuple[bytes, ...] | None = None
    prompt_token_id_logprobs: bytes | None = None
    prompt_token_ranks: tuple[int | None, ...] | None = None
    prompt_routed_experts: RoutedExperts | None = None


def mask_ids(mask: bytes) -> tuple[int, ...]:
    """Return the token ids of a packed sampling mask."""
    return struct.unpack(f"<{len(mask) // 4}i", mask)


TOKEN_COLUMNS = ("support_logprobs", "sampling_masks", "routed_experts")
"""Fields of chunks and samples that have a value for each token if the request has a feature."""


def token_columns(
    of: CompletionChunk | CompletionSample, start: int = 0, stop: int | None = None
) -> dict[str, Any]:
    """Return the token columns that a chunk or sample has, of its tokens from `start` to `stop`."""
    found = {name: getattr(of, name) for name in TOKEN_COLUMNS}
    return {name: each[start:stop] for name, each in found.items() if each is not None}


class Completion(PublicOutput, frozen=True, kw_only=True, tag="completion"):
    """The terminal message; each request gets exactly one.

    Attributes:
        request_id: The request's id.
        entry_id: The entry's id on the requests queue.
        status: "done", or the kind of failure.
        error: Set unless the status is "done".
        samples: All samples in order; after an error, their output until then.
        trace_id: 32 hex digits; empty for an untraced request.
        prompt_logprobs: `[prompt]`, each prompt token's logprob given those before it; None for the
            first, and up to `sampling.prompt_logprob_start`. None if not requested
            (`sampling.prompt_logprobs`), or if the request ended before all were known.
        prompt_top_logprobs: `[prompt]`, as CompletionSample.top_logprobs; empty for the first.
        prompt_token_ids: `[prompt]`, the tokenised prompt. Empty if the request ended before a
            sample began.
        prompt_ref_logprobs: `[prompt]`, as `prompt_logprobs`, by the reference model. None without
            `prompt_logprobs` or such a model.
        kv_session: Result of the request's `kv_session`. None without one, or if the request
            ended before it ran.
        recipe: For `replay`. None with `admission.recipes: false`, or if the request ended before
            a sample began.
        fork: Where the request began; None if it was no fork, or ended before a sample began.
        session: Its session; None without one, or if the request ended before a sample began.
        prompt_token_id_logprobs: `[targets]`, float32, little-endian, base64 in JSON: the logprob
            of each id in `sampling.prompt_logprob_token_ids`, list by list, without those of -1.
            None as for `prompt_logprobs`.
        prompt_token_ranks: `[prompt]`, with `prompt_top_logprobs`: the place of each token among
            all tokens there, from 1, likeliest first; None where it has no logprob.
        prompt_routed_experts: On request, those before the prompt's last token.
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
    kv_session: KVSessionResult | None = None
    recipe: Recipe | None = None
    fork: ForkOrigin | None = None
    session: TreeSession | None = None
    prompt_token_id_logprobs: bytes | None = None
    prompt_token_ranks: tuple[int | None, ...] | None = None
    prompt_routed_experts: RoutedExperts | None = None


Output = CompletionChunk | Completion

OutputBatch = Sequence[tuple[str, Sequence[Output]]]
"""Keys of result streams, each with outputs to append."""
