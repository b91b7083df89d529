"""Shared-memory regions of the gateway's clients, separate for each tenant."""

from __future__ import annotations

from ....config import GatewayConfig, RequestError
from ....kserve.shared_memory import SharedMemoryRegistry, WarmBuffers
from ....kserve.tensors import Array, SharedMemory


class TenantRegions(SharedMemoryRegistry):
    """The regions of all tenants.

    A tenant can't name another's region. A tenant can register any shared memory object that it can
    name and this process may open.

    Attributes:
        is_on: Clients may use shared memory (`gateway.shared_memory`).
        max_tensor_bytes: The most bytes that one request may read and write.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self.is_on = config.shared_memory
        self.max_tensor_bytes = config.max_tensor_bytes
        most_in_use = max(config.max_tensor_bytes, config.max_bodies_bytes)
        super().__init__(buffers=WarmBuffers(config.max_tensor_bytes, most_in_use))

    def register(self, name: str, key: str, offset: int, byte_size: int, tenant: str = "") -> None:
        """Register a region, like `SharedMemoryRegistry.register`; also raises RequestError:
        shared_memory_off.
        """
        self.check_on()
        super().register(name, key, offset, byte_size, tenant)

    def check_on(self) -> None:
        """Raise RequestError (shared_memory_off) if clients may not use shared memory."""
        if not self.is_on:
            raise RequestError(
                "this gateway reads and writes no shared memory (gateway.shared_memory); send "
                "tensors within the messages",
                code="shared_memory_off",
            )


class RequestMemory:
    """A tenant's regions for one request, with a limit for all of its tensors there."""

    def __init__(self, regions: TenantRegions, tenant: str) -> None:
        self._regions = regions
        self._tenant = tenant
        self._left_bytes = regions.max_tensor_bytes

    def read(self, place: SharedMemory) -> Array:
        """Return a tensor in a region, like `SharedMemoryRegistry.read`.

        Raises:
            RequestError: shared_memory_off, unknown_region, invalid_region, request_too_large;
                overloaded if the tensors of all requests have reached their limit.
        """
        self._count(place)
        return self._regions.read(place, self._tenant)

    def write(self, place: SharedMemory, data: bytes | memoryview | Array) -> None:
        """Write a tensor to a region, like `SharedMemoryRegistry.write`. Raises as `read`."""
        self._count(place)
        self._regions.write(place, data, self._tenant)

    def _count(self, place: SharedMemory) -> None:
        self._regions.check_on()
        if place.byte_size > self._left_bytes:
            raise RequestError(
                f"the tensors of this request in shared memory have more than "
                f"{self._regions.max_tensor_bytes} bytes; send less at a time, or raise "
                "gateway.max_tensor_bytes",
                code="request_too_large",
            )
        self._left_bytes -= max(0, place.byte_size)
