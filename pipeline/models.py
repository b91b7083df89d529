"""The status of a deployment's models, from the registry and the reports of executors."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ..bus.backlog import Backlog
from ..config import ModelConfig, split_role
from ..store.board import StageReport
from ..store.loaded_adapter import LoadedAdapter
from ..store.registry import ModelRecord, ModelState
from .health import lanes_of

FACTS = (
    "model", "model_path", "aliases", "parameters", "weight_bytes", "kv_bytes", "kv_token_bytes",
    "kv_dtype", "state_bytes", "vocab_size", "dtype", "quantization", "experts", "active_experts",
    "capabilities", "max_batch_size", "load_ns",
)  # fmt: skip
"""The keys of `StageReport.load` in which executors describe their models."""


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a deployment, about a second ago.

    Fields that come from executors are 0 or empty while no lane of the model is ready.

    Attributes:
        id: The name that requests give in `model`.
        path: Its folder.
        revision: As in its settings.
        aliases: Other names.
        default: Whether requests without a model are for it.
        pinned: Whether it is never unloaded for another model.
        state: See `ModelRecord`.
        reason: The reason of the state; of a failed model the error.
        since_ns: Begin of the state, wall clock.
        load_ns: Duration of the load; 0 before it.
        memory_bytes: Memory of its processes, with their share of shared memory. 0 without a model
            manager, which measures it.
        takes_requests: Whether requests for it are routed to its stream.
        ready_lanes: Names of the lanes that serve it.
        replicas: Number of executors in these lanes.
        parameters: Number of parameters, all experts included.
        weight_bytes: Size of its weights, in all replicas together.
        kv_bytes: Size of KV, in all replicas together.
        state_bytes: Size of a sequence's recurrent state, beside its KV; 0 without.
        kv_token_bytes: Size of a token's KV in a replica, over all layers.
        max_model_len: Most tokens of a prompt and its answer.
        vocab_size: Rows of the output layer.
        dtype: Dtype of its weights.
        quantization: The forms of its codes, such as "int4-128+int8"; "" for plain weights.
        device: Device of the executors.
        is_moe: Whether it is a mixture of experts.
        n_experts: Experts per layer; 0 without experts.
        n_active_experts: Experts per token.
        ranks: Processes that share the model, in each replica.
        expert_owners: The rank of each expert; empty if each rank has a part of every one.
        capabilities: Some of "generate", "score", "embed".
        adapters: Ids of its adapters.
        waiting: Requests that no lane has taken.
        in_flight: Requests taken and not yet answered.
    """

    id: str
    path: str = ""
    revision: str = ""
    aliases: tuple[str, ...] = ()
    default: bool = False
    pinned: bool = False
    state: ModelState = "unloaded"
    reason: str = ""
    since_ns: int = 0
    load_ns: int = 0
    memory_bytes: int = 0
    takes_requests: bool = False
    ready_lanes: tuple[str, ...] = ()
    replicas: int = 0
    parameters: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    state_bytes: int = 0
    kv_token_bytes: int = 0
    max_model_len: int = 0
    vocab_size: int = 0
    dtype: str = ""
    quantization: str = ""
    device: str = ""
    is_moe: bool = False
    n_experts: int = 0
    n_active_experts: int = 0
    ranks: int = 1
    expert_owners: tuple[int, ...] = ()
    capabilities: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    waiting: int = 0
    in_flight: int = 0


def status_of(record: ModelRecord, reports: Sequence[StageReport], backlog: Backlog) -> ModelStatus:
    """Return the status of a model from its record and its stages' reports."""
    of_spec = ("id", "path", "revision", "aliases", "default", "pinned")
    of_record = ("state", "reason", "since_ns", "load_ns", "memory_bytes", "takes_requests")
    return ModelStatus(
        **{name: getattr(record.spec, name) for name in of_spec},
        **{name: getattr(record, name) for name in of_record},
        waiting=backlog.waiting,
        in_flight=backlog.pending,
        **facts_of(reports),
    )


def only_model(reports: Sequence[StageReport], backlog: Backlog) -> list[ModelStatus]:
    """Return the only model of a deployment, from its executors' reports; none without reports."""
    executors = [report for report in reports if "model_path" in report.load]
    if not executors:
        return []
    oldest = max(executors, key=lambda each: each.since_s)
    facts = facts_of(reports)
    spec = ModelConfig(
        id=str(oldest.load["model"]),
        path=str(oldest.load["model_path"]),
        aliases=_words(oldest.load.get("aliases", "")),
        default=True,
        pinned=True,
    )
    record = ModelRecord(
        spec=spec,
        state="ready" if facts["ready_lanes"] else "loading",
        since_ns=time.time_ns() - int(oldest.since_s * 1e9),
        load_ns=int(oldest.load.get("load_ns", 0)),
        takes_requests=True,
    )
    return [status_of(record, reports, backlog)]


def facts_of(reports: Sequence[StageReport]) -> dict[str, Any]:
    """Return the fields of `ModelStatus` that come from executors of the model's ready lanes."""
    ready = {lane.lane: lane for lane in lanes_of(reports) if lane.ready}
    loads = [
        report.load
        for lane in ready.values()
        for role, report in lane.stages.items()
        if split_role(role)[0] == "executor" and report.state == "ready"
    ]
    first = loads[0] if loads else {}
    numbers = {
        "parameters": "parameters",
        "kv_token_bytes": "kv_token_bytes",
        "max_model_len": "max_model_len",
        "vocab_size": "vocab_size",
        "n_experts": "experts",
        "n_active_experts": "active_experts",
        "state_bytes": "state_bytes",
    }
    return {
        "ready_lanes": tuple(ready),
        "replicas": len(loads),
        **{field: int(first.get(name, 0)) for field, name in numbers.items()},
        **{field: str(first.get(field, "")) for field in ("dtype", "quantization", "device")},
        **{
            field: sum(int(load.get(field, 0)) for load in loads)
            for field in ("weight_bytes", "kv_bytes")
        },
        "is_moe": bool(first.get("experts", 0)),
        "ranks": int(first.get("ranks", 1)),
        "expert_owners": expert_owners(first),
        "capabilities": _words(first.get("capabilities", "")),
        "adapters": tuple(adapter.id for adapter in adapters_of(reports)),
    }


def expert_owners(load: Mapping[str, object]) -> tuple[int, ...]:
    """Return the rank of each expert, from an executor's report; empty without owners."""
    return tuple(map(int, _words(load.get("expert_owners", ""))))


def _words(value: object) -> tuple[str, ...]:
    """Split a list, which reports carry as text."""
    return tuple(filter(None, str(value).split(",")))


def admits(reports: Iterable[StageReport]) -> bool:
    """Return whether an admission takes requests, so that it has the adapters of its lane. One
    that has been started anew waits for the executors before."""
    return any(
        report.stage == "admission" and report.state in ("ready", "draining") for report in reports
    )


def adapters_of(
    reports: Sequence[StageReport], lane: str | None = None
) -> tuple[LoadedAdapter, ...]:
    """Return the adapters that admission has in all lanes of a model, or in one lane.

    A lane whose admission takes no requests yet has no list, and is left out: see `admits`.
    """
    by_model: dict[str, dict[str, dict[str, LoadedAdapter]]] = {}
    for report in reports:
        if lane in (None, report.lane) and admits([report]):
            lanes = by_model.setdefault(report.model, {})
            lanes.setdefault(report.lane, {each.id: each for each in report.adapters})
    return tuple(
        first[id]
        for first, *others in (lanes.values() for lanes in by_model.values())
        for id in sorted(first)
        if all(id in each for each in others)
    )


def served_names(status: ModelStatus) -> tuple[str, ...]:
    """Return all names of a model, with its adapters."""
    return (status.id, *status.aliases, *status.adapters)
