"""Shared memory returns the tensors, refuses invalid messages, and is always freed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from nano_inference.bus.weights import SharedMemoryWeights, TensorMeta
from nano_inference.config import WeightsError
from nano_inference.stages.executor.runner.weights.transports import (
    SharedWeights,
    WeightsGroup,
    fetch,
)
from nano_inference.stages.executor.runner.weights.transports.group import WeightGroups
from nano_inference.stages.executor.runner.weights.transports.shared_memory import (
    read_shared_memory,
)

from ......programs import Program, run
from ....refusals import refused
from .samples import same, samples

TRAINER = """
import sys, torch
from nano_inference.stages.executor.runner.weights.transports import SharedWeights
shared = SharedWeights({"x": torch.ones(1000), "y": torch.ones(2000)}, bucket_bytes=1)
print(*shared.source.segments, flush=True)
sys.stdin.read()
"""

READER = """
import msgspec
from nano_inference.bus.weights import SharedMemoryWeights
from nano_inference.stages.executor.runner.weights.transports import shared_memory
source = msgspec.json.decode({!r}, type=SharedMemoryWeights)
print(len(shared_memory.read_shared_memory(source)))
"""


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
def test_all_tensors_come_through(bucket_bytes: int) -> None:
    wanted = samples()
    with SharedWeights(wanted, bucket_bytes) as shared:
        # As it crosses the bus.
        source = msgspec.msgpack.decode(
            msgspec.msgpack.encode(shared.source), type=SharedMemoryWeights
        )
        found = fetch(source, WeightGroups(), 1.0)
    assert same(found, wanted)
    assert found["d.large"].data_ptr() == found["d.large.again"].data_ptr()


def test_the_copies_are_private_and_an_update_needs_no_new_memory() -> None:
    weights = {"x": torch.zeros(5), "y": torch.zeros(2)}
    with SharedWeights(weights) as shared:
        source = shared.source
        first = read_shared_memory(source)
        weights["x"].fill_(1)
        shared.update()
        second = read_shared_memory(source)
        shared.update({"x": torch.full((5,), 2.0), "y": torch.zeros(2)})
        third = read_shared_memory(source)
        assert shared.source is source
        with pytest.raises(WeightsError, match="share them anew"):
            shared.update({"x": torch.zeros(6), "y": torch.zeros(2)})
    assert [each["x"][0].item() for each in (first, second, third)] == [0, 1, 2]


def test_tensors_whose_numbers_are_not_there_are_refused() -> None:
    """Reading them would end the trainer's process."""
    with pytest.raises(WeightsError, match="'x' can't be read: it is on the meta device"):
        SharedWeights({"x": torch.zeros(5, device="meta")})
    with pytest.raises(WeightsError, match="'x' can't be read: its layout is sparse_coo"):
        WeightsGroup("127.0.0.1:0", 2).broadcast({"x": torch.zeros(5).to_sparse()})
    weights = {"x": torch.zeros(5)}
    with SharedWeights(weights) as shared:
        weights["x"].untyped_storage().resize_(0)
        with pytest.raises(WeightsError, match="its storage has 0 bytes and 20 are needed"):
            shared.update()


def test_shared_memory_is_freed_at_the_end_of_the_block() -> None:
    with SharedWeights(samples(), bucket_bytes=100) as shared:
        names = shared.source.segments
        assert len(names) > 3
        assert all(Path("/dev/shm", name).exists() for name in names)
    assert not any(Path("/dev/shm", name).exists() for name in names)
    with pytest.raises(WeightsError, match="there is no shared memory"):
        read_shared_memory(shared.source)


def test_readers_leave_the_segments_and_a_killed_trainer_leaves_none(
    tmp_path: Path,
) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    with Program(tmp_path / "trainer.py") as trainer:
        names = tuple(trainer.output.readline().split())
        metas = (TensorMeta("x", "float32", (1000,)), TensorMeta("y", "float32", (2000,)))
        source = SharedMemoryWeights(names, metas, ((0, 0), (1, 0)))
        reader = READER.format(msgspec.json.encode(source).decode())
        for _ in range(2):
            # A reader that thought the memory its own would remove it as it ends, and say so.
            assert run(reader, tmp_path, whole_end=True) == (0, "2\n", "")
        assert all(Path("/dev/shm", name).exists() for name in names)
        # Alone: what Python has started to clear up after it goes on.
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
        for _ in range(300):
            if not any(Path("/dev/shm", name).exists() for name in names):
                return
            time.sleep(0.1)
    pytest.fail("the killed trainer's memory is still there")


@pytest.fixture
def shared() -> Iterator[SharedWeights]:
    with SharedWeights({"x": torch.ones(10), "y": torch.ones(4)}, bucket_bytes=1) as made:
        yield made


def spoilt(source: SharedMemoryWeights, **changes: Any) -> SharedMemoryWeights:
    return msgspec.structs.replace(source, **changes)


X, Y = TensorMeta("x", "float32", (10,)), TensorMeta("y", "float32", (4,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"places": ((0, -4), (1, 0))}, "'x' is at -4 to 36"),
        ({"places": ((0, 1 << 70), (1, 0))}, "'x' is at"),
        ({"places": ((0, 4096), (1, 0))}, "'x' is at 4096"),
        ({"places": ((0, 2), (1, 0))}, "where no float32 begins"),
        ({"places": ((2, 0), (1, 0))}, "in segment 2 of 2"),
        ({"places": ((-1, 0), (1, 0))}, "in segment -1 of 2"),
        ({"places": ((0, 0),)}, "2 tensors have 1 places"),
        ({"tensors": (TensorMeta("x", "float31", (10,)), Y)}, "unknown dtype 'float31'"),
        ({"tensors": (TensorMeta("x", "float32", (1 << 40,)), Y)}, "'x' is at 0 to"),
        ({"segments": ("psm_none", "psm_none_either")}, "there is no shared memory 'psm_none'"),
        ({"segments": ("../../etc/passwd", "b")}, "is no name of shared memory"),
        ({"segments": ("..", "b")}, "is no name of shared memory"),
        ({"segments": ("", "b")}, "is no name of shared memory"),
        ({"segments": ("a\0b", "b")}, "is no name of shared memory"),
        ({"segments": ("same", "same")}, "named twice"),
    ],
)
def test_a_message_that_does_not_fit_is_refused(
    shared: SharedWeights, changes: dict[str, Any], message: str
) -> None:
    with refused("weights_refused", message):
        read_shared_memory(spoilt(shared.source, **changes))
    assert len(read_shared_memory(shared.source)) == 2


def test_invalid_names_of_shared_memory_are_refused(shared: SharedWeights, tmp_path: Path) -> None:
    name = f"nano-test-{os.getpid()}"
    place = Path("/dev/shm", name)
    source = spoilt(shared.source, segments=(name, shared.source.segments[1]))
    (tmp_path / "file").write_bytes(bytes(4096))
    makers = (lambda: place.symlink_to(tmp_path / "file"), lambda: os.mkfifo(place), place.mkdir)
    for make in makers:
        make()
        try:
            with pytest.raises(WeightsError):
                read_shared_memory(source)
        finally:
            place.rmdir() if place.is_dir() else place.unlink()


def test_overlapping_tensors_are_two_views(shared: SharedWeights) -> None:
    both = spoilt(shared.source, places=((0, 0), (0, 8)))
    assert set(read_shared_memory(both)) == {"x", "y"}


def test_too_large_shared_memory_is_refused_and_leaves_no_file() -> None:
    before = set(os.listdir("/dev/shm"))
    huge = torch.empty(1, dtype=torch.uint8).expand(1 << 44)
    with pytest.raises(WeightsError, match="can't be allocated"):
        SharedWeights({"small": torch.ones(1), "x": huge}, bucket_bytes=1)
    assert set(os.listdir("/dev/shm")) <= before
