"""Messages about requests on their way between stages.

Those of a step are in `steps.py`, control messages in `control.py`; the clients' messages are in
`public.py`. All are frozen msgspec structs, tagged with `type`. In memory they pass by reference,
unencoded; on Redis those between stages are msgpack arrays.

Times ending in `_ns` are integer nanoseconds: timestamps since the Unix epoch, budgets relative.
Token ids are plain ints. Fields may be added at the end with a default; none is ever reordered.
`links.py` draws the path of a request.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from ..config import SamplingParams
from .control import Internal, InternalPart
from .pooling import Pooling
from .sections import Sections
from .times import StageTime

RowFinish = Literal["", "stop", "length", "abort"]
"""Why a sequence ended with a row's token; "" if it continues."""


TopLogprobs = tuple[tuple[int, float], ...]
"""(token id, logprob) of the likeliest tokens at one place, likeliest first."""


class SequenceSpec(InternalPart, frozen=True, array_like=True):
    """One sample: its sequence id (unique within an epoch), index in the request, and seed.

    A sample's random numbers depend on (seed, position) only.

    Attributes:
        generated: Tokens of the sample that streaming already has, after a failure; the sequence
            continues after them.
    """

    seq_id: int
    sample_index: int
    seed: int
    generated: tuple[int, ...] = ()


class RequestInfo(InternalPart, frozen=True, array_like=True):
    """Ids of a request, its trace, and what batching and the executor need besides its sampling.

    Attributes:
        traceparent, tracestate: Context of the stages' spans.
        adapter: Id of the LoRA adapter; "" for none.
        pooling: Pooling of the prompt into a vector; None for a request that generates.
        queued: When fairness held the request; None before fairness has dispatched it.
    """

    request_id: str
    entry_id: str
    traceparent: str = ""
    tracestate: str = ""
    adapter: str = ""
    pooling: Pooling | None = None
    queued: StageTime | None = None


class StoredSample(InternalPart, frozen=True, array_like=True):
    """A finished sample in the response cache.

    Attributes:
        token_ids: `[k]`.
        logprobs: `[k]`.
        top_logprobs: `[k]`; empty if not requested.
        finish_reason: Finish reason of the last token, by the executor: "" if a stop string ended
            the sample.
        columns: Names and values of token columns, as in CompletionSample.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]
    finish_reason: RowFinish
    columns: tuple[tuple[str, tuple[Any, ...]], ...] = ()


class StoredResponse(InternalPart, frozen=True, array_like=True):
    """A finished response in the response cache.

    Attributes:
        samples: All of them.
        weight_version: Version of the weights that made all tokens.
        adapter_version: The same of the adapter; 0 without one.
        generation: As in ResponseCaching.
    """

    samples: tuple[StoredSample, ...]
    weight_version: int
    adapter_version: int
    generation: int


class RequestOpened(Internal, frozen=True):
    """Admission to streaming: a request that enters the lane, and what its results need.

    It is sent before the AdmittedRequest, over a link of its own: over Redis its sequences' first
    step may come earlier, and streaming holds that back. In a new epoch it is sent again.

    Attributes:
        n: Number of samples.
        stream: Whether the client gets chunks.
        stop: Stop strings.
        prompt_token_ids: `[prompt]`.
        received_ns: When admission took the entry.
        admitted_ns: When the request left admission.
        min_tokens: Stop strings are not searched for in the text of this many first tokens.
        logprobs: Number of top logprobs at each completion token.
        prompt_logprobs: The same for the prompt; None without prompt logprobs.
        priority: Label of metrics.
        embeds: Whether the request needs the prompt's vector.
        tenant: Label of metrics.
        parts: Sections of optional parts.
        prompt_logprob_start: Last position of the prompt before those with logprobs.
        num_targets: Targets at positions of the prompt; None if none were given.
        is_chat: Whether the prompt is a conversation; label of metrics.
    """

    request_id: str
    entry_id: str
    model: str
    n: int
    stream: bool
    stop: tuple[str, ...]
    prompt_token_ids: tuple[int, ...]
    traceparent: str = ""
    tracestate: str = ""
    received_ns: int = 0
    admitted_ns: int = 0
    min_tokens: int = 0
    logprobs: int = 0
    prompt_logprobs: int | None = None
    priority: int = 0
    embeds: bool = False
    tenant: str = ""
    parts: Sections = ()
    prompt_logprob_start: int = 0
    num_targets: int | None = None
    is_chat: bool = False


class Prompt(InternalPart, frozen=True, array_like=True):
    """A request's prompt.

    Attributes:
        token_ids: At least one.
        media: The id of each image among the tokens.
    """

    token_ids: tuple[int, ...]
    media: tuple[str, ...] = ()


class CacheScope(NamedTuple):
    """The identity of KV besides token ids: only sequences of one scope share cached KV.

    Attributes:
        tenant: "" where prefixes are shared across tenants.
        salt: The request's `cache_salt`.
        adapter: Id of the LoRA adapter; "" for none.
        adapter_version: Version of the adapter's weights; 0 before batching sets it.
    """

    tenant: str = ""
    salt: str = ""
    adapter: str = ""
    adapter_version: int = 0


DEFAULT_SCOPE = CacheScope()
"""The scope without tenant, salt and adapter."""


class RemoteBlocks(InternalPart, frozen=True, array_like=True):
    """The leading full blocks of a sequence, in host slots of the executor that computed them.

    They are the receiver's blocks only if all fields but the first and the last equal its own.

    Attributes:
        address: Address at which they are read, as in TierCapacity.
        layout: As in TierCapacity.
        model: As in TierCapacity.
        weight_version: Version of the weights that computed them.
        adapter_version: Version of the adapter; 0 without one.
        blocks: (name, host slot, id of the step there that offers it) of each.
        states: The same of snapshots, each named as the block that ends there.
        states_address: Address at which these are read.
    """

    address: str
    layout: str
    model: str
    weight_version: int
    adapter_version: int
    blocks: tuple[tuple[bytes, int, int], ...]
    states: tuple[tuple[bytes, int, int], ...] = ()
    states_address: str = ""


class AdmittedRequest(Internal, frozen=True):
    """A valid request after admission. Fairness sends some or all of its sequences on to batching,
    in the same form with a rank; each uses up one credit.

    A sequence goes first to a replica that prefills, which hands it over to one that decodes, if
    the replicas have such roles.

    Attributes:
        sampling: `stop_token_ids` include the model's own; `stop` is empty, since streaming has it.
        sequences: The samples that are still to be made.
        has_stop_strings: Whether a stop string may end a sample.
        rank: Sequences with a smaller rank go first where not all fit. Ranks grow with time, so
            no sequence waits for ever.
        parts: Sections of optional parts.
    """

    info: RequestInfo
    prompt: Prompt
    sampling: SamplingParams
    sequences: tuple[SequenceSpec, ...]
    tenant: str
    priority: int
    cache_scope: CacheScope = DEFAULT_SCOPE
    has_stop_strings: bool = False
    rank: int = 0
    parts: Sections = ()


class AnnounceSequence(Internal, frozen=True):
    """Batching to another replica's batching: a sequence is to go on there after its first token.

    Fairness has promised it a place there. Either Handover or WithdrawSequences follows. Repeated
    if its blocks are computed anew.

    Attributes:
        request: With one sequence, and its blocks as far as they are planned: they can be read when
            they are computed.
    """

    request: AdmittedRequest


class AnnounceBlocks(Internal, frozen=True):
    """More blocks of an announced sequence, after those before; `blocks` and `states` as in
    RemoteBlocks."""

    seq_id: int
    blocks: tuple[tuple[bytes, int, int], ...]
    states: tuple[tuple[bytes, int, int], ...] = ()


class Handover(Internal, frozen=True):
    """Executor to another replica's batching: an announced sequence has its first token.

    Attributes:
        seq_id: The sequence.
        token_ids: The tokens of the step that sampled the first one.
        num_messages: Messages that batching has sent about the sequence; all of them come first.
        sampled_ns: When this step ended, on the sender's clock.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    num_messages: int = 1
    sampled_ns: int = 0


class WithdrawSequences(Internal, frozen=True):
    """Batching to another replica's batching: these announced sequences have ended."""

    seq_ids: tuple[int, ...]


class ReleaseBlocks(Internal, frozen=True):
    """Fairness to batching: the blocks that were offered for these sequences are not needed."""

    seq_ids: tuple[int, ...]


class PauseSequences(Internal, frozen=True):
    """Pause these sequences. Finished sequences are ignored.

    Batching keeps their tokens; their KV stays in the prefix cache until its blocks are needed.
    """

    seq_ids: tuple[int, ...]


class ResumeSequences(Internal, frozen=True):
    """Resume paused sequences, ranked as in AdmittedRequest. Each uses one credit."""

    seq_ids: tuple[int, ...]
    rank: int = 0


class Credit(Internal, frozen=True):
    """Batching's room for more sequences, and its work since the last report.

    Attributes:
        sequences: Number of free places.
        steps: For each finished step, the sequences that gained a token.
        started: (sequence, tokens to compute) for each that began, or began again.
        paused: Paused sequences, which wait for ResumeSequences.
        ended: Sequences that will not run again.
        step_ns: Device time of the shortest step; 0 without steps.
        kv_free: Tokens for which KV is free, including KV held by the prefix cache only.
        keeps_cache: The prefix cache survived.
        left: Sequences that were handed over.
    """

    sequences: int
    steps: tuple[tuple[int, ...], ...] = ()
    started: tuple[tuple[int, int], ...] = ()
    paused: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    step_ns: int = 0
    kv_free: int = 0
    keeps_cache: bool = True
    left: tuple[int, ...] = ()


class RequestFinished(Internal, frozen=True):
    """Streaming to admission: the request's terminal message has been written.

    Attributes:
        response: For the response cache, if it is to be kept (ResponseCaching) and all of it was
            computed with one version of the weights.
    """

    request_id: str
    entry_id: str
    response: StoredResponse | None = None
