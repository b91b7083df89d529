"""An asyncio client of KServe models over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from time import monotonic_ns
from typing import Any

import grpc
import msgspec
import numpy as np

from ..config import NanoInferenceError
from .grpc_codec import decode_infer_response, encode_infer_request
from .parameters import (
    CODE_KEY,
    FINAL_PARAM,
    RETRY_KEY,
    STATUS_KEY,
    WANTS_FINAL_PARAM,
    deadline_params,
)
from .pool import BufferPool, PoolSlot
from .protobuf import METHODS
from .tensors import (
    Array,
    InferRequest,
    InferResponse,
    ModelSpec,
    ModelState,
    NamedTensor,
    Parameters,
    RequestedOutput,
    SharedMemory,
    TensorError,
    TensorSpec,
    byte_size,
    raw_bytes,
)

_FIRST_WAIT_S = 0.1
_MOST_WAIT_S = 5.0

_OPTIONS = (
    # The server limits the sizes that it accepts.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # While gRPC backs off before it connects again, retried calls fail at once.
    ("grpc.initial_reconnect_backoff_ms", int(_FIRST_WAIT_S * 500)),
    ("grpc.min_reconnect_backoff_ms", int(_MOST_WAIT_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", int(_MOST_WAIT_S * 500)),
)

# A server may still be writing outputs into the caller's memory when a request's deadline passes.
# The call stays open for this long, in which the server reports the end.
_GRACE_NS = 1_000_000_000

# The time to unregister each pool on exit, in case the server is gone.
_EXIT_NS = 1_000_000_000

_CODES = {
    grpc.StatusCode.CANCELLED: "cancelled",
    grpc.StatusCode.INVALID_ARGUMENT: "invalid_request",
    grpc.StatusCode.DEADLINE_EXCEEDED: "expired",
    grpc.StatusCode.NOT_FOUND: "not_found",
    grpc.StatusCode.PERMISSION_DENIED: "insufficient_scope",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "overloaded",
    grpc.StatusCode.UNAUTHENTICATED: "invalid_api_key",
    grpc.StatusCode.UNAVAILABLE: "unreachable",
    grpc.StatusCode.UNIMPLEMENTED: "unsupported",
}
"""Codes of errors without one: of other servers, and of gRPC itself."""

_STATUSES: dict[int, grpc.StatusCode] = {each.value[0]: each for each in grpc.StatusCode}


class KServeError(NanoInferenceError):
    """A failed call.

    Attributes:
        code: The server's, or one for the status.
        status: gRPC's.
        retry_after_s: Seconds after which a retry is worthwhile; None if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        status: grpc.StatusCode,
        code: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, code=code or _CODES.get(status, "internal_error"))
        self.status = status
        self.retry_after_s = retry_after_s


class _InferCall:
    """A call: its message, with tensors within it or in a slot, its time limit and its attempts.

    Attributes:
        slot: As of `KServeClient.infer`.
        message: The ModelInferRequest.
        writes: The server is to write outputs into the slot.
        failed: Attempts that no server took.
        registered: The slot's region was registered again.
    """

    def __init__(
        self,
        request: InferRequest,
        outputs: Sequence[str | NamedTensor],
        slot: PoolSlot | None,
        shared: bool,
        deadline_ns: int | None,
    ) -> None:
        """Encode a request.

        Args:
            request: The request, without outputs.
            outputs: As of `KServeClient.infer`.
            slot: The same.
            shared: Tensors go through the slot, not within the message.
            deadline_ns: When its time is over; None for never.

        Raises:
            TensorError: A tensor has no datatype.
            ValueError: The inputs don't fit the slot, or an output is to be put outside of it.
        """
        self._deadline_ns = deadline_ns
        self.failed = 0
        self.registered = False
        self.slot = slot
        self._memory = slot if shared else None
        self._places = {
            each.name: _place(each, slot) for each in outputs if isinstance(each, NamedTensor)
        }
        self.writes = shared and bool(self._places)
        names = [each if isinstance(each, str) else each.name for each in outputs]
        wanted = [
            RequestedOutput(name, self._places.get(name) if shared else None) for name in names
        ]
        self.message = encode_infer_request(
            msgspec.structs.replace(request, outputs=tuple(wanted)),
            None if self._memory is None else _stage(request.inputs, self._memory),
        )

    def left_ns(self) -> int | None:
        """Return the time left, above zero; None without a limit. Raises KServeError `expired`."""
        if self._deadline_ns is None:
            return None
        left_ns = self._deadline_ns - monotonic_ns()
        if left_ns <= 0:
            raise KServeError(
                "the call's time (budget_ns) was over before it could be sent; give it more",
                status=grpc.StatusCode.DEADLINE_EXCEEDED,
            )
        return left_ns

    def begin(self) -> int | None:
        """Set the time that the next attempt has. Returns and raises as `left_ns`."""
        left_ns = self.left_ns()
        for name, value in deadline_params(left_ns or 0).items():
            self.message.parameters[name].int64_param = value
        return left_ns

    def decode(self, message: Any) -> InferResponse:
        """Decode a ModelInferResponse, and put each output in its place.

        The arrays of outputs with a place are views of it. BYTES outputs are there as well, but
        the response has copies, as no array can show them.

        Raises:
            RequestError: The message is malformed, or an output is larger than its place.
        """
        response = decode_infer_response(message, self._memory)
        outputs = tuple(NamedTensor(each.name, self._placed(each)) for each in response.outputs)
        return msgspec.structs.replace(response, outputs=outputs)

    def _placed(self, tensor: NamedTensor) -> Array:
        place = self._places.get(tensor.name)
        if place is None or self.slot is None:
            return tensor.data
        if (size := byte_size(tensor)) > place.byte_size:
            raise TensorError(
                f"the output {tensor.name} has {size} bytes and its place {place.byte_size}; make "
                "that larger"
            )
        if self._memory is None:
            self.slot.write(place, raw_bytes(tensor))
        if tensor.data.dtype == np.object_:
            return tensor.data
        return self.slot.array_at(place, tensor.data.shape, tensor.data.dtype)


class KServeClient:
    """Calls the models of a server over gRPC.

    ```python
    async with KServeClient("127.0.0.1:8001") as client:
        answer = await client.infer("tiny", [text_tensor("text_input", "98 + 25 =")])
    ```

    Failures raise KServeError with the server's code. A call that reached no server, or one that is
    stopping, is sent again with the rest of its budget.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Mapping[str, str] | None = None,
        retries: int = 4,
        timeout_s: float = 30.0,
    ) -> None:
        """Create a client. Nothing is sent until it is used.

        Args:
            address: Host and port, such as "127.0.0.1:8001".
            api_key: The caller's key; "" for none.
            credentials: For TLS: `grpc.ssl_channel_credentials(...)`, also with a client
                certificate. None for plain text.
            metadata: Sent with each call, such as `traceparent` or `x-tenant`.
            retries: How often a call is sent again.
            timeout_s: Time limit of all calls but inference.
        """
        keys = {"authorization": f"Bearer {api_key}"} if api_key else {}
        given = {name.lower(): value for name, value in (metadata or {}).items()}
        self._metadata = tuple((given | keys).items())
        self._address = address
        self._credentials = credentials
        self._retries = retries
        self._timeout_ns = int(timeout_s * 1e9)
        self._pools: set[BufferPool] = set()
        self._channel: grpc.aio.Channel

    async def __aenter__(self) -> KServeClient:
        if self._credentials is None:
            self._channel = grpc.aio.insecure_channel(self._address, _OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(self._address, self._credentials, _OPTIONS)
        return self

    async def __aexit__(self, *error: object) -> None:
        """Unregister the pools, if the server answers; calls in flight are cancelled."""
        for pool in list(self._pools):
            with suppress(KServeError):
                await self.unregister(pool, budget_ns=_EXIT_NS)
        await self._channel.close()

    # --- inference ----------------------------------------------------------------------------

    async def infer(
        self,
        model: str,
        inputs: Iterable[NamedTensor],
        *,
        outputs: Sequence[str | NamedTensor] = (),
        slot: PoolSlot | None = None,
        budget_ns: int = 0,
        parameters: Parameters | None = None,
        id: str = "",
        version: str = "",
    ) -> InferResponse:
        """Call a model and wait for its one response.

        Args:
            model: Its name.
            inputs: Tensors in any memory. With a `slot` of a registered pool all of them go
                through it: those made by `slot.scratch` as they are, others are copied there.
            outputs: The outputs to return; empty for all. A tensor made by `slot.scratch` is the
                place of that output, and the response's tensor is a view of it.
            slot: Of a pool. If the pool isn't registered here, tensors go within the messages, and
                outputs are copied to their places: slower, otherwise the same.
            budget_ns: Time limit; 0 or less for none.
            parameters: Of the request.
            id: Of the request; the response repeats it.
            version: Of the model; "" for any.

        Returns:
            The response. Tensors in the slot end when it is released.

        Raises:
            KServeError: The server could not be reached, or refused or failed the call.
            TensorError: A tensor has no datatype, or the response is malformed.
            ValueError: The inputs don't fit the slot, or an output's place is outside of it.
        """
        deadline_ns = _deadline(budget_ns)
        request = _request(model, inputs, parameters, id, version)
        call = _InferCall(request, outputs, slot, self._is_shared(slot), deadline_ns)
        while True:
            if (limit_ns := call.begin()) is not None and call.writes:
                limit_ns += _GRACE_NS
            try:
                message = await self._call("ModelInfer", call.message, limit_ns)
            except KServeError as error:
                await self._prepare_retry(error, call)
            else:
                return call.decode(message)

    async def stream(
        self,
        model: str,
        inputs: Iterable[NamedTensor],
        *,
        outputs: Sequence[str] = (),
        slot: PoolSlot | None = None,
        budget_ns: int = 0,
        parameters: Parameters | None = None,
        id: str = "",
        version: str = "",
    ) -> AsyncGenerator[InferResponse, None]:
        """Call a model that may respond several times; yield each response as it comes.

        Arguments and errors are those of `infer`; outputs come within the messages. A caller that
        stops early cancels the request. A call is not retried after its first response.
        """
        deadline_ns = _deadline(budget_ns)
        parameters = {WANTS_FINAL_PARAM: True, **(parameters or {})}
        request = _request(model, inputs, parameters, id, version)
        call, begun = _InferCall(request, outputs, slot, self._is_shared(slot), deadline_ns), False
        while True:
            left_ns = call.begin()
            try:
                async for response in self._responses(call, left_ns):
                    begun = True
                    yield response
                return
            except KServeError as error:
                if begun:
                    raise
                await self._prepare_retry(error, call)

    async def _responses(
        self, request: _InferCall, left_ns: int | None
    ) -> AsyncGenerator[InferResponse, None]:
        """Yield the responses of one stream."""
        call = self._method("ModelStreamInfer", self._channel.stream_stream)
        call = call(timeout=_seconds(left_ns), metadata=self._metadata)
        try:
            await call.write(request.message)
            await call.done_writing()
            async for message in call:
                if message.error_message:
                    raise _stream_error(message)
                response = request.decode(message.infer_response)
                is_last = response.parameters.get(FINAL_PARAM)
                if response.outputs or not is_last:
                    yield response
                if is_last:
                    return
        except grpc.aio.AioRpcError as error:
            raise _call_error(error) from None
        finally:
            call.cancel()
        raise KServeError(
            "the stream ended before its last answer; ask again",
            status=grpc.StatusCode.UNAVAILABLE,
            code="connection_lost",
        )

    async def _prepare_retry(self, error: KServeError, call: _InferCall) -> None:
        """Return when a failed call is worth sending again; otherwise raise its error."""
        if error.code == "unknown_region" and call.slot is not None and not call.registered:
            # The server was restarted, or the address leads to another one.
            call.registered = True
            await self.register(call.slot.pool, budget_ns=call.left_ns())
            return
        if error.status is not grpc.StatusCode.UNAVAILABLE or call.failed >= self._retries:
            raise error
        wait_s = error.retry_after_s
        if wait_s is None:
            wait_s = min(_FIRST_WAIT_S * 2**call.failed, _MOST_WAIT_S)
        left_ns = call.left_ns()
        if left_ns is not None and left_ns <= wait_s * 1e9:
            raise error
        call.failed += 1
        await asyncio.sleep(wait_s)

    def _is_shared(self, slot: PoolSlot | None) -> bool:
        """Return whether a slot's pool is registered here."""
        return slot is not None and slot.pool in self._pools

    # --- information --------------------------------------------------------------------------

    async def ready(self, model: str = "", version: str = "") -> bool:
        """Return whether a call would be served now, of a model or of any. Raises KServeError."""
        if model:
            answer = await self._ask("ModelReady", name=model, version=version)
        else:
            answer = await self._ask("ServerReady")
        return bool(answer.ready)

    async def metadata(self, model: str, version: str = "") -> ModelSpec:
        """Return a model's interface. Raises KServeError."""
        found = await self._ask("ModelMetadata", name=model, version=version)
        config = (await self._ask("ModelConfig", name=model, version=version)).config
        optional = {each.name for each in config.input if each.optional}
        inputs, outputs = (
            tuple(
                TensorSpec(each.name, each.datatype, tuple(each.shape), each.name in some)
                for each in tensors
            )
            for tensors, some in ((found.inputs, optional), (found.outputs, ()))
        )
        return ModelSpec(
            name=found.name,
            versions=tuple(found.versions),
            platform=found.platform,
            inputs=inputs,
            outputs=outputs,
            decoupled=config.model_transaction_policy.decoupled,
        )

    async def index(self, *, ready: bool = False) -> list[ModelState]:
        """Return the server's models; with `ready` only ready ones. Raises KServeError."""
        answer = await self._ask("RepositoryIndex", ready=ready)
        return [
            ModelState(each.name, each.version, each.state == "READY", each.reason)
            for each in answer.models
        ]

    async def register(self, pool: BufferPool, *, budget_ns: int | None = None) -> None:
        """Register a pool's memory at the server, replacing a region of the pool's name.

        From then on calls with one of its slots go through it.

        Raises:
            KServeError: The server refuses it, or is on another machine.
            ValueError: The pool is not in shared memory.
        """
        if not pool.use_shm:
            raise ValueError(f"the pool {pool.name} is not in shared memory; make one that is")
        fields = {"name": pool.name, "key": pool.key, "byte_size": pool.n_bytes}
        await self._ask("SystemSharedMemoryRegister", budget_ns, **fields)
        self._pools.add(pool)

    async def unregister(self, pool: BufferPool, *, budget_ns: int | None = None) -> None:
        """Unregister a pool's memory; idempotent.

        Afterwards calls with one of its slots go within the messages. Raises KServeError.
        """
        self._pools.discard(pool)
        await self._ask("SystemSharedMemoryUnregister", budget_ns, name=pool.name)

    # --- calls --------------------------------------------------------------------------------

    async def _ask(self, name: str, budget_ns: int | None = None, /, **fields: Any) -> Any:
        limit_ns = self._timeout_ns if budget_ns is None else min(budget_ns, self._timeout_ns)
        return await self._call(name, METHODS[name].request(**fields), limit_ns)

    async def _call(self, name: str, message: Any, limit_ns: int | None) -> Any:
        call = self._method(name, self._channel.unary_unary)
        try:
            return await call(message, timeout=_seconds(limit_ns), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise _call_error(error) from None

    def _method(self, name: str, kind: Callable[..., Any]) -> Any:
        """Return a function that calls a method. `kind`: the channel's function for its kind."""
        method = METHODS[name]
        return kind(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )


def _deadline(budget_ns: int) -> int | None:
    """Return the end of a call that begins now, its encoding included; None without a limit."""
    return monotonic_ns() + budget_ns if budget_ns > 0 else None


def _request(
    model: str, inputs: Iterable[NamedTensor], parameters: Parameters | None, id: str, version: str
) -> InferRequest:
    return InferRequest(
        model_name=model,
        model_version=version,
        id=id,
        parameters=parameters or {},
        inputs=tuple(inputs),
    )


def _place(output: NamedTensor, slot: PoolSlot | None) -> SharedMemory:
    offset = None if slot is None else slot.offset_of(output.data)
    if slot is None or offset is None:
        raise ValueError(f"{output.name} is to be put where the slot has not made it with scratch")
    return SharedMemory(slot.pool.name, output.data.nbytes, offset)


def _stage(tensors: Sequence[NamedTensor], slot: PoolSlot) -> list[SharedMemory]:
    """Copy inputs that are outside a slot into it, and return the places of all."""
    offsets = [slot.offset_of(each.data) for each in tensors]
    outside = [index for index, offset in enumerate(offsets) if offset is None]
    raws = [raw_bytes(tensors[index]) for index in outside]
    buffers = slot.scratch([(len(raw), np.uint8) for raw in raws])
    for index, buffer, raw in zip(outside, buffers, raws, strict=True):
        buffer[:] = np.frombuffer(raw, np.uint8)
        offsets[index] = slot.offset_of(buffer)
    return [
        SharedMemory(slot.pool.name, byte_size(tensor), offset or 0)
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]


def _call_error(error: grpc.aio.AioRpcError) -> KServeError:
    trailers = dict(error.trailing_metadata() or ())
    retry_after_s = None
    with suppress(KeyError, ValueError):
        retry_after_s = max(0.0, float(trailers[RETRY_KEY]))
    return KServeError(
        error.details() or f"the call ended with {error.code().name}",
        status=error.code(),
        code=str(trailers.get(CODE_KEY, "")),
        retry_after_s=retry_after_s,
    )


def _stream_error(message: Any) -> KServeError:
    """Return the error in a ModelStreamInferResponse."""
    found = message.infer_response.parameters
    number = found[STATUS_KEY].int64_param if STATUS_KEY in found else -1
    return KServeError(
        message.error_message,
        status=_STATUSES.get(number, grpc.StatusCode.UNKNOWN),
        code=found[CODE_KEY].string_param if CODE_KEY in found else "",
    )


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e9
