"""Calls over gRPC, each of which goes the way of one over HTTP: observed, limited, allowed, served.

    observer → policy's head → the message → limits → its method

Each request of a stream is a call of its own, since each has its prompts, its tokens and its end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import grpc
from google.protobuf.message import Message
from starlette.requests import Request
from starlette.types import Scope

from ....config import GatewayConfig, NanoInferenceError
from ....config.logger import get_logger
from ....kserve.keys import CODE_KEY, STATUS_KEY
from ....kserve.protobuf import METHODS, SERVICE, Method
from ...policy.caller import ROUTE
from ...policy.chain import PolicyChain
from ...policy.document import Needed
from ...server.calls import CALL_HEADER, ObservedCall
from ...server.http import ERROR_CODE, call_id_of
from ...server.server import HttpServer
from .endings import Endings
from .grpc_connection import GrpcConnection, Waiting, scope_of
from .grpc_errors import Failure, failure_of
from .grpc_methods import GrpcMethod, GrpcMethods
from .grpc_stream import InferStream, Send

Handle = Callable[[Any, Any], Awaitable[None]]

_TRACED = ("generate", "weights", "admin")
"""Calls that need one of these begin a trace; the others are asked each second, or could be."""


class GrpcCalls:
    """What answers calls.

    Attributes:
        handler: gRPC asks it for what handles a method.
        endings: Of those under way.
        waiting: Those of which a message is awaited.
    """

    def __init__(
        self, methods: GrpcMethods, policy: PolicyChain, config: GatewayConfig, http: HttpServer
    ) -> None:
        """Args: what is done for each, what each has to pass, the gateway's settings, and the
        server that observes and counts calls."""
        self.endings = Endings()
        self.waiting = Waiting(http.limits.max_requests, http.connections.count)
        self._methods = methods
        self._policy = policy
        self._observer = http.calls.observer
        self._limits = http.limits
        self._config = config
        self._scheme = "https" if config.tls_certificate else "http"
        handlers = {
            name: grpc.stream_stream_rpc_method_handler(self._handler(method))
            for name, method in METHODS.items()
        }
        self.handler = grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _handler(self, method: Method) -> Handle:
        """One for streams, which a client with one message takes for one of its kind: it is asked
        for the message when the call may go on, and says how long the answer may take."""

        async def handle(unused: Any, context: Any) -> None:
            connection = GrpcConnection(context, method, self._config, self.waiting)
            if method.streams:
                failure, trailers = await self._stream(method, context, connection)
            else:
                failure, trailers = await self._one(method, context, connection)
            context.set_trailing_metadata(tuple(trailers.items()))
            if failure is not None:
                await _abort(context, failure)

        return handle

    # --- a call with one answer -----------------------------------------------------------------

    async def _one(
        self, method: Method, context: Any, connection: GrpcConnection
    ) -> tuple[Failure | None, dict[str, str]]:
        """Returns what went wrong, and the trailers."""
        found = self._methods.unary[method.name]
        scope = scope_of(context, method.path, self._scheme)
        with self._observed(scope, found.needed) as call:
            failure = await self._attempt(
                call, scope, lambda: self._answer(found, scope, connection)
            )
            call.account.sent_bytes = connection.sent_bytes
        return failure, _trailers(call, failure)

    async def _answer(self, method: GrpcMethod, scope: Scope, connection: GrpcConnection) -> None:
        with self.endings.open():
            request = await self._entered(scope, method.needed)
            message, size = await connection.request()
            # Of probes, as over HTTP, there may be any number.
            with nullcontext() if method.needed == "nothing" else self._limits.entered() as held:
                if held is not None:
                    held.add(size)
                await connection.send(await method.answer(request, message))

    # --- a stream -------------------------------------------------------------------------------

    async def _stream(
        self, method: Method, context: Any, connection: GrpcConnection
    ) -> tuple[Failure | None, dict[str, str]]:
        needed = self._methods.stream_needs

        async def serve(message: Any, size: int, send: Send) -> None:
            scope = scope_of(context, method.path, self._scheme)
            with self._observed(scope, needed) as call:

                async def send_counted(answer: Message) -> None:
                    await send(answer)
                    call.account.sent_bytes += answer.ByteSize()

                failure = await self._attempt(
                    call, scope, lambda: self._answer_part(scope, message, size, send_counted)
                )
                if failure is not None:
                    await send_counted(_error_part(message.id, failure))

        scope = scope_of(context, method.path, self._scheme)
        failure = await self._refusal(scope, needed)
        if failure is None:
            stream = InferStream(connection, serve, self._methods.answers_in_order)
            try:
                with self.endings.open():
                    await stream.run()
            except NanoInferenceError as error:
                failure = failure_of(error)
        return failure, {} if failure is None else dict(failure.trailers())

    async def _answer_part(self, scope: Scope, message: Any, size: int, send: Send) -> None:
        request = await self._entered(scope, self._methods.stream_needs)
        with self._limits.entered() as held:
            held.add(size)
            await self._methods.stream(request, message, send)

    async def _refusal(self, scope: Scope, needed: Needed) -> Failure | None:
        """Why a stream can't begin, which is told like a call; one that can is told of by its
        requests."""
        try:
            await self._entered(scope, needed)
        except NanoInferenceError as error:
            refused = error
        else:
            return None

        async def refuse() -> None:
            raise refused

        with self._observed(scope, needed) as call:
            return await self._attempt(call, scope, refuse)

    # --- what both have -------------------------------------------------------------------------

    def _observed(self, scope: Scope, needed: Needed) -> Any:
        scope["state"][ROUTE] = (scope["path"], needed)
        return self._observer.observed(scope, scope["path"], traced=needed in _TRACED)

    async def _entered(self, scope: Scope, needed: Needed) -> Request:
        """A call that the policy lets go on, as far as its head can tell."""
        request = Request(scope)
        await self._policy.enter(request, needed)
        return request

    async def _attempt(
        self, call: ObservedCall, scope: Scope, work: Callable[[], Awaitable[None]]
    ) -> Failure | None:
        """Does a call's work, and notes how it ended. Returns what went wrong."""
        failure: Failure | None = None
        try:
            await work()
            call.status = 200
        except Exception as error:  # noqa: BLE001  # gRPC would tell the client what it says
            failure = _failure(scope, error)
            call.status = failure.status
        call.account.complete = True
        return failure


def _failure(scope: Scope, error: Exception) -> Failure:
    """What a call raised, which is logged where it is not the client's doing."""
    log = get_logger().bind(path=scope["path"], call_id=call_id_of(scope))
    if not isinstance(error, NanoInferenceError):
        log.error("grpc_handler_failed", exc_info=error)
        return failure_of(NanoInferenceError("the gateway has failed; its log says where"))
    scope["state"][ERROR_CODE] = error.code
    failure = failure_of(error)
    if failure.status >= 500:
        log.warning("grpc_call_failed", code=error.code, error=error.message)
    return failure


def _trailers(call: ObservedCall, failure: Failure | None) -> dict[str, str]:
    told = {CALL_HEADER: call.name} | call.account.headers
    lowered = {name.lower(): value for name, value in told.items()}
    return lowered if failure is None else lowered | dict(failure.trailers())


def _error_part(request_id: str, failure: Failure) -> Message:
    """The answer of a stream to a request that went wrong; the others go on."""
    answer: Any = METHODS["ModelStreamInfer"].response(error_message=failure.details)
    answer.infer_response.id = request_id
    parameters = answer.infer_response.parameters
    parameters[CODE_KEY].string_param = failure.error.code
    parameters[STATUS_KEY].int64_param = failure.number
    return answer


async def _abort(context: Any, failure: Failure) -> None:
    """Ends a call with an error."""
    try:
        await context.abort(failure.code, failure.details, context.trailing_metadata())
    except grpc.aio.InternalError:
        # It has ended: by its client, or by gRPC, which refuses what is too large itself.
        return
