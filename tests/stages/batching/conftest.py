"""The prefix caches."""

from __future__ import annotations

import pytest

from .replica import CACHE_TYPES, CacheType


@pytest.fixture(params=CACHE_TYPES)
def cache_type(request: pytest.FixtureRequest) -> CacheType:
    param: CacheType = request.param
    return param
