"""Bytes of KV blocks in host memory and on disk."""

from __future__ import annotations

import os
import resource
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
from nano_inference.bus.steps import KVMove
from nano_inference.config import EngineConfig, ModelError
from nano_inference.stages.executor import KVCache, LoadedModel
from nano_inference.stages.executor.runner.kv_codes import keep_codes
from nano_inference.stages.executor.runner.loaded_model import Dtypes, LayerSpec
from nano_inference.stages.executor.runner.tiers import disk as disk_module
from nano_inference.stages.executor.runner.tiers.fetches import Fetches
from nano_inference.stages.executor.runner.tiers.layout import BlockLayout, model_digest
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
    for tensor in cache.in_blocks:
        tensor.copy_(torch.randn(tensor.shape) * 9)
    config = EngineConfig(kv_host_bytes=host, kv_disk_path=str(folder), kv_disk_bytes=disk)
    tiers = BlockTiers(config, model, cache, 0, 1000)
    try:
        yield tiers
    finally:
        tiers.close()


def block_of(tiers: BlockTiers, block_id: int) -> list[torch.Tensor]:
    return [tensor[block_id].clone() for tensor in tiers.slots._units()]


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
@pytest.mark.parametrize("codes", [False, True])
def test_a_block_comes_back_bit_for_bit(dtype: torch.dtype, *, codes: bool) -> None:
    model = make_model(dtype)
    with opened(model=keep_codes(model, "int8") if codes else model) as tiers:
        before = [block_of(tiers, block_id) for block_id in (1, 2)]
        tiers.apply([KVMove("store", NAME, 4, 1), KVMove("store", OTHER, 5, 2)])
        tiers.apply([KVMove("load", NAME, 4, 0), KVMove("load", OTHER, 5, 1)])
        assert same(block_of(tiers, 0), before[0])
        assert same(block_of(tiers, 1), before[1])
        assert same(block_of(tiers, 2), before[1])


def test_a_slot_is_written_to_disk(tmp_path: Path) -> None:
    with opened(tmp_path) as tiers:
        tiers.apply(
            [KVMove("store", NAME, 0, 1), KVMove("write", NAME, 0), KVMove("store", b"", 0)]
        )
        assert waited(tiers, lambda changes: changes.stored).stored == (NAME,)
        fetched(tiers)
        tiers.apply([KVMove("load", NAME, 3, 4)])
        assert same(block_of(tiers, 4), block_of(tiers, 1))


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
        assert tiers.blocks._disk is not None
        go = threading.Event()
        tiers.blocks._disk._writer.submit(go.wait, 60)
        tiers.apply([KVMove("store", NAME, 0, 1, True), KVMove("store", OTHER, 0, 2, True)])
        go.set()
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


def files_of(folder: Path) -> tuple[Path, Path]:
    """The blocks and the index of the only folder."""
    (blocks,) = folder.rglob("blocks")
    return blocks, blocks.with_name("index")


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def swap(path: Path, start: int) -> None:
    """Exchange the halves of a file after a header."""
    data = path.read_bytes()
    middle = (start + len(data)) // 2
    path.write_bytes(data[:start] + data[middle:] + data[start:middle])


def cut(path: Path, num_bytes: int) -> None:
    os.truncate(path, path.stat().st_size - num_bytes)


# The index is a header of 24 bytes, and 40 for each block: 16 of its name, two checksums.
BLOCK_DAMAGE = [
    pytest.param(lambda blocks, index: flip(blocks, 40), 1, id="flipped bit"),
    pytest.param(lambda blocks, index: cut(blocks, 1), 1, id="cut off"),
    pytest.param(lambda blocks, index: os.truncate(blocks, 0), 2, id="empty"),
    pytest.param(lambda blocks, index: swap(blocks, 0), 2, id="swapped blocks"),
]
INDEX_DAMAGE = [
    pytest.param(lambda blocks, index: blocks.unlink(), 2, id="deleted"),
    pytest.param(lambda blocks, index: flip(index, 3), 2, id="another format"),
    pytest.param(lambda blocks, index: flip(index, 20), 2, id="another layout"),
    pytest.param(lambda blocks, index: flip(index, 30), 1, id="another name"),
    pytest.param(lambda blocks, index: flip(index, 50), 1, id="another checksum"),
    pytest.param(lambda blocks, index: cut(index, 1), 1, id="index cut off"),
    pytest.param(lambda blocks, index: swap(index, 24), 2, id="swapped names"),
    pytest.param(lambda blocks, index: index.unlink(), 2, id="no index"),
]
Damage = Callable[[Path, Path], object]


def write_both(tiers: BlockTiers) -> None:
    written(tiers, 1, NAME)
    written(tiers, 2, OTHER)


def fetch_both(tiers: BlockTiers) -> tuple[set[bytes], set[bytes]]:
    """The names of blocks that are fetched, with the right bytes, and of those that are lost."""
    found = [fetched(tiers, slot, name) for slot, name in ((3, NAME), (4, OTHER))]
    whole = {name for changes in found for name in changes.fetched}
    tiers.apply([KVMove("load", NAME, 3, 4), KVMove("load", OTHER, 4, 5)])
    for name, copy, block_id in ((NAME, 4, 1), (OTHER, 5, 2)):
        assert name not in whole or same(block_of(tiers, copy), block_of(tiers, block_id))
    return whole, {name for changes in found for name in changes.lost}


@pytest.mark.parametrize(("damage", "num_lost"), BLOCK_DAMAGE)
def test_a_damaged_block_is_a_miss(tmp_path: Path, damage: Damage, num_lost: int) -> None:
    with opened(tmp_path) as tiers:
        write_both(tiers)
        damage(*files_of(tmp_path))
        whole, lost = fetch_both(tiers)
        assert len(lost) == num_lost
        assert {*tiers.on_disk().stored} == whole, "it would be read again"
        write_both(tiers)
        assert fetch_both(tiers)[0] == {NAME, OTHER}


@pytest.mark.parametrize(("damage", "num_lost"), BLOCK_DAMAGE + INDEX_DAMAGE)
def test_damage_between_two_starts_is_a_miss(tmp_path: Path, damage: Damage, num_lost: int) -> None:
    torch.manual_seed(0)
    with opened(tmp_path) as tiers:
        write_both(tiers)
    damage(*files_of(tmp_path))
    torch.manual_seed(0)
    with opened(tmp_path) as tiers:
        whole, lost = fetch_both(tiers)
        assert len(lost) == num_lost
        assert {*tiers.on_disk().stored} == whole
        write_both(tiers)
        assert fetch_both(tiers)[0] == {NAME, OTHER}


def test_a_block_whose_entry_was_not_written_is_not_found(tmp_path: Path) -> None:
    """The process was killed between the two writes."""
    with opened(tmp_path) as tiers:
        written(tiers)
        _, index = files_of(tmp_path)
        before = index.read_bytes()
        written(tiers, 2, OTHER)
    index.write_bytes(before)
    with opened(tmp_path) as tiers:
        assert tiers.on_disk().stored == (NAME,)


def test_places_are_used_again_and_space_is_freed(tmp_path: Path) -> None:
    with opened(tmp_path) as tiers:
        write_both(tiers)
        blocks, index = files_of(tmp_path)
        sizes = blocks.stat().st_size, index.stat().st_size
        tiers.apply([KVMove("drop", NAME)])
        assert tiers.on_disk().stored == (OTHER,)
        written(tiers, 1, NAME)
        assert (blocks.stat().st_size, index.stat().st_size) == sizes
        assert fetch_both(tiers)[0] == {NAME, OTHER}
        tiers.apply([KVMove("drop", NAME), KVMove("drop", OTHER)])
        assert tiers.on_disk().stored == ()
        assert blocks.stat().st_size == 0


def test_dropped_blocks_are_not_found_by_a_later_start(tmp_path: Path) -> None:
    with opened(tmp_path) as tiers:
        write_both(tiers)
        tiers.apply([KVMove("drop", NAME)])
    with opened(tmp_path) as tiers:
        assert tiers.on_disk().stored == (OTHER,)


def test_the_size_limit_holds_for_all_files(tmp_path: Path) -> None:
    limit = 7000
    names = [bytes([index]) * 16 for index in range(9)]
    with opened(tmp_path, disk=limit) as tiers:
        count = tiers.capacity.disk_blocks
        assert 2 < count < len(names)
        tiers.apply([KVMove("store", name, 0, 1, write=True) for name in names])
        assert {*tiers.on_disk().stored} == {*names[:count]}
        changes = tiers.take_changes()
        assert changes is not None
        assert changes.lost == tuple(names[count:])
        files = files_of(tmp_path)
        assert limit * 0.8 < sum(path.stat().st_size for path in files) <= limit
    with opened(tmp_path, disk=limit // 2) as tiers:
        assert len(tiers.on_disk().stored) == tiers.capacity.disk_blocks < count
        assert sum(path.stat().st_size for path in files) <= limit // 2


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"block_size": 8}, id="block size"),
        pytest.param({"model": make_model(torch.bfloat16)}, id="dtype"),
        pytest.param({"model": keep_codes(make_model(), "int8")}, id="codes"),
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
    before = model_digest(model)
    assert model_digest(model) == before
    with torch.no_grad():
        model.weight[0, 0] += 1
    assert model_digest(model) != before
    assert model_digest(model, "1") != model_digest(model, "2")


def test_each_field_of_a_layout_is_in_its_digest() -> None:
    layout = BlockLayout(16, ((2, 64, 64),), "bfloat16")
    others = [
        msgspec.structs.replace(layout, **{field: value})
        for field, value in {
            "block_size": 8,
            "layers": ((2, 64, 32),),
            "dtype": "float16",
            "states": (((2, 3), "float32"),),
            "order": "head, token, width",
            "endian": "big",
            "version": 1,
        }.items()
    ]
    assert len({each.digest for each in (layout, *others)}) == 8


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
    folder = files_of(tmp_path)[0].parent
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(ModelError, match="this user alone"), opened(tmp_path):
        pass
    folder.chmod(0o700)
    folder.parent.chmod(0o777)
    with pytest.raises(ModelError, match="this user alone"), opened(tmp_path):
        pass


@pytest.mark.parametrize(
    ("depth", "link"),
    [(0, os.symlink), (0, os.link), (0, lambda _, path: os.mkfifo(path)), (1, os.symlink)],
    ids=["link", "hard link", "pipe", "folder"],
)
@pytest.mark.parametrize("number", [0, 1])
def test_a_link_in_place_of_a_file_or_folder_is_refused(
    depth: int, link: Callable[[Path, Path], None], number: int, tmp_path: Path
) -> None:
    """Its target would be overwritten. Files are the blocks and the index; folders that of the
    executor and that of the layout."""
    with opened(tmp_path / "kv") as tiers:
        written(tiers)
    file = files_of(tmp_path)[number]
    place = file.parents[number] if depth else file
    own = place.rename(tmp_path / "own")
    link(own, place)
    before = [path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    with pytest.raises(ModelError, match=f"{place} is not a"), opened(tmp_path / "kv"):
        pass
    assert before == [path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()]


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


@contextmanager
def other_file(tiers: BlockTiers, path: str | Path, flags: int) -> Iterator[None]:
    """Let the descriptor of the blocks be of another file."""
    assert tiers.blocks._disk is not None
    descriptor = tiers.blocks._disk._folder._blocks
    saved, other = os.dup(descriptor), os.open(path, flags)
    os.dup2(other, descriptor)
    try:
        yield
    finally:
        os.dup2(saved, descriptor)
        os.close(saved)
        os.close(other)


def test_a_full_disk_loses_blocks_and_no_more(tmp_path: Path) -> None:
    """Writes to /dev/full fail with ENOSPC."""
    with opened(tmp_path) as tiers:
        written(tiers)
        with other_file(tiers, "/dev/full", os.O_RDWR):
            for _ in range(3):
                tiers.apply([KVMove("store", OTHER, 0, 2, write=True)])
                assert waited(tiers, lambda changes: changes.lost).lost == (OTHER,)
        assert tiers.on_disk().stored == (NAME,)
        assert fetch_both(tiers) == ({NAME}, {OTHER})
        written(tiers, 2, OTHER)
        assert fetch_both(tiers)[0] == {NAME, OTHER}
        assert files_of(tmp_path)[0].stat().st_size == 2 * tiers.slots.memory.shape[1]


def test_a_disk_that_becomes_read_only_serves_the_blocks_it_has(tmp_path: Path) -> None:
    with opened(tmp_path) as tiers:
        written(tiers)
        with other_file(tiers, files_of(tmp_path)[0], os.O_RDONLY):
            tiers.apply([KVMove("store", OTHER, 0, 2, write=True)])
            assert waited(tiers, lambda changes: changes.lost).lost == (OTHER,)
            assert fetch_both(tiers) == ({NAME}, {OTHER})


def test_a_write_that_stops_at_the_limit_of_a_file_loses_its_block(tmp_path: Path) -> None:
    """Two blocks and a half fit, so the third one is written in part."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    names = [bytes([index]) * 16 for index in range(4)]
    with opened(tmp_path) as tiers:
        size = tiers.slots.memory.shape[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size * 5 // 2, before[1]))
        try:
            tiers.apply([KVMove("store", name, 0, 1, write=True) for name in names])
            assert {*tiers.on_disk().stored} == {*names[:2]}
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with opened(tmp_path) as tiers:
        assert {*tiers.on_disk().stored} == {*names[:2]}


def test_a_folder_that_was_removed_ends_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as tiers:
        written(tiers)
        shutil.rmtree(files_of(tmp_path)[0].parent)
        written(tiers, 2, OTHER)
        assert fetch_both(tiers)[0] == {NAME, OTHER}
        tiers.apply([KVMove("drop", OTHER)])
        assert tiers.on_disk().stored == (NAME,)
    with opened(tmp_path) as tiers:
        assert tiers.on_disk().stored == ()


def test_writes_beyond_the_bytes_in_flight_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a buffer for one block, which is used again when it is written."""
    monkeypatch.setattr(disk_module, "MOST_BYTES_IN_FLIGHT", 1)
    with opened(tmp_path) as tiers:
        assert tiers.blocks._disk is not None
        go = threading.Event()
        tiers.blocks._disk._writer.submit(go.wait, 60)
        tiers.apply([KVMove("store", name, 0, 1, write=True) for name in (NAME, OTHER)])
        go.set()
        assert waited(tiers, lambda changes: changes.lost).lost == (OTHER,)
        assert tiers.on_disk().stored == (NAME,)
        written(tiers, 1, OTHER)


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
        fetches.submit([KVMove("fetch", NAME, 2)])
        fetches.submit([KVMove("fetch", OTHER, 3)])
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
        tiers.blocks._reads.close()
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


def test_closing_finishes_writes_and_frees_descriptors_and_threads(
    tmp_path: Path,
) -> None:
    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    names = [index.to_bytes(16, "little") for index in range(1000)]
    before = counts()
    with opened(tmp_path) as tiers:
        written(tiers)
        fetched(tiers)
        during = counts()
        for name in names:
            tiers.apply([KVMove("store", name, 0, 1, write=True)])
        tiers.apply([KVMove("fetch", name, slot) for slot, name in enumerate(names[:16])])
        assert counts()[0] == during[0]
    assert counts() == before
    with opened(tmp_path) as tiers:
        assert {*tiers.on_disk().stored} == {NAME, *names}
    with pytest.raises(ModelError), opened(files_of(tmp_path)[0]):
        pass
    assert counts() == before
