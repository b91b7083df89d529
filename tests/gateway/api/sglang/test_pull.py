"""slime's `/pull_weights`: versions as slime publishes them, applied as a whole or not at all."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from safetensors.numpy import load_file, save_file

from nano_inference.config import WeightsError
from nano_inference.gateway.api.sglang import pull
from nano_inference.gateway.api.sglang.pull import pull_weights

from ....errors import raises
from ...fake import Client

State = dict[str, Any]
CHECKSUMS = {
    "xxh3-128": lambda data: xxhash.xxh3_128_hexdigest(data),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the disk, which take most of the time."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def weights(seed: int) -> State:
    dice = np.random.default_rng(seed)
    return {name: dice.integers(0, 9, (7, 5), np.int32) for name in ("a", "b", "c")}


def write(folder: Path, state: State) -> None:
    """A checkpoint of two files."""
    folder.mkdir(parents=True)
    names = sorted(state)
    save_file({name: state[name] for name in names[:2]}, folder / "model-1.safetensors")
    save_file({name: state[name] for name in names[2:]}, folder / "model-2.safetensors")
    (folder / "config.json").write_text("{}")


def publish(
    source: Path,
    version: int,
    old: State,
    new: State,
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    base: int | None = None,
) -> None:
    """A delta, as slime's `UpdateWeightFromDiskDelta` writes it."""
    folder = source / f"weight_v{version:06d}"
    folder.mkdir(parents=True)
    tensors, checksums = {}, {}
    for name in new:
        before, after = (each[name].view(np.uint8).reshape(-1) for each in (old, new))
        mask = before != after
        if not mask.any():
            continue
        diff = before ^ after
        if encoding == "overwrite":
            places = np.flatnonzero(mask).astype("<u4")
            count = np.array([places.size], "<u4")
            diff = np.concatenate([count.view(np.uint8), places.view(np.uint8), after[mask]])
        frame = zstandard.ZstdCompressor(level=1).compress(diff)
        tensors[name] = np.frombuffer(frame, np.uint8)
        checksums[name] = CHECKSUMS[checksum](after.tobytes())
    save_file(tensors, folder / "model-00000-of-00001.safetensors", metadata=checksums)
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1 if base is None else base:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
    }
    index = {"metadata": metadata, "weight_map": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def state_of(folder: Path) -> State:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def same(folder: Path, state: State) -> bool:
    found = state_of(folder)
    return found.keys() == state.keys() and all((found[k] == state[k]).all() for k in state)


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path, Path]:
    """The local checkpoint, the base of version 0, and the published versions: 1 and 2 deltas, 3 a
    whole one, 4 a delta."""
    local, base, source = (tmp_path / name for name in ("local", "base", "source"))
    write(base, weights(0))
    publish(source, 1, weights(0), weights(1))
    publish(source, 2, weights(1), weights(2), "overwrite", "adler32")
    write(source / "weight_v000003", weights(3))
    publish(source, 4, weights(3), weights(4))
    return local, base, source


async def test_the_route_pulls_a_version(http: Client, places: tuple[Path, Path, Path]) -> None:
    local, _, source = places
    body = {"local_checkpoint_dir": str(local), "source_dir": str(source), "target_version": 3}
    answer = await http.post("/pull_weights", json=body)
    assert (answer.status_code, answer.json()["success"]) == (200, True)
    assert same(local, weights(3))
    answer = await http.post("/pull_weights", json=body | {"target_version": 9})
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert "not published" in answer.json()["message"]


def test_versions_come_in_order_or_at_once(places: tuple[Path, Path, Path], tmp_path: Path) -> None:
    local, base, source = places
    for version in range(5):
        assert pull_weights(local, base, source, version) == version - 1
        assert same(local, weights(version))
    assert pull_weights(local, base, source, 4) == 4
    for version in (0, 2, 4):
        pull_weights(tmp_path / f"late-{version}", base, source, version)
        assert same(tmp_path / f"late-{version}", weights(version))
    state = json.loads((local / ".weight_sync" / "state.json").read_text())
    assert state == {"version": "000004"}, "as SGLang writes it"


def test_a_pull_that_was_killed_is_continued(
    places: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of its acts on the disk: the next pull reaches the version."""
    local, base, source = places
    acts = 0
    while True:
        pull_weights(local, base, source, 0)
        left = acts

        def killed(self: Path, *args: Any, original: Any = Path.replace) -> Any:
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1
            return original(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", killed)
            try:
                pull_weights(local, base, source, 2)
            except KeyboardInterrupt:
                acts += 1
            else:
                break
        pull_weights(local, base, source, 2)
        assert same(local, weights(2))
        (local / ".weight_sync" / "state.json").unlink()
    assert acts > 6


@pytest.mark.parametrize(
    ("change", "code"),
    [("cut", "weights_delta"), ("base", "weights_base"), ("order", "weights_base")],
)
def test_what_does_not_fit_leaves_the_version_before(
    places: tuple[Path, Path, Path], tmp_path: Path, change: str, code: str
) -> None:
    local, base, source = places
    pull_weights(local, base, source, 4)
    broken = weights(4) if change != "base" else weights(0)
    publish(source, 5, broken, weights(5), base=3 if change == "order" else None)
    if change == "cut":
        file = next((source / "weight_v000005").glob("*.safetensors"))
        tensors, checksums = load_file(file), pull._header(file)[0]["__metadata__"]
        tensors["b"] = tensors["b"][:-4]
        save_file(tensors, file, metadata=checksums)
    with raises(code, kind=WeightsError):
        pull_weights(local, base, source, 5)
    assert same(local, weights(4))
    assert pull_weights(local, base, source, 4) == 4


def test_files_of_others_are_not_replaced(places: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, base, source = places
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    for local in (tmp_path / "mine", base, source, Path("relative")):
        with raises("weights_refused", kind=WeightsError):
            pull_weights(local, base, source, 1)
