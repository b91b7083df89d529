"""Policy backends: one suite for all, and the promises of the file."""

from __future__ import annotations

import multiprocessing
import os
import stat
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import anyio
import msgspec
import pytest

from nano_inference.config import ConfigError, PolicyConfig, RequestError
from nano_inference.gateway.policy import backend as policy_file
from nano_inference.gateway.policy.backend import (
    FileBackend,
    PolicyBackend,
    PolicyUnavailable,
    open_backend,
)
from nano_inference.gateway.policy.document import ApiKey, Guardrails, PolicyDocument, TenantPolicy
from nano_inference.gateway.policy.store import PolicyStore
from nano_inference.store.policy import PolicyRecord
from nano_inference.store.records import MemoryRecords
from nano_inference.store.redis.keys import Keys

PASSPHRASE = "correct horse battery staple"

Open = Callable[[], PolicyBackend]

DOCUMENT = PolicyDocument(
    keys={"0a": ApiKey("0a", "ci", "ff", "t", ("generate",), 1)},
    tenants={"t": TenantPolicy(weight=2.0)},
    guardrails=Guardrails(literals=("ß",)),
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scrypt's cost, which isn't tested."""
    monkeypatch.setattr(policy_file, "_N", 2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "policy"


def made_record() -> PolicyRecord:
    return PolicyRecord(Keys("n"), MemoryRecords())


@pytest.fixture(params=["file", "bus"])
def open_one(request: pytest.FixtureRequest, path: Path) -> Open:
    """Opens another backend of the same document."""
    record = made_record()
    config = PolicyConfig(backend=request.param, file=str(path), passphrase=PASSPHRASE)
    return lambda: open_backend(config, record)


def adding(tenant: str) -> Callable[[PolicyDocument], PolicyDocument]:
    """A change."""
    return lambda document: document.with_tenant(tenant, TenantPolicy())


async def test_a_written_document_is_read_once(open_one: Open) -> None:
    one, other = open_one(), open_one()
    assert await one.read("") is None
    found = await one.read("?")
    assert found == ("", PolicyDocument())
    assert await one.replace("", DOCUMENT)
    stored = await other.read("")
    assert stored.document == DOCUMENT
    assert await other.read(stored.version) is None
    assert not await other.replace("", PolicyDocument())
    assert await other.replace(stored.version, PolicyDocument())
    assert not await one.replace(stored.version, DOCUMENT)
    again = await one.read(stored.version)
    assert again.document == PolicyDocument()
    for each in (one, other):
        await each.aclose()


async def test_concurrent_changes_are_not_lost(open_one: Open) -> None:
    stores = [PolicyStore(open_one(), 1) for _ in range(4)]
    async with anyio.create_task_group() as group:
        for number in range(20):
            store = stores[number % 4]
            group.start_soon(store.change, adding(f"t{number}"))
    await stores[0].refresh()
    assert len((await stores[0].document()).tenants) == 20


async def test_an_edit_that_raises_changes_nothing(open_one: Open) -> None:
    store = PolicyStore(open_one(), 1)
    before = await store.document()
    with pytest.raises(RequestError, match="0a"):
        await store.change(lambda document: document.without_key("0a"))
    await store.refresh()
    assert await store.document() is before


def _add(path: str, name: str) -> None:
    policy_file._N = 2

    async def add() -> None:
        store = PolicyStore(FileBackend(path, PASSPHRASE), 1)
        for number in range(5):
            await store.change(adding(f"{name}-{number}"))

    anyio.run(add)


def test_changes_of_two_processes_are_not_lost(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_add, args=(str(path), name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0

    async def count() -> int:
        return len((await PolicyStore(FileBackend(str(path), PASSPHRASE), 1).document()).tenants)

    assert anyio.run(count) == 10


def put(path: Path, raw: bytes) -> None:
    """Whatever was there before."""
    path.write_bytes(raw)


def raw_of(path: Path) -> bytes:
    return path.read_bytes()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_the_file_is_encrypted_and_authenticated(path: Path) -> None:
    backend = FileBackend(str(path), PASSPHRASE)
    assert await backend.replace("", DOCUMENT)
    raw = raw_of(path)
    assert b"generate" not in raw
    assert mode_of(path) == 0o600
    assert sorted(os.listdir(path.parent)) == ["policy", "policy.lock"]
    with pytest.raises(PolicyUnavailable, match="passphrase"):
        await FileBackend(str(path), PASSPHRASE + "!").read("")
    # Each write differs, and a change of any byte is detected.
    stored = await backend.read("")
    assert await backend.replace(stored.version, DOCUMENT)
    assert raw_of(path) != raw
    for place in range(0, len(raw), 7):
        put(path, raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        with pytest.raises(PolicyUnavailable):
            await FileBackend(str(path), PASSPHRASE).read("")
    put(path, raw[:-5])
    with pytest.raises(PolicyUnavailable):
        await FileBackend(str(path), PASSPHRASE).read("")


async def test_a_lock_that_is_a_link_is_not_followed(path: Path) -> None:
    planted = path.parent / "elsewhere"
    path.with_name("policy.lock").symlink_to(planted)
    with pytest.raises(PolicyUnavailable, match="can't be written: Too many levels"):
        await FileBackend(str(path), PASSPHRASE).replace("", DOCUMENT)
    assert not planted.exists()


async def test_the_last_document_holds_while_the_file_is_damaged(path: Path) -> None:
    backend = FileBackend(str(path), PASSPHRASE)
    await backend.replace("", DOCUMENT)
    store = PolicyStore(backend, 1)
    assert await store.document() == DOCUMENT
    put(path, b"something else")
    with pytest.raises(PolicyUnavailable):
        await store.refresh()
    assert await store.document() == DOCUMENT


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backend": "flie"}, "file"),
        ({"backend": "file", "file": "f", "passphrase": "short"}, "passphrase"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, str], words: str) -> None:
    config = msgspec.structs.replace(PolicyConfig(), **changes)
    with pytest.raises(ConfigError, match=words):
        open_backend(config, made_record())


async def test_a_package_can_register_a_backend(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[PolicyConfig] = []

    class Found:
        name = "mine"

        def load(self) -> Callable[[PolicyConfig], PolicyBackend]:
            def make(config: PolicyConfig) -> PolicyBackend:
                made.append(config)
                return FileBackend(str(path), PASSPHRASE)

            return make

    monkeypatch.setattr(
        metadata, "entry_points", lambda group: [Found()] if "policy" in group else []
    )
    config = PolicyConfig(backend="mine")
    assert await open_backend(config, made_record()).read("") is None
    assert made == [config]
