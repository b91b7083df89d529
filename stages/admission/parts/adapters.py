"""LoRA adapters that requests may name."""

from __future__ import annotations

from collections.abc import Iterable

from ....bus.control import ReplicaCapacity
from ....bus.entries import RequestEntry
from ....bus.parts.adapters import adapters_of
from ....bus.public import GenerateRequest
from ....config import RequestError, shown
from ....store.loaded_adapter import LoadedAdapter
from . import Part

MOST_FORMER = 1024
"""Ids of unloaded adapters that are remembered."""


class Adapters(Part):
    """Names of the model and of its loaded adapters."""

    def __init__(self, model_name: str, names: Iterable[str]) -> None:
        """`names`: of the model, the main one included."""
        self._model_name = model_name
        self._names = frozenset(names)
        self._loaded: dict[str, LoadedAdapter] = {}
        # Version by id of adapters that are being unloaded.
        self._closed: dict[str, int] = {}
        # Ids of adapters that were loaded, the last ones.
        self._former: dict[str, None] = {}

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        """Adapters that requests may name."""
        return tuple(self._loaded.values())

    def get(self, id: str) -> LoadedAdapter | None:
        """Return a loaded adapter."""
        return self._loaded.get(id)

    def set_capacity(self, capacity: ReplicaCapacity) -> None:
        self.set(adapters_of(capacity))

    def set(self, adapters: Iterable[LoadedAdapter]) -> None:
        """Set the loaded adapters; of a closed one only a newer version can be named."""
        loaded = {adapter.id: adapter for adapter in adapters}
        self._former |= dict.fromkeys(loaded)
        while len(self._former) > MOST_FORMER:
            del self._former[next(iter(self._former))]
        self._closed = {
            id: version
            for id, version in self._closed.items()
            if id in loaded and loaded[id].version <= version
        }
        self._loaded = {id: each for id, each in loaded.items() if id not in self._closed}

    def unload(self, id: str) -> bool:
        """Refuse an adapter until it is loaded again; return whether it was loaded."""
        adapter = self._loaded.pop(id, None)
        if adapter is not None:
            self._closed[id] = adapter.version
        return adapter is not None or id in self._closed

    def resolve(self, entry: RequestEntry, request: GenerateRequest) -> str:
        """Return the id of the adapter that an entry names; "" for the model itself.

        The entry's own field wins over the request's, as in the router; but the request may name an
        adapter of that model, also an unloaded one: the model without it must not answer.

        Raises:
            RequestError: unknown_model.
        """
        model = request.model
        if entry.model and (entry.model != self._model_name or not self._has_named(model)):
            model = entry.model
        if model in self._names:
            return ""
        if model in self._loaded:
            return model
        adapters = f", or for an adapter: {', '.join(self._loaded)}" if self._loaded else ""
        raise RequestError(
            f"there is no model {shown(model)} here; leave model empty or ask for "
            f"{self._model_name!r}{adapters}",
            code="unknown_model",
        )

    def _has_named(self, model: str) -> bool:
        return model in self._names or model in self._loaded or model in self._former
