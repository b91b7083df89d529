"""Control messages: cancelling, pausing, weights, epochs, scores of the reference model.

Arrays of msgpack on Redis, as all messages between stages.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ..config import FairnessConfig, ModelConfig, PoolingKind, ReplicaRole
from ..store.loaded_adapter import LoadedAdapter
from .entry_keys import entry_key
from .kv_sessions import SessionAction
from .sections import Section, Sections
from .weights import InFlight, PauseMode, StagedWeights, WeightsSource

Capability = Literal["generate", "score", "embed"]
"""Uses of a model."""

MemoryTag = Literal["weights", "kv_cache"]
MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")
"""Parts of an executor's memory that can be released separately."""


class Internal(msgspec.Struct, frozen=True, tag=True, tag_field="type", array_like=True):
    """A message between stages: on the wire an array that begins with the class's name."""


class InternalPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of a message between stages: an untagged array."""


class Cancel(Internal, frozen=True):
    """End a request early, with this status.

    It follows the request through the stages, each of which drops the request, and streaming writes
    the terminal message.

    Attributes:
        unstarted: The sender guarantees that no sequence of the request went further, so streaming
            has no state of it and must answer. Otherwise a request unknown to streaming has already
            ended.
        elsewhere: Another lane has taken the request over: it is dropped, and nothing is written.
        retry_after_s: As in ErrorInfo.
        taken_ns: When admission took the entry, if admission ends the request; else 0.
        queued_ns: As in RequestEntry, with `taken_ns`.
    """

    request_id: str
    entry_id: str
    status: Literal["error", "cancelled", "expired"]
    code: str
    message: str
    unstarted: bool = False
    elsewhere: bool = False
    retry_after_s: float | None = None
    taken_ns: int = 0
    queued_ns: int = 0

    @property
    def key(self) -> str:
        """The identity of its entry."""
        return entry_key(self.entry_id, self.request_id)

    @property
    def result_key(self) -> str:
        """The key of the result stream for the terminal message.

        A duplicate's id names the first request's stream.
        """
        own = self.request_id and self.code != "duplicate_request"
        return self.request_id if own else self.entry_id


class StopSequences(Internal, frozen=True):
    """Streaming to batching: these sequences reached a stop string."""

    seq_ids: tuple[int, ...]


class Pause(Internal, frozen=True):
    """To batching: plan no further steps. Answered when no step is in flight.

    Replies go out under the envelope's `operation_id`, here and below.

    Attributes:
        in_flight: Treatment of batching's sequences. Admission ends earlier requests (`CancelAll`).
    """

    in_flight: PauseMode = "keep"


class Resume(Internal, frozen=True):
    """Continue after a Pause."""


class CancelAll(Internal, frozen=True):
    """To admission: end every request in flight with its output so far. Untaken entries are not in
    flight."""


class UpdateWeights(Internal, frozen=True):
    """To the executor: fetch new weights, and put them in place between two steps.

    Steps continue during the fetch. Answered when the weights are in place, or refused.

    Attributes:
        source: Their source.
        in_flight: Treatment of sequences that have begun.
        version: The new version, above the present one; None for the next.
        partial: Keep parameters that are missing from the source.
        timeout_s: Time limit of the fetch.
        part_of: Name of an update in several messages: the tensors are checked and kept beside
            earlier ones of this name. `StagedWeights` puts all of them in place. Parts of another
            name are dropped.
        part: The part's number, from 0; one that comes again replaces the former. None for the
            next.
        prepare_as: Name of an update of several executors: the weights are fetched and checked, and
            wait for `FinishUpdate`. Until then, for at most `timeout_s`, other updates are refused.
            The same name again is answered as the first time.
        decided: Whether the store has the decision (`WeightUpdateState.committed`), which the
            executor reads when `FinishUpdate` doesn't come.
    """

    source: WeightsSource | StagedWeights
    in_flight: InFlight = "keep"
    version: int | None = None
    partial: bool = False
    timeout_s: float = 300.0
    part_of: str = ""
    prepare_as: str = ""
    part: int | None = None
    decided: bool = False


class FinishUpdate(Internal, frozen=True):
    """To the executor: put the prepared weights in place, or drop them. Answered when done.

    Attributes:
        prepared: The name given in `UpdateWeights.prepare_as`.
        version: The new version; None to drop them.
        logged: Their place in the log of weights (`Outcome.logged`), for an executor that was
            restarted since; "" without a log.
    """

    prepared: str
    version: int | None = None
    logged: str = ""


class WeightsReady(Internal, frozen=True):
    """The executor to batching: new weights are ready for the next plan."""

    version: int
    in_flight: InFlight


class JoinWeightsGroup(Internal, frozen=True):
    """To the executor: join a torch.distributed group for weight broadcasts.

    Attributes:
        group: Its name. An earlier group of this name is left first.
        address: host:port of the group's TCP store, on rank 0.
        rank: The executor's, at least 1.
        world_size: Number of ranks, including rank 0.
        backend: "gloo" or "nccl".
        timeout_s: Time limit for the other ranks.
    """

    group: str
    address: str
    rank: int
    world_size: int
    backend: str
    timeout_s: float


class LeaveWeightsGroup(Internal, frozen=True):
    """To the executor: leave a group, if joined."""

    group: str


class TellWeightVersion(Internal, frozen=True):
    """To the executor: reply with the version of the weights in place."""


class ChecksumWeights(Internal, frozen=True):
    """To the executor: reply with the SHA-256 of each parameter in place."""


class ReleaseMemory(Internal, frozen=True):
    """To the executor: release memory after the steps in flight. Answered when done.

    Until resumption no step runs, and requests wait. KV is recomputed afterwards; weights are lost,
    and no step runs before an update has brought all of them.

    Attributes:
        tags: Some of `MEMORY_TAGS`. Released memory stays released.
    """

    tags: tuple[str, ...] = MEMORY_TAGS


class ResumeMemory(Internal, frozen=True):
    """To the executor: take released memory again. Answered when done."""

    tags: tuple[str, ...] = MEMORY_TAGS


class MemoryState(Internal, frozen=True):
    """The executor to batching: state of its memory.

    Attributes:
        lacks: Released or empty parts; no step can run until this is empty.
        release: Parts that the next plan is to release.
    """

    lacks: tuple[str, ...]
    release: tuple[str, ...] = ()


class MoveExperts(Internal, frozen=True):
    """To the executor: give the experts other owners between two steps. Answered when done.

    Attributes:
        owners: The rank of each expert of a layer; each rank owns equally many.
    """

    owners: tuple[int, ...]


class LoadAdapter(Internal, frozen=True):
    """To the executor: read a LoRA adapter, and put it in place between two steps.

    Steps continue while it is read. Answered with its version when it is in place, or refused.

    Attributes:
        adapter: Its id in requests. A loaded one gets new weights.
        folder: In PEFT's format, readable by the executor's process.
        in_flight: Treatment of sequences that have begun with it.
        version: The new version, above all earlier ones of this id; None for the next.
    """

    adapter: str
    folder: str
    in_flight: InFlight = "keep"
    version: int | None = None
    only_check: bool = False


class UnloadAdapter(Internal, frozen=True):
    """To admission: let no request with this adapter in any more. Answered when none is in flight.

    To the executor, after that: forget it. Answered when that is so; what still has it ends.

    Attributes:
        in_flight: "abort" ends requests in flight with what they have; else they finish first.
    """

    adapter: str
    in_flight: InFlight = "keep"


class AdapterReady(Internal, frozen=True):
    """The executor to batching: an adapter is ready for the next plan.

    Attributes:
        version: Version of its weights; 0 to unload it.
    """

    adapter: str
    version: int
    in_flight: InFlight


class FlushCache(Internal, frozen=True):
    """To batching: drop all cached prefixes; running sequences keep their blocks. To admission:
    drop all cached responses."""


class ControlSession(Internal, frozen=True):
    """To batching: change what is kept of a session's KV. Answered with a KVSessionResult.

    Attributes:
        session: The session's id.
        ttl_s: Seconds for which the session is known from now on; None: as before.
    """

    tenant: str
    session: str
    action: SessionAction
    ttl_s: float | None = None


class Drain(Internal, frozen=True):
    """Admit no more requests; those in flight after `timeout_ns` end with an error.

    A second Drain may shorten the time.
    """

    timeout_ns: int


class UpdateFairness(Internal, frozen=True):
    """Replace the fairness stage's settings, as a whole."""

    config: FairnessConfig


class UpdateRoles(Internal, frozen=True):
    """To fairness: replace the replicas' roles, as a whole. Sequences stay where they run."""

    roles: tuple[ReplicaRole, ...]


class LoadModel(Internal, frozen=True):
    """To the model manager: load a model. Answered when it is ready or has failed.

    Attributes:
        id: One of its names.
        model: Settings of a new model of the deployment; None for an existing one.
    """

    id: str
    model: ModelConfig | None = None


class UnloadModel(Internal, frozen=True):
    """To the model manager: unload a model. Answered when its processes have ended.

    It accepts no more requests, and those in flight finish first.

    Attributes:
        id: One of its names.
        timeout_s: Time limit of its requests; the rest end with an error. None: no limit.
        remove: Also remove it from the deployment.
    """

    id: str
    timeout_s: float | None = None
    remove: bool = False


class Reset(Internal, frozen=True):
    """A new epoch begins: drop the state of older epochs, then reply with StageReady.

    The epoch is the envelope's.
    """


class EmbeddingCapacity(Section, frozen=True):
    """In ReplicaCapacity: embeddings of the executor's model.

    Attributes:
        size: Components of a vector.
        pooling: Default pooling.
        normalize: Default normalisation.
        whole: As in Pooling.
    """

    size: int
    pooling: PoolingKind
    normalize: bool
    whole: bool = False


class TierCapacity(Section, frozen=True):
    """In ReplicaCapacity: KV tiers of an executor below its cache.

    Attributes:
        host_slots: Blocks in host memory.
        disk_blocks: Blocks on disk; 0 for no disk tier.
        layout: Digest of the layout of a block's bytes.
        model: Digest of the weights as they were loaded, and of all else that decides the numbers
            of their KV: configuration, versions, machine, kernels, settings.
        weight_version: Version of these weights.
        incarnation: Incarnation of the executor.
        load_ns: Time to load a block from host memory, measured at the start, as the next two.
        fetch_ns: Time to read a block from disk.
        token_ns: Time to compute one token of a prompt.
        address: Address at which other executors read its offered blocks; "" if it offers none.
        states: The same of snapshots of a recurrent state, which have slots and files of their own;
            None for a model without. `token_ns` and what names a block are as above.
    """

    host_slots: int
    disk_blocks: int
    layout: str
    model: str
    weight_version: int
    incarnation: str
    load_ns: int
    fetch_ns: int
    token_ns: int
    address: str = ""
    states: TierCapacity | None = None


class ImageCapacity(Section, frozen=True):
    """In ReplicaCapacity: limits of an executor for images, in image tokens.

    Attributes:
        max_tokens: Most tokens of one image, and of all that one step encodes.
        cache_tokens: Most tokens of all images whose embeddings are kept.
        sees_itself: Whether the tokens of an image attend to each other in both directions, so that
            one step computes all of them.
    """

    max_tokens: int
    cache_tokens: int
    sees_itself: bool = False


class ReplicaCapacity(InternalPart, frozen=True, array_like=True):
    """Capacity of an executor.

    Attributes:
        num_blocks: KV blocks.
        block_size: Tokens per block.
        max_model_len: The configured limit, capped by the model's own.
        vocab_size: Rows of the output layer.
        device: For display: "cpu", "cuda:0 NVIDIA H200".
        weight_version: Version of the weights in place.
        lacks: As in MemoryState.
        max_batch_size: Sequences that run concurrently.
        capabilities: Uses of the model.
        exact: Whether it runs in deterministic mode.
        pipeline_stages: Stages of the model, each of which computes a plan at a time.
        parts: Capacities of optional parts.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    device: str
    weight_version: int = 0
    lacks: tuple[str, ...] = ()
    max_batch_size: int = 256
    capabilities: tuple[Capability, ...] = ("generate", "score")
    exact: bool = False
    pipeline_stages: int = 1
    parts: Sections = ()


class AuditedBlock(InternalPart, frozen=True, array_like=True):
    """A block that was loaded and computed again, with the digests of both."""

    name: bytes
    loaded: str
    computed: str


class TiersChanged(Internal, frozen=True):
    """The executor to batching: changes of its KV tiers, by block hashes.

    Attributes:
        stored: Blocks that are on disk now.
        fetched: Blocks that are in their host slots now.
        lost: Blocks that could not be written to disk, or not be read whole.
        whole: Whether `stored` is all that is on disk.
        audited: Blocks that were compared.
        states: The same of snapshots, named as the blocks that end there; None for no change.
    """

    stored: tuple[bytes, ...] = ()
    fetched: tuple[bytes, ...] = ()
    lost: tuple[bytes, ...] = ()
    whole: bool = False
    audited: tuple[AuditedBlock, ...] = ()
    states: TiersChanged | None = None


class AdaptersChanged(Internal, frozen=True):
    """The executor to admission, within an epoch: its loaded adapters."""

    stage: str
    adapters: tuple[LoadedAdapter, ...]


class WeightsChanged(Internal, frozen=True):
    """The executor to admission, with a response cache: new weights, or a change of an adapter, are
    in place.

    Answered when no response of former ones is served any more; only then the executor answers the
    operation. It comes after AdaptersChanged, on the same link.

    Attributes:
        weight_version: The new version; 0 after a change of an adapter.
    """

    stage: str
    weight_version: int = 0


class StageStarted(Internal, frozen=True):
    """A stage has started without state. Admission then begins a new epoch."""

    stage: str
    incarnation: str


class StageReady(Internal, frozen=True):
    """The stage has dropped older state and takes part in the envelope's epoch.

    An executor adds its capacity, and sends this to batching too.
    """

    stage: str
    incarnation: str
    capacity: ReplicaCapacity | None = None


class ServerRestarted(Internal, frozen=True):
    """The bus to admission: the server restarted or was replaced, and may have lost messages."""


class StageStopped(Internal, frozen=True):
    """A stage has left or failed; its state is lost to this epoch.

    Attributes:
        reason: For people.
        failed: Whether it crashed, so that one of its requests may be the cause.
    """

    stage: str
    incarnation: str
    reason: str
    failed: bool = False


class ScoreSample(Internal, frozen=True):
    """Streaming to an executor: score a finished sample with the reference model.

    Answered in the same epoch, with SampleScored.

    Attributes:
        token_ids: `[prompt + completion]`.
        start: Position of the first token to score, at least 1.
        temperature: Temperature of the logprobs.
    """

    request_id: str
    entry_id: str
    sample_index: int
    token_ids: tuple[int, ...]
    start: int
    temperature: float


class SampleScored(Internal, frozen=True):
    """An executor to streaming: the logprobs of `ScoreSample.token_ids` from `start` on.

    Empty if this executor has no reference model.
    """

    request_id: str
    entry_id: str
    sample_index: int
    logprobs: tuple[float, ...]
