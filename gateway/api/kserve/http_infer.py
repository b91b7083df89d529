"""Tensors over HTTP: a model is called with JSON, behind which their bytes may stand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import anyio
import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....config import RequestError, shown
from ....kserve.http_codec import HEADER, decode_http_request, encode_http_response
from ....kserve.memory import TensorMemory
from ....kserve.tensors import InferRequest, InferResponse
from ...policy.caller import caller_of
from ...server.http import check_containers, read_body, while_connected
from ...server.limits import hold
from ...serving.origin import origin_of, tenant_of
from .compression import coding_of, packed, unpacked, wanted_coding
from .http_info import named
from .shared import KServe

# What is copied or decoded faster than a thread is asked to.
_MOST_HERE_BYTES = 1 << 18
# At a time: what the connection's buffer gets before it is asked whether it can take more. Of 1 MiB
# the copies take twice as long, since memory of that size is new each time.
_SENT_BYTES = 1 << 18
_MOST_DIGITS = 19


class TensorResponse(Response):
    """JSON, and the bytes of tensors behind it, none of which are put together first."""

    def __init__(
        self, parts: Sequence[bytes | memoryview], header_length: int | None, coding: str = ""
    ) -> None:
        """Args: the body's parts; how much of it is JSON, None for all; how it is compressed."""
        super().__init__()
        self._parts = parts
        self.headers["Content-Length"] = str(sum(map(len, parts)))
        self.headers["Content-Type"] = "application/json"
        if header_length is not None:
            self.headers["Content-Type"] = "application/octet-stream"
            self.headers[HEADER] = str(header_length)
        if coding:
            self.headers["Content-Encoding"] = coding

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send(start | {"headers": self.raw_headers})
        for part in self._parts:
            for begin in range(0, len(part), _SENT_BYTES):
                piece = bytes(part[begin : begin + _SENT_BYTES])
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class InferCalls:
    """The endpoint."""

    def __init__(self, kserve: KServe, max_body_bytes: int) -> None:
        """Args: what is served, and the most that a body may have, when it is unpacked too."""
        self._service = kserve.service
        self._regions = kserve.regions
        self._max_body_bytes = max_body_bytes
        # Who wants everything compressed takes one processor.
        self._packing = anyio.CapacityLimiter(1)

    async def infer(self, request: Request) -> Response:
        """Calls a model, which answers once."""
        name, version = named(request)
        self._service.spec(name, version, caller_of(request))
        tenant = tenant_of(request)
        memory = self._regions.memory(tenant)
        origin = origin_of(request, tenant, None)
        asked = await self._read(request, name, version, memory)

        async def work() -> Response:
            response = await self._service.infer_once(origin, asked)
            return await self._written(request, asked, response, memory)

        return await while_connected(request.receive, work)

    async def _read(
        self, request: Request, name: str, version: str, memory: TensorMemory
    ) -> InferRequest:
        body = await read_body(request, self._max_body_bytes)
        if coding := coding_of(request.headers):
            body = await unpacked(body, coding, self._max_body_bytes, partial(hold, request.scope))
        length = _header_length(request)
        json = body if length is None else body[:length]
        check_containers(json)
        decode = partial(decode_http_request, name, version, body, length, memory)
        # Memory is copied from, and it may be large.
        if len(body) <= _MOST_HERE_BYTES and b"shared_memory_region" not in json:
            return decode()
        return await anyio.to_thread.run_sync(decode)

    async def _written(
        self, request: Request, asked: InferRequest, response: InferResponse, memory: TensorMemory
    ) -> Response:
        encode = partial(
            encode_http_response, response, asked.outputs, asked.binary_outputs, memory
        )
        small = sum(each.data.nbytes for each in response.outputs) <= _MOST_HERE_BYTES
        parts, length = encode() if small else await anyio.to_thread.run_sync(encode)
        coding = wanted_coding(request.headers)
        if coding:
            parts = [await anyio.to_thread.run_sync(packed, parts, coding, limiter=self._packing)]
        return TensorResponse(parts, length, coding)


def _header_length(request: Request) -> int | None:
    """How much of a body is JSON; None when all of it is.

    Raises:
        RequestError: malformed.
    """
    given = request.headers.get(HEADER)
    if given is None:
        return None
    # Of digits there may be many, and other alphabets have some as well.
    if not (given.isascii() and given.isdecimal() and len(given) < _MOST_DIGITS):
        raise RequestError(
            f"{HEADER} is {shown(given)}; it must be the length of the JSON at the beginning of "
            "the body",
            code="malformed",
        )
    return int(given)
