"""The garbage collector while much is loaded."""

from __future__ import annotations

import gc

import pytest

from nano_inference.config.collector import collector_paused


def test_collector_resumes_after_an_error() -> None:
    with pytest.raises(KeyError), collector_paused():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_disabled_collector_stays_disabled() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
