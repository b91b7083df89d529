"""GGUF's blocks read to codes: the weights are those of the gguf package, to the last bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from nano_inference.stages.executor.runner.kernels.codes import pack_plain, unpack, unpack_plain
from nano_inference.stages.executor.runner.linear.formats.gguf import KINDS

from ......gguf_files import random_rows


@pytest.mark.parametrize("name", KINDS)
def test_blocks_have_the_weights_of_the_gguf_package(name: str) -> None:
    kind = KINDS[name]
    rows = random_rows(name, 70, 512)
    wanted = torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name]))
    plain, form = kind.plain(torch.from_numpy(rows)), kind.form(70, 512)
    assert int(plain.codes.max()) < 2**form.bits
    assert plain.scales.values.shape == (70, form.groups)
    found = unpack_plain(form, plain)
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
    assert torch.equal(unpack(form, pack_plain(form, plain)), wanted)


@pytest.mark.parametrize("name", KINDS)
def test_sizes_of_blocks_are_those_of_the_gguf_package(name: str) -> None:
    sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert sizes == (KINDS[name].block, KINDS[name].block_bytes)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_K"])
def test_zero_blocks_are_zero_weights(name: str) -> None:
    kind = KINDS[name]
    rows = torch.zeros(1, 256 // kind.block * kind.block_bytes, dtype=torch.uint8)
    assert not unpack_plain(kind.form(1, 256), kind.plain(rows)).any()
    assert np.all(gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[name]) == 0)
