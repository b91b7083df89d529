"""An executor's weights in the log of weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial

from torch import Tensor

from .....config import EngineConfig, ModelError, WeightsError, shown
from ..shards import NewShard, NewWeight
from .delta import digest
from .in_place import base_of, first_names
from .log import Digests, LogBounds, PreparedVersion, WeightLogWriter
from .sync_manager import WeightSyncManager


class LoggedWeights:
    """Writes each version of a manager's weights to the log, and reads them back.

    Its methods may run on another thread, beside the forward pass, while no update is staged.

    Attributes:
        writer: The log.
    """

    def __init__(self, manager: WeightSyncManager, config: EngineConfig) -> None:
        """Raises ModelError for weights in another form than the model's own."""
        if manager.shards.converts:
            raise ModelError(
                "engine.weight_log needs weights in the model's own form, and some are codes here; "
                "leave out engine.quantization, or engine.weight_log"
            )
        self._manager = manager
        bounds = LogBounds(
            config.weight_log_snapshot_every,
            config.weight_log_max_versions,
            config.weight_log_max_bytes,
        )
        self.writer = WeightLogWriter(config.weight_log, bounds, self._digests)

    def begin_run(self, run: str) -> None:
        """Name the run, unless it has a name."""
        self.writer.run = self.writer.run or run

    def prepare(self, new_weights: Mapping[str, NewWeight]) -> PreparedVersion:
        """Write new weights, which have no version yet.

        Raises:
            WeightsError: They can't be written (`weights_log`), or are not in this process.
        """
        manager = self._manager
        new = {self._names[name]: self._whole(name, each) for name, each in new_weights.items()}
        base = None if manager.empty else partial(base_of, manager)
        return self.writer.prepare(manager.version, new, base)

    def commit(self, prepared: PreparedVersion, version: int) -> None:
        """Give prepared weights their version. Raises WeightsError: `weights_log`."""
        self.writer.commit(prepared, version)

    def recover(self, run: str, version: int, digest_of_all: str) -> dict[str, Tensor]:
        """Return the weights of a decided version, as `WeightLogWriter.recover`."""
        return self.writer.recover(run, version, digest_of_all)

    def weights(self, version: int, run: str = "") -> dict[str, Tensor]:
        """Return a past version of this run, or of another one (`WeightLog.weights`)."""
        return self.writer.weights(version, run or self.writer.run)

    def catch_up(self, run: str, version: int, digest_of_all: str) -> dict[str, Tensor]:
        """Return the lane's weights; those that come next belong to the same run.

        Raises:
            WeightsError: They can't be read.
        """
        self.writer.run = run
        return self.writer.catch_up(version, digest_of_all)

    @cached_property
    def _names(self) -> dict[str, str]:
        """The first name of each tensor, by all its names."""
        return first_names(self._manager)

    def _digests(self) -> Digests:
        return {name: digest(base_of(self._manager, name)) for name in {*self._names.values()}}

    def _whole(self, name: str, new: NewWeight) -> Tensor:
        if isinstance(new, Tensor):
            return new
        part = new.parts[0] if new.parts else None
        if isinstance(new, NewShard) and isinstance(part, Mapping) and "places" in part:
            whole = base_of(self._manager, name).clone()
            return whole.put_(part["places"].to(whole.device), part["values"].to(whole.device))
        raise WeightsError(
            f"engine.weight_log can't log {shown(name)}: each rank has received its part of it "
            "from the group; send the weights by a folder, shared memory or a message"
        )
