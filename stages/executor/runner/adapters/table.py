"""The adapters that are loaded, side by side, as steps need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .....config import AdapterError, ModelError
from .....store.board import LoadedAdapter
from ..batch import IntArray
from ..loaded_model import LoadedModel
from .peft import Adapter, AdapterLimits
from .step import AdapterStep, Layer, Layout

NO_ADAPTER = -1


@dataclass
class _Wrapped:
    """A module of which some adapter has a layer, and its pass with what they add."""

    module: nn.Module
    forward: Callable[[Tensor], Tensor]


class AdapterTable:
    """Knows the adapters that are loaded by slots: a slot keeps its adapter until it is vacated.

    New weights of an adapter take a slot of their own, and then the place of the others: so what
    can fail is done before a plan relies on it.

    A step with rows that have an adapter runs within `applied`; only there do the model's modules
    compute anything but what they do by themselves, so that other steps cost nothing.

    Methods must not be called while a step is computed.
    """

    def __init__(
        self,
        model: LoadedModel,
        limits: AdapterLimits | None = None,
        *,
        one_by_one: bool = False,
        check: Callable[[], AbstractContextManager[object]] = nullcontext,
        alone: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Without any.

        Args:
            model: What they are for.
            limits: How many there may be, and how large; the settings' defaults when None.
            one_by_one: Never compute several adapters in one product, whose bits would depend on
                which ones they are.
            check: What a product with an adapter's tensors is tried in when it is added.
            alone: What has every module called by itself, so that it sees its inputs.
        """
        self.limits = limits or AdapterLimits()
        self._model = model
        self._one_by_one = one_by_one
        self._check = check
        self._alone = alone
        self._slots: list[Adapter | None] = []
        self._slot_of: dict[str, int] = {}
        self._wrapped: list[_Wrapped] = []
        self._step: AdapterStep | None = None

    def __len__(self) -> int:
        """How many rows can have."""
        return len(self._slot_of)

    def __iter__(self) -> Iterator[Adapter]:
        """Those that rows can have."""
        return (self._at(slot) for slot in self._slot_of.values())

    def get(self, id: str) -> Adapter | None:
        """An adapter that rows can have; None for any other."""
        slot = self._slot_of.get(id)
        return None if slot is None else self._at(slot)

    def slot_of(self, id: str) -> int:
        """Where an adapter is; `NO_ADAPTER` for "".

        Raises:
            ValueError: There is none of this id.
        """
        if id and id not in self._slot_of:
            raise ValueError(f"the plan has a sequence of adapter {id!r}, which is not here")
        return self._slot_of[id] if id else NO_ADAPTER

    def told(self) -> tuple[LoadedAdapter, ...]:
        """What others are told of those that rows can have."""
        return tuple(
            LoadedAdapter(each.id, each.version, each.folder, each.rank, each.num_bytes)
            for each in self
        )

    def versions(self, slots: IntArray) -> tuple[int, ...]:
        """Of the adapters in these slots, 0 for none; nothing where there is none at all."""
        if (slots == NO_ADAPTER).all():
            return ()
        return tuple(self._at(slot).version if slot >= 0 else 0 for slot in slots.tolist())

    def check_room(self, id: str) -> None:
        """Whether another one fits.

        Raises:
            AdapterError: There are `limits.adapters` already, and `id` is none of them.
        """
        ids = {adapter.id for adapter in self._slots if adapter is not None}
        if id not in ids and len(ids) >= self.limits.adapters:
            raise AdapterError(
                f"{len(ids)} adapters are loaded, and engine.max_adapters is "
                f"{self.limits.adapters}; unload one first",
                code="adapter_limit",
            )

    def check_products(self, adapter: Adapter) -> None:
        """Whether deterministic mode, if this is it, can multiply with an adapter's tensors.

        Raises:
            AdapterError: It can't on this machine.
        """
        seen = set()
        try:
            with self._check(), torch.inference_mode():
                for pair in adapter.pairs.values():
                    if (shapes := (pair.a.shape, pair.b.shape)) not in seen:
                        seen.add(shapes)
                        row = pair.a.new_ones(1, pair.a.shape[1])
                        torch.nn.functional.linear(
                            torch.nn.functional.linear(row, pair.a), pair.b.t()
                        )
        except ModelError as error:
            raise AdapterError(error.message, code="adapter_unsupported") from None

    def put(self, adapter: Adapter) -> None:
        """Takes an adapter at once. Raises AdapterError as `stage`."""
        self.stage(adapter)
        self.switch(adapter.id, adapter.version)

    @torch.no_grad()
    def stage(self, adapter: Adapter) -> None:
        """Takes an adapter that no row can have before `switch`; only here can anything fail.

        Raises:
            AdapterError: There are too many, there is no memory for it, or deterministic mode can't
                have it; nothing has changed.
        """
        self.check_room(adapter.id)
        self.check_products(adapter)
        slots = list(self._slots)
        if None in slots:
            slots[slots.index(None)] = adapter
        else:
            slots.append(adapter)
        try:
            self._lay_out(slots)
        except RuntimeError as error:  # torch's, for memory
            raise AdapterError(
                f"the device has not enough memory for the adapter: {error}", code="out_of_memory"
            ) from None

    def switch(self, id: str, version: int) -> tuple[int, int]:
        """From now on an id stands for what was staged of it in this version; 0: for nothing.

        Returns:
            The slot that it stood for, and the one that it stands for. Rows that have the first
            must have the second before the next step.

        Raises:
            KeyError: Nothing of this version was staged.
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
        """What a step needs in which some token has an adapter.

        Args:
            slots: `[tokens]`, of each token of the batch; `NO_ADAPTER` for none.
        """
        ranks = [0 if adapter is None else adapter.rank for adapter in self._slots]
        return AdapterStep(slots, ranks, self._model.device, one_by_one=self._one_by_one)

    @contextmanager
    def applied(self, step: AdapterStep | None) -> Iterator[None]:
        """Within it, the model's modules add what the tokens' adapters give, if any has one."""
        if step is None:
            yield
            return
        before = [vars(each.module).get("forward") for each in self._wrapped]
        self._step = step
        try:
            for each in self._wrapped:
                # Not by setattr, which for a module takes longer than all that is set.
                vars(each.module)["forward"] = each.forward
            with self._alone():
                yield
        finally:
            self._step = None
            for each, forward in zip(self._wrapped, before, strict=True):
                if forward is None:
                    vars(each.module).pop("forward", None)
                else:
                    vars(each.module)["forward"] = forward

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
        # Laying out takes memory before it gives any back; without it the tensors stay.
        with suppress(RuntimeError):
            self._lay_out(slots)
            return
        self._slots[slot] = None

    def _lay_out(self, slots: list[Adapter | None]) -> None:
        """Puts the tensors of these side by side, module by module."""
        names = dict.fromkeys(name for adapter in slots if adapter for name in adapter.pairs)
        layouts: dict[tuple[tuple[int, int], ...], Layout] = {}
        layers: dict[str, Layer] = {}
        for name in names:
            pairs = {
                slot: adapter.pairs[name]
                for slot, adapter in enumerate(slots)
                if adapter is not None and name in adapter.pairs
            }
            ranks = tuple((slot, pair.a.shape[0]) for slot, pair in pairs.items())
            if ranks not in layouts:
                layouts[ranks] = Layout.of(ranks, self._model.device)
            layers[name] = Layer(layouts[ranks], pairs)
        # Parts of what lies side by side, so that there is one of each tensor.
        self._slots = [
            adapter and replace(adapter, pairs={n: layers[n].pairs[slot] for n in adapter.pairs})
            for slot, adapter in enumerate(slots)
        ]
        self._wrapped = [
            _Wrapped(module, self._with(layer, module))
            for name, layer in layers.items()
            for module in (self._model.module.get_submodule(name),)
        ]

    def _with(self, layer: Layer, module: Any) -> Callable[[Tensor], Tensor]:
        plain: Callable[[Tensor], Tensor] = module.forward

        def forward(x: Tensor) -> Tensor:
            assert self._step is not None
            return self._step.add(layer, x, plain(x))

        return forward
