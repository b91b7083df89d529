"""The thread that fetches weights takes no cores from the one that runs steps."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nano_inference.stages.executor.changes.updates import stay_single
from nano_inference.stages.executor.runner.weights.transports import Background


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_it_alone_has_no_parallel_regions(two_threads: None) -> None:
    with ThreadPoolExecutor(1) as steps:
        assert steps.submit(torch.get_num_threads).result() == 2
        fetching = Background("weights-test", stay_single)
        assert fetching.submit(torch.get_num_threads).result(60) == 1
        fetching.close()
        assert steps.submit(torch.get_num_threads).result() == 2
    assert torch.get_num_threads() == 2
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == 2
