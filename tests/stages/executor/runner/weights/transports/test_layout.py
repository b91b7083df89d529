"""Both sides of a transport cut the same tensors into the same buckets."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus.weights import TensorMeta
from nano_inference.config import WeightsError
from nano_inference.stages.executor.runner.weights.transports.background import Background
from nano_inference.stages.executor.runner.weights.transports.layout import (
    as_bytes,
    as_tensor,
    buckets,
    distinct,
    meta_of,
    sizes_of,
)

from ......programs import run
from ....refusals import refused
from .samples import samples

METAS = st.lists(
    st.builds(
        TensorMeta,
        st.just("x"),
        st.sampled_from(["float32", "bfloat16", "int8"]),
        st.tuples(st.integers(0, 50)),
    ),
    max_size=20,
)


@given(METAS, st.integers(0, 200))
def test_buckets_hold_each_tensor_once_of_one_dtype_and_not_too_many(
    metas: list[TensorMeta], most: int
) -> None:
    metas = [TensorMeta(str(i), each.dtype, each.shape) for i, each in enumerate(metas)]
    sizes = sizes_of(metas)
    cut = buckets(metas, sizes, most)
    assert sorted(index for bucket in cut for index in bucket) == list(range(len(metas)))
    for bucket in cut:
        assert len({metas[index].dtype for index in bucket}) == 1
        assert len(bucket) == 1 or sum(sizes[index] for index in bucket) <= most
        assert bucket == sorted(bucket)
    if not most:
        assert cut == [[index] for index in range(len(metas))]


def test_tensors_become_bytes_and_tensors_again() -> None:
    for name, tensor in samples().items():
        again = as_tensor(as_bytes(tensor), meta_of(name, tensor))
        assert again.dtype == tensor.dtype
        assert again.tolist() == tensor.tolist()


def test_a_tied_tensor_is_sent_once() -> None:
    table = torch.ones(3, 2)
    other = table.clone()
    empty = [torch.empty(0), torch.empty(0)]
    found = distinct(
        {"a": table, "b": table, "c": other, "d": table[:2], "e": empty[0], "f": empty[1]}
    )
    assert list(found) == ["a", "c", "d", "e", "f"]


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("float31", (1,)),
        ("nn", (1,)),
        ("quint8", (1,)),
        ("complex64", (1,)),
        ("__doc__", (1,)),
        ("float32", (-1,)),
        ("float32", (-1, -1)),
        ("float32", (1 << 40, 1 << 40)),
        ("float32", (1 << 40, 0, 1 << 40)),
        ("float32", (1 << 80,)),
    ],
)
def test_invalid_tensors_are_refused(dtype: str, shape: tuple[int, ...]) -> None:
    with refused("weights_refused"):
        sizes_of([TensorMeta("x", dtype, shape)])


def test_a_name_comes_once() -> None:
    meta = TensorMeta("x", "float32", (1,))
    with pytest.raises(WeightsError, match="comes twice"):
        sizes_of([meta, meta])


HANGING = """
import threading
from nano_inference.stages.executor.runner.weights.transports.background import Background
begun = threading.Event()
Background("x").submit(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
print("end")
"""


def test_results_and_errors_in_order_on_one_thread() -> None:
    seen: list[object] = []
    background = Background("weights-test", lambda: seen.append(threading.get_ident()))
    thread = background.submit(threading.get_ident)
    failed = background.submit(int, "x")
    last = background.submit(seen.append, "last")
    background.close()
    last.result(30)
    assert seen == [thread.result(), "last"]
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result()


def test_cancelled_calls_do_not_run() -> None:
    gate = threading.Event()
    background = Background("weights-test")
    background.submit(gate.wait)
    cancelled = background.submit(gate.clear)
    assert cancelled.cancel()
    gate.set()
    background.submit(int).result(30)
    background.close()
    assert gate.is_set()


def test_the_end_of_a_program_does_not_wait_for_it(tmp_path: Path) -> None:
    assert run(HANGING, tmp_path, whole_end=True) == (0, "end\n", "")
