"""Bytes of KV blocks in host memory and on disk."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from nano_inference.bus.control import TiersChanged
from nano_inference.bus.messages import KVMove
from nano_inference.config import EngineConfig, ModelError
from nano_inference.stages.executor import KVCache, LoadedModel
from nano_inference.stages.executor.runner.loaded_model import Dtypes, LayerSpec
from nano_inference.stages.executor.runner.tiers import disk as disk_module
from nano_inference.stages.executor.runner.tiers.fetches import Fetches
from nano_inference.stages.executor.runner.tiers.layout import BlockLayout, weights_digest
from nano_inference.stages.executor.runner.tiers.tiers import BlockTiers

NAME, OTHER = b"n" * 16, b"o" * 16
LAYERS = (LayerSpec(2, 16, 8, None), LayerSpec(1, 8, 16, 4))


def make_model(dtype: torch.dtype = torch.float32, layers: Any = LAYERS) -> LoadedModel:
    config: Any = None
    return LoadedModel(
        nn.Linear(4, 4), config, torch.device("cpu"), Dtypes.of(dtype), 64, 16, layers
    )


@contextmanager
def opened(
    folder: Path | str = "",
    *,
    model: LoadedModel | None = None,
    host: int = 1 << 16,
    disk: int = 1 << 30,
    block_size: int = 4,
) -> Iterator[BlockTiers]:
    model = model or make_model()
    cache = KVCache(model, 6, block_size)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn(tensor.shape))
    config = EngineConfig(kv_host_bytes=host, kv_disk_path=str(folder), kv_disk_bytes=disk)
    tiers = BlockTiers(config, model, cache, 0, 1000)
    try:
        yield tiers
    finally:
        tiers.close()


def block_of(tiers: BlockTiers, block_id: int) -> list[torch.Tensor]:
    cache = tiers.slots._cache
    return [tensor[block_id].clone() for tensor in (*cache.keys, *cache.values)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def waited(tiers: BlockTiers, done: Callable[[TiersChanged], object]) -> TiersChanged:
    """The first changes for which `done` holds, within a minute."""
    for _ in range(60):
        tiers.wait(1.0)
        changes = tiers.take_changes()
        if changes is not None and done(changes):
            return changes
    raise AssertionError("nothing happened")


def written(tiers: BlockTiers, block_id: int = 1, name: bytes = NAME) -> None:
    tiers.apply([KVMove("store", name, 0, block_id, write=True)])
    waited(tiers, lambda changes: changes.stored)


def fetched(tiers: BlockTiers, slot: int = 3, name: bytes = NAME) -> TiersChanged:
    tiers.apply([KVMove("fetch", name, slot)])
    return waited(tiers, lambda changes: changes.fetched or changes.lost)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    with opened(model=make_model(dtype)) as tiers:
        before = [block_of(tiers, block_id) for block_id in (1, 2)]
        tiers.apply([KVMove("store", NAME, 4, 1), KVMove("store", OTHER, 5, 2)])
        tiers.apply([KVMove("load", NAME, 4, 0), KVMove("load", OTHER, 5, 1)])
        assert same(block_of(tiers, 0), before[0])
        assert same(block_of(tiers, 1), before[1])
        assert same(block_of(tiers, 2), before[1])


def test_moves_are_applied_in_order() -> None:
    """A slot is given away in the plan that loads from it."""
    with opened() as tiers:
        first, second = block_of(tiers, 1), block_of(tiers, 2)
        tiers.apply(
            [
                KVMove("store", NAME, 0, 1),
                KVMove("load", NAME, 0, 3),
                KVMove("store", OTHER, 0, 2),
                KVMove("load", OTHER, 0, 1),
            ]
        )
        assert same(block_of(tiers, 3), first)
        assert same(block_of(tiers, 1), second)


def test_a_slot_that_is_given_away_in_the_same_plan_is_written_with_its_own_block(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as tiers:
        first, second = block_of(tiers, 1), block_of(tiers, 2)
        tiers.apply([KVMove("store", NAME, 0, 1, True), KVMove("store", OTHER, 0, 2, True)])
        tiers.on_disk()
        assert fetched(tiers, 3, NAME).fetched == (NAME,)
        assert fetched(tiers, 4, OTHER).fetched == (OTHER,)
        tiers.apply([KVMove("load", NAME, 3, 4), KVMove("load", OTHER, 4, 5)])
        assert same(block_of(tiers, 4), first)
        assert same(block_of(tiers, 5), second)


def test_blocks_on_disk_survive_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as tiers:
        before = block_of(tiers, 1)
        written(tiers)
    with opened(tmp_path) as tiers:
        assert tiers.on_disk() == TiersChanged(stored=(NAME,), whole=True)
        assert fetched(tiers).fetched == (NAME,)
        tiers.apply([KVMove("load", NAME, 3, 5)])
        assert same(block_of(tiers, 5), before)
        tiers.apply([KVMove("drop", NAME)])
        assert tiers.on_disk().stored == ()
        assert fetched(tiers).lost == (NAME,)


def only_file(folder: Path) -> Path:
    (path,) = folder.rglob("*.kv")
    return path


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: flip(path, -1), id="flipped bit"),
        pytest.param(lambda path: flip(path, 20), id="another layout"),
        pytest.param(lambda path: flip(path, 30), id="another name"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-1]), id="cut off"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes() + b"x"), id="too long"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: path.unlink(), id="deleted"),
        pytest.param(
            lambda path: path.rename(path.with_name(f"{OTHER.hex()}.kv")), id="swapped names"
        ),
    ],
)
def test_a_damaged_file_is_a_miss(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    with opened(tmp_path) as tiers:
        written(tiers)
        path = only_file(tmp_path)
        damage(path)
        name = OTHER if path.with_name(f"{OTHER.hex()}.kv").exists() else NAME
        assert fetched(tiers, name=name).lost == (name,)
        assert not list(tmp_path.rglob("*.kv")), "it would be read again"


def test_unfinished_and_cut_off_files_are_dropped_at_the_start(tmp_path: Path) -> None:
    with opened(tmp_path) as tiers:
        written(tiers)
    path = only_file(tmp_path)
    path.with_name(f"{OTHER.hex()}.part").write_bytes(b"half")
    path.with_name(f"{OTHER.hex()}.kv").write_bytes(path.read_bytes()[:-1])
    with opened(tmp_path) as tiers:
        assert tiers.on_disk().stored == (NAME,)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"block_size": 8}, id="block size"),
        pytest.param({"model": make_model(torch.bfloat16)}, id="dtype"),
        pytest.param({"model": make_model(layers=LAYERS[:1])}, id="missing layer"),
        pytest.param({"model": make_model(layers=LAYERS[::-1])}, id="layers in another order"),
    ],
)
def test_another_layout_finds_nothing(tmp_path: Path, other: dict[str, Any]) -> None:
    with opened(tmp_path) as tiers:
        written(tiers)
    with opened(tmp_path, **other) as tiers:
        assert tiers.on_disk().stored == ()
        assert fetched(tiers).lost == (NAME,)


def test_other_weights_have_another_digest() -> None:
    model = nn.Linear(4, 4)
    before = weights_digest(model)
    assert weights_digest(model) == before
    with torch.no_grad():
        model.weight[0, 0] += 1
    assert weights_digest(model) != before


def test_each_field_of_a_layout_is_in_its_digest() -> None:
    layout = BlockLayout(16, ((2, 64, 64),), "bfloat16")
    others = [
        msgspec.structs.replace(layout, **{field: value})
        for field, value in {
            "block_size": 8,
            "layers": ((2, 64, 32),),
            "dtype": "float16",
            "order": "head, token, width",
            "endian": "big",
            "version": 2,
        }.items()
    ]
    assert len({each.digest for each in (layout, *others)}) == 7


def test_executors_that_run_at_a_time_have_folders_of_their_own(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        written(first)
        with opened(tmp_path) as second:
            assert second.on_disk().stored == ()
    with opened(tmp_path) as third:
        assert third.on_disk().stored == (NAME,)


def test_the_folder_is_for_one_user_only(tmp_path: Path) -> None:
    with opened(tmp_path) as tiers:
        written(tiers)
    folder = only_file(tmp_path).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(ModelError, match="this user alone"), opened(tmp_path):
        pass
    folder.chmod(0o700)
    folder.parent.chmod(0o777)
    with pytest.raises(ModelError, match="this user alone"), opened(tmp_path):
        pass


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ModelError, match="kv_disk_path"), opened(path):
        pass


def test_a_model_without_kv_and_tiers_below_a_block_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="keeps no KV"), opened(model=make_model(layers=())):
        pass
    with pytest.raises(ModelError, match="one block takes"), opened(host=10):
        pass
    with pytest.raises(ModelError, match="kv_disk_bytes"), opened(tmp_path, disk=100):
        pass


def test_a_full_disk_loses_a_block_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as tiers:
        full = OSError(28, "No space left on device")

        def no_space(*args: Any) -> None:
            raise full

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", no_space)
            patch.setattr(Path, "rename", no_space)
            tiers.apply([KVMove("store", NAME, 0, 1, write=True)])
            assert waited(tiers, lambda changes: changes.lost).lost == (NAME,)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        written(tiers)


def test_a_folder_that_was_removed_holds_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as tiers:
        written(tiers)
        shutil.rmtree(only_file(tmp_path).parent)
        assert tiers.on_disk() == TiersChanged(whole=True)
        assert fetched(tiers).lost == (NAME,)
        tiers.apply([KVMove("store", OTHER, 0, 1, write=True), KVMove("drop", OTHER)])
        assert waited(tiers, lambda changes: changes.lost).lost == (OTHER,)


def test_writes_beyond_the_bytes_in_flight_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "MOST_BYTES_IN_FLIGHT", 0)
    with opened(tmp_path) as tiers:
        tiers.apply([KVMove("store", NAME, 0, 1, write=True)])
        assert waited(tiers, lambda changes: changes.lost).lost == (NAME,)


class SlowSource:
    """Blocks of one byte value, read in two halves, the second when `go` is set."""

    def __init__(self, value: int) -> None:
        self.started, self.go = threading.Event(), threading.Event()
        self._value = value

    def __call__(self, name: bytes, block: memoryview) -> bool:
        half = len(block) // 2
        block[:half] = bytes([self._value]) * half
        self.started.set()
        assert self.go.wait(60)
        block[half:] = bytes([self._value]) * (len(block) - half)
        return True


@contextmanager
def fetches_of(tiers: BlockTiers, source: SlowSource) -> Iterator[Fetches]:
    fetches = Fetches(tiers.slots, tiers._changes, source, 1, "test")
    try:
        yield fetches
    finally:
        source.go.set()
        fetches.close()


def test_a_fetch_that_waits_at_a_reset_writes_to_no_slot() -> None:
    source = SlowSource(7)
    with opened() as tiers, fetches_of(tiers, source) as fetches:
        fetches.submit([KVMove("fetch", NAME, 2), KVMove("fetch", OTHER, 3)])
        assert source.started.wait(60)
        tiers.reset()
        tiers.apply([KVMove("store", OTHER, 3, 2), KVMove("load", OTHER, 3, 5)])
        source.go.set()
        fetches._threads.submit(int).result()
        tiers.apply([KVMove("load", OTHER, 3, 4)])
        assert same(block_of(tiers, 4), block_of(tiers, 2))
        assert tiers.take_changes() is None


def test_a_store_waits_for_a_fetch_that_runs_at_a_reset() -> None:
    source = SlowSource(7)
    with opened() as tiers, fetches_of(tiers, source) as fetches:
        fetches.submit([KVMove("fetch", NAME, 3)])
        assert source.started.wait(60)
        tiers.reset()
        threading.Timer(0.01, source.go.set).start()
        tiers.apply([KVMove("store", OTHER, 3, 2)])
        fetches.close()
        tiers.apply([KVMove("load", OTHER, 3, 5)])
        assert same(block_of(tiers, 5), block_of(tiers, 2))
        assert tiers.take_changes() is None


def test_a_fetch_waits_for_one_that_runs_at_a_reset() -> None:
    source, other = SlowSource(7), SlowSource(8)
    other.go.set()
    with opened() as tiers, fetches_of(tiers, source) as before, fetches_of(tiers, other) as after:
        before.submit([KVMove("fetch", NAME, 3)])
        assert source.started.wait(60)
        tiers.reset()
        after.submit([KVMove("fetch", OTHER, 3)])
        source.go.set()
        assert waited(tiers, lambda changes: changes.fetched).fetched == (OTHER,)
        before.close()
        assert set(tiers.slots.memory[3].tolist()) == {8}


def test_a_report_of_a_fetch_from_before_a_reset_is_dropped(tmp_path: Path) -> None:
    """Batching would take it for the report of a new fetch of the same block."""
    with opened(tmp_path) as tiers:
        tiers.apply([KVMove("store", OTHER, 0, 1, write=True), KVMove("fetch", NAME, 3)])
        tiers.on_disk()
        tiers._reads.close()
        tiers.reset()
        assert tiers.take_changes() == TiersChanged(stored=(OTHER,))


def test_a_source_that_fails_loses_its_block() -> None:
    def fail(name: bytes, block: memoryview) -> bool:
        raise ConnectionError

    with opened() as tiers:
        fetches = Fetches(tiers.slots, tiers._changes, fail, 1, "test")
        fetches.submit([KVMove("fetch", NAME, 3)])
        assert waited(tiers, lambda changes: changes.lost).lost == (NAME,)
        fetches.close()
        tiers.apply([KVMove("store", OTHER, 3, 2)])


def test_closing_writes_what_is_in_flight_and_frees_descriptors(tmp_path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with opened(tmp_path) as tiers:
        tiers.apply([KVMove("store", NAME, 0, 1, write=True)])
    assert only_file(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == descriptors
