"""Deltas in the formats of `fireworks-delta-compression`, as the package writes and reads them."""

from __future__ import annotations

import pickle
import sys
import zlib
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import zstandard
from fireworks_delta_compression import delta_compress_dicts_to_file
from safetensors.torch import load_file, save_file
from torch import Tensor

from nano_inference import EngineConfig, InferenceEngine
from nano_inference.bus.weights import ArcFormat, ArcWeights
from nano_inference.stages.executor.runner.weights import arc
from nano_inference.stages.executor.runner.weights.arc import read_arc, write_arc
from nano_inference.stages.executor.runner.weights.transports.folder import metadata_of

from .....pipeline import short_model
from ...refusals import refused

State = dict[str, Tensor]
FORMATS = get_args(ArcFormat)


def weights(share: float) -> State:
    """A part of the elements is different."""
    dice = torch.Generator().manual_seed(1)
    found = {}
    for name, shape in (("a", (100, 30)), ("b", (50,)), ("c", ())):
        tensor = torch.randn(shape, generator=dice).bfloat16()
        found[name] = torch.where(torch.rand(shape, generator=dice) < share, tensor + 0.1, tensor)
    return found


def same(left: State, right: State) -> bool:
    return all(torch.equal(left[name], right[name]) for name in right)


@pytest.mark.parametrize("format", FORMATS)
def test_both_sides_agree_with_the_package(format: ArcFormat, tmp_path: Path) -> None:
    old = weights(0)
    for share in (0.02, 1.0):
        new, theirs, ours = weights(share), tmp_path / "theirs", tmp_path / "ours"
        delta_compress_dicts_to_file(
            src=old, dst=new, diff_file=str(theirs), compression_format=format
        )
        write_arc(ours, old, new, format=format)
        for path in (theirs, ours):
            delta = read_arc(path, old, base_version=4, format=format)
            assert delta.head.base_version == 4
            assert same({**old, **delta.apply(old)}, new)
    with refused("weights_base", "Checksum"):
        read_arc(tmp_path / "theirs", weights(0.5), base_version=4, format=format)


def test_an_engine_takes_one(tmp_path: Path) -> None:
    config = EngineConfig(model_path=str(short_model.folder()), dtype="bfloat16", max_model_len=64)
    with InferenceEngine(config) as engine:
        old = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        new = {name: tensor * 1.5 for name, tensor in old.items()}
        write_arc(tmp_path / "delta", old, new)
        with refused("weights_base", "version 3"):
            engine.update_weights(ArcWeights(str(tmp_path / "delta"), 3))
        engine.update_weights(ArcWeights(str(tmp_path / "delta"), 0), blocking=True)
        assert same(engine.state_dict(), new)
        with refused("weights_base"):
            engine.update_weights(ArcWeights(str(tmp_path / "delta"), 0))


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("code ran",))


def enveloped(content: object) -> bytes:
    data = zstandard.compress(pickle.dumps(content))
    return arc._envelope_prefix() + pickle.dumps({"codec": "zstd", "data": data})


BAD: dict[str, tuple[ArcFormat, bytes]] = {
    "code": ("arc_v3", enveloped({"strategy": Evil()})),
    "code outside": ("arc_v3", arc._envelope_prefix() + pickle.dumps(Evil())),
    "no payload": ("arc_v3", enveloped([1])),
    "huge": ("arc_v2", zstandard.compress(bytes(1 << 20))),
    "huge zlib": ("arc_v1", zlib.compress(bytes(1 << 20))),
    "nothing": ("arc_v2", b"nothing"),
}


@pytest.mark.parametrize(("format", "data"), BAD.values(), ids=BAD)
def test_no_file_runs_code_or_fills_memory(
    format: ArcFormat, data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, path = weights(0), tmp_path / "delta"
    write_arc(path, old, old, format=format)
    tensors, checksums = load_file(path), metadata_of(path)
    tensors["b"] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    save_file(tensors, path, metadata=checksums)
    with refused("weights_delta"):
        read_arc(path, old, base_version=0, format=format)
    assert not capsys.readouterr().out


def test_without_the_package_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fireworks_delta_compression", None)
    with refused("unsupported", r"nano-inference\[arc\]"):
        read_arc("delta", {}, base_version=0)
