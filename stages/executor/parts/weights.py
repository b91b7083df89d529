"""New weights, put in place between two steps."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from msgspec.structs import replace
from torch import Tensor

from ....bus.control import ReplicaCapacity, UpdateWeights
from ....bus.parts.weights import WeightsPlan
from ....bus.weights import FolderWeights, GroupWeights
from ....config import WeightsError
from ..driver.step import LaunchedStep
from ..runner.shards import NewWeight
from ..runner.weights.checks import limits_of
from ..runner.weights.sync_manager import WeightSyncManager
from . import ExecutorState, Part

if TYPE_CHECKING:
    from ..runner.weights.parts import PartsTaker
    from ..runner.weights.stored import PartWriter, StoredUpdates
    from ..runner.weights.transports.group import WeightGroups


class WeightsOrigin(NamedTuple):
    """A folder from which tensors can be read again, while its files match the stamp."""

    folder: str
    stamp: str


class Fetched(NamedTuple):
    """New weights in this process.

    Attributes:
        tensors: By the model's names and in its dtypes if `converted`; else by a checkpoint's
            names, until the other parts are there to convert them.
        origin: Where the tensors can be read again.
        covers: Whether they replace every parameter.
        converted: True, but for a part of an update.
        stored: The name under which they are stored; "" if they are not.
    """

    tensors: Mapping[str, NewWeight]
    origin: WeightsOrigin | None
    covers: bool
    converted: bool = True
    stored: str = ""


class WeightChanges(Part):
    """Puts staged weights in place when a plan names their version.

    Attributes:
        manager: Stages and writes them.
        stored: The updates that are stored for a restarted executor; None to store none.
    """

    reads = WeightsPlan
    changes: ClassVar[bool] = True

    def __init__(self, state: ExecutorState) -> None:
        super().__init__(state)
        model, config = state.model, state.config
        limits = limits_of(model.whole, config.max_weight_tensors, config.max_weight_bytes)
        write = None
        if state.ranks and model.shards:
            from ..runner.rank_weights import write_to_ranks

            write = partial(write_to_ranks, state.ranks, model.shards)
        self.stored: StoredUpdates | None = None
        self.manager = WeightSyncManager(model.module, limits, shards=model.shards, write=write)

    @cached_property
    def groups(self) -> WeightGroups:
        """Groups of trainers, joined by each rank."""
        ranks, shards = self.state.ranks, self.state.model.shards
        if ranks is not None and shards is not None:
            from ..runner.rank_weights import LeaderGroups

            return LeaderGroups(ranks, shards)
        from ..runner.weights.transports.group import WeightGroups

        return WeightGroups()

    def close(self) -> None:
        if "groups" in vars(self):
            self.groups.close()

    def fetch(self, update: UpdateWeights) -> Fetched:
        """Return the weights of an update's source, checked to be finite.

        Blocks until they have come. May run on another thread, beside the forward pass.

        Raises:
            WeightsError: They can't be fetched or read, or don't fit; nothing has changed.
        """
        from ..runner.weights.transports.folder import stamp_of

        source = update.source
        folder = source.path if isinstance(source, FolderWeights) else ""
        # Before reading: files that are replaced meanwhile will not have this stamp.
        origin = WeightsOrigin(folder, stamp_of(folder, self.manager.limits)) if folder else None
        if self.stored is None:
            return self.read(update, origin, checkpoint=bool(folder))
        name = update.part_of or update.prepare_as or uuid.uuid4().hex
        writer = self.stored.begin(name, update.part, checkpoint=bool(folder))
        try:
            fetched = self.read(update, origin, checkpoint=bool(folder), writer=writer)
            writer.finish()
        finally:
            writer.close()
        return fetched._replace(stored=name)

    def read_stored(self, update: str, number: int = 0) -> Fetched:
        """Return the weights of a stored update of so many parts; 0 for as many as there are.

        Raises:
            WeightsError: Some are not stored here.
        """
        assert self.stored is not None
        tensors: dict[str, NewWeight] = {}
        for part in self.stored.check(update, number):
            source = FolderWeights(str(part.path))
            tensors |= self.read(
                UpdateWeights(source, part_of=update), None, checkpoint=part.checkpoint
            ).tensors
        prepared = self.manager.prepare(tensors)
        return Fetched(prepared, None, self.manager.covers(prepared), stored=update)

    def read(
        self,
        update: UpdateWeights,
        origin: WeightsOrigin | None = None,
        *,
        checkpoint: bool = True,
        writer: PartWriter | None = None,
    ) -> Fetched:
        """Return the weights of an update's source, like `fetch`.

        Args:
            update: The update.
            origin: As in the result.
            checkpoint: As in `as_parameters`.
            writer: Stores them as they come; None to store nothing.
        """
        from ..runner.weights.conversion import PartsMissing
        from ..runner.weights.transports import fetch, fetch_each

        source, weights = update.source, self.manager
        arguments = source, self.groups, update.timeout_s, weights.limits
        from_group = isinstance(source, GroupWeights)
        if writer is not None and isinstance(source, GroupWeights):
            writer.begin([meta.name for meta in source.tensors])
        self.groups.tee = writer.take if writer is not None and from_group else None
        tensors: Mapping[str, NewWeight]
        if weights.converts:
            takers: list[PartsTaker] = []

            def begin(names: Sequence[str]) -> Callable[[str, Tensor], None]:
                taker = weights.taker(names, checkpoint=checkpoint)
                takers.append(taker)
                if writer is None or from_group:
                    return taker.take
                writer.begin(names)

                def take(name: str, tensor: Tensor) -> None:
                    writer.take(name, tensor)
                    taker.take(name, tensor)

                return take

            fetch_each(*arguments, begin)
            tensors = takers[0].parts()
        else:
            tensors = fetch(*arguments)
            if writer is not None and not from_group:
                # Whole ones: only groups bring a rank's parts.
                writer.store({n: each for n, each in tensors.items() if isinstance(each, Tensor)})
        try:
            prepared = weights.prepare(tensors, checkpoint=checkpoint)
        except PartsMissing:
            if not update.part_of:
                raise
            return Fetched(tensors, origin, covers=False, converted=False)
        return Fetched(prepared, origin, weights.covers(prepared))

    def apply(self, section: WeightsPlan, step: LaunchedStep) -> None:
        """Finish a planned update (`WeightSyncManager.finish_planned_sync`); after its error no
        plan runs until a reset.

        Raises:
            WeightsError: No weights are in place.
        """
        try:
            self.manager.finish_planned_sync(section.version)
        except WeightsError as error:
            self.state.blocked = error
            raise
        for hook in self.state.parts.replaced:
            hook()

    def launched(self, step: LaunchedStep) -> None:
        step.weight_version = self.manager.version

    def capacity(self, found: ReplicaCapacity) -> ReplicaCapacity:
        return replace(found, weight_version=self.manager.version)
