"""Shared memory over HTTP: clients register regions, of which tensors are then parts."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....config import Int64
from ...server.http import JsonResponse, read_object
from ...serving.fields import read_part
from ...serving.origin import tenant_of
from .regions import Regions


class _RegisterBody(msgspec.Struct):
    key: str
    byte_size: Int64
    offset: Int64 = 0


class MemoryCalls:
    """The endpoints."""

    def __init__(self, regions: Regions, max_body_bytes: int) -> None:
        """Args: those that clients have registered, and the most that a body may have."""
        self._regions = regions
        self._max_body_bytes = max_body_bytes

    async def status(self, request: Request) -> Response:
        """The caller's region of a name, or all of them."""
        regions = self._regions.status(tenant_of(request), _region(request))
        return JsonResponse(
            [
                {
                    "name": name,
                    "key": region.key,
                    "offset": region.offset,
                    "byte_size": region.byte_size,
                }
                for name, region in regions.items()
            ]
        )

    async def register(self, request: Request) -> Response:
        """Has a region be known by a name."""
        tenant = tenant_of(request)
        body = read_part(await read_object(request, self._max_body_bytes), _RegisterBody)
        self._regions.register(tenant, _region(request), body.key, body.offset, body.byte_size)
        return Response()

    async def unregister(self, request: Request) -> Response:
        """Has the caller's region of a name be known no more, or all of them."""
        self._regions.unregister(tenant_of(request), _region(request))
        return Response()


async def no_regions(request: Request) -> Response:
    """Which regions there are where none can be registered."""
    return JsonResponse([])


async def nothing_to_unregister(request: Request) -> Response:
    """The same, of one who cleans up."""
    return Response()


def _region(request: Request) -> str:
    """The region that a path names; "" where it names none."""
    name: str = request.path_params.get("region", "")
    return name
