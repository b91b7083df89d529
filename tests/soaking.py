"""Parameters of `make soak` alone."""

from __future__ import annotations

from typing import Any

import pytest


def in_soak(*values: Any) -> Any:
    """A set of parameters that `make test` leaves out: others show the same promise every day."""
    return pytest.param(*values, marks=pytest.mark.soak(only=True))
