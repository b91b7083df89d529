"""A tenant's regions are his alone, a request's tensors in them are bounded, and all may be off."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from nano_inference.config import GatewayConfig, RequestError
from nano_inference.config.temporary import SHARED_MEMORY
from nano_inference.gateway.api.kserve import regions
from nano_inference.gateway.api.kserve.regions import Regions
from nano_inference.gateway.server.http import status_of
from nano_inference.kserve.pool import BufferPool
from nano_inference.kserve.tensors import SharedMemory

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="there is no /dev/shm")

SIZE, LIMIT = 1000, 1500
ALL = SharedMemory("r", SIZE)


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    """A client's."""
    with BufferPool(SIZE, 1) as found:
        yield found


@pytest.fixture
def here() -> Iterator[Regions]:
    found = Regions(GatewayConfig(shared_memory=True, max_tensor_bytes=LIMIT))
    yield found
    found.close()


def refused(code: str, status: int, why: str | None = None) -> pytest.RaisesExc[RequestError]:
    return pytest.RaisesExc(
        RequestError,
        match=why,
        check=lambda error: error.code == code and status_of(error) == status,
    )


def test_what_a_client_has_laid_down_is_read_and_answered(here: Regions, pool: BufferPool) -> None:
    slot = pool.acquire_slot_blocking()
    slot.scratch(3, "u1")[:] = [1, 2, 3]
    here.register("a", "r", pool.key, 0, SIZE)
    memory = here.memory("a")
    assert memory.read(SharedMemory("r", 3)).tolist() == [1, 2, 3]
    memory.write(SharedMemory("r", 3, 500), b"abc")
    assert slot.read(SharedMemory(pool.name, 3, 500)).tobytes() == b"abc"


def test_a_tenant_has_nothing_of_anothers(here: Regions, pool: BufferPool) -> None:
    with BufferPool(SIZE, 1) as other:
        here.register("a", "r", pool.key, 0, SIZE)
        here.register("b", "r", other.key, 0, SIZE)
        here.memory("a").write(ALL, b"a" * SIZE)
        here.memory("b").write(ALL, b"b" * SIZE)
        assert here.memory("a").read(ALL).tobytes() == b"a" * SIZE
        assert (here.status("a")["r"].key, here.status("b")["r"].key) == (pool.key, other.key)
        with refused("unknown_region", 404):
            here.memory("c").read(ALL)
        with refused("unknown_region", 404):
            here.status("c", "r")
        assert here.status("c") == {}
        here.unregister("c")
        here.unregister("b", "r")
        assert list(here.status("a")) == ["r"]
        with refused("unknown_region", 404):
            here.memory("b").write(ALL, b"")


def test_a_request_has_the_regions_that_there_are_by_then(here: Regions, pool: BufferPool) -> None:
    memory = here.memory("a")
    with refused("unknown_region", 404):
        memory.read(SharedMemory("r", 1))
    here.register("a", "r", pool.key, 0, SIZE)
    assert len(memory.read(ALL)) == SIZE
    here.unregister("a")
    with refused("unknown_region", 404):
        memory.read(SharedMemory("r", 1))


def test_what_a_request_reads_and_writes_is_bounded(here: Regions, pool: BufferPool) -> None:
    here.register("a", "r", pool.key, 0, SIZE)
    memory = here.memory("a")
    memory.read(ALL)
    for _ in range(2):
        with refused("request_too_large", 413, "more than 1500 bytes"):
            memory.write(SharedMemory("r", LIMIT - SIZE + 1), b"1" * (LIMIT - SIZE + 1))
    memory.write(SharedMemory("r", LIMIT - SIZE), b"1" * (LIMIT - SIZE))
    with refused("request_too_large", 413):
        memory.read(SharedMemory("r", 1))
    with refused("invalid_region", 400):
        memory.read(SharedMemory("r", -1000))
    with refused("request_too_large", 413):
        memory.read(SharedMemory("r", 1))
    assert len(here.memory("a").read(ALL)) == SIZE, "each request for itself"


def test_what_all_requests_have_read_is_bounded(pool: BufferPool) -> None:
    here = Regions(
        GatewayConfig(
            shared_memory=True,
            max_tensor_bytes=SIZE,
            max_body_bytes=1,
            max_weights_bytes=1,
            max_bodies_bytes=2 * SIZE,
        )
    )
    for tenant in "abc":
        here.register(tenant, "r", pool.key, 0, SIZE)
    read = [here.memory(tenant).read(ALL) for tenant in "ab"]
    with refused("overloaded", 429):
        here.memory("c").read(ALL)
    read.pop()
    assert len(here.memory("c").read(ALL)) == SIZE
    here.close()


def test_while_it_is_off_nothing_is_registered_or_read(pool: BufferPool) -> None:
    off = Regions(GatewayConfig())
    with refused("shared_memory_off", 403, "gateway.shared_memory"):
        off.register("a", "r", pool.key, 0, SIZE)
    memory = off.memory("a")
    with refused("shared_memory_off", 403):
        memory.read(ALL)
    with refused("shared_memory_off", 403):
        memory.write(ALL, b"")
    # Triton's examples begin with this.
    off.unregister("a")
    assert off.status("a") == {}


def test_all_tenants_together_have_a_limit(
    here: Regions, pool: BufferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "MAX_REGIONS_OF_ALL", 3)
    for tenant in "abc":
        here.register(tenant, "r", pool.key, 0, SIZE)
    for tenant, name in (("d", "r"), ("a", "s")):
        with refused("invalid_region", 400, "3 regions"):
            here.register(tenant, name, pool.key, 0, SIZE)
    here.register("a", "r", pool.key, 1, 2)  # instead of another
    with refused("invalid_region", 400, "no key"):
        here.register("a", "r", "", 0, 1)
    here.unregister("b")
    here.register("d", "r", pool.key, 0, SIZE)
    assert [list(here.status(tenant)) for tenant in "abcd"] == [["r"], [], ["r"], ["r"]]


def test_at_the_end_nothing_is_open(pool: BufferPool) -> None:
    here = Regions(GatewayConfig(shared_memory=True))
    before = len(os.listdir("/proc/self/fd"))
    for tenant in "ab":
        here.register(tenant, "r", pool.key, 0, SIZE)
    assert len(os.listdir("/proc/self/fd")) > before
    here.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert here.status("a") == {}
    assert (SHARED_MEMORY / pool.key[1:]).exists()
