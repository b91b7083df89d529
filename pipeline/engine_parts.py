"""Calls of an `InferenceEngine` about targets in prompts, and about the parts of its model that
change between two steps: adapters, and the owners of experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, cast

from ..bus.control import AdapterReady, LoadAdapter
from ..bus.weights import InFlight, check_in_flight
from ..config import AdapterError, SamplingParams, shown
from ..config.clock import now_ns
from ..stages.admission.core import AdmissionCore
from ..stages.batching import BatchingCore
from ..store.loaded_adapter import LoadedAdapter
from .engine_calls import one_at_a_time
from .engine_requests import check_prompts, params_of_targets
from .rollouts import TrainingSample

if TYPE_CHECKING:
    from torch import Tensor

    from ..bus.targets import Logprobs
    from ..stages.executor.core import ExecutorCore


@one_at_a_time
class ModelParts(ABC):
    """The calls of an engine about targets, adapters and experts."""

    _admission: AdmissionCore
    _batching: BatchingCore

    @property
    @abstractmethod
    def _executor(self) -> ExecutorCore:
        """The executor. Raises RuntimeError after the shutdown."""

    @abstractmethod
    def _scored(
        self, prompts: Any, params: Sequence[SamplingParams], show_progress: bool, adapter: str = ""
    ) -> list[TrainingSample]:
        """Run requests for logprobs of prompts, each with its own parameters."""

    def score_targets(
        self,
        prompts: Sequence[Sequence[int]],
        targets: Sequence[Sequence[Sequence[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = False,
    ) -> list[Logprobs]:
        """Return the logprobs of given token ids at the last positions of prompts.

        KV of the tokens before these positions may be cached.

        Args:
            prompts: Token ids, those of completions included.
            targets: For each prompt, lists of token ids for as many of its last positions: a list
                or an array `[positions, ids]`. -1 asks for nothing.
            sampling_params: One for all, or one for each; only the temperature counts.
            show_progress: As in `generate`.

        Returns:
            For each prompt `[positions, most targets at a position]`, float32, with minus infinity
            where nothing was asked for.

        Raises:
            RequestError: An argument is refused, as for `score`. Nothing was computed.
        """
        prompts = check_prompts(prompts)
        params = params_of_targets(sampling_params, prompts, targets)
        scored = self._scored(prompts, params, show_progress)
        return cast("list[Logprobs]", [each.prompt_token_id_logprobs for each in scored])

    def load_adapter(
        self,
        id: str,
        source: str | PathLike[str] | Mapping[str, Tensor],
        config: Mapping[str, Any] | None = None,
        *,
        in_flight: InFlight = "keep",
        version: int | None = None,
    ) -> int:
        """Load a LoRA adapter, or replace the weights of a loaded one; requests name it by `id`.

        Args:
            id: 1 to 128 letters, digits and . _ : / @ + -.
            source: A folder written by PEFT's `save_pretrained`; or the tensors, in the form of
                `peft.get_peft_model_state_dict`, which are copied.
            config: With tensors: the content of adapter_config.json, such as `r`, `lora_alpha`.
            in_flight: How its unfinished requests go on. keep: with their KV as it is. retract:
                they compute their KV again. abort: the next step ends them early.
            version: The new version, above all former ones of this id; None for the next.

        Returns:
            Its version.

        Raises:
            AdapterError: It can't be served, or does not fit the model; nothing has changed.
        """
        from ..stages.executor.parts.adapters import AdapterChanges

        check_in_flight(in_flight)
        if config is not None and not isinstance(config, Mapping):
            raise AdapterError(
                f"config is {shown(config)}; it must be the content of adapter_config.json",
                remedy="pass a dict, such as json.loads of the file",
            )
        tensors = source if isinstance(source, Mapping) else None
        folder = "" if isinstance(source, Mapping) else fspath(source)
        changes = self._executor.part(AdapterChanges)
        adapter = changes.read(LoadAdapter(id, folder, version=version), tensors, config)
        # No step is running, so it can be switched at once.
        changes.put(adapter)
        self._adapter_changed(id, adapter.version, in_flight)
        return adapter.version

    def unload_adapter(self, id: str, *, in_flight: InFlight = "keep") -> None:
        """Unload an adapter.

        Args:
            id: Its id.
            in_flight: "abort": the next step ends its unfinished requests early. Otherwise the
                adapter can't be unloaded while it has any.

        Raises:
            AdapterError: `adapter_not_found`; or `adapter_in_use`: finish the requests first.
        """
        from ..stages.executor.parts.adapters import AdapterChanges

        check_in_flight(in_flight)
        if self._executor.runner.adapters.get(id) is None:
            raise AdapterError(
                f"no adapter {id!r:.80} is loaded", code="adapter_not_found", remedy="load it first"
            )
        if in_flight != "abort" and any(
            seq.info.adapter == id for seq in self._batching.index.values()
        ):
            raise AdapterError(
                f"requests in flight use the adapter {id!r}; step until they end, or unload it "
                "with in_flight='abort'",
                code="adapter_in_use",
            )
        self._executor.part(AdapterChanges).switch(id, 0)
        self._adapter_changed(id, 0, in_flight)

    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Return the loaded adapters: id, version, folder, rank and size."""
        return self._executor.runner.adapters.describe()

    @property
    def expert_owners(self) -> list[int]:
        """The rank of each expert of a layer; empty without `expert_parallel`."""
        from ..stages.executor.parts.experts import Experts

        experts = self._executor.find(Experts)
        return [] if experts is None else experts.owners

    def move_experts(self, owners: Sequence[int]) -> None:
        """Give the experts of a model over several ranks other owners. No token changes.

        Args:
            owners: The rank of each expert of a layer; each rank owns equally many.

        Raises:
            WeightsError: Experts have no owners here (`expert_parallel`), or these don't fit.
        """
        from ..stages.executor.parts.experts import Experts, move_experts

        move_experts(self._executor.find(Experts), owners)

    def _adapter_changed(self, id: str, version: int, in_flight: InFlight) -> None:
        from ..stages.admission.parts.adapters import Adapters

        self._batching.receive(AdapterReady(id, version, in_flight), now_ns())
        self._admission.part(Adapters).set(self.adapters())
