"""Errors of ours that tests expect."""

from __future__ import annotations

import pytest

from nano_inference.config import NanoInferenceError, RequestError


def raises(
    code: str,
    why: str | None = None,
    kind: type[NanoInferenceError] = RequestError,
    **fields: object,
) -> pytest.RaisesExc[NanoInferenceError]:
    """Expect an error with a code, a sentence that matches `why`, and these other attributes."""
    wanted = {"code": code} | fields
    return pytest.RaisesExc(
        kind,
        match=why,
        check=lambda error: {name: getattr(error, name) for name in wanted} == wanted,
    )
