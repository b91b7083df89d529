"""Operators with recurrent state: each kernel against its definition in torch, and its bits however
tokens are divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nano_inference.stages.executor.runner.kernels import mixers
from nano_inference.stages.executor.runner.kernels.compile import KernelsUnavailable, Library
from nano_inference.stages.executor.runner.kernels.mixers import KernelOperators
from nano_inference.stages.executor.runner.mixers.choose import choose_operators
from nano_inference.stages.executor.runner.mixers.operators import Operators
from nano_inference.stages.executor.runner.mixers.reference import ReferenceOperators
from nano_inference.stages.executor.runner.state.segments import Segments

TOLERANCES = {torch.bfloat16: 2.0**-7, torch.float32: 1e-5}
TOKENS, SLOTS = 77, 9

Call = Callable[[Operators, Tensor, Segments, slice], Tensor]
"""An operator over some of its tokens, with a state tensor."""


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


LIBRARIES = [(dtype, each) for dtype, found in mixers._LIBRARIES.items() for each in found]


@pytest.fixture(params=LIBRARIES, ids=lambda param: param[1].define.lower().replace(" ", "-"))
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    """That of one of the libraries, which is used then."""
    one: Library
    found, one = request.param
    monkeypatch.setitem(mixers._LIBRARIES, found, (one,))
    mixers.library.cache_clear()
    try:
        mixers.library(found)
    except KernelsUnavailable as error:
        pytest.skip(f"no kernels on this machine: {error}")
    yield found
    mixers.library.cache_clear()


def segments(*runs: tuple[int, int, int]) -> Segments:
    """Segments one after the other: tokens, slot and save of each."""
    count, slot, save = (np.array(column, np.int64) for column in zip(*runs, strict=True))
    return Segments(np.cumsum(count) - count, count, slot, save)


class Given:
    """Random arguments by name, the same for each dtype and call."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._random = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self._random).to(dtype or self.dtype)

    def steps(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self._random)


def delta(given: Given, widths: tuple[int, int], *, by_channel: bool) -> tuple[Call, Any]:
    q, k = (given(TOKENS, 2, widths[0]) for _ in range(2))
    v = given(TOKENS, 4, widths[1])
    g = -given.steps(TOKENS, 4, widths[0]) if by_channel else -given.steps(TOKENS, 4)
    beta = given.steps(TOKENS, 4).to(given.dtype)
    scale = widths[0] ** -0.5

    def call(operators: Operators, state: Tensor, runs: Segments, some: slice) -> Tensor:
        return operators.gated_delta(
            q[some], k[some], v[some], g[some], beta[some], scale, True, state, runs
        )

    return call, given(SLOTS, 4, *widths, dtype=torch.float32)


def ssd(given: Given, widths: tuple[int, int]) -> tuple[Call, Any]:
    b, c = (given(TOKENS, 2, widths[0]) for _ in range(2))
    x, rates, residual = given(TOKENS, 4, widths[1]), -given.steps(4), given(4)
    times = given.steps(TOKENS, 4).to(given.dtype)

    def call(operators: Operators, state: Tensor, runs: Segments, some: slice) -> Tensor:
        return operators.ssd(x[some], times[some], rates, b[some], c[some], residual, state, runs)

    return call, given(SLOTS, 4, *widths, dtype=torch.float32)


def lightning(given: Given, widths: tuple[int, int]) -> tuple[Call, Any]:
    q, k = (given(TOKENS, 4, widths[0]) for _ in range(2))
    v, decay = given(TOKENS, 4, widths[1]), given.steps(4)

    def call(operators: Operators, state: Tensor, runs: Segments, some: slice) -> Tensor:
        return operators.lightning(q[some], k[some], v[some], decay, state, runs)

    return call, given(SLOTS, 4, *widths, dtype=torch.float32)


def selective_scan(given: Given, channels: int, width: int) -> tuple[Call, Any]:
    x, times = given(TOKENS, channels), given.steps(TOKENS, channels)
    b, c = (given(TOKENS, width) for _ in range(2))
    rates, residual = -given.steps(channels, width), given(channels, dtype=torch.float32)

    def call(operators: Operators, state: Tensor, runs: Segments, some: slice) -> Tensor:
        return operators.selective_scan(
            x[some], times[some], rates, b[some], c[some], residual, state, runs
        )

    return call, given(SLOTS, channels, width, dtype=torch.float32)


def conv(
    given: Given, channels: int, taps: int, activation: str | None, *, bias: bool
) -> tuple[Call, Any]:
    x, weight = given(TOKENS, channels), given(channels, taps)
    added = given(channels) if bias else None

    def call(operators: Operators, state: Tensor, runs: Segments, some: slice) -> Tensor:
        return operators.conv(x[some], weight, added, activation, state, runs)

    return call, given(SLOTS, taps - 1, channels)


CASES: dict[str, Callable[[Given], tuple[Call, Any]]] = {
    "gated delta rule": lambda given: delta(given, (128, 128), by_channel=False),
    "gated delta rule, odd widths": lambda given: delta(given, (20, 83), by_channel=False),
    "gated delta rule by channel": lambda given: delta(given, (40, 64), by_channel=True),
    "ssd": lambda given: ssd(given, (128, 64)),
    "ssd, odd widths": lambda given: ssd(given, (5, 37)),
    "lightning": lambda given: lightning(given, (32, 144)),
    "selective scan": lambda given: selective_scan(given, 70, 16),
    "selective scan, odd widths": lambda given: selective_scan(given, 3, 21),
    "convolution": lambda given: conv(given, 600, 4, "silu", bias=True),
    "convolution over three": lambda given: conv(given, 35, 3, None, bias=False),
    "convolution over six": lambda given: conv(given, 16, 6, "gelu", bias=False),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, dtype: torch.dtype) -> tuple[Call, Tensor]:
    return CASES[request.param](Given(dtype))


def test_results_are_those_of_the_definition(case: tuple[Call, Tensor], dtype: torch.dtype) -> None:
    call, state = case
    # Two sequences, one of them in three segments, with copies of its state on the way.
    runs = segments((40, 3, -1), (1, 5, 8), (33, 5, 7), (TOKENS - 74, 5, -1))
    states = [state.clone() for _ in range(2)]
    found, wanted = (
        call(operators, own, runs, slice(None))
        for operators, own in zip(
            (KernelOperators(dtype), ReferenceOperators()), states, strict=True
        )
    )
    assert found.dtype is wanted.dtype
    for ours, theirs in ((found, wanted), states):
        bound = TOLERANCES[ours.dtype] * theirs.abs().max()
        assert (ours.float() - theirs.float()).abs().max() <= bound


def test_bits_do_not_depend_on_the_division_into_segments_and_steps(
    case: tuple[Call, Tensor], dtype: torch.dtype
) -> None:
    call, state = case
    operators = KernelOperators(dtype)
    whole, cut, steps = (state.clone() for _ in range(3))
    wanted = call(operators, whole, segments((TOKENS, 4, -1)), slice(None))
    runs = segments((1, 4, -1), (2, 4, 2), (37, 4, -1), (3, 4, 6), (TOKENS - 43, 4, -1))
    assert torch.equal(call(operators, cut, runs, slice(None)), wanted)
    assert torch.equal(cut[4], whole[4])
    place = 0
    for count in (1, 1, 1, 5, 32, 33, 1, 1, TOKENS - 75):
        some = slice(place, place := place + count)
        part = call(operators, steps, segments((count, 4, 6 if place == 43 else -1)), some)
        assert torch.equal(part, wanted[some]), some
        if place == 3:
            assert torch.equal(steps[4], cut[2])
    assert torch.equal(steps[4], whole[4])
    untouched = [0, 1, 3, 5, 7, 8]
    assert torch.equal(cut[untouched], state[untouched])


def test_kernels_that_compute_something_else_are_not_taken(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    operators, why = choose_operators(dtype, torch.device("cpu"))
    assert (type(operators), why) == (KernelOperators, "")
    lightning = KernelOperators.lightning
    monkeypatch.setattr(KernelOperators, "lightning", lambda *args: 1.03 * lightning(*args))
    operators, why = choose_operators(dtype, torch.device("cpu"))
    assert (type(operators), why) == (
        ReferenceOperators,
        "lightning computes something else on this machine",
    )


def test_other_dtypes_run_without_kernels() -> None:
    operators, why = choose_operators(torch.float16, torch.device("cpu"))
    assert (type(operators), why) == (
        ReferenceOperators,
        "there are none for torch.float16 on cpu",
    )
