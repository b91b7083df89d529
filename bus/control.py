"""What steers the stages beside the requests' own path: cancelling, pausing, weights, epochs.

Arrays of msgpack on Redis, as all that crosses between stages.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ..config import FairnessConfig, ModelConfig, PoolingKind
from ..store.board import LoadedAdapter
from .weights import InFlight, StagedWeights, WeightsSource

Capability = Literal["generate", "score", "embed"]
"""What a model can be asked for."""

MemoryTag = Literal["weights", "kv_cache"]
MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")
"""What of an executor's memory can be released by itself."""


class Internal(msgspec.Struct, frozen=True, tag=True, tag_field="type", array_like=True):
    """A message between stages: on the wire an array that starts with the class's name."""


class InternalPart(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a message between stages: an array too, without a type of its own."""


class Cancel(Internal, frozen=True):
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


class StopSequences(Internal, frozen=True):
    """Streaming to batching: these sequences met a stop string and need no more tokens."""

    seq_ids: tuple[int, ...]


class Pause(Internal, frozen=True):
    """To batching: plan no further steps. Answered when no step is under way any more.

    Here and below an answer goes out under the envelope's `operation_id`.

    Attributes:
        in_flight: What becomes of sequences that batching has. Requests that have not come so far
            are up to admission (`CancelAll`).
    """

    in_flight: InFlight = "keep"


class Resume(Internal, frozen=True):
    """Go on after a Pause."""


class CancelAll(Internal, frozen=True):
    """To admission: every request in flight ends with what it has. What is not yet taken from the
    queue is not in flight."""


class UpdateWeights(Internal, frozen=True):
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
    part_of: str = ""
    prepare_as: str = ""


class FinishUpdate(Internal, frozen=True):
    """To the executor: put the weights in place that wait under this name, or drop them.

    Answered when they are in place, or dropped.

    Attributes:
        prepared: What `UpdateWeights.prepare_as` called it.
        version: What to count from then on; None to drop them.
    """

    prepared: str
    version: int | None = None


class WeightsReady(Internal, frozen=True):
    """The executor to batching: new weights wait for the next plan to put them in place."""

    version: int
    in_flight: InFlight


class JoinWeightsGroup(Internal, frozen=True):
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


class LeaveWeightsGroup(Internal, frozen=True):
    """To the executor: leave a group, if it is in it."""

    group: str


class TellWeightVersion(Internal, frozen=True):
    """To the executor: answer with the version of the weights in place."""


class ReleaseMemory(Internal, frozen=True):
    """To the executor: release memory once the steps under way are done.

    Answered when that is so. Until it is resumed no step runs, and requests wait. KV is computed
    again afterwards; weights are lost, and no step runs before an update has brought all of them.

    Attributes:
        tags: Of `MEMORY_TAGS`. What is released already stays so.
    """

    tags: tuple[str, ...] = MEMORY_TAGS


class ResumeMemory(Internal, frozen=True):
    """To the executor: take memory again that was released; answered when it is there."""

    tags: tuple[str, ...] = MEMORY_TAGS


class MemoryState(Internal, frozen=True):
    """The executor to batching: what memory there is.

    Attributes:
        lacks: What is not there, or holds nothing; while there is any, no step can run.
        release: What of it waits for the next plan to release it.
    """

    lacks: tuple[str, ...]
    release: tuple[str, ...] = ()


class LoadAdapter(Internal, frozen=True):
    """To the executor: read a LoRA adapter, and put it in place between two steps.

    Steps go on while it is read. Answered with its version when it is in place, or refused.

    Attributes:
        adapter: Its id, by which requests name it. One that is loaded gets new weights.
        folder: Where PEFT has written it; the executor's process must be able to read it.
        in_flight: What becomes of sequences that have begun with it.
        version: What to count from then on, above all that this id has had; None for the next.
        only_check: Read it and change nothing; answered with the version that it would have.
    """

    adapter: str
    folder: str
    in_flight: InFlight = "keep"
    version: int | None = None
    only_check: bool = False


class UnloadAdapter(Internal, frozen=True):
    """To admission: let no request with this adapter in any more. Answered when none is in flight.

    To the executor, behind that: forget it. Answered when that is so; what still has it ends.

    Attributes:
        in_flight: "abort" ends requests in flight with what they have; else they finish first.
    """

    adapter: str
    in_flight: InFlight = "keep"


class AdapterReady(Internal, frozen=True):
    """The executor to batching: an adapter waits for the next plan to put it in place.

    Attributes:
        version: Of its weights; 0: it is to be forgotten.
    """

    adapter: str
    version: int
    in_flight: InFlight


class FlushCache(Internal, frozen=True):
    """Forget all cached prefixes. Running sequences keep their blocks."""


class Drain(Internal, frozen=True):
    """Let nothing more in; what is still in flight after `timeout_ns` ends with an error.

    A second one may shorten the time.
    """

    timeout_ns: int


class UpdateFairness(Internal, frozen=True):
    """Replace the fairness stage's settings, as a whole."""

    config: FairnessConfig


class LoadModel(Internal, frozen=True):
    """To whoever runs the models: load one. Answered when it is ready, or why it can't be.

    Attributes:
        id: Which one, by any of its names.
        model: What it is, where the deployment shall have it from now on; None for one that it has.
    """

    id: str
    model: ModelConfig | None = None


class UnloadModel(Internal, frozen=True):
    """To whoever runs the models: unload one. Answered when its processes have ended.

    It takes no more requests, and those that it has are answered first.

    Attributes:
        id: Which one, by any of its names.
        timeout_s: How long they may take; what is left then ends with an error. None: any time.
        remove: Whether the deployment shall not have it any more.
    """

    id: str
    timeout_s: float | None = None
    remove: bool = False


class Reset(Internal, frozen=True):
    """A new epoch begins: drop whatever belongs to older ones, then answer with StageReady.

    The epoch is that of the envelope.
    """


class EmbeddingCapacity(InternalPart, frozen=True, array_like=True):
    """What vectors the executor's model makes of prompts.

    Attributes:
        size: How many numbers they have.
        pooling: That of requests that name none.
        normalize: Likewise.
        whole: As in Pooling.
    """

    size: int
    pooling: PoolingKind
    normalize: bool
    whole: bool = False


class ReplicaCapacity(InternalPart, frozen=True, array_like=True):
    """What the executor can hold.

    Attributes:
        num_blocks: KV blocks of the lane.
        block_size: Tokens per block.
        max_model_len: The configured limit cut to the model's own.
        vocab_size: Rows of the output layer.
        device: For people: "cpu", "cuda:0 NVIDIA H200".
        weight_version: Of the weights in place.
        lacks: As in MemoryState.
        max_batch_size: Sequences that run at the same time.
        adapters: Those that requests can name.
        capabilities: What the model can be asked for.
        embedding: What vectors it makes; None where it makes none.
        experts: How many a layer of the model has; 0 where it has none.
        drafts: Whether its steps can verify drafts, where the settings ask for it.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    device: str
    weight_version: int = 0
    lacks: tuple[str, ...] = ()
    max_batch_size: int = 256
    adapters: tuple[LoadedAdapter, ...] = ()
    capabilities: tuple[Capability, ...] = ("generate", "score")
    embedding: EmbeddingCapacity | None = None
    experts: int = 0
    drafts: bool = True


class AdaptersChanged(Internal, frozen=True):
    """The executor to admission, within an epoch: these are the adapters that it has now."""

    stage: str
    adapters: tuple[LoadedAdapter, ...]


class StageStarted(Internal, frozen=True):
    """A stage is up and holds nothing. Sent to admission, which then begins a new epoch."""

    stage: str
    incarnation: str


class StageReady(Internal, frozen=True):
    """The stage has dropped what is older than the envelope's epoch and takes part in it.

    The executor tells its capacity, and tells batching as well as admission.
    """

    stage: str
    incarnation: str
    capacity: ReplicaCapacity | None = None


class ServerRestarted(Internal, frozen=True):
    """A bus to admission: its server is not the one that it was, and may have lost messages."""


class StageStopped(Internal, frozen=True):
    """A stage leaves in good order or has failed. What it held is lost to this epoch.

    Attributes:
        reason: For people.
        failed: Whether it failed by itself, so that what it held may be to blame.
    """

    stage: str
    incarnation: str
    reason: str
    failed: bool = False
