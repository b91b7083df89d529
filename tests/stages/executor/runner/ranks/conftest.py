"""Fixtures of tests of ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nano_inference.stages.executor.runner import comparison, sharded_model


@pytest.fixture(scope="session", autouse=True)
def builds_in_turn() -> Iterator[None]:
    """Transformers changes torch's default dtype while it builds a model, for all threads."""
    lock, make_whole = threading.Lock(), sharded_model.make_whole

    def make_in_turn(*args: Any) -> Any:
        with lock:
            return make_whole(*args)

    with pytest.MonkeyPatch.context() as patch:
        for module in (sharded_model, comparison):
            patch.setattr(module, "make_whole", make_in_turn)
        yield
