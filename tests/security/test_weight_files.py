"""A file or a list of tensors is refused by its size, before work is done for what stands in it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nano_inference.bus.control import UpdateWeights
from nano_inference.bus.weights import GroupWeights, SharedMemoryWeights, TensorMeta
from nano_inference.config import WeightsError
from nano_inference.stages.executor.changes.arguments import check_arguments
from nano_inference.stages.executor.changes.core import WeightParts
from nano_inference.stages.executor.runner.weights.checks import WeightLimits, limits_of
from nano_inference.stages.executor.runner.weights.transports import folder, layout
from nano_inference.stages.executor.runner.weights.transports.background import Background
from nano_inference.stages.executor.runner.weights.transports.folder import read_folder, stamp_of
from nano_inference.stages.executor.runner.weights.transports.shared_memory import (
    read_shared_memory,
)

LIMIT_S = 30.0
FEW = WeightLimits(tensors=100, num_bytes=1 << 20)
INDEX = "model.safetensors.index.json"
ENTRY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def write(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def names(count: int) -> dict[str, Any]:
    return {f"model.layers.{number}.weight": ENTRY for number in range(count)}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that were described, checked or made so far."""
    found: list[str] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found.append(function.__name__)
            return function(*args)

        return call

    monkeypatch.setattr(folder, "TensorMeta", counted(TensorMeta))
    monkeypatch.setattr(folder, "as_tensor", counted(folder.as_tensor))
    monkeypatch.setattr(layout, "num_bytes", counted(layout.num_bytes))
    return found


def refused(path: Path, limits: WeightLimits = FEW) -> str:
    """Why a file or folder is not read, in a thread that nobody has to wait for."""
    thread = Background("weights-test")
    with pytest.raises(WeightsError) as error:
        thread.submit(read_folder, str(path), limits).result(LIMIT_S)
    thread.close()
    assert error.value.code == "weights_refused"
    assert error.value.message.isascii()
    return error.value.message


def test_more_names_than_the_model_can_have(tmp_path: Path, made: list[str]) -> None:
    file = write(tmp_path / "x.safetensors", json.dumps(names(101)).encode())
    assert "101 tensors are more than this model can take, 100" in refused(file)
    assert "101 tensors are more" in refused(tmp_path)
    assert not made
    write(file, json.dumps(names(100)).encode())
    assert len(read_folder(str(file), FEW)) == 100
    assert made


def test_several_files_are_counted_together(tmp_path: Path) -> None:
    for file in range(3):
        header = {f"{file}.{name}": entry for name, entry in names(40).items()}
        write(tmp_path / f"{file}.safetensors", json.dumps(header).encode())
    assert "40 tensors are more than this model can take, 20" in refused(tmp_path)
    for file in range(101):
        write(tmp_path / f"{file}.safetensors", b"{}")
    assert "101 tensors are more than this model can take, 100" in refused(tmp_path)


def test_a_header_too_long_for_its_names_is_not_read(
    tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 90_000_000))
        stream.truncate(90_000_100)
    read: list[int] = []

    def pread(descriptor: int, size: int, start: int) -> bytes:
        read.append(size)
        return os.read(descriptor, size)

    monkeypatch.setattr(folder.os, "pread", pread)
    assert "has 90000000 bytes, more than 100 tensors need" in refused(file)
    assert read == [8]
    assert not made


@pytest.mark.parametrize(
    "header",
    [
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"[" * 100_000,
        b'{"x":' * 100_000,
        b'{"x":{"dtype":"F32","shape":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
        b'{"x":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}',
        b'{"x":{"dtype":"F32","shape":[' + b"9" * 400 + b'],"data_offsets":[0,0]}}',
        b'{"\\ud800":1}',
        b'{"x\\u0000y":{"dtype":"\\n\\n","shape":[0],"data_offsets":[0,0]}}',
    ],
)
def test_a_header_that_is_none(tmp_path: Path, header: bytes) -> None:
    message = refused(write(tmp_path / "x.safetensors", header))
    assert len(message) < 1000
    assert "\n" not in message


@pytest.mark.parametrize("places", [[(0, 8), (0, 8)], [(0, 8), (12, 20)], [(0, 4), (0, 4)]])
def test_tensors_fill_their_file_without_overlap(
    tmp_path: Path, places: list[tuple[int, int]]
) -> None:
    """Else a small file would be large in memory, or a large one be held for little."""
    header = {
        str(start): {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end]}
        for start, end in places
    }
    header["y"] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    file = write(tmp_path / "x.safetensors", json.dumps(header).encode(), bytes(20))
    assert "cut off or no safetensors file" in refused(file)


def test_more_bytes_than_the_model_can_have(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1 << 18)}, tmp_path / "x.safetensors")
    assert set(read_folder(str(tmp_path), FEW)) == {"x"}
    save_file({"y": torch.zeros(1)}, tmp_path / "y.safetensors")
    assert "4 bytes of new weights are more than this model can take, 0" in refused(tmp_path)


def test_an_index_of_more_names_than_the_model_can_have(tmp_path: Path, made: list[str]) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "a.safetensors")
    index = {"weight_map": dict.fromkeys(map(str, range(101)), "a.safetensors")}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert "101 tensors are more" in refused(tmp_path)
    with (tmp_path / INDEX).open("wb") as stream:
        stream.truncate(1 << 34)
    assert "17179869184 bytes, more than 100 tensors need" in refused(tmp_path)
    (tmp_path / INDEX).write_bytes(b'{"weight_map":' + b"[" * 100_000)
    assert "can't read" in refused(tmp_path)
    with pytest.raises(WeightsError):
        stamp_of(str(tmp_path), FEW)
    assert not made


# --- what is no file --------------------------------------------------------------------------


def bound(place: Path) -> None:
    # Whole paths of sockets have at most 108 bytes.
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(place.parent):
        listener.bind(place.name)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "socket": bound,
    "device": lambda place: place.symlink_to("/dev/zero"),
    "process": lambda place: place.symlink_to("/proc/self/mem"),
    "endless": lambda place: place.symlink_to("/proc/self/pagemap"),
}


@pytest.mark.parametrize("make", NO_FILES.values(), ids=NO_FILES)
def test_nothing_but_regular_files_is_read(make: Callable[[Path], object], tmp_path: Path) -> None:
    strange = tmp_path / "model.safetensors"
    make(strange)
    assert refused(strange)
    assert refused(strange.parent)
    assert strange.exists()


@pytest.mark.parametrize("make", [os.mkfifo, bound, NO_FILES["device"], Path.mkdir])
def test_an_index_and_its_files_are_regular(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / INDEX)
    assert refused(tmp_path)
    (tmp_path / INDEX).rmdir() if make is Path.mkdir else (tmp_path / INDEX).unlink()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "a.bin"}}))
    make(tmp_path / "a.bin")
    assert "is missing" in refused(tmp_path)


def test_names_that_are_no_text_are_quoted(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff\xfe.safetensors")
    (tmp_path / name).write_bytes(b"12345678")
    assert "\\udcff\\udcfe.safetensors' is cut off" in refused(tmp_path)


# --- lists in messages --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["group", "shared memory"])
def test_a_list_of_more_tensors_than_the_model_can_have(kind: str, made: list[str]) -> None:
    metas = tuple(TensorMeta(str(number), "float32", (1,)) for number in range(101))
    source: Any = GroupWeights("g", metas)
    if kind == "shared memory":
        source = SharedMemoryWeights(("x",), metas, ((0, 0),) * 101)
    with pytest.raises(WeightsError, match="101 tensors are more"):
        check_arguments(UpdateWeights(source), FEW)
    with pytest.raises(WeightsError, match="101 tensors are more"):
        layout.sizes_of(metas, FEW)
    assert not made


def test_more_segments_than_tensors() -> None:
    meta = TensorMeta("x", "float32", (1,))
    source = SharedMemoryWeights(tuple(map(str, range(1000))), (meta,), ((0, 0),))
    with pytest.raises(WeightsError, match="in 1000 segments"):
        check_arguments(UpdateWeights(source), FEW)


def test_many_segments_leave_the_process_its_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0

    def fstat(descriptor: int) -> os.stat_result:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")))
        return original(descriptor)

    original = os.fstat
    places = [Path("/dev/shm", f"nano-test-{os.getpid()}-{number}") for number in range(50)]
    for place in places:
        place.write_bytes(bytes(4))
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fstat", fstat)
    try:
        metas = tuple(TensorMeta(place.name, "float32", (1,)) for place in places)
        segments = tuple(place.name for place in places)
        source = SharedMemoryWeights(segments, metas, tuple((n, 0) for n in range(50)))
        assert len(read_shared_memory(source, FEW)) == 50
    finally:
        for place in places:
            place.unlink()
    assert most <= before + 2


def test_tensors_of_more_bytes_than_the_model_can_have() -> None:
    metas = [TensorMeta(str(number), "float32", (1 << 16,)) for number in range(5)]
    assert sum(layout.sizes_of(metas[:4], FEW)) == FEW.num_bytes
    with pytest.raises(WeightsError, match="1310720 bytes of new weights are more"):
        layout.sizes_of(metas, FEW)


def test_parts_are_counted_together() -> None:
    parts = WeightParts()
    large = torch.zeros(1 << 17)  # half of what there may be
    parts.add("u", {"x": large[:1]}, None, FEW)
    for _ in range(5):
        parts.add("u", {"y": large.clone()[:1]}, None, FEW)
    with pytest.raises(WeightsError, match="1572864 bytes of new weights are more"):
        parts.add("u", {"z": large.clone()[:1]}, None, FEW)
    parts.drop()
    with pytest.raises(WeightsError, match="101 tensors are more"):
        parts.add("u", {str(number): large for number in range(101)}, None, FEW)


# --- for models as they are -----------------------------------------------------------------------


@pytest.fixture
def experts() -> nn.Module:
    """60 layers of 256 experts, whose gates and projections are fused."""
    with torch.device("meta"):
        module = nn.Module()
        for layer in range(60):
            module.register_parameter(f"up_{layer}", nn.Parameter(torch.empty(256, 4096, 7168)))
            module.register_parameter(f"down_{layer}", nn.Parameter(torch.empty(256, 7168, 2048)))
            for number in range(12):
                module.register_parameter(f"norm_{layer}_{number}", nn.Parameter(torch.empty(7168)))
    return module


def test_published_checkpoints_are_within_the_limits(experts: nn.Module) -> None:
    limits = limits_of(experts)
    each_with_a_scale = 2 * 60 * (3 * 256 + 12)
    assert limits.tensors > 2 * each_with_a_scale
    assert limits.num_bytes > 8 * sum(each.numel() for each in experts.parameters())
    long = "model.language_model.layers.10.block_sparse_moe.experts.100.gate_up_proj.weight_scale"
    entry = {"dtype": "BF16", "shape": [4096, 7168], "data_offsets": [10**12, 10**12]}
    assert limits.header_bytes > each_with_a_scale * len(json.dumps({long: entry}))


def test_settings_override_limits_derived_from_the_model(experts: nn.Module) -> None:
    assert limits_of(experts, 7, 9) == WeightLimits(7, 9)


def test_long_lists_let_other_threads_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[float] = []
    monkeypatch.setattr(layout.time, "sleep", turns.append)
    assert list(layout.unhurried(range(1000))) == list(range(1000))
    assert turns == [0, 0, 0]
