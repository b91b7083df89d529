"""Messages on a request's path between stages, and their envelope.

Control messages are in `control.py`; the clients' messages are in `public.py`. All are frozen
msgspec structs, tagged with `type`. In memory they pass by reference, unencoded; on Redis those
between stages are msgpack arrays.

Times ending in `_ns` are integer nanoseconds: timestamps since the Unix epoch, budgets relative.
Token ids are plain ints. Fields may be added at the end with a default; none is ever reordered.
`links.py` draws the path of a request.
"""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union

import msgspec

from ..config import SamplingParams
from .control import Cancel, Internal, InternalPart
from .media import MediaItem as MediaItem
from .pooling import PooledPrompt, Pooling
from .public import AfterTurn, KVSession, KVSessionResult, SessionTier, StageTime
from .recipes import RecipeParts
from .recovery import Fenced as Fenced
from .recovery import Recover as Recover
from .recovery import Recovered as Recovered
from .recovery import RecoveredSample as RecoveredSample
from .recovery import RecoveryItem as RecoveryItem
from .times import NO_TIMES, StepTimes

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
        pooling: How the prompt becomes a vector; None for a request that generates.
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
        finish_reason: Of the last token, by the executor: "" if a stop string ended the sample.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]
    finish_reason: RowFinish


class StoredResponse(InternalPart, frozen=True, array_like=True):
    """A finished response in the response cache.

    Attributes:
        samples: All of them.
        weight_version: Of the weights that made all tokens.
        adapter_version: The same of the adapter; 0 without one.
        generation: As `RequestOpened.keeps`.
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
        ref_temperature: Of the reference model's logprobs; None without a reference model.
        embeds: Whether the request asks for the prompt's vector.
        keeps: The response cache's generation, if RequestFinished is to carry the response; else 0.
        response: The response from there; no sequence of the request runs.
        tenant: Label of metrics.
        queued_ns, waited_ns: As in RequestEntry.
        down_since_ns: When the lane failed, if the request is opened again; else 0.
        recipe: Of the Completion's recipe; None for none.
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
    ref_temperature: float | None = None
    embeds: bool = False
    keeps: int = 0
    response: StoredResponse | None = None
    tenant: str = ""
    queued_ns: int = 0
    waited_ns: int = 0
    down_since_ns: int = 0
    recipe: RecipeParts | None = None


class Prompt(InternalPart, frozen=True, array_like=True):
    """A request's prompt.

    Attributes:
        token_ids: At least one.
        media: The id of each image among the tokens.
    """

    token_ids: tuple[int, ...]
    media: tuple[str, ...] = ()


class CacheScope(NamedTuple):
    """What KV depends on besides token ids: only sequences of one scope share cached KV.

    Attributes:
        tenant: "" where prefixes are shared across tenants.
        salt: The request's `cache_salt`.
        adapter: Id of the LoRA adapter; "" for none.
        adapter_version: Of the adapter's weights; 0 before batching sets it.
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
        address: Where they are read, as in TierCapacity.
        layout: As in TierCapacity.
        weights: As in TierCapacity.
        weight_version: Of the weights that computed them.
        adapter_version: Of the adapter; 0 without one.
        blocks: (name, host slot, id of the step there that offers it) of each.
    """

    address: str
    layout: str
    weights: str
    weight_version: int
    adapter_version: int
    blocks: tuple[tuple[bytes, int, int], ...]


class AdmittedRequest(Internal, frozen=True):
    """What admission has made of a valid request. Fairness sends some or all of its sequences on to
    batching, in the same form with a rank; each uses up one credit.

    A sequence goes first to a replica that prefills, which hands it over to one that decodes, if
    the replicas have such roles.

    Attributes:
        sampling: `stop_token_ids` include the model's own; `stop` is empty, since streaming has it.
        sequences: The samples that are still to be made.
        prediction: What the client expects to come, as tokens; a draft for speculation.
        has_stop_strings: Whether a stop string may end a sample.
        rank: Sequences with a smaller rank go first where not all fit. Ranks grow with time, so
            no sequence waits for ever.
        successors: For each sequence, the number of the replica that continues it behind its first
            token; empty if the sequences stay.
        remote: Blocks of the replica that hands its one sequence over; None if none does.
        kv_session: As in GenerateRequest.
        media: The images among the prompt's tokens, in order.
    """

    info: RequestInfo
    prompt: Prompt
    sampling: SamplingParams
    sequences: tuple[SequenceSpec, ...]
    tenant: str
    priority: int
    cache_scope: CacheScope = DEFAULT_SCOPE
    prediction: tuple[int, ...] = ()
    has_stop_strings: bool = False
    rank: int = 0
    successors: tuple[int, ...] = ()
    remote: RemoteBlocks | None = None
    kv_session: KVSession | None = None
    media: tuple[MediaItem, ...] = ()


class AnnounceSequence(Internal, frozen=True):
    """Batching to another replica's batching: a sequence is to go on there behind its first token.

    Fairness has promised it a place there. Either Handover or WithdrawSequences follows. Repeated
    if its blocks are computed anew.

    Attributes:
        request: With one sequence, and its blocks as far as they are planned: they can be read when
            they are computed.
    """

    request: AdmittedRequest


class AnnounceBlocks(Internal, frozen=True):
    """More blocks of an announced sequence, behind those before; `blocks` as in RemoteBlocks."""

    seq_id: int
    blocks: tuple[tuple[bytes, int, int], ...]


class Handover(Internal, frozen=True):
    """Executor to another replica's batching: an announced sequence has its first token.

    Attributes:
        seq_id: The sequence.
        token_ids: The tokens of the step that sampled the first one.
        num_messages: That batching has sent about the sequence, all of which are to come first.
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


class SessionGrant(InternalPart, frozen=True, array_like=True):
    """What a turn of a session may leave in the KV cache, decided when the turn starts.

    Attributes:
        after: As in KVSession.
        num_blocks: Most full blocks that are pinned at its end.
        block_size: Tokens per block.
        tiers: Whether there are tiers below the device.
        reason: Why no more is granted, or nothing.
    """

    after: AfterTurn
    num_blocks: int
    block_size: int
    tiers: bool = False
    reason: str = ""

    def result(self, num_tokens: int) -> KVSessionResult:
        """Return what the request is answered, which ends with so many tokens in all."""
        if self.reason and not self.num_blocks:
            return KVSessionResult(outcome="rejected", reason=self.reason)
        if self.after == "release":
            return KVSessionResult(outcome="accepted")
        num_full = max(num_tokens - 1, 0) // self.block_size
        number = num_full if self.after == "demote" else min(num_full, self.num_blocks)
        tier: SessionTier = "host" if self.after == "demote" and self.tiers else "device"
        return KVSessionResult(
            outcome="clipped" if number < num_full else "accepted",
            num_tokens=number * self.block_size,
            tier=tier if number else "",
            reason=self.reason if number < num_full else "",
        )


class NewSequence(InternalPart, frozen=True, array_like=True):
    """A sequence as the executor needs it, sent once.

    Attributes:
        seq_id: The sequence's id.
        token_ids: Prompt, and after a preemption the generated tokens.
        num_generated: Number of generated tokens at the end of `token_ids`.
        num_cached: Leading tokens whose KV is already in the blocks; all of them with a shared
            prefill.
        block_ids: Blocks of the KV cache, in order.
        sampling: Parameters; `max_tokens` counts from the prompt's end and is already limited by
            the model's length.
        sample: The sample's index and seed.
        info: Its request.
        cache_scope: Speculation learns only from sequences of the same scope.
        prediction: As in AdmittedRequest.
        handed_over: As in StartedSequence.
        hands_over: Whether it leaves with its first token here.
        session: Of a session's turn; None for other sequences.
        media: As in AdmittedRequest.
        fetching_since_ns: When it began to wait for blocks from a tier; 0 if it did not.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    num_generated: int
    num_cached: int
    block_ids: tuple[int, ...]
    sampling: SamplingParams
    sample: SequenceSpec
    info: RequestInfo
    cache_scope: CacheScope = DEFAULT_SCOPE
    prediction: tuple[int, ...] = ()
    handed_over: bool = False
    hands_over: bool = False
    session: SessionGrant | None = None
    media: tuple[MediaItem, ...] = ()
    fetching_since_ns: int = 0


AUDIT_SEQ_ID = -2
"""The sequence that computes a block of the KV tiers again. It belongs to no request."""


class KVMove(InternalPart, frozen=True, array_like=True):
    """One block's move between the KV cache and the tiers below it.

    Attributes:
        kind: "store": from a block of the cache to a host slot. "load": from a host slot to a
            block. "fetch": from disk, or from another executor, to a host slot, in the background.
            "offer": store it if it has a block, and let other executors read the slot. "drop":
            delete it on disk. "compare": report whether two blocks of the cache are equal.
        name: Its block hash, 16 bytes.
        slot: The host slot; -1 for none.
        block_id: The block of the cache; -1 for none.
        write: Of "store": also write it to disk, in the background.
        other: Of "compare": the loaded block; `block_id` is the computed one. Of "fetch": the host
            slot of the other executor.
        source: Of "fetch": address of the other executor; "" for the disk.
        source_name: The block's name there.
        step: The step there that offers the block, for which the fetch waits.
    """

    kind: Literal["store", "load", "fetch", "offer", "drop", "compare"]
    name: bytes
    slot: int = -1
    block_id: int = -1
    write: bool = False
    other: int = -1
    source: str = ""
    source_name: bytes = b""
    step: int = 0


class StepPlan(Internal, frozen=True):
    """One forward pass.

    The executor applies `finished`, `new`, `grown`, `kv_moves` and `copies` in this order, then
    runs the rows.

    Row i computes the next `num_tokens[i]` tokens of `seq_ids[i]`. A row that reaches the end of
    the tokens known so far samples one more; the executor feeds that token to the sequence's next
    row itself, so the next plan may be sent before this one's result is back.

    Attributes:
        step_id: Counts up from 1 within an epoch.
        new: Sequences that appear for the first time (or again, after a preemption).
        seq_ids: `[rows]`.
        num_tokens: `[rows]`; 0 for a shared prefill: the row samples from the logits of the row
            before, whose tokens are the same.
        grown: (seq_id, block ids appended to its table) for each sequence that grew.
        copies: (source, destination) blocks to copy before the pass.
        finished: Sequences that will not be named again; the executor forgets them.
        ended: Requests that were cut short, passed on to streaming in order behind their tokens.
        made_ns: When batching made the plan.
        weight_version: Of new weights to be put in place before the pass; 0 for none.
        release: Memory to be released. No plan before has rows, nor has any until it is resumed.
        adapters: (id, version) of adapters whose new weights are to be put in place before the
            pass; version 0: the executor forgets the adapter. Behind `finished`, before `new`.
        num_drafts: `[rows]`, how many drafted tokens the executor may verify in a row besides,
            for which the row's blocks have room; empty: none in any.
        kv_moves: Blocks to move between the KV cache and the tiers below it, in this order.
        kv_offers: Blocks to offer to other executors, behind the rows that compute them.
        handovers: (sequence, replica, `num_messages` of the Handover) for each row that samples
            the first token of a sequence that the other replica continues if it goes on.
        forgotten_images: Keys of images whose embeddings the executor drops.
        encodes: Images to encode behind that, before the pass.
        times: For the accounts of time.
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
    adapters: tuple[tuple[str, int], ...] = ()
    num_drafts: tuple[int, ...] = ()
    kv_moves: tuple[KVMove, ...] = ()
    kv_offers: tuple[KVMove, ...] = ()
    handovers: tuple[tuple[int, int, int], ...] = ()
    forgotten_images: tuple[tuple[str, int], ...] = ()
    encodes: tuple[MediaItem, ...] = ()
    times: StepTimes = NO_TIMES


class StartedSequence(InternalPart, frozen=True, array_like=True):
    """A sequence whose first step this is; after a preemption, its first step since.

    Attributes:
        num_cached: Prompt tokens that needed no computing.
        num_generated: Tokens that earlier runs of this sequence have already reported.
        executed_ns: When the step began on the device.
        queued: As in RequestInfo.
        handed_over: Whether another replica computed the sequence before.
        session, hands_over, fetching_since_ns: As in NewSequence.
    """

    seq_id: int
    sample_index: int
    request_id: str
    entry_id: str
    num_cached: int
    num_generated: int
    executed_ns: int
    queued: StageTime | None = None
    handed_over: bool = False
    session: SessionGrant | None = None
    hands_over: bool = False
    fetching_since_ns: int = 0


class PromptLogprobs(InternalPart, frozen=True, array_like=True):
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


class VerifiedDraft(InternalPart, frozen=True, array_like=True):
    """A row's drafted tokens, of which the first `num_accepted` were what was sampled.

    `source`: where they came from, as in `engine.draft_sources`, or "model".
    """

    seq_id: int
    source: str
    num_tokens: int
    num_accepted: int


class StepResult(Internal, frozen=True):
    """What one forward pass sampled. Rows that only prefilled are not in it.

    A sequence whose draft was accepted in part or whole is named once for each token that it got,
    in order and one after the other. So `[rows]` are tokens here.

    Attributes:
        step_id: The plan's.
        started: Sequences that were new in this step.
        seq_ids: `[rows]`, those that sampled.
        token_ids: `[rows]`.
        logprobs: `[rows]`, of the policy.
        finish_reasons: `[rows]`, "" while the sequence goes on.
        ended: As in the plan.
        weight_version: Of the weights that made these tokens.
        start_ns, end_ns: When the device began the step, and when its tokens were on the host.
        top_logprobs: `[rows]`, empty for a row that did not ask; all empty: no row did.
        prompt_logprobs: For sequences that asked for them.
        adapter_versions: `[rows]`, of each row's adapter, 0 for none; empty: no row had one.
        pooled: For sequences that asked for their prompt's vector and have computed all of it.
        drafts: For each row in which drafted tokens were verified.
        draft_rest: So many plans to come need allow no drafts, since they would not pay.
        failed: Requests that the executor ends; rows of theirs don't count.
        spoiled: Sequences whose KV is invalid, since an image was missing.
        times: For the accounts of time.
    """

    step_id: int
    started: tuple[StartedSequence, ...]
    seq_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reasons: tuple[RowFinish, ...]
    ended: tuple[Cancel, ...]
    weight_version: int
    start_ns: int
    end_ns: int
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    adapter_versions: tuple[int, ...] = ()
    pooled: tuple[PooledPrompt, ...] = ()
    drafts: tuple[VerifiedDraft, ...] = ()
    draft_rest: int = 0
    failed: tuple[Cancel, ...] = ()
    spoiled: tuple[int, ...] = ()
    times: StepTimes = NO_TIMES

    def summary(self, handovers: tuple[tuple[int, int, int], ...] = ()) -> StepSummary:
        """The part for batching. `handovers`: the plan's."""
        ended = (*compress(self.seq_ids, self.finish_reasons), *(p.seq_id for p in self.pooled))
        return StepSummary(
            step_id=self.step_id,
            seq_ids=self.seq_ids,
            token_ids=self.token_ids,
            ended=ended,
            start_ns=self.start_ns,
            end_ns=self.end_ns,
            drafts=self.drafts,
            draft_rest=self.draft_rest,
            spoiled=self.spoiled,
            handed_over=tuple([i for i, *_ in handovers if i in self.seq_ids and i not in ended]),
        )


class StepSummary(Internal, frozen=True):
    """The part of a StepResult that batching needs: no logprobs, no vectors.

    Attributes:
        step_id, seq_ids, token_ids, start_ns, end_ns, drafts, draft_rest, spoiled: As in
            StepResult.
        ended: Sequences that have ended with this step, by a finish reason or with their vector.
        handed_over: Sequences whose first token was sent to the replica that continues them.
    """

    step_id: int
    seq_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    ended: tuple[int, ...]
    start_ns: int
    end_ns: int
    drafts: tuple[VerifiedDraft, ...] = ()
    draft_rest: int = 0
    spoiled: tuple[int, ...] = ()
    handed_over: tuple[int, ...] = ()


class RequestFinished(Internal, frozen=True):
    """Streaming to admission: the request's terminal message has been written.

    Attributes:
        response: For the response cache, if `RequestOpened.keeps` and all of it was computed with
            one version of the weights.
    """

    request_id: str
    entry_id: str
    response: StoredResponse | None = None


def _kinds(message: Any) -> list[Any]:
    """Return a class, or the classes below it."""
    below = message.__subclasses__()
    return [kind for each in below for kind in _kinds(each)] if below else [message]


if TYPE_CHECKING:
    Message = Internal
else:
    # The decoder takes a union: all messages of this module, of `control` and of `recovery`.
    Message = Union[tuple(_kinds(Internal))]  # noqa: UP007


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
        operation_id: Id under which the sender of a control message waits for the reply
            (`Replies`); "" if no reply is expected.
    """

    body: Message
    epoch: int = 0
    sender: str = ""
    id: int = 0
    sent_ns: int = 0
    traceparent: str = ""
    tracestate: str = ""
    budget_ns: int | None = None
    operation_id: str = ""
