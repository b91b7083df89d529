"""Anthropic's library."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from anthropic import AsyncAnthropic


@pytest.fixture
async def client(connected: dict[str, Any]) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url="http://127.0.0.1", **connected) as made:
        yield made
