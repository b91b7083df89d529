"""A folder's weights equal those that Transformers loads, all or none."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nano_inference.config import WeightsError
from nano_inference.stages.executor.runner.weights.transports.folder import read_folder

from ....models import make_model
from ....refusals import refused
from .samples import same, samples

INDEX = "model.safetensors.index.json"


def distinct_samples() -> dict[str, torch.Tensor]:
    """safetensors writes no two names of one tensor."""
    return {
        name: tensor.detach().contiguous().clone()
        for name, tensor in samples().items()
        if name != "d.large.again"
    }


def test_all_tensors_of_one_file(tmp_path: Path) -> None:
    wanted = distinct_samples()
    save_file(wanted, tmp_path / "any.safetensors", metadata={"format": "pt"})
    assert same(read_folder(str(tmp_path)), wanted)
    assert same(read_folder(str(tmp_path / "any.safetensors")), wanted)


def test_several_files_of_any_names(tmp_path: Path) -> None:
    wanted = distinct_samples()
    for name, tensor in wanted.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    assert same(read_folder(str(tmp_path)), wanted)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def test_shards(sharded: Path) -> None:
    assert same(read_folder(str(sharded)), make_model("llama").state_dict())


def test_files_outside_the_index_are_not_read(sharded: Path) -> None:
    save_file({"x": torch.ones(1)}, sharded / "consolidated.safetensors")
    assert same(read_folder(str(sharded)), make_model("llama").state_dict())


def test_a_whole_file_goes_before_shards(sharded: Path) -> None:
    """Transformers has the same order."""
    save_file({"x": torch.ones(1)}, sharded / "model.safetensors")
    assert set(read_folder(str(sharded))) == {"x"}


def test_files_may_be_links(sharded: Path, tmp_path: Path) -> None:
    """The Hub's cache has links."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in sharded.iterdir():
        if file != linked:
            (linked / file.name).symlink_to(file)
    assert same(read_folder(str(linked)), make_model("llama").state_dict())


def test_files_may_be_replaced_after_reading(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(5000)}, file)
    found = read_folder(str(tmp_path))
    with file.open("r+b") as stream:
        stream.truncate(0)
    assert found["x"].sum() == 5000


def test_an_unaligned_tensor_is_refused(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    write(tmp_path / "x.safetensors", header, b"\x07" + struct.pack("<ff", 1.5, 2.5))
    found = read_folder(str(tmp_path))
    assert (found["a"].tolist(), found["b"].tolist()) == ([7], [1.5, 2.5])
    assert same(found, load_file(tmp_path / "x.safetensors"))


def write(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def first_shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def cut(folder: Path) -> None:
    file = first_shard(folder)
    file.write_bytes(file.read_bytes()[:-1])


def lose(folder: Path) -> None:
    first_shard(folder).unlink()


def loop(folder: Path) -> None:
    lose(folder)
    for name in ("model.safetensors.index.json", "model.safetensors"):
        (folder / name).unlink(missing_ok=True)
    (folder / "a.safetensors").symlink_to("b.safetensors")
    (folder / "b.safetensors").symlink_to("a.safetensors")


def spoil_index(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def misplace(folder: Path) -> None:
    content = json.loads((folder / INDEX).read_text())
    shards = sorted(set(content["weight_map"].values()))
    content["weight_map"] = dict.fromkeys(content["weight_map"], shards[0])
    (folder / INDEX).write_text(json.dumps(content))


def reach_out(folder: Path) -> None:
    content = json.loads((folder / INDEX).read_text())
    shard = first_shard(folder)
    outside = folder / "below" / shard.name
    outside.parent.mkdir()
    shutil.move(shard, outside)
    for name, file in content["weight_map"].items():
        content["weight_map"][name] = f"below/{file}" if file == shard.name else file
    (folder / INDEX).write_text(json.dumps(content))


def twice(folder: Path) -> None:
    (folder / INDEX).unlink()
    shutil.copy(first_shard(folder), folder / "again.safetensors")


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut, "is cut off or no safetensors file"),
        (lose, "is missing, one of"),
        (loop, "can't be read: Too many levels of symbolic links"),
        (spoil_index, "can't read"),
        (misplace, "where it is not"),
        (reach_out, "which is not beside it"),
        (twice, "which is also in another file"),
        (empty, "there is no .safetensors file"),
    ],
)
def test_an_incomplete_folder_is_refused(
    sharded: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(sharded)
    with refused("weights_refused", message):
        read_folder(str(sharded))


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"", b""),
        (b"{", b""),
        (b"[]", b""),
        (b'{"x": 1}', b""),
        (b'{"\xff": 1}', b""),
        ({"x": {**ENTRY, "dtype": "F31"}}, bytes(8)),
        ({"x": {**ENTRY, "dtype": 3}}, bytes(8)),
        ({"x": {**ENTRY, "shape": [-2]}}, bytes(8)),
        ({"x": {**ENTRY, "shape": [3]}}, bytes(8)),
        ({"x": {**ENTRY, "shape": [1 << 62, 4]}}, bytes(8)),
        ({"x": {**ENTRY, "data_offsets": [-8, 0]}}, bytes(8)),
        ({"x": {**ENTRY, "data_offsets": [8, 16]}}, bytes(8)),
        ({"x": {**ENTRY, "data_offsets": [8, 0]}}, bytes(8)),
        ({"x": {**ENTRY, "data_offsets": [0]}}, bytes(8)),
        ({"x": {"dtype": "F32"}}, bytes(8)),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, header: Any, data: bytes) -> None:
    write(tmp_path / "x.safetensors", header, data)
    with refused("weights_refused"):
        read_folder(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 8, b"\xff" * 64])
def test_invalid_safetensors_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match="is cut off or no safetensors file"):
        read_folder(str(tmp_path))


def test_a_missing_path_is_refused() -> None:
    with pytest.raises(WeightsError, match="can't be read: No such file"):
        read_folder("/nowhere/at/all")
