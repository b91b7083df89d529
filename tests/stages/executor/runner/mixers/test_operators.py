"""The operators' definition in torch: Transformers' results, with the arguments of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.bamba import modeling_bamba as bamba
from transformers.models.jamba import modeling_jamba as jamba
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from nano_inference.stages.executor.runner.batch import Rows
from nano_inference.stages.executor.runner.mixers.calls import CALLS
from nano_inference.stages.executor.runner.mixers.reference import ReferenceOperators
from nano_inference.stages.executor.runner.state.segments import Segments, segments_of

TOKENS, HEADS, KEYS, VALUES = 37, 4, 8, 12


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class OnePass:
    """One sequence in one segment, from a state of zeros."""

    module = None
    operators = ReferenceOperators()
    segments = Segments(*(np.array([each]) for each in (0, TOKENS, 0, -1)))

    def state(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(1, *shape, dtype=dtype)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def delta(decays: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    queries, keys = draw(1, TOKENS, 2, KEYS), draw(1, TOKENS, 2, KEYS, seed=1)
    more = {"g": -decays.exp(), "beta": draw(1, TOKENS, HEADS).sigmoid()}
    more["use_qk_l2norm_in_kernel"] = True
    return (queries, keys, draw(1, TOKENS, HEADS, VALUES)), more


def each_channel() -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    arguments, more = delta(draw(1, TOKENS, HEADS, KEYS))
    wide = tuple(each.repeat_interleave(2, dim=2) for each in arguments[:2])
    return (*wide, arguments[2]), {**more, "initial_state": None, "output_final_state": False}


def convolution() -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    return (draw(1, HEADS, TOKENS), draw(HEADS, 3), draw(HEADS)), {"activation": "silu"}


def mamba_2() -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, times, rates = draw(1, TOKENS, HEADS, VALUES), draw(1, TOKENS, HEADS), -draw(HEADS).exp()
    more = {"D": draw(HEADS), "dt_bias": draw(HEADS, seed=1), "dt_softplus": True}
    inputs = draw(1, TOKENS, 2, KEYS), draw(1, TOKENS, 2, KEYS, seed=1)
    return (x, times, rates, *inputs), {**more, "chunk_size": 16, "dt_limit": (0.1, 1.0)}


def mamba_1() -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    x, times, gate = (draw(1, VALUES, TOKENS, seed=seed) for seed in range(3))
    inputs = draw(1, KEYS, TOKENS), draw(1, KEYS, TOKENS, seed=1)
    more = {"D": draw(VALUES), "z": gate, "delta_bias": draw(VALUES), "delta_softplus": True}
    return (x, times, -draw(VALUES, KEYS).exp(), *inputs), more


CASES: dict[str, tuple[Any, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "causal_conv1d_fn": (qwen, convolution),
    "torch_chunk_gated_delta_rule": (qwen, lambda: delta(draw(1, TOKENS, HEADS))),
    "chunk_kimi_delta_attention": (kimi, each_channel),
    "mamba2_chunk_scan": (bamba, mamba_2),
    "mamba_selective_scan": (jamba, mamba_1),
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_transformers(name: str) -> None:
    module, make = CASES[name]
    arguments, more = make()
    found = CALLS[name](OnePass(), *arguments, **more)
    wanted = getattr(module, name)(*arguments, **more)
    found, wanted = (each[0] if isinstance(each, tuple) else each for each in (found, wanted))
    assert found.shape == wanted.shape
    assert (found - wanted).norm() < 1e-5 * wanted.norm()


def test_rows_are_cut_where_states_are_saved() -> None:
    saves = np.array([[2, 5, 11], [2, 9, 10], [0, 1, 12]])
    rows = Rows(
        np.array([7, 3, 0]),
        np.array([1, 1, 9]),
        np.zeros((3, 3), np.int64),
        2,
        states=np.array([4, 2, 6]),
        saves=saves,
    )
    assert [*segments_of(rows).each()] == [
        (0, 1, 4, 12),
        (1, 2, 2, -1),
        (2, 7, 6, 11),
        (7, 11, 6, 10),
    ]
    rows.saves[1, 1] = 5  # type: ignore[index]
    with pytest.raises(ValueError, match="two snapshots of the same position"):
        segments_of(rows)
