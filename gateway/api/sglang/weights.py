"""SGLang's calls about weights: groups, updates, sessions, pausing; and about memory."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import anyio
import anyio.to_thread
import msgspec

from ....bus.control import MEMORY_TAGS, MemoryTag
from ....bus.weights import (
    ArcFormat,
    ArcWeights,
    FolderWeights,
    GroupWeights,
    InFlight,
    TensorMeta,
    WeightsSource,
)
from ....config import Int64, NanoInferenceError, RequestError, field_error, shown
from ....config.temporary import temporary_folder
from ...call import Call
from ...server.http import JsonResponse, Response, decode_object, error_response
from ...serving.fields import RefusedField, read_part
from ...serving.model_names import alias_of
from ...serving.services import Services
from .pull import pull_weights
from .requests import read_sglang_object

_BY_ITSELF = "the engine itself frees memory and records graphs"
_NEUTRAL = {
    "flush_cache": "cached prefixes of other weights are never used, flushed or not",
    "torch_empty_cache": _BY_ITSELF,
    "recapture_cuda_graph": _BY_ITSELF,
    "keep_pause": "a pause lasts until generation is continued",
    "token_step": "`weight_version` is the label",
}
_SELECTORS = ("all", "target")

_UNPACKED_AT_ONCE = 1
"""Calls whose tensors are decoded, beside the event loop; each keeps a core busy. Others wait."""

_PULLED_AT_ONCE = 1
"""Pulls, which share a disk. Others wait."""

_PIECE = 1 << 20
"""Characters of base64 that are decoded in one go, a multiple of 4: until that is done no other
thread of Python runs, the event loop's neither."""

_IN_FLIGHT: dict[str, InFlight] = {"abort": "abort", "retract": "retract", "in_place": "keep"}


B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")


class GroupBody(msgspec.Struct, frozen=True):
    """`/init_weights_update_group`."""

    master_address: str
    # AReaL writes it as text.
    master_port: Int64 | Annotated[str, msgspec.Meta(pattern="^[0-9]{1,5}$")]
    rank_offset: Int64
    world_size: Int64
    group_name: str = "weight_update_group"
    backend: Literal["gloo", "nccl"] = "nccl"


class LeaveBody(msgspec.Struct, frozen=True):
    """`/destroy_weights_update_group`."""

    group_name: str = "weight_update_group"


class UpdateBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of all updates."""

    NEUTRAL: ClassVar = _NEUTRAL
    REFUSED: ClassVar = {
        "is_async": RefusedField("an update is answered when it is in place"),
        "manifest": RefusedField("the tensors are named in the call or in their file"),
    }

    weight_version: str | None = None
    abort_all_requests: bool = False
    load_format: str = ""
    selector: str = "all"


class DistributedBody(UpdateBody, frozen=True, kw_only=True):
    """`/update_weights_from_distributed`."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[Int64, ...]]
    group_name: str = "weight_update_group"


class DiskBody(UpdateBody, frozen=True, kw_only=True):
    """`/update_weights_from_disk`. `base_version` is ours, for deltas in arc formats."""

    model_path: str
    base_version: Int64 | None = None


class PullBody(msgspec.Struct, frozen=True):
    """`/pull_weights`, slime's."""

    local_checkpoint_dir: str
    source_dir: str
    target_version: Int64


class TensorBody(UpdateBody, frozen=True, kw_only=True):
    """`/update_weights_from_tensor`."""

    serialized_named_tensors: list[str]


class SessionBody(msgspec.Struct, frozen=True):
    """`/begin_weight_update`."""

    selector: str = "all"


class PauseBody(msgspec.Struct, frozen=True):
    """`/pause_generation`."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class EmptyBody(msgspec.Struct, frozen=True):
    """`/continue_generation` and `/end_weight_update`."""

    NEUTRAL: ClassVar = _NEUTRAL


class MemoryBody(msgspec.Struct, frozen=True):
    """`/release_memory_occupation` and `/resume_memory_occupation`."""

    tags: list[MemoryTag | Literal["cuda_graph"]] | None = None

    @property
    def ours(self) -> tuple[MemoryTag, ...]:
        """CUDA graphs go and come with the memory that they use."""
        if self.tags is None:
            return MEMORY_TAGS
        return tuple(tag for tag in self.tags if tag != "cuda_graph")


class VersionBody(msgspec.Struct, frozen=True):
    """`/update_weight_version`."""

    new_version: str
    abort_all_requests: bool = True


class UnloadLoraBody(msgspec.Struct, frozen=True):
    """`/unload_lora_adapter`."""

    lora_name: str


class LoadLoraBody(UnloadLoraBody, frozen=True):
    """`/load_lora_adapter`."""

    NEUTRAL: ClassVar = dict.fromkeys(
        ("pinned", "added_tokens_config"), "there is no pool of adapters beside the loaded ones"
    )

    lora_path: str


class WeightCalls:
    """The endpoints."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._client = services.client
        self._gateway = services.config.gateway
        self._sync = services.weight_sync
        self._unpacking = anyio.CapacityLimiter(_UNPACKED_AT_ONCE)
        self._pulling = anyio.CapacityLimiter(_PULLED_AT_ONCE)

    async def init_group(self, call: Call) -> Response:
        body = await self._read(call, GroupBody)
        host = body.master_address
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        joining = self._client.join_weights_group(
            body.group_name,
            f"{host}:{body.master_port}",
            body.world_size,
            rank_offset=body.rank_offset,
            backend=body.backend,
            timeout_s=self._gateway.sync_timeout_s,
        )
        return await _outcome(joining, lambda _: f"joined the group {body.group_name!r}")

    async def destroy_group(self, call: Call) -> Response:
        name = (await self._read(call, LeaveBody)).group_name
        leaving = self._client.leave_weights_group(name)
        return await _outcome(leaving, lambda _: f"left the group {name!r}")

    async def from_distributed(self, call: Call) -> Response:
        body = await self._read(call, DistributedBody)
        _check_update(body, formats=("", "auto"))
        if not len(body.names) == len(body.dtypes) == len(body.shapes):
            raise RequestError(
                "names, dtypes and shapes differ in length",
                remedy="give one of each for each tensor",
            )
        if not body.names:
            raise RequestError("names is empty; name the tensors that are broadcast")
        # In a thread: there may be very many, and others wait for this one.
        tensors = await anyio.to_thread.run_sync(_metas, body, limiter=self._unpacking)
        return await self._take(GroupWeights(body.group_name, tensors), body)

    async def from_disk(self, call: Call) -> Response:
        body = await self._read(call, DiskBody)
        arcs: tuple[ArcFormat, ...] = get_args(ArcFormat)
        _check_update(body, formats=("", "auto", "safetensors", *arcs))
        source: WeightsSource = FolderWeights(body.model_path)
        for arc in arcs:
            if body.load_format == arc:
                if body.base_version is None:
                    raise field_error("base_version", "is missing: give the version it changes")
                source = ArcWeights(body.model_path, body.base_version, arc)
        return await self._take(source, body, whole=True, num_paused_requests=0)

    async def pull(self, call: Call) -> Response:
        """Bring a local checkpoint to a published version. It is put in place by `from_disk`."""
        body = await self._read(call, PullBody)
        local, source = Path(body.local_checkpoint_dir), Path(body.source_dir)
        base = self._services.config.engine.model_folder
        target = body.target_version
        pulling = anyio.to_thread.run_sync(
            pull_weights, local, base, source, target, limiter=self._pulling
        )
        return await _outcome(pulling, lambda _: f"version {target} is in {local}")

    async def from_tensor(self, call: Call) -> Response:
        """Tensors in the body. They go on in a file, which takes executors on this machine."""
        content = await call.read(self._gateway.max_weights_bytes)
        found = await anyio.to_thread.run_sync(decode_object, content, limiter=self._unpacking)
        del content
        body = read_part(found, TensorBody)
        _check_update(body, formats=("", "safetensors", "flattened_bucket", "direct"))
        if body.load_format != "safetensors":
            raise RequestError(
                "serialized_named_tensors holds pickles, which can run any code and are not read "
                "here; send base64 of safetensors files with load_format 'safetensors', or use "
                "update_weights_from_distributed or update_weights_from_disk",
                code="unsupported",
            )
        if not body.serialized_named_tensors:
            raise RequestError("serialized_named_tensors is empty; send at least one tensor")
        with temporary_folder("weights") as folder:
            texts = body.serialized_named_tensors
            await anyio.to_thread.run_sync(_unpack, folder, texts, limiter=self._unpacking)
            del found, texts
            return await self._take(FolderWeights(str(folder)), body)

    async def begin(self, call: Call) -> Response:
        _check_selector((await self._read(call, SessionBody)).selector)
        return await _outcome(
            self._sync.open(), lambda parts: f"a weight update session is open{_dropped(parts)}"
        )

    async def end(self, call: Call) -> Response:
        await self._read(call, EmptyBody)
        return await _outcome(self._sync.close(), _in_place)

    async def pause(self, call: Call) -> Response:
        body = await self._read(call, PauseBody)
        dropped = await self._sync.pause(_IN_FLIGHT[body.mode])
        return _ok(f"generation is paused{_dropped(dropped)}")

    async def resume(self, call: Call) -> Response:
        await self._read(call, EmptyBody)
        version = await self._sync.resume()
        return _ok(f"generation goes on; {_in_place(version)}")

    async def release_memory(self, call: Call) -> Response:
        tags = (await self._read(call, MemoryBody)).ours
        dropped = await self._sync.release_memory(tags)
        return _ok(f"released: {', '.join(tags)}{_dropped(dropped)}")

    async def resume_memory(self, call: Call) -> Response:
        tags = (await self._read(call, MemoryBody)).ours
        version = await self._sync.resume_memory(tags)
        update = "" if version is None else f"; {_in_place(version)}"
        return _ok(f"there again: {', '.join(tags)}{update}")

    async def rename(self, call: Call) -> Response:
        body = await self._read(call, VersionBody)
        if body.abort_all_requests:
            await self._client.cancel_all()
        await self._sync.rename(body.new_version)
        return _succeeded(
            f"the weights in place are called {body.new_version!r}", new_version=body.new_version
        )

    async def load_adapter(self, call: Call) -> Response:
        """Load an adapter; a loaded one of that name gets new weights."""
        body = await self._read(call, LoadLoraBody)
        if target := alias_of(body.lora_name, self._services.config.gateway.model_aliases):
            raise field_error(
                "lora_name",
                f"is {shown(body.lora_name)}, which gateway.model_aliases serves as "
                f"{shown(target)}; give the adapter another name",
            )
        loading = self._client.load_adapter(body.lora_name, body.lora_path)
        return await self._adapter_outcome(loading, body.lora_name, loaded=True)

    async def unload_adapter(self, call: Call) -> Response:
        """Unload an adapter, after its requests in flight."""
        name = (await self._read(call, UnloadLoraBody)).lora_name
        return await self._adapter_outcome(self._client.unload_adapter(name), name, loaded=False)

    async def _adapter_outcome(
        self, work: Awaitable[object], name: str, *, loaded: bool
    ) -> Response:
        served, failure = self._services.served, None
        try:
            await work
        except NanoInferenceError as error:
            failure = error
        else:
            await served.wait_for(name, loaded=loaded)
        answer = {
            "success": failure is None,
            "error_message": failure.message if failure else "",
            "loaded_adapters": {each.id: each.folder for each in await served.adapters()},
        }
        return error_response(failure, answer) if failure else JsonResponse(answer)

    async def _take(
        self, weights: WeightsSource, body: UpdateBody, *, whole: bool = False, **more: Any
    ) -> Response:
        taking = self._sync.take(
            weights, body.weight_version, abort=body.abort_all_requests, whole=whole
        )
        kept = "a part is kept; all are put in place when the update ends"
        return await _outcome(
            taking, lambda version: kept if version is None else _in_place(version), **more
        )

    async def _read(self, call: Call, kind: type[B]) -> B:
        return read_part(await read_sglang_object(call, self._services.config), kind)


def _check_update(body: UpdateBody, formats: tuple[str, ...]) -> None:
    _check_selector(body.selector)
    if body.load_format not in formats:
        known = ", ".join(repr(each) for each in formats if each)
        raise RequestError(
            f"load_format {body.load_format!r} is not supported here; leave it out, or give one "
            f"of {known}",
            code="unsupported",
        )


def _check_selector(selector: str) -> None:
    if selector not in _SELECTORS:
        raise RequestError(
            f"selector {selector!r} is not supported here: there is one model and no draft",
            code="unsupported",
            remedy="leave it out",
        )


def _metas(body: DistributedBody) -> tuple[TensorMeta, ...]:
    return tuple(
        TensorMeta(name, dtype.removeprefix("torch."), shape)
        for name, dtype, shape in zip(body.names, body.dtypes, body.shapes, strict=True)
    )


def _unpack(folder: Path, texts: list[str]) -> None:
    for index, text in enumerate(texts):
        with (folder / f"part-{index:05}.safetensors").open("wb") as file:
            try:
                for start in range(0, len(text), _PIECE):
                    file.write(b64decode(text[start : start + _PIECE], validate=True))
            except ValueError:
                raise RequestError("serialized_named_tensors must hold base64") from None


def _dropped(parts: int) -> str:
    return f"; {parts} parts of an update that was not ended are dropped" if parts else ""


def _in_place(version: int | None) -> str:
    return "the weights are as they were" if version is None else f"version {version} is in place"


def _succeeded(message: str, **more: Any) -> Response:
    return JsonResponse({"success": True, "message": message, **more})


async def _outcome(work: Awaitable[T], message_of: Callable[[T], str], **more: Any) -> Response:
    """Await some work, and return its outcome as SGLang does."""
    try:
        return _succeeded(message_of(await work), **more)
    except NanoInferenceError as error:
        return error_response(error, {"success": False, "message": error.message, **more})


def _ok(message: str) -> Response:
    return JsonResponse({"message": message, "status": "ok"})
