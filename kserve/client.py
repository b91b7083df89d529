"""A client of models over gRPC, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import suppress
from time import monotonic_ns
from types import TracebackType
from typing import Any, NamedTuple

import grpc

from .deadlines import deadline_params
from .errors import KServeError, error_of, expired, stream_error
from .keys import FINAL_PARAM, WANTS_FINAL_PARAM
from .pool import BufferPool
from .pool_slot import PoolSlot
from .protobuf import METHODS
from .staging import Staged
from .tensors import InferResponse, ModelSpec, NamedTensor, Parameters, TensorSpec

_FIRST_WAIT_S = 0.1
_MOST_WAIT_S = 5.0

_OPTIONS = (
    # Tensors are as large as they are; a server says for itself how much it takes.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # While gRPC waits before it connects again, a call that is sent again fails at once.
    ("grpc.initial_reconnect_backoff_ms", int(_FIRST_WAIT_S * 500)),
    ("grpc.min_reconnect_backoff_ms", int(_MOST_WAIT_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", int(_MOST_WAIT_S * 500)),
)

# Behind a request's deadline a server may still be writing its outputs into memory of ours, so the
# call is left open for a moment in which it says that it has ended.
_GRACE_NS = 1_000_000_000

# How long whoever leaves waits for a server that may be gone.
_PARTING_NS = 1_000_000_000


class IndexedModel(NamedTuple):
    """A model of a server's index.

    Attributes:
        name: As it is called.
        version: Which one.
        ready: Whether a call would be served now.
        reason: Why not.
    """

    name: str
    version: str
    ready: bool
    reason: str


class _Deadline:
    """When a call's time is over, on this process's clock."""

    def __init__(self, budget_ns: int) -> None:
        self._at_ns = monotonic_ns() + budget_ns if budget_ns > 0 else None

    def left_ns(self) -> int | None:
        """What is left, more than none; None without a limit. Raises KServeError `expired`."""
        if self._at_ns is None:
            return None
        left_ns = self._at_ns - monotonic_ns()
        if left_ns <= 0:
            raise expired()
        return left_ns


class _Tries:
    """What has become of a call so far.

    Attributes:
        failed: How often nobody took it.
        registered: Whether the server was told of the call's region again.
    """

    def __init__(self) -> None:
        self.failed = 0
        self.registered = False


class KServeClient:
    """Calls the models of a server over gRPC.

    ```python
    async with KServeClient("127.0.0.1:8001") as client:
        answer = await client.infer("tiny", [text_tensor("text_input", "98 + 25 =")])
    ```

    What fails raises KServeError, with the server's own code. A call that found nobody, or was
    turned away by a server that stops, is sent again, with what is then left of its budget.
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
        """A client of the server at an address. Nothing is sent until it is used.

        Args:
            address: Host and port, such as "127.0.0.1:8001".
            api_key: The caller's key; "" for none.
            credentials: For TLS: `grpc.ssl_channel_credentials(...)`, which also takes a
                certificate of the client's own. None for a connection without.
            metadata: What else each call brings, such as `traceparent` or `x-tenant`.
            retries: How often a call is sent again.
            timeout_s: How long everything but inference may take.
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
            self._channel = grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(
                self._address, self._credentials, options=_OPTIONS
            )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Has the server leave the pools' memory, if it answers; calls under way are cancelled."""
        for pool in list(self._pools):
            with suppress(KServeError):
                await self.unregister(pool, budget_ns=_PARTING_NS)
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
        """Calls a model and waits for its one answer.

        Args:
            model: Its name.
            inputs: Its tensors, in any memory. With a `slot` of a registered pool all of them go
                through it: those that `slot.scratch` made as they are, others are copied there.
            outputs: The outputs that are wanted, all when empty. A tensor that `slot.scratch` made
                is where that output is to be put; the answer's tensor is then a view of it.
            slot: Of a pool. Where that is not registered here, tensors go within the messages, and
                outputs are copied to where they are to be put: slower, and otherwise the same.
            budget_ns: How long it may take; 0 or less for no limit.
            parameters: What the request says besides.
            id: What it is called; the answer repeats it.
            version: Of the model; "" for any.

        Returns:
            The answer. What lies in the slot is dead when that is released.

        Raises:
            KServeError: The server could not be reached, or refused or failed the call.
            TensorError: A tensor has no datatype, or the answer can't be read.
            ValueError: The inputs don't fit the slot, or an output is to be put elsewhere.
        """
        deadline = _Deadline(budget_ns)
        staged = Staged(
            model,
            inputs,
            outputs,
            slot,
            self._has(slot),
            parameters=parameters,
            id=id,
            model_version=version,
        )
        tries = _Tries()
        while True:
            left_ns = self._brief(staged, deadline)
            grace_ns = _GRACE_NS if staged.writes else 0
            try:
                message = await self._call(
                    "ModelInfer", staged.message, None if left_ns is None else left_ns + grace_ns
                )
            except KServeError as error:
                await self._before_next(error, tries, slot, deadline)
                continue
            return staged.taken(message)

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
        """Calls a model that may answer several times; yields each answer as it comes.

        The arguments, and what it raises, are those of `infer`; outputs come within the messages.
        When the caller stops before the end, the request is cancelled. A call is not sent again
        once it was answered.
        """
        deadline = _Deadline(budget_ns)
        asked = {WANTS_FINAL_PARAM: True, **(parameters or {})}
        staged = Staged(
            model,
            inputs,
            outputs,
            slot,
            self._has(slot),
            parameters=asked,
            id=id,
            model_version=version,
        )
        tries, begun = _Tries(), False
        while True:
            try:
                async for response in self._answers(staged, self._brief(staged, deadline)):
                    begun = True
                    yield response
                return
            except KServeError as error:
                if begun:
                    raise
                await self._before_next(error, tries, slot, deadline)

    async def _answers(
        self, staged: Staged, left_ns: int | None
    ) -> AsyncGenerator[InferResponse, None]:
        """The answers of one stream, up to the last one."""
        method = METHODS["ModelStreamInfer"]
        call = self._channel.stream_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )(timeout=_seconds(left_ns), metadata=self._metadata)
        try:
            await call.write(staged.message)
            await call.done_writing()
            async for answer in call:
                if answer.error_message:
                    raise stream_error(answer)
                response = staged.taken(answer.infer_response)
                is_last = response.parameters.get(FINAL_PARAM)
                if response.outputs or not is_last:
                    yield response
                if is_last:
                    return
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None
        finally:
            call.cancel()
        raise KServeError(
            "the stream ended before its last answer; ask again",
            status=grpc.StatusCode.UNAVAILABLE,
            code="connection_lost",
        )

    def _brief(self, staged: Staged, deadline: _Deadline) -> int | None:
        """Tells a request how much time it has now, and returns it.

        Raises:
            KServeError: None is left, which must not be sent: it would mean no limit.
        """
        left_ns = deadline.left_ns()
        for name, value in deadline_params(left_ns or 0).items():
            staged.message.parameters[name].int64_param = value
        return left_ns

    async def _before_next(
        self, error: KServeError, tries: _Tries, slot: PoolSlot | None, deadline: _Deadline
    ) -> None:
        """Returns when a call that failed is worth sending again; raises its error if never."""
        if error.code == "unknown_region" and slot is not None and not tries.registered:
            # The server has been started anew, or it is another one behind the same address.
            tries.registered = True
            await self.register(slot.pool, budget_ns=deadline.left_ns())
            return
        if error.status is not grpc.StatusCode.UNAVAILABLE or tries.failed >= self._retries:
            raise error
        wait_s = error.retry_after_s
        if wait_s is None:
            wait_s = min(_FIRST_WAIT_S * 2**tries.failed, _MOST_WAIT_S)
        left_ns = deadline.left_ns()
        if left_ns is not None and left_ns <= wait_s * 1e9:
            raise error
        tries.failed += 1
        await asyncio.sleep(wait_s)

    def _has(self, slot: PoolSlot | None) -> bool:
        """Whether a slot lies in memory that was registered here."""
        return slot is not None and slot.pool in self._pools

    # --- what there is ------------------------------------------------------------------------

    async def ready(self, model: str = "", version: str = "") -> bool:
        """Whether a call would be served now, of a model or of any. Raises KServeError."""
        if model:
            answer = await self._ask("ModelReady", name=model, version=version)
        else:
            answer = await self._ask("ServerReady")
        return bool(answer.ready)

    async def metadata(self, model: str, version: str = "") -> ModelSpec:
        """What a model takes and gives. Raises KServeError."""
        told = await self._ask("ModelMetadata", name=model, version=version)
        config = (await self._ask("ModelConfig", name=model, version=version)).config
        optional = {each.name for each in config.input if each.optional}
        return ModelSpec(
            name=told.name,
            versions=tuple(told.versions),
            platform=told.platform,
            inputs=tuple(
                TensorSpec(each.name, each.datatype, tuple(each.shape), each.name in optional)
                for each in told.inputs
            ),
            outputs=tuple(
                TensorSpec(each.name, each.datatype, tuple(each.shape)) for each in told.outputs
            ),
            decoupled=config.model_transaction_policy.decoupled,
        )

    async def index(self, *, ready: bool = False) -> list[IndexedModel]:
        """The server's models; with `ready` only those that are. Raises KServeError."""
        answer = await self._ask("RepositoryIndex", ready=ready)
        return [
            IndexedModel(each.name, each.version, each.state == "READY", each.reason)
            for each in answer.models
        ]

    async def register(self, pool: BufferPool, *, budget_ns: int | None = None) -> None:
        """Has the server attach a pool's memory, under the pool's name, instead of any before.

        From then on calls with one of its slots go through it.

        Raises:
            KServeError: The server does not, or is on another machine.
            ValueError: The pool is not in shared memory.
        """
        if not pool.use_shm:
            raise ValueError(f"the pool {pool.name} is not in shared memory; make one that is")
        await self._ask(
            "SystemSharedMemoryRegister",
            budget_ns,
            name=pool.name,
            key=pool.key,
            byte_size=pool.n_bytes,
        )
        self._pools.add(pool)

    async def unregister(self, pool: BufferPool, *, budget_ns: int | None = None) -> None:
        """Has the server leave a pool's memory; nothing happens when it has not attached it.

        Calls with one of its slots go within the messages afterwards. Raises KServeError.
        """
        self._pools.discard(pool)
        await self._ask("SystemSharedMemoryUnregister", budget_ns, name=pool.name)

    # --- calls --------------------------------------------------------------------------------

    async def _ask(self, name: str, budget_ns: int | None = None, /, **fields: Any) -> Any:
        limit_ns = self._timeout_ns if budget_ns is None else min(budget_ns, self._timeout_ns)
        return await self._call(name, METHODS[name].request(**fields), limit_ns)

    async def _call(self, name: str, message: Any, limit_ns: int | None) -> Any:
        method = METHODS[name]
        call = self._channel.unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        try:
            return await call(message, timeout=_seconds(limit_ns), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e9
