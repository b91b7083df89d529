"""TenantRegions are separate by tenant, limited by request, and off by default."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from nano_inference.config import GatewayConfig, RequestError
from nano_inference.config.temporary import SHARED_MEMORY
from nano_inference.gateway.api.kserve.regions import RequestMemory, TenantRegions
from nano_inference.gateway.server.http import status_of
from nano_inference.kserve import shared_memory
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
def here() -> Iterator[TenantRegions]:
    found = TenantRegions(GatewayConfig(shared_memory=True, max_tensor_bytes=LIMIT))
    yield found
    found.close()


def refused(code: str, status: int, why: str | None = None) -> pytest.RaisesExc[RequestError]:
    return pytest.RaisesExc(
        RequestError,
        match=why,
        check=lambda error: error.code == code and status_of(error) == status,
    )


def test_tenants_are_separate(here: TenantRegions, pool: BufferPool) -> None:
    with BufferPool(SIZE, 1) as other:
        here.register("r", pool.key, 0, SIZE, "a")
        here.register("r", other.key, 0, SIZE, "b")
        RequestMemory(here, "a").write(ALL, b"a" * SIZE)
        RequestMemory(here, "b").write(ALL, b"b" * SIZE)
        assert RequestMemory(here, "a").read(ALL).tobytes() == b"a" * SIZE
        assert (here.status(tenant="a")["r"].key, here.status(tenant="b")["r"].key) == (
            pool.key,
            other.key,
        )
        with refused("unknown_region", 404):
            RequestMemory(here, "c").read(ALL)
        with refused("unknown_region", 404):
            here.status("r", "c")
        assert here.status(tenant="c") == {}
        here.unregister(tenant="c")
        here.unregister("r", "b")
        assert list(here.status(tenant="a")) == ["r"]
        with refused("unknown_region", 404):
            RequestMemory(here, "b").write(ALL, b"")


def test_bytes_of_one_request_are_limited(here: TenantRegions, pool: BufferPool) -> None:
    here.register("r", pool.key, 0, SIZE, "a")
    memory = RequestMemory(here, "a")
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
    assert len(RequestMemory(here, "a").read(ALL)) == SIZE, "each request for itself"


def test_bytes_of_all_requests_are_limited(pool: BufferPool) -> None:
    here = TenantRegions(
        GatewayConfig(
            shared_memory=True,
            max_tensor_bytes=SIZE,
            max_body_bytes=1,
            max_weights_bytes=1,
            max_bodies_bytes=2 * SIZE,
        )
    )
    for tenant in "abc":
        here.register("r", pool.key, 0, SIZE, tenant)
    read = [RequestMemory(here, tenant).read(ALL) for tenant in "ab"]
    with refused("overloaded", 429):
        RequestMemory(here, "c").read(ALL)
    read.pop()
    assert len(RequestMemory(here, "c").read(ALL)) == SIZE
    here.close()


def test_nothing_is_registered_or_read_while_off(pool: BufferPool) -> None:
    off = TenantRegions(GatewayConfig())
    with refused("shared_memory_off", 403, "gateway.shared_memory"):
        off.register("r", pool.key, 0, SIZE, "a")
    memory = RequestMemory(off, "a")
    with refused("shared_memory_off", 403):
        memory.read(ALL)
    with refused("shared_memory_off", 403):
        memory.write(ALL, b"")
    # Triton's examples begin with this.
    off.unregister(tenant="a")
    assert off.status(tenant="a") == {}


def test_all_tenants_together_have_a_limit(
    here: TenantRegions, pool: BufferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "MAX_REGIONS_OF_ALL", 3)
    for tenant in "abc":
        here.register("r", pool.key, 0, SIZE, tenant)
    for tenant, name in (("d", "r"), ("a", "s")):
        with refused("invalid_region", 400, "3 regions"):
            here.register(name, pool.key, 0, SIZE, tenant)
    here.register("r", pool.key, 1, 2, "a")  # instead of another
    with refused("invalid_region", 400, "no key"):
        here.register("r", "", 0, 1, "a")
    here.unregister(tenant="b")
    here.register("r", pool.key, 0, SIZE, "d")
    assert [list(here.status(tenant=tenant)) for tenant in "abcd"] == [["r"], [], ["r"], ["r"]]


def test_close_detaches_everything(pool: BufferPool) -> None:
    here = TenantRegions(GatewayConfig(shared_memory=True))
    before = len(os.listdir("/proc/self/fd"))
    for tenant in "ab":
        here.register("r", pool.key, 0, SIZE, tenant)
    assert len(os.listdir("/proc/self/fd")) > before
    here.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert here.status(tenant="a") == {}
    assert (SHARED_MEMORY / pool.key[1:]).exists()
