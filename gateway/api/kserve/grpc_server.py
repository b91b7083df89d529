"""The gRPC server. Importing this imports gRPC, which takes long and starts threads.

A call takes the same way as over HTTP: observer → policy's head → the message → limits → its
method. Each request of a stream is a call of its own, with its prompts, its tokens and its end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import grpc
import msgspec
from google.protobuf.message import Message

from ....config import ConfigError, GatewayConfig, NanoInferenceError, RequestError
from ....config.logger import get_logger
from ....kserve.grpc_codec import decode_infer_request, encode_infer_response
from ....kserve.parameters import CODE_KEY, FINAL_PARAM, STATUS_KEY, WANTS_FINAL_PARAM
from ....kserve.protobuf import METHODS, SERVICE, Method
from ....kserve.tensors import InferRequest, InferResponse
from ...call import IGNORED_HEADER, MOST_IGNORED, Call
from ...caller import Needed
from ...server.connections import LINGER_S
from ...server.http import CALL_HEADER, DEFAULT_RETRY_S, EngineError, task_group
from ...server.limits import ConnectionLimits
from ...server.server import HttpServer
from ...server.tls import Certificates
from ...serving.chain import PolicyChain
from ...serving.fields import collect_ignored
from .compression import LITTLE_BYTES, run_codec
from .grpc_connection import (
    GrpcConnection,
    GrpcFailure,
    OpenScopes,
    WaitingCalls,
    call_of,
    failure_of,
)
from .operations import OPERATIONS, Operation, OperationCall
from .regions import RequestMemory
from .service import KServe, time_parameters

MOST_AT_ONCE = 64
"""Concurrent requests of one stream; the next one is read when one of them has ended."""

_MAX_INT32 = 2**31 - 1
_MAX_METADATA_BYTES = 1 << 16
# Clients may send keepalive pings this often, with or without calls in flight.
_LEAST_PING_MS = 10_000

_TRACED = ("generate", "weights", "admin")
"""Scopes whose calls begin a trace; other calls are polled."""

_OPERATIONS = {each.method: each for each in OPERATIONS}

Send = Callable[[Message], Awaitable[None]]

Outcome = tuple[GrpcFailure | None, dict[str, str]]
"""A call's failure, and its trailers."""


@dataclass
class GrpcCalls:
    """Handles calls.

    Attributes:
        kserve: The served models.
        policy: The chain that calls pass.
        config: The gateway's settings.
        http: The HTTP server, with which gRPC shares observer, limits and certificates.
        in_flight: Calls in flight.
        waiting: Calls that wait for a message.
        handler: Gives gRPC the handler of each method.
    """

    kserve: KServe
    policy: PolicyChain
    config: GatewayConfig
    http: HttpServer

    def __post_init__(self) -> None:
        self.in_flight = OpenScopes()
        self.waiting = WaitingCalls(self.http.limits.max_requests, self.http.connections.count)
        # Streams for all methods, which is the same on the wire: the handler reads the message when
        # the call may go on, and limits the time of the response.
        handlers = {
            name: grpc.stream_stream_rpc_method_handler(partial(self._handle, method))
            for name, method in METHODS.items()
        }
        self.handler = grpc.method_handlers_generic_handler(SERVICE, handlers)

    async def _handle(self, method: Method, unused: Any, context: Any) -> None:
        connection = GrpcConnection(context, method, self.config, self.waiting)
        serve = self._serve_stream if method.streams else self._serve_unary
        failure, trailers = await serve(connection)
        context.set_trailing_metadata(tuple(trailers.items()))
        if failure is not None:
            try:
                await context.abort(failure.code, failure.details, context.trailing_metadata())
            except grpc.aio.InternalError:
                # The client, or gRPC because of a message's size, has ended the call.
                return

    # --- unary calls ----------------------------------------------------------------------------

    async def _serve_unary(self, connection: GrpcConnection) -> Outcome:
        operation = _OPERATIONS.get(connection.method.name)
        needed = "generate" if operation is None else operation.needed
        call = self._call(connection)

        async def answer() -> None:
            with self.in_flight.open():
                await self.policy.enter(call, needed)
                message, size = await connection.request()
                # Health checks have no limit, as over HTTP.
                with nullcontext() if needed == "nothing" else self.http.limits.entered() as held:
                    if held is not None:
                        held.add(size)
                    if operation is None:
                        response = await self._infer(call, message)
                    else:
                        response = await self._run(operation, call, message)
                    await connection.send(response)

        with self._observed(call, needed):
            failure = await self._attempt(call, answer)
            call.account.sent_bytes = connection.sent_bytes
        trailers = {CALL_HEADER: call.id} | call.account.response_headers
        lowered = {name.lower(): value for name, value in trailers.items()}
        return failure, lowered if failure is None else lowered | failure.trailers()

    async def _run(self, operation: Operation, call: Call, message: Any) -> Message:
        name = getattr(message, "name", "") or getattr(message, "model_name", "")
        version = getattr(message, "version", "")
        asked = OperationCall(self.kserve, call, name, version, message)
        found = await operation.run(asked)
        if isinstance(found, str):
            found = not found
        elif operation.field == "regions":
            found = {each["name"]: each for each in found}
        fields = {operation.field: found} if operation.field else found or {}
        return METHODS[operation.method].response(**fields)

    async def _infer(self, call: Call, message: Any) -> Message:
        memory = self._begun(call)
        decoded = await _decode(message, memory)
        response = await self.kserve.service.infer_once(call, decoded)
        return await _encode(response, decoded, memory)

    # --- streams --------------------------------------------------------------------------------

    async def _serve_stream(self, connection: GrpcConnection) -> Outcome:
        # Of all requests of the stream, for its trailers.
        whole = self._call(connection).account

        async def serve(message: Any, size: int, send: Send) -> None:
            call = self._call(connection)
            with self._observed(call, "generate"):

                async def send_counted(answer: Message) -> None:
                    await send(answer)
                    call.account.sent_bytes += answer.ByteSize()

                async def answer() -> None:
                    await self.policy.enter(call, "generate")
                    with self.http.limits.entered() as held:
                        held.add(size)
                        await self._infer_stream(call, message, send_counted)

                failure = await self._attempt(call, answer)
                if len(whole.ignored) <= MOST_IGNORED:
                    whole.ignored.update(call.account.ignored)
                if failure is not None:
                    await send_counted(_error_message(message.id, failure))

        call = self._call(connection)
        failure: GrpcFailure | None = None
        try:
            await self.policy.enter(call, "generate")
        except NanoInferenceError as error:
            # A refused stream is observed as one call; otherwise each of its requests is.
            with self._observed(call, "generate"):
                failure = _failed(call, error)
        else:
            stream = InferStream(connection, serve, self._responds_in_order)
            try:
                with self.in_flight.open():
                    await stream.run()
            except NanoInferenceError as error:
                failure = failure_of(error)
        names = whole.ignored_names
        trailers = {IGNORED_HEADER.lower(): names} if names else {}
        return failure, trailers if failure is None else trailers | failure.trailers()

    async def _infer_stream(self, call: Call, message: Any, send: Send) -> None:
        """Send a model's responses to one request of a stream.

        Raises:
            NanoInferenceError: The request failed, perhaps after some responses.
        """
        memory = self._begun(call)
        decoded = await _decode(message, memory)
        service = self.kserve.service
        many = service.spec(decoded.model_name, decoded.model_version).decoupled

        async def respond(response: InferResponse, final: bool = not many) -> None:
            parameters = {**response.parameters, FINAL_PARAM: final}
            response = msgspec.structs.replace(response, parameters=parameters)
            encoded = await _encode(response, decoded, memory)
            await send(METHODS["ModelStreamInfer"].response(infer_response=encoded))

        await service.infer(call, decoded, respond, many=many)
        if many and decoded.parameters.get(WANTS_FINAL_PARAM) is True:
            times = time_parameters(call.account)
            name = decoded.model_name
            await respond(InferResponse(model_name=name, id=decoded.id, parameters=times), True)

    def _responds_in_order(self, message: Any) -> bool:
        """Return whether a request's response waits for those of earlier requests of the stream.

        So it does in Triton for models with one response, as few clients set request ids.
        """
        try:
            spec = self.kserve.service.spec(message.model_name, message.model_version)
        except RequestError:
            return True
        return not spec.decoupled

    # --- both -----------------------------------------------------------------------------------

    def _begun(self, call: Call) -> RequestMemory:
        """Raises RequestError: invalid_tenant, invalid_budget."""
        collect_ignored(call.account.ignored, self.config.unknown_fields)
        call.begin()
        return RequestMemory(self.kserve.regions, call.tenant)

    def _call(self, connection: GrpcConnection) -> Call:
        scheme = "https" if self.config.tls_certificate else "http"
        return call_of(connection.context, connection.method.path, scheme)

    def _observed(self, call: Call, needed: Needed) -> AbstractContextManager[None]:
        call.needed = needed
        return self.http.calls.observed(call, call.path, traced=needed in _TRACED)

    async def _attempt(self, call: Call, work: Callable[[], Awaitable[None]]) -> GrpcFailure | None:
        """Do a call's work, and record how it ended. Returns its failure."""
        try:
            await work()
        except Exception as error:  # noqa: BLE001  # gRPC would send its text to the client
            return _failed(call, error)
        call.status = 200
        call.account.complete = True
        return None


class GrpcServer(GrpcCalls):
    """Serves KServe V2 over gRPC.

    Attributes:
        port: Its port.
    """

    port = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._server = grpc.aio.server(options=_options(self.config, self.http.most))
        self._server.add_generic_rpc_handlers((self.handler,))

    def listen(self, address: str) -> None:
        """Bind the port; connections wait for `start`.

        Args:
            address: An IP address of this machine.

        Raises:
            ConfigError: The port is not available.
        """
        host = f"[{address}]" if ":" in address else address
        place = f"{host}:{self.config.grpc_port}"
        try:
            if self.http.certificates is None:
                self.port = self._server.add_insecure_port(place)
            else:
                self.port = self._server.add_secure_port(
                    place, _credentials(self.http.certificates)
                )
        except RuntimeError:
            raise ConfigError(
                f"the gateway can't listen on {self.config.host} port {self.config.grpc_port}, "
                "for gRPC: it is taken, or not allowed; choose another gateway.grpc_port or "
                "gateway.host"
            ) from None

    async def start(self) -> None:
        """Start serving."""
        await self._server.start()

    def drain(self) -> None:
        """End each stream when its requests are answered. Calls that have begun go on."""
        self.waiting.streams.close(_stopping())

    async def aclose(self, leave_s: float) -> None:
        """Stop accepting calls; those in flight are ended after so many seconds."""
        self.drain()
        stopped = anyio.Event()

        async def end_late() -> None:
            with anyio.move_on_after(leave_s):
                await stopped.wait()
            self.in_flight.close(_stopping())

        async with anyio.create_task_group() as group:
            group.start_soon(end_late)
            await self._server.stop(leave_s + LINGER_S)
            stopped.set()


@dataclass
class InferStream:
    """Serves the requests of one stream concurrently.

    Attributes:
        connection: The stream's messages.
        serve: Answers a message of so many bytes, also with an error; raises NanoInferenceError if
            a response could not be sent.
        in_order: Whether the responses to a message wait for those to earlier such messages.
    """

    connection: GrpcConnection
    serve: Callable[[Any, int, Send], Awaitable[None]]
    in_order: Callable[[Any], bool]

    def __post_init__(self) -> None:
        self._room = anyio.Semaphore(MOST_AT_ONCE)
        self._sending = anyio.Lock()
        self._last: anyio.Event | None = None

    async def run(self) -> None:
        """Return when the client has sent its last request and has all responses.

        Raises:
            NanoInferenceError: Sending failed; or reading, and all that was read is answered.
        """
        unread: NanoInferenceError | None = None
        async with task_group() as group:
            try:
                while (found := await self.connection.next_request(self._is_idle)) is not None:
                    await self._room.acquire()
                    message, size = found
                    before, done = None, anyio.Event()
                    if self.in_order(message):
                        before, self._last = self._last, done
                    group.start_soon(self._serve_one, message, size, before, done)
            except NanoInferenceError as error:
                unread = error
        if unread is not None:
            raise unread

    def _is_idle(self) -> bool:
        return self._room.value == MOST_AT_ONCE

    async def _serve_one(
        self, message: Any, size: int, before: anyio.Event | None, done: anyio.Event
    ) -> None:
        async def send(answer: Message) -> None:
            if before is not None:
                await before.wait()
            async with self._sending:
                await self.connection.send(answer)

        try:
            await self.serve(message, size, send)
        finally:
            done.set()
            self._room.release()


def _failed(call: Call, error: Exception) -> GrpcFailure:
    """Record a call's error, logged unless the client caused it. Returns the failure."""
    log = get_logger().bind(path=call.path, call_id=call.id)
    if isinstance(error, NanoInferenceError):
        call.code, call.message = error.code, error.message
        failure = failure_of(error)
        if failure.status >= 500:
            log.warning("grpc_call_failed", code=error.code, error=str(error))
    else:
        log.error("grpc_handler_failed", exc_info=error)
        failure = failure_of(NanoInferenceError("the gateway has failed; its log says where"))
    call.status = failure.status
    call.account.complete = True
    return failure


def _error_message(request_id: str, failure: GrpcFailure) -> Message:
    """Return a stream's response to a request that failed; other requests go on."""
    return METHODS["ModelStreamInfer"].response(
        error_message=failure.details,
        infer_response={
            "id": request_id,
            "parameters": {
                CODE_KEY: {"string_param": failure.error.code},
                STATUS_KEY: {"int64_param": failure.code.value[0]},
            },
        },
    )


async def _decode(message: Any, memory: RequestMemory) -> InferRequest:
    """Decode a request, in a thread if it has tensors in shared memory, which are copied."""
    little = not any(each.parameters for each in message.inputs)
    return await run_codec(partial(decode_infer_request, message, memory), is_little=little)


async def _encode(response: InferResponse, request: InferRequest, memory: RequestMemory) -> Any:
    """Encode a response, in a thread if it is large."""
    encode = partial(encode_infer_response, response, request.outputs, memory)
    little = sum(each.data.nbytes for each in response.outputs) <= LITTLE_BYTES
    return await run_codec(encode, is_little=little)


def _stopping() -> EngineError:
    return EngineError(
        "the gateway is stopping; send it again, to another one",
        code="shutting_down",
        retry_after_s=DEFAULT_RETRY_S,
    )


def _options(config: GatewayConfig, most: ConnectionLimits) -> list[tuple[str, Any]]:
    """gRPC's options, by their names in grpc/impl/channel_arg_names.h."""

    def milliseconds(seconds: float) -> int:
        return max(1, int(seconds * 1000))

    return [
        # Binding a port that another server has is an error.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", min(config.max_body_bytes, _MAX_INT32)),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.max_allowed_incoming_connections", most.connections),
        # Of one connection. Clients hold back calls beyond it, which would get no error.
        ("grpc.max_concurrent_streams", most.requests + most.connections),
        ("grpc.server_handshake_timeout_ms", milliseconds(config.head_timeout_s)),
        ("grpc.max_connection_idle_ms", milliseconds(config.keep_alive_s)),
        # A client that doesn't answer the ping has gone.
        ("grpc.keepalive_time_ms", milliseconds(config.send_timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _LEAST_PING_MS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _LEAST_PING_MS),
    ]


def _credentials(certificates: Certificates) -> Any:
    """Return server credentials that use the current certificate for each handshake."""
    given = certificates.pem

    def configuration() -> Any:
        key, chain, client_ca = certificates.pem
        return grpc.ssl_server_certificate_configuration([(key, chain)], client_ca or None)

    def changed() -> Any:
        # Runs on one of gRPC's threads. `Certificates` reads the files.
        nonlocal given
        if certificates.pem is given:
            return None
        given = certificates.pem
        return configuration()

    return grpc.dynamic_ssl_server_credentials(
        configuration(), changed, require_client_authentication=bool(given.client_ca)
    )
