"""KServe V2 over HTTP: its routes, and inference with tensors and with plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import msgspec

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
from ...call import Call
from ...caller import Needed
from ...server.http import (
    Endpoint,
    EventStream,
    JsonResponse,
    PartsResponse,
    Response,
    SendEvent,
    check_containers,
    connected,
    error_headers,
    field_error,
    read_object,
    status_of,
)
from ...serving.fields import read_part
from ..routes import PolicyRoute
from .compression import (
    LITTLE_BYTES,
    coding_of,
    compress,
    decompressed,
    run_codec,
    wanted_coding,
)
from .operations import MODEL, OPERATIONS, Operation, OperationCall, paths_of
from .regions import RequestMemory
from .service import KServe

PATH = "/v2"

CODE_HEADER = "X-Error-Code"
"""The header of an error's stable code; the body has the sentence alone."""

# By the protocol 4xx is "no"; clients may take 5xx for a failure.
_NOT_READY = 400

_MOST_DIGITS = 19

_PARAMETERS = "parameters"
_ID = "id"


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
    async def answer(call: Call) -> Response:
        body: Any = None
        if operation.body is not None:
            body = read_part(await read_object(call, max_body_bytes), operation.body)
        path = call.params
        name, version = path.get("model") or path.get("region", ""), path.get("version", "")
        asked = OperationCall(kserve, call, name, version, body)

        # Loading a model takes long; a client that leaves ends it.
        async with connected(call.cancelled) if operation.needed == "admin" else nullcontext():
            found = await operation.run(asked)
        if not found and not isinstance(found, list):
            return Response()
        if isinstance(found, str):
            return JsonResponse({"error": found}, _NOT_READY, {CODE_HEADER: "not_ready"})
        return JsonResponse(found)

    return answer


# --- inference ------------------------------------------------------------------------------------


class InferCalls:
    """The endpoints of inference."""

    def __init__(self, kserve: KServe, config: GatewayConfig) -> None:
        self._service = kserve.service
        self._regions = kserve.regions
        self._config = config
        # All compression together takes one core.
        self._compressing = anyio.CapacityLimiter(1)

    async def infer(self, call: Call) -> Response:
        """Call a model with tensors, which responds once."""
        name, version = _model_of(call)
        self._service.spec(name, version, call.caller)
        call.begin()
        memory = RequestMemory(self._regions, call.tenant)
        decoded = await self._read(call, name, version, memory)
        async with connected(call.cancelled):
            response = await self._service.infer_once(call, decoded)
            return await self._response(call, decoded, response, memory)

    async def generate(self, call: Call) -> Response:
        """Call a model with plain JSON, which responds once."""
        decoded = await self._read_generate(call)
        async with connected(call.cancelled):
            return JsonResponse(generate_json(await self._service.infer_once(call, decoded)))

    async def generate_stream(self, call: Call) -> Response:
        """Call a model with plain JSON; each response is an event."""
        decoded = await self._read_generate(call)

        async def produce(send: SendEvent) -> None:
            async def respond(response: InferResponse) -> None:
                await send(msgspec.json.encode(generate_json(response)))

            try:
                await self._service.infer(call, decoded, respond, many=True)
            except NanoInferenceError as error:
                if not stream.committed:
                    raise
                await send(msgspec.json.encode({"error": error.message}))

        stream = EventStream(produce, self._config.comment_s)
        return stream

    async def _read(
        self, call: Call, name: str, version: str, memory: RequestMemory
    ) -> InferRequest:
        most = self._config.max_body_bytes
        body = await call.read(most)
        if coding := coding_of(call):
            body = await decompressed(body, coding, most, call.hold)
        length = _header_length(call)
        json = body if length is None else body[:length]
        check_containers(json)
        decode = partial(codec.decode_http_request, name, version, body, length, memory)
        # Tensors in shared memory are copied, and may be large.
        little = len(body) <= LITTLE_BYTES and b"shared_memory_region" not in json
        return await run_codec(decode, is_little=little)

    async def _response(
        self,
        call: Call,
        decoded: InferRequest,
        response: InferResponse,
        memory: RequestMemory,
    ) -> Response:
        encode = partial(
            codec.encode_http_response, response, decoded.outputs, decoded.binary_outputs, memory
        )
        little = sum(each.data.nbytes for each in response.outputs) <= LITTLE_BYTES
        parts, length = await run_codec(encode, is_little=little)
        coding = wanted_coding(call)
        if coding:
            compressed = await anyio.to_thread.run_sync(
                compress, parts, coding, limiter=self._compressing
            )
            parts = [compressed]
        headers = {"Content-Type": "application/json"}
        if length is not None:
            headers = {"Content-Type": "application/octet-stream", codec.HEADER: str(length)}
        if coding:
            headers["Content-Encoding"] = coding
        return PartsResponse(parts, headers)

    async def _read_generate(self, call: Call) -> InferRequest:
        name, version = _model_of(call)
        spec = self._service.spec(name, version, call.caller)
        call.begin(requested_model=name)
        body = await read_object(call, self._config.max_body_bytes)
        return read_generate(spec, version, body)


def _model_of(call: Call) -> tuple[str, str]:
    """Return the model and version in a path; "" for any version."""
    return call.params["model"], call.params.get("version", "")


def _header_length(call: Call) -> int | None:
    """Return the length of a body's JSON; None if all of it is.

    Raises:
        RequestError: malformed.
    """
    given = call.header(codec.HEADER)
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
        "a boolean, or a number that fits 64 bits; leave it out",
    )


# --- calls and errors of the interface ------------------------------------------------------------


def is_called(call: Call) -> bool:
    """Return whether a call is of this interface, with or without such a route."""
    path = call.path
    return path == PATH or path.startswith(f"{PATH}/")


def takes_compressed(call: Call) -> bool:
    """Return whether a call's route takes compressed bodies."""
    return is_called(call) and call.path.endswith("/infer")


def respond(call: Call, error: NanoInferenceError) -> Response:
    """Return an error's response, as Triton's clients read it."""
    headers = error_headers(error) | {CODE_HEADER: error.code}
    return JsonResponse({"error": error.message}, status_of(error), headers)
