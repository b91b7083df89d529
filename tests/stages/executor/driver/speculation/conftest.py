"""Shared fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nano_inference.stages.executor.driver.speculation.costs import StepCosts
from nano_inference.stages.executor.parts.speculation import Speculation


@pytest.fixture(scope="module")
def unmeasured() -> Iterator[None]:
    """Skip the lanes' measurement of steps' costs (half a second each), for tests that choose
    themselves which drafts are verified."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speculation, "_measure_costs", lambda core: StepCosts([1], [1.0]))
        yield
