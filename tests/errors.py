"""Errors that tests expect."""

from __future__ import annotations

from typing import Any

import pytest


def raises_code(kind: type[Exception], code: str, match: str | None = None) -> Any:
    """As `pytest.raises`, for an error with this code."""
    return pytest.raises(kind, match=match, check=lambda error: error.code == code)  # type: ignore[attr-defined]
