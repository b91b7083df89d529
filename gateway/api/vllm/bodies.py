"""The bodies and queries of vLLM's control plane."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from ....config import Int64
from ...serving.fields import RefusedField

PACKED_BYTES = 1 << 30
"""The size of packed broadcasts, unless the trainer gives another."""

_NAMED = {"model": "the gateway finds the model by it"}

# As vLLM's `PauseMode`, without "retract".
Mode = Literal["abort", "wait", "keep"]

_BY_ITSELF = "cached prefixes of other weights are never used, flushed or not"
_NO_BUFFERS = "how many buffers rank 0 fills ahead changes nothing here"
_CUDA = "CUDA IPC handles open memory of a GPU in the same machine and are pickles, which can run "
_CUDA += "any code; use shared_memory, path, or a group"


class PauseQuery(msgspec.Struct, frozen=True):
    """`/pause`, the query."""

    NEUTRAL: ClassVar = _NAMED | {"clear_cache": _BY_ITSELF}

    mode: Mode = "abort"


class EmptyBody(msgspec.Struct, frozen=True):
    """`/pause`, `/resume` and other calls without a body."""


class AbortRequestsBody(msgspec.Struct, frozen=True):
    """`/abort_requests`."""

    request_ids: list[str] | None = None


class WorldSizeQuery(msgspec.Struct, frozen=True):
    """`/get_world_size`, the query."""

    NEUTRAL: ClassVar = _NAMED

    include_dp: bool = True


class ServerInfoQuery(msgspec.Struct, frozen=True):
    """`/server_info` with `config_format`, the query."""

    NEUTRAL: ClassVar = _NAMED

    config_format: Literal["text", "json"] = "text"


class InitInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`init_info` of `/init_weight_transfer_engine`; `backend` and `group_name` are not vLLM's."""

    NEUTRAL: ClassVar = {"packed_num_buffers": _NO_BUFFERS}
    REFUSED: ClassVar = {
        "nccl_unique_id_b64": RefusedField(
            "executors meet the trainer in a TCP store; give master_address and master_port"
        ),
    }

    master_address: str = ""
    master_port: Int64 | str = 0
    rank_offset: Int64 = 1
    world_size: Int64 = 0
    packed: bool = False
    packed_buffer_size_bytes: Int64 = PACKED_BYTES
    backend: Literal["gloo", "nccl", "disk", "shared_memory"] | None = None
    group_name: str = ""


class InitBody(msgspec.Struct, frozen=True):
    """`/init_weight_transfer_engine`."""

    init_info: InitInfo


class StartBody(msgspec.Struct, frozen=True):
    """`/start_weight_update`; `replace` is not vLLM's."""

    NEUTRAL: ClassVar = {"is_checkpoint_format": "names decide between a checkpoint's and ours"}

    replace: bool = False


class SharedMemoryInfo(msgspec.Struct, frozen=True):
    """`shared_memory` of `update_info`: POSIX segments, and (segment, offset) of each tensor."""

    segments: list[str]
    places: list[tuple[Int64, Int64]]


class UpdateInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`update_info` of `/update_weights`; `shared_memory` and `group_name` are not vLLM's."""

    REFUSED: ClassVar = dict.fromkeys(
        ("ipc_handles", "ipc_handles_pickled"), RefusedField(_CUDA)
    ) | dict.fromkeys(
        ("num_updates_list", "indices", "delta"),
        RefusedField("a sparse update is a delta: use its own call"),
    )

    path: str = ""
    names: list[str] = []
    dtype_names: list[str] = []
    shapes: list[tuple[Int64, ...]] = []
    packed: bool | None = None
    shared_memory: SharedMemoryInfo | None = None
    group_name: str = ""


class UpdateBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/update_weights`: vLLM's `update_info`, or prime-rl's `weight_dir`."""

    NEUTRAL: ClassVar = {"skip_prefix_cache_reset": _BY_ITSELF}

    update_info: UpdateInfo | list[UpdateInfo] | None = None
    weight_dir: str = ""
    step: Int64 | None = None


class FinishBody(msgspec.Struct, frozen=True):
    """`/finish_weight_update`."""

    weight_version: str | None = None


class CheckerBody(msgspec.Struct, frozen=True):
    """`/weight_checker`."""

    action: Literal["checksum", "reset", "compare"]
    baseline: dict[str, str] | None = None


class SleepQuery(msgspec.Struct, frozen=True):
    """`/sleep`, the query; `tags` is SkyRL's."""

    NEUTRAL: ClassVar = _NAMED

    level: Annotated[int, msgspec.Meta(ge=0, le=2)] = 1
    mode: Mode = "abort"
    tags: str = ""


class RpcBody(msgspec.Struct, frozen=True):
    """`/collective_rpc`: SkyRL's methods of a weight update."""

    NEUTRAL: ClassVar = {"timeout": "a call ends with what it calls"}
    REFUSED: ClassVar = {"args": RefusedField("arguments have names: give kwargs")}

    method: str
    kwargs: dict[str, Any] = {}


class ResetQuery(msgspec.Struct, frozen=True):
    """`/reset_prefix_cache`, the query."""

    NEUTRAL: ClassVar = _NAMED | {"reset_external": "tiers of KV are flushed with the cache"}
    REFUSED: ClassVar = {
        "reset_running_requests": RefusedField("running requests keep their own KV"),
    }
