"""Shared memory of clients, for each tenant apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ....config import GatewayConfig, RequestError
from ....kserve.buffers import WarmBuffers
from ....kserve.shared_memory import MAX_REGIONS, Region, SharedMemoryRegistry
from ....kserve.tensors import Array, SharedMemory

MAX_REGIONS_OF_ALL = 256
"""Of all tenants together: each holds two of the process's descriptors."""


class Regions:
    """The regions of all tenants, none of which can name another's.

    What keeps them apart is the name: of shared memory objects, which live outside of here, a
    tenant may register whichever it can name and this process may open.

    Attributes:
        is_on: Whether clients may name shared memory (`gateway.shared_memory`).
    """

    def __init__(self, config: GatewayConfig) -> None:
        self.is_on = config.shared_memory
        self._max_tensor_bytes = config.max_tensor_bytes
        most = max(config.max_tensor_bytes, config.max_bodies_bytes)
        self._buffers = WarmBuffers(config.max_tensor_bytes, most)
        self._registries: dict[str, SharedMemoryRegistry] = {}

    def register(self, tenant: str, name: str, key: str, offset: int, byte_size: int) -> None:
        """Attaches a shared memory object; see `SharedMemoryRegistry.register`.

        Raises:
            RequestError: invalid_region, shared_memory_off.
        """
        registry = self._allowed(tenant)
        others = sum(map(len, self._registries.values()))
        if others >= MAX_REGIONS_OF_ALL and name not in registry.status():
            raise RequestError(
                f"{others} regions of all tenants are registered, which is as many as there may "
                "be; unregister some",
                code="invalid_region",
            )
        registry.register(name, key, offset, byte_size)
        self._registries[tenant] = registry

    def unregister(self, tenant: str, name: str = "") -> None:
        """Detaches a region of a tenant, or all of them for ""; nothing happens where it is not
        there, as everywhere while shared memory is off."""
        registry = self._registries.get(tenant)
        if registry is None:
            return
        registry.unregister(name)
        if not registry:
            del self._registries[tenant]

    def status(self, tenant: str, name: str = "") -> dict[str, Region]:
        """A tenant's regions by their names, or the one of a name.

        Raises:
            RequestError: unknown_region.
        """
        return self._registry(tenant).status(name)

    def memory(self, tenant: str) -> RequestMemory:
        """What one request of a tenant may read and write."""
        return RequestMemory(partial(self._allowed, tenant), self._max_tensor_bytes)

    def close(self) -> None:
        """Detaches all."""
        for registry in self._registries.values():
            registry.unregister()
        self._registries.clear()

    def _allowed(self, tenant: str) -> SharedMemoryRegistry:
        if not self.is_on:
            raise RequestError(
                "this gateway reads and writes no shared memory (gateway.shared_memory); send "
                "tensors within the messages",
                code="shared_memory_off",
            )
        return self._registry(tenant)

    def _registry(self, tenant: str) -> SharedMemoryRegistry:
        """A tenant's; one with nothing in it, which is not kept, where he has registered none."""
        return self._registries.get(tenant) or SharedMemoryRegistry(MAX_REGIONS, self._buffers)


class RequestMemory:
    """A tenant's regions for one request, whose tensors there hold no more than is allowed."""

    def __init__(self, registry: Callable[[], SharedMemoryRegistry], max_tensor_bytes: int) -> None:
        """Args: finds the tenant's regions as they are by then; and how many bytes there may be."""
        self._registry = registry
        self._max_bytes = max_tensor_bytes
        self._left_bytes = max_tensor_bytes

    def read(self, place: SharedMemory) -> Array:
        """As `SharedMemoryRegistry.read`.

        Raises:
            RequestError: shared_memory_off, unknown_region, invalid_region, request_too_large;
                overloaded when the tensors of all requests have as much as may be in memory.
        """
        registry = self._registry()
        self._count(place)
        return registry.read(place)

    def write(self, place: SharedMemory, data: bytes | memoryview | Array) -> None:
        """As `SharedMemoryRegistry.write`. Raises as `read`."""
        registry = self._registry()
        self._count(place)
        registry.write(place, data)

    def _count(self, place: SharedMemory) -> None:
        if place.byte_size > self._left_bytes:
            raise RequestError(
                f"the tensors of this request in shared memory have more than {self._max_bytes} "
                "bytes; send less at a time, or raise gateway.max_tensor_bytes",
                code="request_too_large",
            )
        self._left_bytes -= max(0, place.byte_size)
