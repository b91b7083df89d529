"""Every message that crosses the bus.

All are frozen msgspec structs, tagged with `type`. In memory they pass by reference, unencoded;
on Redis those between stages are msgpack arrays, and the public ones (`GenerateRequest`,
`CompletionChunk`, `Completion`) are JSON objects, so that any language can take part.

Times ending in `_ns` are integer nanoseconds: stamps since the Unix epoch, budgets relative.
Token ids are plain ints. Fields may be added at the end with a default; none is ever reordered.

The path of a request, and the link that carries each message, is drawn in `links.py`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ..config import FairnessConfig, SamplingParams
from .weights import InFlight, StagedWeights, WeightsSource

FinishReason = Literal["stop", "length", "abort"]
Status = Literal["done", "error", "cancelled", "expired"]

MemoryTag = Literal["weights", "kv_cache"]
MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")
"""What of an executor's memory can be released by itself."""


class Public(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="type",
    forbid_unknown_fields=True,
):
    """A message of the public interface that clients write: a JSON object with a `type`."""


class PublicOutput(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """One that clients read; a newer pipeline may send them fields that they don't know."""


class Internal(msgspec.Struct, frozen=True, tag_field="type", array_like=True):
    """A message between stages: on the wire an array that starts with its type."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A piece of an internal message."""


class PublicPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A piece of a public message that clients write."""


class OutputPart(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one that clients read."""


# --- public: what clients write ---------------------------------------------------------------


class ChatMessage(PublicPart, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


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

    Attributes:
        request_id: The client's own name for the request, unique among those in flight or whose
            output is still readable. When empty, the id that the requests queue gave the entry.
        prompt: Text to be continued.
        prompt_token_ids: The same, already as tokens of the model.
        messages: A conversation, put through the model's chat template.
        model: The model's name; any name but the served one is refused. Empty takes what is there.
        n: Samples of this one prompt.
        sampling: How to sample; see SamplingParams.
        stream: Whether chunks are wanted as tokens come, or only the final completion.
        priority: Higher runs earlier; waiting adds to it.
        tenant: Whose request it is.
        budget_ns: Time that the answer may take from arrival on, relative, in nanoseconds.
            Zero or less is refused as expired; absent means no deadline.
        cache_salt: Prefixes are shared only among requests of the same salt, so that nobody can
            learn by timing what others have asked. Empty shares with all others that are empty.
    """

    request_id: str = ""
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: tuple[ChatMessage, ...] | None = None
    model: str = ""
    n: int = 1
    sampling: SamplingParams = SamplingParams()
    stream: bool = True
    priority: int = 0
    tenant: str = "default"
    budget_ns: int | None = None
    cache_salt: str = ""


# --- public: what clients read ----------------------------------------------------------------


class ErrorInfo(OutputPart, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request did not end well: a stable code, and a sentence that says what to change.

    Attributes:
        retry_after_s: When trying again may help, seconds from the answer on.
    """

    code: str
    message: str
    retry_after_s: float | None = None


class Usage(OutputPart, frozen=True, kw_only=True):
    """Tokens of a request. Cached ones are those of the prompt that needed no computing,
    summed over the samples."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


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
    """

    sample_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    weight_version: int = 0
    weight_versions: tuple[tuple[int, int], ...] = ()
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None


class CompletionChunk(
    PublicOutput,
    frozen=True,
    kw_only=True,
    tag="chunk",
    tag_field="type",
):
    """New tokens of one sample.

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


Output = CompletionChunk | Completion


# --- the path of a request through the stages --------------------------------------------------


class SequenceSpec(Part, frozen=True, array_like=True):
    """One sample to be made: its id (unique within an epoch), its index in the request, its seed.

    A sample's random numbers are a function of (seed, position), so they depend on nothing else.

    Attributes:
        generated: Tokens of the sample that streaming has already, when it is resumed after a
            failure; the sequence goes on behind them.
    """

    seq_id: int
    sample_index: int
    seed: int
    generated: tuple[int, ...] = ()


class RequestInfo(Part, frozen=True, array_like=True):
    """What the streaming stage must know of a request; rides along untouched.

    Attributes:
        stages: When each stage so far held the request.
        min_tokens: Stop strings are not looked for in the text of that many first tokens.
        logprobs: How many of the likeliest tokens are reported at each place.
        prompt_logprobs: The same for the prompt; None when its logprobs are not reported at all.
    """

    request_id: str
    entry_id: str
    model: str
    n: int
    stream: bool
    stop: tuple[str, ...]
    num_prompt_tokens: int
    traceparent: str
    tracestate: str
    received_ns: int
    stages: tuple[StageTime, ...] = ()
    min_tokens: int = 0
    logprobs: int = 0
    prompt_logprobs: int | None = None


class AdmittedRequest(Internal, frozen=True, array_like=True, tag="admitted", tag_field="type"):
    """A valid request, as tokens. `sampling.stop_token_ids` holds the model's own stop ids too."""

    info: RequestInfo
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    sequences: tuple[SequenceSpec, ...]
    tenant: str
    priority: int
    cache_salt: str = ""


class Dispatch(Internal, frozen=True, array_like=True, tag="dispatch", tag_field="type"):
    """Some or all sequences of a request, sent to run. Each uses up one credit.

    Attributes:
        rank: Sequences with a smaller rank go first where not all fit. Ranks grow with time, so
            nobody is passed by others for ever.
    """

    info: RequestInfo
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    sequences: tuple[SequenceSpec, ...]
    priority: int
    cache_salt: str = ""
    rank: int = 0


class Yield(Internal, frozen=True, array_like=True, tag="yield", tag_field="type"):
    """These sequences must make room. They keep what they have generated.

    Batching sets them aside: it keeps their tokens, and their KV as long as nobody else needs the
    blocks. Those that have ended meanwhile are left alone.
    """

    seq_ids: tuple[int, ...]


class Continue(Internal, frozen=True, array_like=True, tag="continue", tag_field="type"):
    """Sequences that made room run again, ranked as in Dispatch. Each uses up one credit."""

    seq_ids: tuple[int, ...]
    rank: int = 0


class Credit(Internal, frozen=True, array_like=True, tag="credit", tag_field="type"):
    """Batching can take this many more sequences; and what it has done since it last said so.

    Attributes:
        sequences: Places that have become free.
        steps: For each step that came back, the sequences that gained a token.
        started: (sequence, tokens that it had to compute) for each that began, or began again.
        yielded: Sequences that have made room and wait for Continue.
        ended: Sequences that will not run again.
        step_ns: What the shortest of the steps took on the device; 0 when there is none.
        kv_free: Tokens for which KV is free, with that which only the prefix cache has.
        keeps_cache: What the prefix cache has been sent before may still be there. False when
            it begins with nothing.
    """

    sequences: int
    steps: tuple[tuple[int, ...], ...] = ()
    started: tuple[tuple[int, int], ...] = ()
    yielded: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    step_ns: int = 0
    kv_free: int = 0
    keeps_cache: bool = True


class NewSequence(Part, frozen=True, array_like=True):
    """All that the executor must know of a sequence, sent once.

    Attributes:
        seq_id: The sequence's id.
        token_ids: Prompt, and after a preemption what had been generated.
        num_generated: How many of `token_ids`, at the end, were generated.
        num_cached: Leading tokens whose KV is already in the blocks; less than all of them.
        block_ids: Blocks of the KV cache, in order.
        sampling: Parameters; `max_tokens` counts from the prompt's end and is already cut to
            what the model's length allows.
        sample: The sample's index and seed.
        info: For the streaming stage.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    num_generated: int
    num_cached: int
    block_ids: tuple[int, ...]
    sampling: SamplingParams
    sample: SequenceSpec
    info: RequestInfo


class StepPlan(Internal, frozen=True, array_like=True, tag="plan", tag_field="type"):
    """One forward pass.

    The executor applies `finished`, `new`, `grown` and `copies` in this order, then runs the rows.

    Row i computes the next `num_tokens[i]` tokens of `seq_ids[i]`. A row that reaches the end of
    the tokens known so far samples one more; the executor feeds that token to the sequence's next
    row itself, so the next plan may be sent before this one's result is back.

    Attributes:
        step_id: Counts up from 1 within an epoch.
        new: Sequences that appear for the first time (or again, after a preemption).
        seq_ids: `[rows]`.
        num_tokens: `[rows]`, each at least 1.
        grown: (seq_id, block ids appended to its table) for each sequence that grew.
        copies: (source, destination) blocks to copy before the pass.
        finished: Sequences that will not be named again; the executor forgets them.
        ended: Requests that were cut short, passed on to streaming in order behind their tokens.
        made_ns: When batching made the plan.
        weight_version: Of new weights to be put in place before the pass; 0 for none.
        release: Memory to be released. Then no plan is under way before this one, which has no
            rows, nor has any other until the memory is there again.
    """

    step_id: int
    new: tuple[NewSequence, ...]
    seq_ids: tuple[int, ...]
    num_tokens: tuple[int, ...]
    grown: tuple[tuple[int, tuple[int, ...]], ...]
    copies: tuple[tuple[int, int], ...]
    finished: tuple[int, ...]
    ended: tuple[Cancel, ...]
    made_ns: int
    weight_version: int = 0
    release: tuple[str, ...] = ()


class StartedSequence(Part, frozen=True, array_like=True):
    """Told to streaming with the first step of a sequence.

    Attributes:
        num_cached: Prompt tokens that needed no computing.
        num_generated: Tokens that earlier runs of this sequence have already reported.
        planned_ns: When batching first planned it.
        executed_ns: When its first step began on the device.
    """

    seq_id: int
    sample_index: int
    num_cached: int
    num_generated: int
    info: RequestInfo
    planned_ns: int
    executed_ns: int


TopLogprobs = tuple[tuple[int, float], ...]
"""(token id, logprob) of the likeliest tokens at one place, likeliest first."""


class PromptLogprobs(Part, frozen=True, array_like=True):
    """What one step found out about a prompt.

    Attributes:
        seq_id: The sequence, always the first sample of its request.
        start: Position in the prompt of the first token reported, at least 1.
        logprobs: `[k]`, of the tokens at `start .. start + k - 1`.
        top_logprobs: `[k]`, or empty when none were asked for.
    """

    seq_id: int
    start: int
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...] = ()


class StepResult(Internal, frozen=True, array_like=True, tag="step", tag_field="type"):
    """What one forward pass sampled. Rows that only prefilled are not in it.

    Attributes:
        step_id: The plan's.
        started: Sequences that were new in this step.
        seq_ids: `[rows]`, those that sampled.
        token_ids: `[rows]`.
        logprobs: `[rows]`, of the policy.
        finish_reasons: `[rows]`, "" while the sequence goes on.
        ended: As in the plan.
        weight_version: Of the weights that made these tokens.
        start_ns: When the device began the step.
        end_ns: When its tokens were on the host.
        top_logprobs: `[rows]`, empty for a row that did not ask; all empty: no row did.
        prompt_logprobs: For sequences that asked for them.
    """

    step_id: int
    started: tuple[StartedSequence, ...]
    seq_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reasons: tuple[Literal["", "stop", "length"], ...]
    ended: tuple[Cancel, ...]
    weight_version: int
    start_ns: int
    end_ns: int
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class RecoveryItem(Part, frozen=True, array_like=True):
    """A request that admission holds, after a failure.

    Attributes:
        key: Of its result stream.
        entry_id: Its entry.
        info: None for one that was refused.
    """

    key: str
    entry_id: str
    info: RequestInfo | None = None


class Recover(Internal, frozen=True, array_like=True, tag="recover", tag_field="type"):
    """Admission to streaming, in a new epoch: what have you of these requests?

    Each is answered with Recovered, or with RequestFinished when its terminal message is written.
    """

    requests: tuple[RecoveryItem, ...]


class RecoveredSample(Part, frozen=True, array_like=True):
    """What streaming has of one sample, whether from memory or from the result stream."""

    sample_index: int
    token_ids: tuple[int, ...]
    finished: bool


class Recovered(Internal, frozen=True, array_like=True, tag="recovered", tag_field="type"):
    """Streaming to admission: go on behind these tokens. Samples that never began are not here."""

    entry_id: str
    samples: tuple[RecoveredSample, ...]


class Fenced(Internal, frozen=True, array_like=True, tag="fenced", tag_field="type"):
    """Streaming to admission: somebody goes on with the streams of these entries in a larger epoch.

    Whose they are now, the requests queue tells.
    """

    entry_ids: tuple[str, ...]


class RequestFinished(Internal, frozen=True, array_like=True, tag="finished", tag_field="type"):
    """Streaming to admission: the request's terminal message has been written."""

    request_id: str
    entry_id: str


# --- control ----------------------------------------------------------------------------------


class Cancel(Internal, frozen=True, array_like=True, tag="cancel", tag_field="type"):
    """End a request early, with this status.

    It travels behind the request through the stages, each of which drops what it holds of it, and
    streaming writes the terminal message.

    Attributes:
        unstarted: Whoever removed the request vouches that none of its sequences went further, so
            streaming has never heard of it and still must answer. Otherwise a request that
            streaming does not know has already ended, and this came too late.
        elsewhere: Another lane has taken the request over: it is dropped, and nothing is written.
    """

    request_id: str
    entry_id: str
    status: Literal["error", "cancelled", "expired"]
    code: str
    message: str
    unstarted: bool = False
    elsewhere: bool = False

    @property
    def result_key(self) -> str:
        """The key of the result stream to which the terminal message goes.

        The id of a duplicate names somebody else's stream.
        """
        own = self.request_id and self.code != "duplicate_request"
        return self.request_id if own else self.entry_id


class StopSequences(Internal, frozen=True, array_like=True, tag="halt", tag_field="type"):
    """Streaming to batching: these sequences met a stop string and need no more tokens."""

    seq_ids: tuple[int, ...]


class Pause(Internal, frozen=True, array_like=True, tag="pause", tag_field="type"):
    """To batching: plan no further steps. Answered when no step is under way any more.

    Attributes:
        in_flight: "keep" or "retract"; to abort requests is up to admission (`CancelAll`).
        operation_id: Under which the answer is expected; "" for none, here and below.
    """

    in_flight: InFlight = "keep"
    operation_id: str = ""


class Resume(Internal, frozen=True, array_like=True, tag="resume", tag_field="type"):
    """Go on after a Pause."""

    operation_id: str = ""


class CancelAll(Internal, frozen=True, array_like=True, tag="cancel_all", tag_field="type"):
    """To admission: every request in flight ends with what it has. What is not yet taken from the
    queue is not in flight."""

    operation_id: str = ""


class UpdateWeights(Internal, frozen=True, array_like=True, tag="weights", tag_field="type"):
    """To the executor: fetch new weights, and put them in place between two steps.

    Steps go on while they are fetched. Answered when they are in place, or when they are refused.

    Attributes:
        source: Where they are.
        in_flight: What becomes of sequences that have begun.
        version: What to count from then on, above the present version; None for the next.
        partial: Whether parameters that are not among them stay as they are.
        timeout_s: How long to wait for them.
        part_of: A name for an update that comes in several such messages: the tensors are checked
            and kept, beside what was kept under this name, and answered for. `StagedWeights` puts
            all of them in place. What was kept under another name is dropped.
        prepare_as: A name for an update that several executors make: the weights are fetched,
            checked and answered for, and wait for `FinishUpdate`. Until that comes, and for at most
            `timeout_s`, other updates are refused.
    """

    source: WeightsSource | StagedWeights
    in_flight: InFlight = "keep"
    version: int | None = None
    partial: bool = False
    timeout_s: float = 300.0
    operation_id: str = ""
    part_of: str = ""
    prepare_as: str = ""


class FinishUpdate(Internal, frozen=True, array_like=True, tag="finish", tag_field="type"):
    """To the executor: put the weights in place that wait under this name, or drop them.

    Answered when they are in place, or dropped.

    Attributes:
        prepared: What `UpdateWeights.prepare_as` called it.
        version: What to count from then on; None to drop them.
    """

    prepared: str
    version: int | None = None
    operation_id: str = ""


class WeightsStaged(Internal, frozen=True, array_like=True, tag="staged", tag_field="type"):
    """The executor to batching: new weights wait for the next plan to put them in place."""

    version: int
    in_flight: InFlight


class JoinWeightsGroup(Internal, frozen=True, array_like=True, tag="join", tag_field="type"):
    """To the executor: join a torch.distributed group from which weights will be broadcast.

    Attributes:
        group: A name for it. One that was joined before is left first.
        address: host:port of the group's TCP store, which rank 0 keeps.
        rank: The executor's, at least 1.
        world_size: How many there are, rank 0 included.
        backend: "gloo" or "nccl".
        timeout_s: How long to wait for the others.
    """

    group: str
    address: str
    rank: int
    world_size: int
    backend: str
    timeout_s: float
    operation_id: str = ""


class LeaveWeightsGroup(Internal, frozen=True, array_like=True, tag="part", tag_field="type"):
    """To the executor: leave a group, if it is in it."""

    group: str
    operation_id: str = ""


class TellWeightVersion(Internal, frozen=True, array_like=True, tag="version", tag_field="type"):
    """To the executor: answer with the version of the weights in place."""

    operation_id: str = ""


class ReleaseMemory(Internal, frozen=True, array_like=True, tag="release", tag_field="type"):
    """To the executor: release memory once the steps under way are done.

    Answered when that is so. Until it is resumed no step runs, and requests wait. KV is computed
    again afterwards; weights are lost, and no step runs before an update has brought all of them.

    Attributes:
        tags: Of `MEMORY_TAGS`. What is released already stays so.
    """

    tags: tuple[str, ...] = MEMORY_TAGS
    operation_id: str = ""


class ResumeMemory(Internal, frozen=True, array_like=True, tag="regain", tag_field="type"):
    """To the executor: take memory again that was released; answered when it is there."""

    tags: tuple[str, ...] = MEMORY_TAGS
    operation_id: str = ""


class MemoryState(Internal, frozen=True, array_like=True, tag="memory", tag_field="type"):
    """The executor to batching: what memory there is.

    Attributes:
        lacks: What is not there, or holds nothing; while there is any, no step can run.
        release: What of it waits for the next plan to release it.
    """

    lacks: tuple[str, ...]
    release: tuple[str, ...] = ()


class FlushCache(Internal, frozen=True, array_like=True, tag="flush", tag_field="type"):
    """Forget all cached prefixes. Running sequences keep their blocks."""

    operation_id: str = ""


class Drain(Internal, frozen=True, array_like=True, tag="drain", tag_field="type"):
    """Let nothing more in; what is still in flight after `timeout_ns` ends with an error."""

    timeout_ns: int


class UpdateFairness(Internal, frozen=True, array_like=True, tag="fairness", tag_field="type"):
    """Replace the fairness stage's settings, as a whole."""

    config: FairnessConfig


class Reset(Internal, frozen=True, array_like=True, tag="reset", tag_field="type"):
    """A new epoch begins: drop whatever belongs to older ones, then answer with StageReady.

    The epoch is that of the envelope.
    """


class LaneCapacity(Part, frozen=True, array_like=True):
    """What the executor can hold.

    Attributes:
        num_blocks: KV blocks of the lane.
        block_size: Tokens per block.
        max_model_len: The configured limit cut to the model's own.
        vocab_size: Rows of the output layer.
        device: For people: "cpu", "cuda:0 NVIDIA H200".
        weight_version: Of the weights in place.
        lacks: As in MemoryState.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    device: str
    weight_version: int = 0
    lacks: tuple[str, ...] = ()


class StageStarted(Internal, frozen=True, array_like=True, tag="started", tag_field="type"):
    """A stage is up and holds nothing. Sent to admission, which then begins a new epoch."""

    stage: str
    incarnation: str


class StageReady(Internal, frozen=True, array_like=True, tag="ready", tag_field="type"):
    """The stage has dropped what is older than the envelope's epoch and takes part in it.

    The executor tells its capacity, and tells batching as well as admission.
    """

    stage: str
    incarnation: str
    capacity: LaneCapacity | None = None


class ServerRestarted(Internal, frozen=True, array_like=True, tag="server", tag_field="type"):
    """A bus to admission: its server is not the one that it was, and may have lost messages."""


class StageStopped(Internal, frozen=True, array_like=True, tag="stopped", tag_field="type"):
    """A stage leaves in good order or has failed. What it held is lost to this epoch."""

    stage: str
    incarnation: str
    reason: str


Message = (
    AdmittedRequest
    | Dispatch
    | Yield
    | Continue
    | Credit
    | StepPlan
    | StepResult
    | Recover
    | Recovered
    | RequestFinished
    | Fenced
    | Cancel
    | StopSequences
    | Pause
    | Resume
    | CancelAll
    | UpdateWeights
    | FinishUpdate
    | WeightsStaged
    | JoinWeightsGroup
    | LeaveWeightsGroup
    | TellWeightVersion
    | ReleaseMemory
    | ResumeMemory
    | MemoryState
    | FlushCache
    | Drain
    | UpdateFairness
    | Reset
    | StageStarted
    | StageReady
    | StageStopped
    | ServerRestarted
)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What carries a message between stages.

    Attributes:
        body: The message.
        epoch: Receivers drop what is older than the epoch they are in; 0 belongs to none and is
            always taken.
        sender: The sending stage's incarnation, for example "batching-3f2a".
        id: Counts up for each sender and link, from 1, so that a link can drop a repeated write.
        sent_ns: When it was handed to the link.
        traceparent: W3C trace context of the request in the body; empty when there is none, or
            when there are several and the body itself names them.
        tracestate: As traceparent.
        budget_ns: What is left of the request's time at `sent_ns`; None means no deadline. Each
            hop turns it into a deadline by its own clock, so clocks need not agree.
    """

    body: Message
    epoch: int = 0
    sender: str = ""
    id: int = 0
    sent_ns: int = 0
    traceparent: str = ""
    tracestate: str = ""
    budget_ns: int | None = None
