"""New weights, put in place between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from msgspec.structs import replace
from torch import Tensor

from ....bus.control import ReplicaCapacity, UpdateWeights
from ....bus.parts.weights import WeightsPlan
from ....bus.weights import ArcWeights, FolderWeights, PastWeights
from ....config import WeightsError, shown
from ..driver.step import LaunchedStep
from ..runner.shards import NewWeight, product
from ..runner.weights.checks import DELTA_HEAD, limits_of
from ..runner.weights.sync_manager import WeightSyncManager
from . import ExecutorState, Part

if TYPE_CHECKING:
    from ..runner.weights.log import PreparedVersion
    from ..runner.weights.logged import LoggedWeights
    from ..runner.weights.parts import PartsTaker
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
        base: The version of which they are a delta; None if they are none.
        delta_amount: Bytes and elements of the delta that they are; None if they are none.
        prepared: Their version in the log of weights; None without a log.
    """

    tensors: Mapping[str, NewWeight]
    origin: WeightsOrigin | None
    covers: bool
    converted: bool = True
    base: int | None = None
    delta_amount: tuple[int, int] | None = None
    prepared: PreparedVersion | None = None

    @property
    def amount(self) -> tuple[int, int]:
        """Bytes that were fetched, and elements: of a delta those that change."""
        if self.delta_amount is not None:
            return self.delta_amount
        tensors = self.tensors.values()
        return sum(each.nbytes for each in tensors), sum(product(each.shape) for each in tensors)

    @property
    def logged(self) -> str:
        """Their run in the log of weights, and the digest of all; "" without a log."""
        prepared = self.prepared
        return f"{prepared.run}/{prepared.digest}" if prepared is not None else ""


class WeightChanges(Part):
    """Puts staged weights in place when a plan names their version.

    Attributes:
        manager: Stages and writes them.
        log: The log of weights; None without one.
    """

    reads = WeightsPlan
    changes: ClassVar[bool] = True

    def __init__(self, state: ExecutorState) -> None:
        super().__init__(state)
        model, config = state.model, state.config
        limits = limits_of(model.whole, config.max_weight_tensors, config.max_weight_bytes)
        write = read = None
        if state.ranks and model.shards:
            from ..runner.rank_weights import read_from_ranks, write_to_ranks

            write = partial(write_to_ranks, state.ranks, model.shards)
            read = partial(read_from_ranks, state.ranks, model.shards)
        self.manager = WeightSyncManager(
            model.module, limits, shards=model.shards, write=write, read=read
        )
        self.log: LoggedWeights | None = None
        if config.weight_log:
            from ..runner.weights.logged import LoggedWeights

            self.log = LoggedWeights(self.manager, config)

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
        """Return the weights of an update's source, checked to be finite, and written to the log.

        Blocks until they have come. May run on another thread, beside the forward pass.

        Raises:
            WeightsError: They can't be fetched or read, or don't fit; nothing has changed.
        """
        return self.logged(self._fetch(update)) if not update.part_of else self._fetch(update)

    def logged(self, fetched: Fetched) -> Fetched:
        """Write the weights of an update to the log, if there is one. May run on another thread.

        Raises:
            WeightsError: They can't be written, or not be logged.
        """
        if self.log is None:
            return fetched
        return fetched._replace(prepared=self.log.prepare(fetched.tensors))

    def recover(self, logged: str, version: int) -> Fetched:
        """Return the weights of a decided update, which an earlier process has written to the log.

        Raises:
            WeightsError: They are not in it.
        """
        assert self.log is not None
        run, _, digest = logged.partition("/")
        prepared = self.manager.prepare(self.log.recover(run, version, digest))
        return Fetched(prepared, None, self.manager.covers(prepared))

    def commit(self, fetched: Fetched, version: int) -> None:
        """Give the weights of an update their version in the log. Raises WeightsError."""
        if self.log is not None and fetched.prepared is not None:
            self.log.commit(fetched.prepared, version)

    def put(self, fetched: Fetched, version: int | None, *, partial: bool, blocking: bool) -> int:
        """Stage fetched weights, or put them in place at once; return their version.

        Raises:
            WeightsError: As `WeightSyncManager.start_sync` and `maybe_finish_sync`.
        """
        manager, is_partial = self.manager, partial or fetched.base is not None
        self.commit(fetched, manager.check_version(version))
        sync = manager.sync_blocking if blocking else manager.start_sync
        return sync(fetched.tensors, version, partial=is_partial, base=fetched.base)

    def _fetch(self, update: UpdateWeights) -> Fetched:
        from ..runner.weights.conversion import PartsMissing
        from ..runner.weights.transports import fetch, fetch_each
        from ..runner.weights.transports.folder import stamp_of

        source, weights = update.source, self.manager
        if isinstance(source, PastWeights | ArcWeights):
            from ..runner.weights.relative import fetch_relative

            return Fetched(*fetch_relative(source, weights, self.log))
        folder = source.path if isinstance(source, FolderWeights) else ""
        # Before reading: files that are replaced meanwhile will not have this stamp.
        origin = WeightsOrigin(folder, stamp_of(folder, weights.limits)) if folder else None
        arguments = source, self.groups, update.timeout_s, weights.limits
        tensors: Mapping[str, NewWeight]
        if weights.converts:
            takers: list[PartsTaker] = []
            delta: dict[str, NewWeight] = {}

            def begin(names: Sequence[str]) -> Callable[[str, Tensor], None]:
                if DELTA_HEAD in names:
                    return delta.__setitem__
                takers.append(weights.taker(names, checkpoint=bool(folder)))
                return takers[0].take

            fetch_each(*arguments, begin)
            tensors = delta or takers[0].parts()
        else:
            tensors = fetch(*arguments)
        if origin is not None and stamp_of(folder, weights.limits) != origin.stamp:
            raise WeightsError(
                f"the files of {shown(folder)} changed while they were read; send them again"
            )
        if DELTA_HEAD in tensors:
            from ..runner.weights.relative import fetch_delta

            return Fetched(*fetch_delta(tensors, weights))
        try:
            prepared = weights.prepare(tensors, checkpoint=bool(folder))
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
