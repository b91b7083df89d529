"""Anthropic's library."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic


@pytest.fixture
async def client(connected: dict[str, Any]) -> AsyncIterator[AsyncAnthropic]:
    # Not above: it takes a second, and every worker imports this file.
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url="http://127.0.0.1", **connected) as made:
        yield made
