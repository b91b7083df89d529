"""The loaded adapters by slots. Their arithmetic is in `layers`, which the first adapter loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .....config import AdapterError
from .....store.loaded_adapter import LoadedAdapter
from ..batch import IntArray
from ..loaded_model import LoadedModel
from .adapter import Adapter, AdapterLimits

if TYPE_CHECKING:
    from .layers import AdapterStep

NO_ADAPTER = -1


@dataclass(eq=False)
class AdapterTable:
    """The loaded adapters by slots. A slot keeps its adapter until it is vacated.

    New weights of an adapter are staged in a slot of their own, so that everything that can fail is
    done before a plan relies on them.

    A step with adapters runs within `applied`, which changes the model's modules; other steps cost
    nothing. Don't call methods during a step.

    Attributes:
        model: The base model.
        limits: Number and size of adapters.
        one_by_one: Never compute several adapters in one product, whose bits would depend on the
            set of adapters.
        check: The context in which products with new tensors are tried.
        alone: The context in which every module is called by itself.
        current: The step that runs, if it has adapters.
    """

    model: LoadedModel
    limits: AdapterLimits
    one_by_one: bool = False
    check: Callable[[], AbstractContextManager[object]] = nullcontext
    alone: Callable[[], AbstractContextManager[object]] = nullcontext

    def __post_init__(self) -> None:
        self._slots: list[Adapter | None] = []
        self._slot_of: dict[str, int] = {}
        # Forward passes with the adapters.
        self._wrapped: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
        self.current: AdapterStep | None = None

    def __len__(self) -> int:
        """The number of adapters in place."""
        return len(self._slot_of)

    def __iter__(self) -> Iterator[Adapter]:
        """Iterate over the adapters in place."""
        return (self._at(slot) for slot in self._slot_of.values())

    def get(self, id: str) -> Adapter | None:
        """Return an adapter in place; None if unknown."""
        slot = self._slot_of.get(id)
        return None if slot is None else self._at(slot)

    def slot_of(self, id: str) -> int:
        """Return an adapter's slot; `NO_ADAPTER` for "".

        Raises:
            ValueError: The id is unknown.
        """
        if id and id not in self._slot_of:
            raise ValueError(f"the plan has a sequence of the unknown adapter {id!r}")
        return self._slot_of[id] if id else NO_ADAPTER

    def describe(self) -> tuple[LoadedAdapter, ...]:
        """Return descriptions of the adapters in place."""
        return tuple(
            LoadedAdapter(each.id, each.version, each.folder, each.rank, each.num_bytes)
            for each in self
        )

    def versions(self, slots: IntArray) -> tuple[int, ...]:
        """Return the versions of adapters by slots, 0 for none; () if all have none."""
        if (slots == NO_ADAPTER).all():
            return ()
        return tuple(self._at(slot).version if slot >= 0 else 0 for slot in slots.tolist())

    def check_room(self, id: str) -> None:
        """Raises AdapterError if `limits.adapters` are loaded and `id` is none of them."""
        ids = {adapter.id for adapter in self._slots if adapter is not None}
        if id not in ids and len(ids) >= self.limits.adapters:
            raise AdapterError(
                f"{len(ids)} adapters are loaded, and engine.max_adapters is "
                f"{self.limits.adapters}; unload one first",
                code="adapter_limit",
            )

    def put(self, adapter: Adapter) -> None:
        """Put an adapter in place at once. Raises AdapterError as `stage`."""
        self.stage(adapter)
        self.switch(adapter.id, adapter.version)

    @torch.no_grad()
    def stage(self, adapter: Adapter) -> None:
        """Stage an adapter for `switch`, which can't fail.

        Raises:
            AdapterError: There are too many, memory is short, or deterministic mode is impossible;
                nothing has changed.
        """
        from .layers import check_products, own_pairs

        self.check_room(adapter.id)
        adapter = replace(adapter, pairs=own_pairs(adapter.pairs, self.model))
        check_products(adapter, self.check)
        slots = list(self._slots)
        if None in slots:
            slots[slots.index(None)] = adapter
        else:
            slots.append(adapter)
        try:
            self._lay_out(slots)
        except RuntimeError as error:  # torch's, for memory
            raise AdapterError(
                f"the device has not enough memory for the adapter: {error}",
                code="out_of_memory",
                remedy="unload one, or lower engine.max_adapters",
            ) from None

    def unstage(self, id: str, version: int) -> None:
        """Drop a staged adapter, if there is one."""
        with suppress(KeyError):
            self._vacate(self._staged(id, version))

    def switch(self, id: str, version: int) -> tuple[int, int]:
        """Put the staged version of an adapter in place; version 0 unloads it.

        Returns:
            Its slots before and after. Move rows from the first to the second before the next step.

        Raises:
            KeyError: This version was not staged.
        """
        before = self._slot_of.get(id, NO_ADAPTER)
        if before != NO_ADAPTER and self._at(before).version == version:
            return before, before
        after = NO_ADAPTER
        if version:
            after = self._staged(id, version)
            self._slot_of[id] = after
        else:
            self._slot_of.pop(id, None)
        if before != NO_ADAPTER:
            self._vacate(before)
        return before, after

    def step(self, slots: IntArray) -> AdapterStep:
        """Return the layout of a step with adapters.

        Args:
            slots: `[tokens]`, of each token of the batch; `NO_ADAPTER` for none.
        """
        from .layers import AdapterStep

        ranks = [0 if adapter is None else adapter.rank for adapter in self._slots]
        return AdapterStep(slots, ranks, self.model.device, self.one_by_one)

    @contextmanager
    def applied(self, step: AdapterStep | None) -> Iterator[None]:
        """Context in which the model's modules add the tokens' adapters, if any."""
        if step is None:
            yield
            return
        before = {module: vars(module).get("forward") for module in self._wrapped}
        self.current = step
        try:
            for module, forward in self._wrapped.items():
                # setattr of a module is far slower.
                vars(module)["forward"] = forward
            with self.alone():
                yield
        finally:
            self.current = None
            for module, own in before.items():
                if own is None:
                    vars(module).pop("forward", None)
                else:
                    vars(module)["forward"] = own

    def _at(self, slot: int) -> Adapter:
        adapter = self._slots[slot]
        assert adapter is not None
        return adapter

    def _staged(self, id: str, version: int) -> int:
        for slot, adapter in enumerate(self._slots):
            if adapter is not None and (adapter.id, adapter.version) == (id, version):
                return slot
        raise KeyError(id)

    def _vacate(self, slot: int) -> None:
        slots = list(self._slots)
        slots[slot] = None
        while slots and slots[-1] is None:
            slots.pop()
        # A new layout needs memory before the old one is freed; otherwise the old one stays.
        with suppress(RuntimeError):
            self._lay_out(slots)
            return
        self._slots[slot] = None

    def _lay_out(self, slots: list[Adapter | None]) -> None:
        from .layers import AdaptedLinear, lay_out

        self._slots, layers = lay_out(slots, self.model)
        self._wrapped = {
            method.layer: AdaptedLinear(method, layer, self).multiply for method, layer in layers
        }
