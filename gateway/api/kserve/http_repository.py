"""Models of the repository loaded and unloaded, over HTTP."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....config import RequestError, shown
from ...endpoints import NO_LOADING
from ...server.http import read_object, while_connected
from ...serving.fields import read_part
from .shared import ModelRepository

_HARMLESS = ("unload_dependents",)
"""A model has no others that would have to go with it."""


class _Body(msgspec.Struct):
    parameters: dict[str, Any] = {}


class RepositoryCalls:
    """The endpoints."""

    def __init__(self, repository: ModelRepository | None, max_body_bytes: int) -> None:
        self._repository = repository
        self._max_body_bytes = max_body_bytes

    async def load(self, request: Request) -> Response:
        """Returns when the model is loaded."""
        repository, model = await self._asked(request)

        async def work() -> Response:
            await repository.load(request, model)
            return Response()

        return await while_connected(request.receive, work)

    async def unload(self, request: Request) -> Response:
        """Returns when the model's requests have ended, and its processes."""
        repository, model = await self._asked(request)

        async def work() -> Response:
            await repository.unload(request, model)
            return Response()

        return await while_connected(request.receive, work)

    async def _asked(self, request: Request) -> tuple[ModelRepository, str]:
        repository = checked(self._repository)
        body = read_part(await read_object(request, self._max_body_bytes), _Body)
        check_parameters(body.parameters)
        return repository, request.path_params["model"]


def checked(repository: ModelRepository | None) -> ModelRepository:
    """Raises RequestError (unsupported) where there is none."""
    if repository is None:
        raise RequestError(NO_LOADING, code="unsupported")
    return repository


def check_parameters(names: Iterable[str]) -> None:
    """Refuses what Triton takes here: a model's configuration, and its files.

    Raises:
        RequestError: unsupported.
    """
    for name in names:
        if name not in _HARMLESS:
            raise RequestError(
                f"the parameter {shown(name)} is not supported here; what a model is made of "
                "stands in the setting models, or is told to POST /admin/models",
                code="unsupported",
            )
