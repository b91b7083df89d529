"""KServe V2 over HTTP: its routes, and inference with tensors and with plain JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....config import MAX_INT64, GatewayConfig, NanoInferenceError, RequestError, field_name, shown
from ....kserve import codec
from ....kserve.tensors import (
    MAX_DIMENSIONS,
    InferRequest,
    InferResponse,
    ModelSpec,
    NamedTensor,
    TensorSpec,
)
from ...policy.caller import caller_of
from ...policy.chain import PolicyRoute
from ...policy.document import Needed
from ...server.callers import Endpoint
from ...server.http import (
    EventStream,
    JsonResponse,
    SendEvent,
    check_containers,
    connected,
    error_headers,
    field_error,
    read_body,
    read_object,
    status_of,
)
from ...server.limits import hold
from ...serving.fields import read_part
from ...serving.origin import Origin, origin_of
from .compression import CODEC_THREADS, coding_of, compress, decompressed, wanted_coding
from .operations import MODEL, OPERATIONS, Operation, OperationCall, paths_of
from .regions import RequestMemory
from .service import KServe

PATH = "/v2"

CODE_HEADER = "X-Error-Code"
"""The header of an error's stable code; the body has the sentence alone."""

# By the protocol 4xx is "no"; clients may take 5xx for a failure.
_NOT_READY = 400

LITTLE_BYTES = 1 << 18
"""Up to this size copying and decoding is faster than waking a thread."""

# The transport's buffer takes this much before it is asked for room. Copies of 1 MiB take twice as
# long, because memory of that size is new each time.
_SENT_BYTES = 1 << 18
_MOST_DIGITS = 19

_PARAMETERS = "parameters"
_ID = "id"


class _Name(PathConvertor):
    """A name in a path, with slashes as they are or as %2F."""

    regex = ".+"


register_url_convertor("name", _Name())


def kserve_routes(kserve: KServe, config: GatewayConfig) -> list[PolicyRoute]:
    """Return all routes. The first one whose path matches is taken."""
    calls = InferCalls(kserve, config)
    endpoints: list[tuple[str, Needed, Endpoint]] = [
        (f"POST {MODEL}/infer", "generate", calls.infer),
        (f"POST {MODEL}/generate", "generate", calls.generate),
        (f"POST {MODEL}/generate_stream", "generate", calls.generate_stream),
    ]
    for operation in OPERATIONS:
        endpoint = _endpoint(operation, kserve, config.max_body_bytes)
        endpoints.append((operation.route, operation.needed, endpoint))
    return [
        PolicyRoute(f"{methods} {path}", needed, endpoint)
        for route, needed, endpoint in endpoints
        for methods, _, optional in [route.partition(" ")]
        for path in paths_of(optional)
    ]


def _endpoint(operation: Operation, kserve: KServe, max_body_bytes: int) -> Endpoint:
    async def answer(request: Request) -> Response:
        body: Any = None
        if operation.body is not None:
            body = read_part(await read_object(request, max_body_bytes), operation.body)
        path = request.path_params
        name, version = path.get("model") or path.get("region", ""), path.get("version", "")
        call = OperationCall(kserve, request, name, version, body)

        # Loading a model takes long; a client that leaves ends it.
        async with connected(request.receive) if operation.needed == "admin" else nullcontext():
            found = await operation.run(call)
        if not found and not isinstance(found, list):
            return Response()
        if isinstance(found, str):
            return JsonResponse({"error": found}, _NOT_READY, {CODE_HEADER: "not_ready"})
        return JsonResponse(found)

    return answer


# --- inference ------------------------------------------------------------------------------------


class TensorResponse(Response):
    """JSON, and binary data behind it, sent without joining them first."""

    def __init__(
        self, parts: Sequence[bytes | memoryview], header_length: int | None, coding: str = ""
    ) -> None:
        """Args: the body's parts; the length of the JSON, None for all; the compression."""
        super().__init__()
        self._parts = parts
        self.headers["Content-Length"] = str(sum(map(len, parts)))
        self.headers["Content-Type"] = "application/json"
        if header_length is not None:
            self.headers["Content-Type"] = "application/octet-stream"
            self.headers[codec.HEADER] = str(header_length)
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
    """The endpoints of inference."""

    def __init__(self, kserve: KServe, config: GatewayConfig) -> None:
        self._service = kserve.service
        self._regions = kserve.regions
        self._config = config
        # All compression together takes one core.
        self._compressing = anyio.CapacityLimiter(1)

    async def infer(self, request: Request) -> Response:
        """Call a model with tensors, which responds once."""
        name, version = _model_of(request)
        self._service.spec(name, version, caller_of(request))
        origin = origin_of(request, None)
        memory = RequestMemory(self._regions, origin.tenant)
        decoded = await self._read(request, name, version, memory)
        async with connected(request.receive):
            response = await self._service.infer_once(origin, decoded)
            return await self._response(request, decoded, response, memory)

    async def generate(self, request: Request) -> Response:
        """Call a model with plain JSON, which responds once."""
        origin, decoded = await self._read_generate(request)
        async with connected(request.receive):
            return JsonResponse(generate_json(await self._service.infer_once(origin, decoded)))

    async def generate_stream(self, request: Request) -> Response:
        """Call a model with plain JSON; each response is an event."""
        origin, decoded = await self._read_generate(request)

        async def produce(send: SendEvent) -> None:
            async def respond(response: InferResponse) -> None:
                await send(msgspec.json.encode(generate_json(response)))

            try:
                await self._service.infer(origin, decoded, respond, many=True)
            except NanoInferenceError as error:
                if not stream.committed:
                    raise
                await send(msgspec.json.encode({"error": error.message}))

        stream = EventStream(produce, self._config.comment_s)
        return stream

    async def _read(
        self, request: Request, name: str, version: str, memory: RequestMemory
    ) -> InferRequest:
        most = self._config.max_body_bytes
        body = await read_body(request, most)
        if coding := coding_of(request.headers):
            body = await decompressed(body, coding, most, partial(hold, request.scope))
        length = _header_length(request)
        json = body if length is None else body[:length]
        check_containers(json)
        decode = partial(codec.decode_http_request, name, version, body, length, memory)
        # Tensors in shared memory are copied, and may be large.
        if len(body) <= LITTLE_BYTES and b"shared_memory_region" not in json:
            return decode()
        return await anyio.to_thread.run_sync(decode, limiter=CODEC_THREADS)

    async def _response(
        self,
        request: Request,
        decoded: InferRequest,
        response: InferResponse,
        memory: RequestMemory,
    ) -> Response:
        encode = partial(
            codec.encode_http_response, response, decoded.outputs, decoded.binary_outputs, memory
        )
        little = sum(each.data.nbytes for each in response.outputs) <= LITTLE_BYTES
        if little:
            parts, length = encode()
        else:
            parts, length = await anyio.to_thread.run_sync(encode, limiter=CODEC_THREADS)
        coding = wanted_coding(request.headers)
        if coding:
            compressed = await anyio.to_thread.run_sync(
                compress, parts, coding, limiter=self._compressing
            )
            parts = [compressed]
        return TensorResponse(parts, length, coding)

    async def _read_generate(self, request: Request) -> tuple[Origin, InferRequest]:
        name, version = _model_of(request)
        spec = self._service.spec(name, version, caller_of(request))
        origin = origin_of(request, None, name)
        body = await read_object(request, self._config.max_body_bytes)
        return origin, read_generate(spec, version, body)


def _model_of(request: Request) -> tuple[str, str]:
    """The model and version in a path; "" for any version."""
    return request.path_params["model"], request.path_params.get("version", "")


def _header_length(request: Request) -> int | None:
    """The length of a body's JSON; None if all of it is.

    Raises:
        RequestError: malformed.
    """
    given = request.headers.get(codec.HEADER)
    if given is None:
        return None
    # Python's int() is slow for many digits, and takes other alphabets' digits.
    if not (given.isascii() and given.isdecimal() and len(given) < _MOST_DIGITS):
        raise RequestError(
            f"{codec.HEADER} is {shown(given)}; it must be the length of the JSON at the "
            "beginning of the body",
            code="malformed",
        )
    return int(given)


# --- `generate` -----------------------------------------------------------------------------------


def read_generate(spec: ModelSpec, version: str, body: Mapping[str, Any]) -> InferRequest:
    """Return the request in the body of `generate`, Triton's extension with plain JSON.

    A field with the name of an input is that input, at the top level or below `parameters`; any
    other field is a parameter of the request.

    Args:
        spec: The model's.
        version: The requested version; "" for any.
        body: The fields.

    Raises:
        FieldError: A field is invalid.
        TensorError: An input is invalid.
    """
    known = {each.name: each for each in spec.inputs}
    fields = dict(body)
    request_id = "" if _ID in known else fields.pop(_ID, "")
    if not isinstance(request_id, str):
        raise field_error(_ID, f"is {shown(request_id)}; it must be a string")
    more = {} if _PARAMETERS in known else fields.pop(_PARAMETERS, {})
    if not isinstance(more, dict):
        raise field_error(_PARAMETERS, f"is {shown(more)}; it must be an object")
    for name in more:
        if name in fields:
            param = field_name(name)
            raise field_error(param, f"is there twice, in {_PARAMETERS} as well; give it once")
    fields |= more
    inputs = {name: fields.pop(name) for name in list(fields) if name in known}
    return InferRequest(
        model_name=spec.name,
        model_version=version,
        id=request_id,
        inputs=tuple(_tensor(known[name], value) for name, value in inputs.items()),
        parameters={name: _parameter(name, value) for name, value in fields.items()},
    )


def generate_json(response: InferResponse) -> dict[str, Any]:
    """Return a response with its outputs by name: one element as itself, several as a list.

    Raises:
        RequestError: An output has no JSON form.
    """
    found = codec.describe_response(response) | codec.describe_parameters(response)
    for output in response.outputs:
        elements = codec.array_to_json(output)
        found[output.name] = elements[0] if len(elements) == 1 else elements
    return found


def _tensor(spec: TensorSpec, value: Any) -> NamedTensor:
    if spec.datatype == "BYTES" and isinstance(value, dict):
        # Triton accepts JSON objects for inputs that are JSON themselves.
        value = msgspec.json.encode(value).decode()
    # The shape of nested lists, by the first element of each.
    shape: list[int] = []
    inner = value
    while isinstance(inner, list) and len(shape) <= MAX_DIMENSIONS:
        shape.append(len(inner))
        inner = inner[0] if inner else None
    # A single element, or a flat list, is the last dimension of the input.
    shape = [1] * (len(spec.shape) - len(shape)) + shape
    data = value if isinstance(value, list) else [value]
    return NamedTensor(spec.name, codec.json_to_array(spec.name, spec.datatype, shape, data))


def _parameter(name: str, value: Any) -> bool | int | float | str:
    fits = not isinstance(value, int) or -(2**63) <= value <= MAX_INT64
    if isinstance(value, bool | int | float | str) and fits:
        return value
    param = field_name(name)
    raise field_error(
        param,
        f"is no input of the model, and {shown(value)} is no parameter; that is a string, "
        "a boolean, or a number that fits 64 bits",
    )


# --- calls and errors of the interface ------------------------------------------------------------


def is_called(scope: Scope) -> bool:
    """Whether a call is of this interface, with or without such a route."""
    path: str = scope.get("path", "")
    return path == PATH or path.startswith(f"{PATH}/")


def takes_compressed(scope: Scope) -> bool:
    """Whether a call's route takes compressed bodies."""
    path: str = scope.get("path", "")
    return is_called(scope) and path.endswith("/infer")


def respond(scope: Scope, error: NanoInferenceError) -> Response:
    """Return an error's response, as Triton's clients read it."""
    headers = error_headers(error) | {CODE_HEADER: error.code}
    return JsonResponse({"error": error.message}, status_of(error), headers)
