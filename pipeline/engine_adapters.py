"""LoRA adapters of an engine on its caller's thread, by the executor's own means."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from ..bus.weights import InFlight, check_in_flight
from ..config import AdapterError, EngineConfig
from ..stages.admission.core import AdmissionCore
from ..stages.batching import BatchingCore
from ..stages.executor.core import ExecutorCore
from ..stages.executor.runner.adapters import (
    adapter_of,
    check_adapter_id,
    next_version,
    read_adapter,
)
from ..store.board import LoadedAdapter

if TYPE_CHECKING:
    from torch import Tensor


class AdapterDoor:
    """The part of an engine that is about adapters."""

    config: EngineConfig
    _admission: AdmissionCore
    _batching: BatchingCore
    # The last version of each id, those that are unloaded among them.
    _adapter_versions: dict[str, int]

    @property
    def _executor(self) -> ExecutorCore:
        raise NotImplementedError

    def load_adapter(
        self,
        id: str,
        source: str | PathLike[str] | Mapping[str, Tensor],
        config: Mapping[str, Any] | None = None,
        *,
        in_flight: InFlight = "keep",
        version: int | None = None,
    ) -> int:
        """Loads a LoRA adapter, or gives one that is loaded new weights; requests name it by `id`.

        Args:
            id: 1 to 128 letters, digits and . _ : / @ + -.
            source: A folder that PEFT's `save_pretrained` has written; or the tensors, as
                `peft.get_peft_model_state_dict` gives them, which are copied.
            config: With tensors: what adapter_config.json would say, such as `r`, `lora_alpha`.
            in_flight: What becomes of requests under way that have it. keep: they go on from their
                KV as it is, with the new weights. retract: they compute the KV of their tokens
                again. abort: the next step ends them with what they have.
            version: What to count from then on, above all that this id has had; None for the next.

        Returns:
            Its version.

        Raises:
            AdapterError: It can't be served, or does not fit the model; all is as it was.
        """
        check_in_flight(in_flight)
        check_adapter_id(id, self.config.model_name)
        executor = self._executor
        version = next_version(id, version, self._adapter_versions.get(id, 0))
        model, limits = executor.model, executor.adapters.limits
        if isinstance(source, Mapping):
            adapter = adapter_of(id, version, source, config or {}, model, limits)
        else:
            adapter = read_adapter(id, version, fspath(source), model, limits)
        executor.adapters.stage(adapter)
        # Nothing is under way between steps, so it can be switched at once.
        executor.switch_adapter(id, version)
        self._batching.change_adapter(id, version, in_flight)
        self._adapter_versions[id] = version
        self._admission.set_adapters(self.adapters())
        return version

    def unload_adapter(self, id: str, *, in_flight: InFlight = "keep") -> None:
        """Forgets an adapter.

        Args:
            id: Its id.
            in_flight: What becomes of requests under way that have it. abort: the next step ends
                them with what they have. Anything else: it is refused while there are any.

        Raises:
            AdapterError: `adapter_not_found`; or `adapter_in_use`: finish the requests first.
        """
        check_in_flight(in_flight)
        if self._executor.adapters.get(id) is None:
            raise AdapterError(f"no adapter {id!r:.80} is loaded", code="adapter_not_found")
        if in_flight != "abort" and self._batching.adapters.in_use(id):
            raise AdapterError(
                f"requests under way have the adapter {id!r}; step until they are done, or unload "
                "it with in_flight='abort'",
                code="adapter_in_use",
            )
        self._executor.switch_adapter(id, 0)
        self._batching.change_adapter(id, 0, in_flight)
        self._admission.set_adapters(self.adapters())

    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Those that requests may name: id, version, folder, rank and size."""
        return self._executor.adapters.told()

    def _load_adapters(self) -> None:
        """Those of the settings. Raises AdapterError."""
        self._adapter_versions = {}
        for id, folder in self.config.adapters.items():
            self.load_adapter(id, folder)
