"""The store of a bus: all shared state that is no message."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import BusConfig
from .batches import BatchStore
from .blobs import RecordBlobs
from .board import StageBoard
from .calls import CallStore
from .files import FileStore
from .forks import ForkStore
from .history import MinuteRecord
from .images import ImageStore, MemoryImages
from .in_place import AdaptersInPlace, InPlaceRecord, WeightsInPlace
from .limits import LimitStore
from .memory import MemoryLimits
from .policy import PolicyRecord
from .records import MemoryRecords, Records
from .redis.keys import Keys
from .registry import ModelRegistry
from .service import ServiceRecord
from .trees import TreeStore
from .weight_update import WeightUpdateRecord


@dataclass(frozen=True)
class Store:
    """Shared state, in memory or on Redis.

    Attributes:
        board: Reports of the stages of every process.
        calls: Durable calls of gateways, which outlive their connection.
        limits: Rate and concurrency limits that all gateways share.
        policy: The policy document of gateways with `policy.backend: bus`.
        weights: The newest weights of a lane, for an executor that starts anew.
        adapters: The adapters of a lane, likewise.
        weight_update: Trainers' weight updates through gateways.
        models: The models of the deployment.
        service: The service that each lane has given to its tenants.
        images: Decoded images of requests.
        forks: Prompts of forks in flight.
        trees: Token trees of sessions.
        files: Files of tenants.
        blobs: Contents of files, where they are kept on the bus.
        batches: Batches of lines.
        history: The minutes of the console's charts.
    """

    board: StageBoard
    calls: CallStore
    limits: LimitStore
    policy: PolicyRecord
    weights: InPlaceRecord[WeightsInPlace]
    adapters: InPlaceRecord[AdaptersInPlace]
    weight_update: WeightUpdateRecord
    models: ModelRegistry
    service: ServiceRecord
    images: ImageStore
    forks: ForkStore
    trees: TreeStore
    files: FileStore
    blobs: RecordBlobs
    batches: BatchStore
    history: MinuteRecord


def store_on(
    records: Records,
    keys: Keys,
    config: BusConfig,
    limits: LimitStore,
    images: ImageStore,
) -> Store:
    """Return a store on records."""
    return Store(
        StageBoard(keys, records),
        CallStore(config, keys, records),
        limits,
        PolicyRecord(keys, records),
        InPlaceRecord(keys.weights, WeightsInPlace, records),
        InPlaceRecord(keys.adapters, AdaptersInPlace, records),
        WeightUpdateRecord(keys, records),
        ModelRegistry(keys, records),
        ServiceRecord(keys, records),
        images,
        ForkStore(keys, records),
        TreeStore(config, keys, records),
        FileStore(keys, records),
        RecordBlobs(keys, records),
        BatchStore(keys, records),
        MinuteRecord(keys, records),
    )


def memory_store(config: BusConfig) -> Store:
    """Return a store of this process and event loop."""
    keys = Keys(config.prefix, config.lane)
    return store_on(MemoryRecords(), keys, config, MemoryLimits(), MemoryImages())
