"""LoRA adapters, switched between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from ....bus.control import LoadAdapter, ReplicaCapacity
from ....bus.parts.adapters import AdapterCapacity, AdaptersPlan, AdaptersResult
from ....bus.sections import with_sections
from ..driver.sampled import Sampled
from ..driver.step import LaunchedStep
from . import ExecutorState, Part

if TYPE_CHECKING:
    from ..runner.adapters.adapter import Adapter


class AdapterChanges(Part):
    """Puts staged adapters in place when a plan names their versions.

    Attributes:
        versions: The last version of each id, unloaded adapters included.
    """

    reads = AdaptersPlan
    changes: ClassVar[bool] = True

    def __init__(self, state: ExecutorState) -> None:
        super().__init__(state)
        self.versions: dict[str, int] = {}

    def read(
        self,
        load: LoadAdapter,
        tensors: Mapping[str, Tensor] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Adapter:
        """Read and check an adapter. May run on another thread, beside the forward pass.

        Args:
            load: Its id, folder and version.
            tensors: The adapter itself, in place of a folder.
            config: With tensors: the content of adapter_config.json.

        Raises:
            AdapterError: It can't be served, or does not fit the model.
        """
        from ..runner.adapters.peft import adapter_of, check_adapter_id, next_version, read_adapter

        id, model, table = load.adapter, self.state.model, self.state.runner.adapters
        check_adapter_id(id, self.state.config.model_name)
        table.check_room(id)
        version = next_version(id, load.version, self.versions.get(id, 0))
        if tensors is not None:
            return adapter_of(id, version, tensors, config or {}, model, table.limits)
        return read_adapter(id, version, load.folder, model, table.limits)

    def stage(self, adapter: Adapter) -> None:
        """As `AdapterTable.stage`, which raises AdapterError; the version is used then."""
        self.state.runner.adapters.stage(adapter)
        self.versions[adapter.id] = adapter.version

    def put(self, adapter: Adapter) -> None:
        """Put an adapter in place at once, between two steps. Raises AdapterError as `stage`."""
        self.stage(adapter)
        self.switch(adapter.id, adapter.version)

    def apply(self, section: AdaptersPlan, step: LaunchedStep) -> None:
        for id, version in section.changes:
            self.switch(id, version)

    def switch(self, id: str, version: int) -> None:
        """Switch an adapter's version between two steps, with the sequences that have it; see
        `AdapterTable.switch`.
        """
        state = self.state
        state.table.change_adapter(*state.runner.adapters.switch(id, version))

    def finish(self, step: LaunchedStep, sampled: Sampled) -> None:
        if sampled.adapter_versions:
            step.parts.append(AdaptersResult(sampled.adapter_versions))

    def capacity(self, found: ReplicaCapacity) -> ReplicaCapacity:
        adapters = self.state.runner.adapters.describe()
        return with_sections(found, AdapterCapacity(adapters)) if adapters else found
