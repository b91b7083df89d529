"""vLLM's calls that pause generation, replace weights and release memory."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qs

import anyio
import anyio.to_thread
import msgspec

from ....bus.control import MEMORY_TAGS, MemoryTag
from ....bus.weights import (
    FolderWeights,
    GroupWeights,
    SharedMemoryWeights,
    TensorMeta,
    WeightsSource,
)
from ....config import RequestError, WeightsError, field_error, shown
from ...call import Call
from ...server.http import JsonResponse, Response, read_object
from ...serving.fields import read_part, read_query
from ...serving.services import Services
from ...serving.weight_sync import NoSession
from .bodies import (
    PACKED_BYTES,
    AbortRequestsBody,
    EmptyBody,
    FinishBody,
    InitBody,
    InitInfo,
    PauseQuery,
    ResetQuery,
    RpcBody,
    SleepQuery,
    StartBody,
    UpdateBody,
    UpdateInfo,
)

GROUP = "weight_transfer"
"""The group's name if the trainer gives none: the prefix of its keys in the TCP store."""

_TAGS = (*MEMORY_TAGS, "scheduling")
_OF_LEVEL: tuple[tuple[MemoryTag, ...], ...] = ((), ("kv_cache",), MEMORY_TAGS)
_UNPACKED_AT_ONCE = 1
_NOTHING_OPEN = "no weight update is open; call start_weight_update first"

B = TypeVar("B", bound=msgspec.Struct)


class WeightCalls:
    """The endpoints."""

    def __init__(self, services: Services) -> None:
        self._client = services.client
        self._config = services.config
        self._submissions = services.submissions
        self._sync = services.weight_sync
        self._unpacking = anyio.CapacityLimiter(_UNPACKED_AT_ONCE)

    # --- generation ---------------------------------------------------------------------------

    async def pause(self, call: Call) -> Response:
        await self._nothing(call)
        await self._sync.pause(read_query(call, PauseQuery).mode)
        return JsonResponse({"status": "paused"})

    async def resume(self, call: Call) -> Response:
        """Let generation continue; the parts of an update without a session are put in place."""
        await self._nothing(call)
        await self._sync.resume()
        return JsonResponse({"status": "resumed"})

    async def is_paused(self, call: Call) -> Response:
        return JsonResponse({"is_paused": (await self._sync.refresh()).paused})

    async def abort_requests(self, call: Call) -> Response:
        """Abort the requests with these ids, as the routes for generation return them; without ids
        all requests of every client."""
        ids = (await self._read(call, AbortRequestsBody)).request_ids
        if ids:
            for each in ids:
                await self._submissions.abort(call.caller, each)
            number = len(ids)
        else:
            number = self._submissions.in_flight + self._submissions.waiting
            await self._submissions.abort_all()
        return JsonResponse({"status": "aborted", "aborted": number})

    # --- weights ------------------------------------------------------------------------------

    async def init_engine(self, call: Call) -> Response:
        """Join the trainer's group. A new trainer's call drops the open update of a former one."""
        info = (await self._read(call, InitBody)).init_info
        group = info.group_name or GROUP
        await self._sync.meet(group, info.packed_buffer_size_bytes if info.packed else 0)
        backend = await self._backend(info)
        if backend in ("gloo", "nccl"):
            await self._join(info, group, "nccl" if backend == "nccl" else "gloo")
        return JsonResponse({"message": "Weight transfer initialized"})

    async def shut_down_engine(self, call: Call) -> Response:
        """Leave the trainer's group, and drop an open update."""
        await self._nothing(call)
        await self._client.leave_weights_group((await self._sync.refresh()).group or GROUP)
        await self._sync.meet("", 0)
        return JsonResponse({"message": "Weight transfer shut down"})

    async def init_broadcaster(self, call: Call) -> Response:
        await read_object(call, self._config.gateway.max_body_bytes)
        raise RequestError(
            "prime-rl's broadcaster names its tensors by pickles, which can run any code and are "
            "not read here; set weight_broadcast.type to 'filesystem', which calls "
            "/update_weights with weight_dir",
            code="unsupported",
        )

    async def rpc(self, call: Call) -> Response:
        """Do what a method of SkyRL's workers does, of which the update's three are known."""
        body = await self._read(call, RpcBody)
        match body.method:
            case "skyrl_start_weight_update":
                await self._start(read_part(body.kwargs, StartBody, "kwargs"))
            case "update_weights_nccl" | "update_weights_ipc" | "update_weights":
                await self._take(read_part(body.kwargs, UpdateBody, "kwargs"))
            case "skyrl_finish_weight_update":
                await self._finish(read_part(body.kwargs, FinishBody, "kwargs"))
            case other:
                raise RequestError(
                    f"method {shown(other)} runs code of a vLLM worker, which is not here; known "
                    "ones are skyrl_start_weight_update, update_weights_nccl and "
                    "skyrl_finish_weight_update; call one of these",
                    code="unsupported",
                )
        return JsonResponse({"results": [None]})

    async def start(self, call: Call) -> Response:
        await self._start(await self._read(call, StartBody))
        return JsonResponse({"message": "Weight update started"})

    async def _start(self, body: StartBody) -> None:
        try:
            await self._sync.open(drop=body.replace)
        except WeightsError as error:
            if error.code != "weights_busy" or not self._sync.state.session:
                raise
            raise WeightsError(
                "a weight update is open already: finish it with finish_weight_update, or drop it "
                'with {"replace": true}',
                code="weights_busy",
            ) from None

    async def start_draft(self, call: Call) -> Response:
        raise RequestError(
            "draft models are not updated by trainers here; leave out start_draft_weight_update",
            code="unsupported",
        )

    async def update(self, call: Call) -> Response:
        """Take a part of the open update; or prime-rl's folder, which is a whole update."""
        found = await self._object(call)
        body = await anyio.to_thread.run_sync(read_part, found, UpdateBody, limiter=self._unpacking)
        await self._take(body)
        return JsonResponse({"status": "ok"} if body.weight_dir else {"message": "Weights updated"})

    async def _take(self, body: UpdateBody) -> None:
        if (body.update_info is None) == (not body.weight_dir):
            raise RequestError("give update_info, or prime-rl's weight_dir")
        if body.weight_dir:
            label = None if body.step is None else str(body.step)
            await self._sync.take(FolderWeights(body.weight_dir), label, whole=True)
            return
        infos = body.update_info if isinstance(body.update_info, list) else [body.update_info]
        state = await self._sync.refresh()
        sources = [
            await anyio.to_thread.run_sync(
                partial(source_of, info, state.group or GROUP, state.packed_bytes),
                limiter=self._unpacking,
            )
            for info in infos
            if info is not None
        ]
        if not sources:
            raise field_error("update_info", "is empty; name the tensors, or give a path")
        for source in sources:
            try:
                await self._sync.take(source, None, in_session=True)
            except NoSession:
                raise WeightsError(_NOTHING_OPEN, code="no_weight_update") from None

    async def finish(self, call: Call) -> Response:
        """Put all parts in place in all executors. A repeated call returns the same."""
        version = await self._finish(await self._read(call, FinishBody))
        # Without parts there is nothing to change, and the version stays.
        more: dict[str, Any] = {} if version is None else {"version": version}
        return JsonResponse({"message": "Weight update finished", **more})

    async def _finish(self, body: FinishBody) -> int | None:
        try:
            return await self._sync.close(body.weight_version, again=True)
        except NoSession as error:
            raise WeightsError(
                error.message.replace("begin one first", "call start_weight_update first"),
                code="no_weight_update",
            ) from None

    # --- memory -------------------------------------------------------------------------------

    async def sleep(self, call: Call) -> Response:
        """Pause, then release memory: level 1 the KV cache, level 2 the weights as well."""
        await self._nothing(call)
        query = read_query(call, SleepQuery)
        wanted = tags_of(call) or _OF_LEVEL[query.level]
        await self._sync.pause(query.mode, asleep=True)
        if tags := [tag for tag in MEMORY_TAGS if tag in wanted]:
            await self._sync.release_memory(tags)
        return JsonResponse({"status": "sleeping", "level": query.level})

    async def wake_up(self, call: Call) -> Response:
        """Take memory again, all or `tags`; with the last of it generation continues."""
        await self._nothing(call)
        given = tags_of(call)
        state = await self._sync.refresh()
        wanted = set(given or _TAGS)
        await self._sync.resume_memory(
            [tag for tag in MEMORY_TAGS if tag in wanted and tag in state.released]
        )
        state = self._sync.state
        status = "sleeping" if state.released or state.asleep else "awake"
        return JsonResponse({"status": status, "tags": given})

    async def is_sleeping(self, call: Call) -> Response:
        state = await self._sync.refresh()
        return JsonResponse({"is_sleeping": bool(state.asleep or state.released)})

    async def release_kv_cache(self, call: Call) -> Response:
        await self._nothing(call)
        await self._sync.release_memory(("kv_cache",))
        return JsonResponse({"status": "kv_cache_released"})

    async def reset_cache(self, call: Call) -> Response:
        """Drop all cached prefixes; running requests keep their own KV."""
        await self._nothing(call)
        read_query(call, ResetQuery)
        await self._client.flush_cache()
        return JsonResponse({"success": True})

    async def reset_encoder_cache(self, call: Call) -> Response:
        """Drop cached prefixes, those with images included. Embeddings of images are cached by
        their pixels and are dropped when new weights come."""
        await self._nothing(call)
        await self._client.flush_cache()
        return Response()

    # --- internals ----------------------------------------------------------------------------

    async def _read(self, call: Call, kind: type[B]) -> B:
        return read_part(await self._object(call), kind)

    async def _object(self, call: Call) -> dict[str, Any]:
        """Return the body without its model, by which the gateway has found this one."""
        found = await read_object(call, self._config.gateway.max_body_bytes)
        found.pop("model", None)
        return found

    async def _nothing(self, call: Call) -> None:
        await self._read(call, EmptyBody)

    async def _backend(self, info: InitInfo) -> str:
        """Return how the trainer sends, by default the group that the executors' devices have."""
        if info.backend is not None:
            return info.backend
        if not info.master_address:
            return "disk"
        reports = await self._client.deployment.reports()
        devices = [str(each.load.get("device", "")) for each in reports]
        return "nccl" if any(each.startswith("cuda") for each in devices) else "gloo"

    async def _join(self, info: InitInfo, group: str, backend: Literal["gloo", "nccl"]) -> None:
        port = str(info.master_port)
        if not info.master_address or not (port.isascii() and port.isdigit() and int(port)):
            raise field_error(
                "init_info", "needs master_address and master_port, where rank 0 has its TCP store"
            )
        if info.world_size < 2:
            raise field_error(
                "init_info.world_size", "counts the trainer and every executor's ranks: at least 2"
            )
        host = info.master_address
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        await self._client.join_weights_group(
            group,
            f"{host}:{port}",
            info.world_size,
            rank_offset=info.rank_offset,
            backend=backend,
            timeout_s=self._config.gateway.sync_timeout_s,
        )


def tags_of(call: Call) -> list[str] | None:
    """Return the `tags` of a call's query, which may come several times; None without.

    Raises:
        FieldError: One is unknown.
    """
    given = parse_qs(call.query_string.decode("latin-1")).get("tags")
    for tag in given or ():
        if tag not in _TAGS:
            raise field_error("tags", f"is {shown(tag)}; give some of {', '.join(_TAGS)}")
    return given


def source_of(info: UpdateInfo, group: str, packed_bytes: int) -> WeightsSource:
    """Return the source of a part.

    Args:
        info: Its description.
        group: The trainer's group, unless the part names one.
        packed_bytes: The size of the group's packed broadcasts; 0 if each tensor is one.

    Raises:
        FieldError: The description is not whole, or has two sources.
    """
    if info.path:
        if info.names or info.shared_memory:
            raise field_error("update_info.path", "has the tensors' names itself; give it alone")
        return FolderWeights(info.path)
    if not info.names:
        raise field_error(
            "update_info", "needs names, dtype_names and shapes of the tensors, or a path"
        )
    if not len(info.names) == len(info.dtype_names) == len(info.shapes):
        raise field_error(
            "update_info",
            "has names, dtype_names and shapes of other lengths",
            remedy="give one of each for each tensor",
        )
    tensors = tuple(
        TensorMeta(name, dtype.removeprefix("torch."), shape)
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True)
    )
    if (memory := info.shared_memory) is not None:
        if len(memory.places) != len(tensors):
            raise field_error("update_info.shared_memory", "needs one place for each tensor")
        return SharedMemoryWeights(tuple(memory.segments), tensors, tuple(memory.places))
    size = packed_bytes if info.packed is None else info.packed and (packed_bytes or PACKED_BYTES)
    return GroupWeights(info.group_name or group, tensors, int(size), packed=bool(size))
