"""Ten classes of defects in KV tiers, planted where the bytes, files, messages or slots are.

Each is refused, so that the tokens are computed and all bits are right, or it is found by the
self-audit, which turns the tiers off. Here, or in the test that is named:

| class | host memory | disk | another executor |
|---|---|---|---|
| layout changed | audit | test_tiers: another layout | refused |
| stale version | audit | test_kv_tiers: new weights | refused |
| swapped keys | audit | test_tiers: swapped names; audit | refused; audit |
| flipped bit | test_kv_tiers: the audit finds | test_tiers: flipped bit; audit | refused; audit |
| cut off | | test_tiers: cut off | test_transports: ends or hangs |
| failed Nth write | audit | refused | audit |
| missing layer | audit | test_tiers: missing layer; audit | audit |
| reused slot | audit | | refused |
| lease expired | | | refused |
| wrong dtype | audit | test_tiers: dtype | refused |
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from nano_inference import InferenceEngine, Pipeline, schedule
from nano_inference.bus.messages import RemoteBlocks
from nano_inference.bus.steps import KVMove
from nano_inference.stages.batching import handover as handover_module
from nano_inference.stages.batching import tiers as tiers_module
from nano_inference.stages.executor.runner.tiers.block_folder import BlockFolder
from nano_inference.stages.executor.runner.tiers.host_slots import HostSlots
from nano_inference.stages.executor.runner.tiers.layout import BlockLayout
from nano_inference.stages.executor.runner.tiers.transports.slots import SharedSlots

from ..soaking import in_soak
from . import reference
from .builders import until
from .conftest import MakeConfig
from .test_kv_tiers import (
    DETERMINISTIC,
    GREEDY,
    PROMPTS,
    bits_of,
    counts,
    engine,
    prompts_of,
)
from .test_replicas import check_at_rest
from .test_roles import answers, bodies, expected_of, with_roles
from .test_roles import counts as counts_of

SHORT_MODEL = True
WHOLE_MODEL: dict[str, Any] = {"model_path": str(reference.FOLDER), "kv_cache_bytes": 1_000_000}
HOST_BYTES = 1 << 20

Memory = npt.NDArray[np.uint8]
Bits = list[tuple[Any, ...]]


@pytest.fixture(scope="module")
def computed() -> dict[str, Bits]:
    """All bits of the prompts, without tiers, by model."""
    found: dict[str, Bits] = {}
    for name, settings in (("short", {}), ("whole", WHOLE_MODEL)):
        with engine(**DETERMINISTIC, **settings) as made:
            found[name] = bits_of(made.generate(PROMPTS, GREEDY))
    return found


def numbers_of(made: InferenceEngine) -> npt.NDArray[np.float32]:
    """The host slots, `[slots, keys or values of a layer, tokens, heads, width]`."""
    tiers = made._tiers
    assert tiers is not None
    layers = made._executor.model.layers
    heads, width = layers[0].num_kv_heads, layers[0].key_dim
    return tiers.slots.memory.view(np.float32).reshape(
        len(tiers.slots.memory), 2 * len(layers), -1, heads, width
    )


# --- host memory -------------------------------------------------------------------------------


def change_layout(numbers: npt.NDArray[np.float32]) -> None:
    """Heads before tokens."""
    numbers[:] = numbers.swapaxes(2, 3).copy().reshape(numbers.shape)


def swap_keys(numbers: npt.NDArray[np.float32]) -> None:
    numbers[:] = numbers[::-1].copy()


def leave_out_a_layer(numbers: npt.NDArray[np.float32]) -> None:
    numbers[:, -2:] = 0


def reuse_slots(numbers: npt.NDArray[np.float32]) -> None:
    numbers[1::2] = numbers[::2]


def round_numbers(numbers: npt.NDArray[np.float32]) -> None:
    """As bfloat16 has them."""
    bits = numbers.view(np.uint32)
    bits &= np.uint32(0xFFFF0000)


IN_MEMORY: dict[str, Callable[[npt.NDArray[np.float32]], None]] = {
    "layout changed": change_layout,
    "swapped keys": swap_keys,
    "missing layer": leave_out_a_layer,
    "reused slot": reuse_slots,
    "wrong dtype": round_numbers,
}


def check_found(made: InferenceEngine, computed: Bits) -> None:
    """Wrong blocks are loaded, the audit finds one, and from then on no bit of them is used."""
    for prompt in PROMPTS:
        made.generate([prompt], GREEDY)  # one by one, since audits wait until nothing runs
        if counts(made).different:
            break
    else:
        raise AssertionError("the audit has found nothing")
    assert bits_of(made.generate(PROMPTS, GREEDY)) == computed
    found = counts(made)
    assert (found.stored, found.loaded, found.fetched) == (0, 0, 0)
    made.flush_cache()
    for _ in range(2):
        assert bits_of(made.generate(PROMPTS, GREEDY)) == computed


@pytest.mark.parametrize("defect", IN_MEMORY)
def test_wrong_bytes_in_host_memory_are_found(defect: str, computed: dict[str, Bits]) -> None:
    settings = WHOLE_MODEL if defect == "missing layer" else {}
    with engine(**DETERMINISTIC, kv_host_bytes=5 * HOST_BYTES, **settings) as made:
        made.generate(PROMPTS, GREEDY)
        IN_MEMORY[defect](numbers_of(made))
        check_found(made, computed["whole" if settings else "short"])


def test_kv_of_older_weights_in_host_memory_is_found(computed: dict[str, Bits]) -> None:
    """Slot by slot as they were before: both engines give them away in the same order."""
    with engine(**DETERMINISTIC, kv_host_bytes=HOST_BYTES) as made:
        made.generate(PROMPTS, GREEDY)
        with engine(**DETERMINISTIC, kv_host_bytes=HOST_BYTES) as older:
            state = {name: tensor * 1.25 for name, tensor in older.state_dict().items()}
            older.update_weights(state, blocking=True)
            older.generate(PROMPTS, GREEDY)
            numbers_of(made)[:] = numbers_of(older)
        check_found(made, computed["short"])


def test_a_store_that_does_nothing_is_found(
    monkeypatch: pytest.MonkeyPatch, computed: dict[str, Bits]
) -> None:
    store, calls = HostSlots.store, count(1)

    def fails_each_third(self: HostSlots, moves: list[KVMove]) -> None:
        if done := [move for move in moves if next(calls) % 3]:
            store(self, done)

    with engine(**DETERMINISTIC, kv_host_bytes=HOST_BYTES) as made:
        with monkeypatch.context() as patch:
            patch.setattr(HostSlots, "store", fails_each_third)
            made.generate(PROMPTS, GREEDY)
        check_found(made, computed["short"])


# --- disk --------------------------------------------------------------------------------------


def take_reports(made: InferenceEngine) -> None:
    """Of all writes so far."""
    tiers = made._tiers
    assert tiers is not None
    tiers.on_disk()
    if (changes := tiers.take_changes()) is not None:
        made._batching.change_tiers(changes)


@pytest.mark.parametrize("every", [in_soak(1), 2, in_soak(5)])
def test_blocks_whose_write_fails_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computed: dict[str, Bits], every: int
) -> None:
    """And found neither now nor after a restart."""
    write, calls = BlockFolder.write, count(1)
    failed: set[bytes] = set()

    def fails(self: BlockFolder, name: bytes, block: memoryview) -> None:
        if next(calls) % every == 0:
            failed.add(name)
            raise OSError(28, "No space left on device")
        write(self, name, block)

    with engine(**DETERMINISTIC, kv_disk_path=str(tmp_path)) as made:
        monkeypatch.setattr(BlockFolder, "write", fails)
        made.generate([*PROMPTS, *prompts_of(1)], GREEDY)
        take_reports(made)
        assert failed
        tiers = made._batching.tiers
        assert tiers is not None
        assert not failed & tiers._on_disk
        assert bits_of(made.generate(PROMPTS, GREEDY)) == computed["short"]
        failed.clear()
        take_reports(made)
        assert not failed & tiers._on_disk
    monkeypatch.setattr(BlockFolder, "write", write)
    with engine(**DETERMINISTIC, kv_disk_path=str(tmp_path)) as made:
        assert bits_of(made.generate(PROMPTS, GREEDY)) == computed["short"]
        assert counts(made).different == 0


def read_another(blocks: list[Memory], block: Memory) -> None:
    """The bytes that were read before."""
    blocks.append(block.copy())
    if len(blocks) > 1:
        block[:] = blocks[-2]


def read_with_a_flipped_bit(blocks: list[Memory], block: Memory) -> None:
    block[len(block) // 2] ^= 4


def read_half(blocks: list[Memory], block: Memory) -> None:
    block[len(block) // 2 :] = 0


@pytest.mark.parametrize("change", [read_another, read_with_a_flipped_bit, read_half])
def test_bytes_that_change_behind_their_checksum_are_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    computed: dict[str, Bits],
    change: Callable[[list[Memory], Memory], None],
) -> None:
    """Swapped keys, a flipped bit, and a part that is missing, between disk and device."""
    with engine(**DETERMINISTIC, kv_disk_path=str(tmp_path)) as made:
        made.generate([*PROMPTS, *prompts_of(1)], GREEDY)
    read, blocks = BlockFolder.read, list[Memory]()

    def lies(self: BlockFolder, name: bytes, block: memoryview) -> bool:
        whole = read(self, name, block)
        change(blocks, np.frombuffer(block, np.uint8))
        return whole

    with engine(**DETERMINISTIC, kv_disk_path=str(tmp_path)) as made:
        with monkeypatch.context() as patch:
            patch.setattr(BlockFolder, "read", lies)
            made.generate(PROMPTS, GREEDY)
        check_found(made, computed["short"])


# --- another executor --------------------------------------------------------------------------

ASKED = [
    {**body, "prompt_token_ids": [*body["prompt_token_ids"], *range(40, 100)]} for body in bodies(4)
]

_expected: list[list[Any]] = []


async def expected_bits(make_config: MakeConfig) -> list[list[Any]]:
    """Those of `ASKED`, computed once."""
    if not _expected:
        _expected.extend(await expected_of(make_config, ASKED))
    return _expected


Plant = Callable[[pytest.MonkeyPatch], None]


def message_with(**fields: Any) -> Plant:
    """What the message says of the blocks is changed."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        describe = handover_module.Handovers._describe

        def changed(*args: Any) -> RemoteBlocks:
            return msgspec.structs.replace(describe(*args), **fields)

        patch.setattr(handover_module.Handovers, "_describe", changed)

    return plant


def blocks_changed(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Plant:
    """The names and slots in the message are changed."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        describe = handover_module.Handovers._describe

        def changed(*args: Any) -> RemoteBlocks:
            remote = describe(*args)
            return msgspec.structs.replace(remote, blocks=change(remote.blocks))

        patch.setattr(handover_module.Handovers, "_describe", changed)

    return plant


def behind_the_offer(change: Callable[[SharedSlots, int], None]) -> Plant:
    """A slot changes once it is offered."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        offer = SharedSlots.offer

        def offered(self: SharedSlots, slot: int, name: bytes) -> None:
            known = self.offers(slot, name)
            offer(self, slot, name)
            if not known:
                change(self, slot)

        patch.setattr(SharedSlots, "offer", offered)

    return plant


def flip(slots: SharedSlots, slot: int) -> None:
    slots.bytes[slot, 5] ^= 1


def give_away(slots: SharedSlots, slot: int) -> None:
    slots.withdraw(slot)
    slots.bytes[slot] = 3


def another_size(patch: pytest.MonkeyPatch) -> None:
    """The other executor's slots are of half the size."""
    reader = SharedSlots.reader

    def smaller(self: SharedSlots) -> Any:
        found = reader(self)
        found.bytes = found.bytes[:, : found.bytes.shape[1] // 2]
        return found

    patch.setattr(SharedSlots, "reader", smaller)


def expire(patch: pytest.MonkeyPatch) -> None:
    """Offers end at once, and their slots are given away before they are read."""
    patch.setattr(tiers_module, "OFFER_S", 0)
    # All blocks of a prompt in one step: those of an earlier one could be read in time.
    patch.setattr(sys.modules[schedule.__module__], "LEAST_AHEAD", 1 << 20)
    end = tiers_module.KVTiers.end_offers

    def ended(self: tiers_module.KVTiers, now_ns: int) -> None:
        had = self.has_offers
        end(self, now_ns)
        if had:
            for number in range(self.capacity.host_slots):
                self.store(b"%16d" % number, 0)

    patch.setattr(tiers_module.KVTiers, "end_offers", ended)


def pairs(blocks: tuple[Any, ...]) -> tuple[Any, ...]:
    return blocks[::-1]


def slots_alone(blocks: tuple[Any, ...]) -> tuple[Any, ...]:
    others = (slot for _, slot, _ in blocks[::-1])
    return tuple((name, slot, step) for (name, _, step), slot in zip(blocks, others, strict=True))


OTHER_DTYPE = BlockLayout(16, ((2, 32, 32),), "bfloat16").digest

REFUSED: dict[str, Plant] = {
    "layout changed": another_size,
    "stale version": message_with(weight_version=7),
    "stale adapter": message_with(adapter_version=7),
    "swapped keys": blocks_changed(slots_alone),
    "flipped bit": behind_the_offer(flip),
    "reused slot": behind_the_offer(give_away),
    "lease expired": expire,
    "wrong dtype": message_with(layout=OTHER_DTYPE),
}


# The others are planted in host memory every day.
@pytest.mark.parametrize(
    "defect",
    [
        each if each in ("lease expired", "stale version", "stale adapter") else in_soak(each)
        for each in REFUSED
    ],
)
async def test_a_wrong_block_of_another_executor_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    expected = await expected_bits(make_config)
    REFUSED[defect](monkeypatch)
    async with Pipeline(with_roles(make_config)) as pipeline:
        assert await answers(pipeline, ASKED) == expected
        await check_at_rest(pipeline)
        given, taken = counts_of(pipeline, 0), counts_of(pipeline, 1)
        assert given.offered > 0
        assert (taken.loaded, taken.different) == (0, 0)


def forget_a_part(patch: pytest.MonkeyPatch) -> None:
    """Values of a layer stay behind when blocks are stored in slots."""
    parts = HostSlots._parts
    store = HostSlots.store

    def stored(self: HostSlots, moves: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(HostSlots, "_parts", lambda self: list(parts(self))[:-1])
            store(self, moves)

    patch.setattr(HostSlots, "store", stored)


def store_nothing(patch: pytest.MonkeyPatch) -> None:
    """Each third block is offered and was never stored."""
    store, calls = HostSlots.store, count(1)

    def stored(self: HostSlots, moves: list[KVMove]) -> None:
        if done := [move for move in moves if next(calls) % 3]:
            store(self, done)

    patch.setattr(HostSlots, "store", stored)


def flip_when_loaded(patch: pytest.MonkeyPatch) -> None:
    load = HostSlots.load

    def loaded(self: HostSlots, moves: Any) -> None:
        for move in moves:
            self.memory[move.slot, 5] ^= 1
        load(self, moves)

    patch.setattr(HostSlots, "load", loaded)


FOUND: dict[str, Plant] = {
    "swapped keys": blocks_changed(pairs),
    "flipped bit": flip_when_loaded,
    "failed Nth write": store_nothing,
    "missing layer": forget_a_part,
}


@pytest.mark.parametrize(
    "defect", [each if each == "flipped bit" else in_soak(each) for each in FOUND]
)
async def test_a_wrong_block_of_another_executor_is_found(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    """It comes whole, with the right checksum of wrong bytes."""
    expected = await expected_bits(make_config)
    async with Pipeline(with_roles(make_config)) as pipeline:
        with monkeypatch.context() as patch:
            FOUND[defect](patch)
            await answers(pipeline, ASKED)
            await until(lambda: counts_of(pipeline, 1).different > 0)
        before = counts_of(pipeline, 1).loaded
        assert await answers(pipeline, ASKED) == expected
        assert counts_of(pipeline, 1).loaded == before, "the tiers are off"
        await pipeline.client.flush_cache()
        assert await answers(pipeline, ASKED) == expected
        assert counts_of(pipeline, 1).loaded > before
        await check_at_rest(pipeline)
