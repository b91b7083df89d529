"""Bytes of snapshots of a recurrent state in host memory, on disk and from other executors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from nano_inference.bus.control import TiersChanged
from nano_inference.bus.steps import KVMove
from nano_inference.config import EngineConfig, ModelError
from nano_inference.stages.executor import KVCache, LoadedModel
from nano_inference.stages.executor.runner.loaded_model import Dtypes
from nano_inference.stages.executor.runner.tiers.tiers import BlockTiers
from nano_inference.stages.executor.runner.tiers.transports import slots as slots_module
from nano_inference.stages.executor.runner.tiers.transports.slots import SlotAddress

from .state.test_memory import Recurrent
from .test_tiers import LAYERS, flip, waited

NAME, OTHER = b"n" * 16, b"o" * 16
SNAPSHOTS = 5
SECRET = "a secret"


def make_model(num_recurrent: int = 2) -> LoadedModel:
    """Its states have two dtypes, one of an odd number of numbers."""
    config: Any = None
    states = tuple(Recurrent() for _ in range(num_recurrent))
    return LoadedModel(
        nn.Linear(4, 4),
        config,
        torch.device("cpu"),
        Dtypes.of(torch.bfloat16),
        64,
        16,
        LAYERS,
        other_states=states,
    )


@contextmanager
def opened(
    folder: Path | str = "", *, model: LoadedModel | None = None, **settings: Any
) -> Iterator[tuple[BlockTiers, KVCache]]:
    """The tiers of an executor whose blocks and states are random."""
    model = model or make_model()
    cache = KVCache(model, 6, 4, num_slots=3, num_snapshots=SNAPSHOTS)
    for tensor in cache.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    shares = settings.pop("shares", False)
    defaults: dict[str, Any] = {"kv_host_bytes": 1 << 16, "kv_disk_path": str(folder)}
    config = EngineConfig(**defaults | settings)
    with closing(BlockTiers(config, model, cache, 0, 1000, shares=shares)) as tiers:
        yield tiers, cache


def snapshot(cache: KVCache, number: int) -> list[Tensor]:
    return [tensor[cache.num_slots + number].clone() for tensor in cache.in_slots]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def move(kind: Any, name: bytes, slot: int = -1, number: int = -1, **more: Any) -> KVMove:
    return KVMove(kind, name, slot, number, state=True, **more)


def written(tiers: BlockTiers, number: int, name: bytes) -> None:
    tiers.apply([move("store", name, 0, number, write=True)])
    waited(tiers, lambda changes: changes.states and changes.states.stored)


def fetched(tiers: BlockTiers, name: bytes, slot: int = 3) -> TiersChanged:
    tiers.apply([move("fetch", name, slot)])
    changes = waited(tiers, lambda changes: changes.states)
    assert changes.states is not None
    return changes.states


def test_a_snapshot_comes_back_bit_for_bit_beside_the_block_of_its_name() -> None:
    with opened() as (tiers, cache):
        others = [each.clone() for each in cache.tensors]
        first, block = snapshot(cache, 1), [each[1].clone() for each in cache.in_blocks]
        tiers.apply([move("store", NAME, 3, 1), KVMove("store", NAME, 3, 1)])
        tiers.apply([move("load", NAME, 3, 4), KVMove("load", NAME, 3, 4)])
        assert same(snapshot(cache, 4), first)
        assert same([each[4] for each in cache.in_blocks], block)
        changed = {id(each): cache.num_slots + 4 for each in cache.in_slots}
        for tensor, before in zip(cache.tensors, others, strict=True):
            before[changed.get(id(tensor), 4)] = tensor[changed.get(id(tensor), 4)]
            assert torch.equal(tensor, before), "a state that no move names"


def test_snapshots_on_disk_survive_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as (tiers, cache):
        before = snapshot(cache, 1)
        written(tiers, 1, NAME)
    with opened(tmp_path) as (tiers, cache):
        on_disk = TiersChanged(stored=(NAME,), whole=True)
        assert tiers.on_disk() == TiersChanged(whole=True, states=on_disk)
        assert fetched(tiers, NAME).fetched == (NAME,)
        tiers.apply([move("load", NAME, 3, 2)])
        assert same(snapshot(cache, 2), before)
        tiers.apply([move("drop", NAME)])
        assert tiers.on_disk().states == TiersChanged(whole=True)  # after the drop
        assert fetched(tiers, NAME).lost == (NAME,)


@pytest.mark.parametrize(
    "damage",
    [
        lambda states, index: flip(states, 40),
        lambda states, index: os.truncate(states, states.stat().st_size - 1),
        lambda states, index: flip(index, 30),
        lambda states, index: index.unlink(),
    ],
    ids=["flipped bit", "cut off", "another name", "no index"],
)
def test_a_damaged_snapshot_is_lost(tmp_path: Path, damage: Callable[[Path, Path], None]) -> None:
    with opened(tmp_path) as (tiers, _):
        written(tiers, 1, NAME)
        (states,) = tmp_path.rglob("states")
    damage(states, states.with_name("states-index"))
    with opened(tmp_path) as (tiers, _):
        assert fetched(tiers, NAME).lost == (NAME,)
        states_on_disk = tiers.on_disk().states
        assert states_on_disk is not None
        assert states_on_disk.stored == (), "it would be read again"


def test_a_full_disk_loses_snapshots_and_no_more(tmp_path: Path) -> None:
    with opened(tmp_path) as (tiers, _):
        assert tiers.states is not None
        assert tiers.states._disk is not None
        descriptor = tiers.states._disk._folder._blocks
        kept, full = os.dup(descriptor), os.open("/dev/full", os.O_RDWR)
        os.dup2(full, descriptor)
        tiers.apply([move("store", NAME, 0, 1, write=True)])
        waited(tiers, lambda changes: changes.states and changes.states.lost == (NAME,))
        os.dup2(kept, descriptor)
        for each in (kept, full):
            os.close(each)
        written(tiers, 1, NAME)
        assert fetched(tiers, NAME).fetched == (NAME,)


def test_a_model_with_another_state_finds_no_snapshot(tmp_path: Path) -> None:
    with opened(tmp_path) as (tiers, _):
        written(tiers, 1, NAME)
    with opened(tmp_path, model=make_model(3)) as (tiers, _):
        assert fetched(tiers, NAME).lost == (NAME,)


def test_an_executor_has_blocks_and_snapshots_in_one_folder(tmp_path: Path) -> None:
    with opened(tmp_path), opened(tmp_path):
        folders = [
            {each.name for each in path.parent.iterdir()} for path in tmp_path.rglob("index")
        ]
    assert folders == 2 * [{"blocks", "index", "states", "states-index"}]


def test_blocks_and_snapshots_share_a_tier_as_they_share_the_device(tmp_path: Path) -> None:
    with opened(kv_host_bytes=1 << 20) as (tiers, cache):
        capacity = tiers.capacity
        assert capacity.states is not None
        blocks = capacity.host_slots / cache.num_blocks
        assert capacity.states.host_slots / cache.num_snapshots == pytest.approx(blocks, rel=0.02)
    with pytest.raises(ModelError, match="of which snapshots get"), opened(kv_host_bytes=700):
        pass


@pytest.mark.parametrize("way", ["process", "memory", "tcp"])
def test_another_executor_reads_an_offered_snapshot(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the address of the blocks it would get a block."""
    listen = {"kv_listen": "127.0.0.1:0", "kv_secret": SECRET, "shares": True}
    with opened(**listen) as (giver, there), opened(**listen) as (taker, here):
        assert giver.capacity.states is not None
        address = SlotAddress.decode(giver.capacity.states.address)
        if way != "process":
            monkeypatch.setattr(slots_module, "_HERE", {})
        if way == "tcp":
            address = msgspec.structs.replace(address, host="")
        where: dict[str, Any] = {"other": 2, "source": address.encode(), "source_name": NAME}
        taker.apply([move("fetch", OTHER, 3, step=1, **where)])
        giver.offer([move("offer", NAME, 2, 4), KVMove("offer", NAME, 2, 4)], 1)
        changes = waited(taker, lambda changes: changes.states)
        assert changes.states == TiersChanged(fetched=(OTHER,))
        taker.apply([move("load", OTHER, 3, 0)])
        assert same(snapshot(here, 0), snapshot(there, 4))
        (transfer,) = taker.take_transfers()
        assert transfer.transport == way


def test_a_snapshot_is_compared_over_all_layers() -> None:
    with opened() as (tiers, cache):
        first = cache.num_slots
        for tensor in cache.in_slots:
            tensor[first + 1] = tensor[first + 2]
        tiers.apply([move("compare", NAME, number=2, other=1)])
        cache.in_slots[-1][first + 1].view(-1)[-1] += 1
        tiers.apply([move("compare", OTHER, number=2, other=1)])
        changes = tiers.take_changes()
        assert changes is not None
        assert changes.states is not None
        found = [(each.name, each.loaded == each.computed) for each in changes.states.audited]
        assert found == [(NAME, True), (OTHER, False)]
