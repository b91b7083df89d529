"""The KV cache's tensors by themselves."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nano_inference.stages.executor import KVCache, LoadedModel, wrap_model
from nano_inference.stages.executor.runner import system_memory
from nano_inference.stages.executor.runner.kv_cache import block_bytes
from nano_inference.stages.executor.runner.loaded_model import Dtypes, LayerSpec
from nano_inference.stages.executor.runner.system_memory import (
    HUGE_PAGE,
    use_huge_pages,
    why_no_huge_pages,
    zeros,
)

from ....resident import asks_for_huge_pages, needs_proc, resident_bytes, resident_bytes_of_file
from ..models import make_model


def make_cache(device: str, num_blocks: int = 5, *, huge_pages: bool = False) -> KVCache:
    spec = LayerSpec(2, 16, 16, None)
    config: Any = None
    layers = (spec, spec)
    model = LoadedModel(
        nn.Module(), config, torch.device(device), Dtypes.of(torch.float32), 4096, 16, layers
    )
    return KVCache(model, num_blocks, block_size=4, huge_pages=huge_pages)


def test_a_layer_that_reads_the_keys_and_values_of_another_has_no_memory_of_its_own() -> None:
    model = wrap_model(make_model("gemma3n_text"), 64)
    assert [layer.source for layer in model.layers] == [None, None, None, 2, 1]
    cache = KVCache(model, 3, block_size=4)
    assert block_bytes(model, 4) * 4 == cache.num_bytes == sum(t.nbytes for t in cache.keys[:3]) * 2
    for own, read in ((3, 2), (4, 1)):
        assert cache.keys[own] is cache.keys[read]
        assert cache.values[own] is cache.values[read]


@needs_proc
def test_the_cache_takes_no_memory_before_it_is_written() -> None:
    before = resident_bytes()
    cache = make_cache("cpu", num_blocks=1 << 15)
    tensors = [*cache.keys, *cache.values]
    size = sum(tensor.nbytes for tensor in tensors)
    assert size > 60 << 20
    assert resident_bytes() - before < size / 4
    assert not any(tensor[::100].any() for tensor in tensors)
    cache.clear()
    assert resident_bytes() - before > size / 2
    del cache, tensors
    assert resident_bytes() - before < size / 4


def test_blocks_beyond_the_cache_are_refused() -> None:
    with pytest.raises(RuntimeError, match="can't allocate 1125899906842624 bytes"):
        zeros((1 << 20, 1 << 28), torch.float32, torch.device("cpu"))


def test_copy_blocks_reads_all_sources_first(device: str) -> None:
    cache = make_cache(device)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    cache.copy_blocks([(0, 3), (3, 4)])
    for tensor, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(tensor, old[[0, 1, 2, 0, 3, 5]])
    cache.copy_blocks([])
    with pytest.raises(ValueError, match="out of range"):
        cache.copy_blocks([(0, 5)])


_CPU = torch.device("cpu")


@needs_proc
@pytest.mark.skipif(bool(why_no_huge_pages()), reason="this system has no large pages")
def test_large_tensors_begin_at_a_large_page() -> None:
    shape = (3, HUGE_PAGE // 4)
    large = zeros(shape, torch.bfloat16, _CPU, huge=True)
    assert large.data_ptr() % HUGE_PAGE == 0
    assert large.shape == shape
    assert not large.any()
    assert asks_for_huge_pages(large)
    # The last row fills none.
    assert not asks_for_huge_pages(large[-1])
    assert not asks_for_huge_pages(zeros(shape, torch.bfloat16, _CPU))


def test_small_tensors_have_normal_pages() -> None:
    small = zeros((8,), torch.float32, _CPU, huge=True)
    assert small.tolist() == [0.0] * 8
    assert small.untyped_storage().nbytes() == small.nbytes


@needs_proc
@pytest.mark.skipif(bool(why_no_huge_pages()), reason="this system has no large pages")
def test_weights_that_fill_no_large_page_share_them() -> None:
    sizes = (HUGE_PAGE - 64, HUGE_PAGE // 2 + 1, 100_000)
    module = nn.ParameterList(
        nn.Parameter(torch.full((size,), size % 7, dtype=torch.uint8), requires_grad=False)
        for size in sizes
    )

    use_huge_pages(module)

    first, *others = (parameter.data_ptr() for parameter in module)
    assert first % HUGE_PAGE == 0
    assert all(address % 64 == 0 and 0 < address - first < 2 * HUGE_PAGE for address in others)
    assert all(asks_for_huge_pages(parameter) for parameter in module)
    for parameter, size in zip(module, sizes, strict=True):
        assert parameter.eq(size % 7).all()
        assert parameter.untyped_storage().nbytes() == size, "none keeps the others in a file"


def test_parameters_stay_unchanged() -> None:
    """A model with tied weights can be saved as before."""
    rows = HUGE_PAGE // (2 * 64) + 1
    embedding = nn.Embedding(rows, 64, dtype=torch.bfloat16)
    output = nn.Linear(64, rows, bias=True, dtype=torch.bfloat16)
    output.weight = embedding.weight
    module = nn.ModuleList([embedding, output])
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    weight = embedding.weight

    use_huge_pages(module)

    assert output.weight is embedding.weight is weight
    after = module.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    # Each has memory of its own, and no more than it takes: else it could not be saved alone.
    assert weight.untyped_storage().nbytes() == weight.nbytes
    assert weight.storage_offset() == 0
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(module.state_dict()["1.weight"], before["0.weight"] * 2)


@needs_proc
def test_the_model_s_file_is_not_mapped_any_more(tmp_path: Path) -> None:
    """Not for the sake of a small tensor either."""
    file = tmp_path / "model.safetensors"
    large = torch.ones(HUGE_PAGE // 4, dtype=torch.float32)
    save_file({"large": large, "small": torch.ones(3)}, file)
    module = nn.Module()
    for name, tensor in load_file(file).items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    assert str(file) in Path("/proc/self/maps").read_text()
    del tensor

    use_huge_pages(module)

    assert str(file) not in Path("/proc/self/maps").read_text()
    assert all(bool((parameter == 1).all()) for parameter in module.parameters())


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("always madvise [never]\n", "says never"),
        ("always [madvise] never\n", ""),
        ("[always] madvise never\n", ""),
        (None, "can't be read"),
    ],
)
def test_reasons_without_kernels(
    setting: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "enabled"
    if setting is not None:
        file.write_text(setting)
    monkeypatch.setattr(system_memory, "_ENABLED", file)
    found = why_no_huge_pages()
    assert (why in found) if why else not found


@needs_proc
def test_copied_pages_of_the_file_are_released_while_it_is_mapped(tmp_path: Path) -> None:
    """Else the weights would be in memory twice until the last tensor is copied."""
    file = tmp_path / "model.safetensors"
    count = 4 * HUGE_PAGE
    names = ("first", "second", "third")
    save_file({name: torch.full((count,), 7, dtype=torch.uint8) for name in names}, file)
    tensors = load_file(file)
    kept = tensors.pop("third")  # keeps the file mapped
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    assert all(tensor.eq(7).all() for tensor in (*module.parameters(), kept))
    before = resident_bytes_of_file(file)
    assert before >= 3 * count

    use_huge_pages(module)

    assert resident_bytes_of_file(file) <= before - 2 * (count - 2 * mmap.PAGESIZE)
    assert all(tensor.eq(7).all() for tensor in (*module.parameters(), kept))
