"""A gateway with two loaded models and an unloaded one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from ..fake import Client
from .deployed import Deployment, Front, opened


@pytest.fixture
async def deployment() -> Deployment:
    made = Deployment()
    await made.put("small", default=True, aliases=("gpt-4o-mini",))
    await made.put("org/large", aliases=("gpt-4o",))
    await made.put("cold", "unloaded")
    return made


@pytest.fixture
async def front(deployment: Deployment) -> Front:
    return await opened(deployment)


@pytest.fixture
async def http(front: Front) -> AsyncIterator[Client]:
    async with front.client() as client:
        yield client
