"""All settings with their defaults, as frozen structs that check ranges when built."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal, get_args

from .base import HUGE, TINY, NonNegativeInt, PositiveInt, Range, Seconds, Section
from .errors import ConfigError
from .models import MOST_ID_LENGTH
from .redact import REDIS_SCHEMES, redact

Stage = Literal["admission", "fairness", "batching", "executor", "streaming"]

STAGES: tuple[Stage, ...] = get_args(Stage)
"""The five stages in pipeline order."""

ReplicaRole = Literal["prefill", "decode", "both"]
"""A replica's share of the work: compute prompts, generate tokens, or both."""

MOST_REPLICAS = 64
"""Limit of `pipeline.replicas`."""

DEFAULT_URL = "redis://127.0.0.1:6390"
"""Address of `up`'s embedded server, and the clients' default.

Not 6379, so that a local Redis and its data aren't touched by accident.
"""


FiniteSeconds = Annotated[float, Range("finite, at least 0", 0, HUGE)]


class SchedulerConfig(Section, frozen=True, forbid_unknown_fields=True):
    """Limits of `schedule()`, per step."""

    max_batch_size: PositiveInt
    max_tokens_per_batch: PositiveInt
    block_size: PositiveInt


MOST_SHARDS = 64
"""Limit of `bus.shards`."""


class BusConfig(Section, frozen=True, forbid_unknown_fields=True):
    """The message transport.

    Attributes:
        url: "memory", or a Redis URL: redis://, rediss:// or unix:// for one server,
            redis+sentinel://host:port,host:port/service for a master named by sentinels,
            redis+cluster://host:port,host:port for a cluster.
        links: "auto" keeps a link in memory when both ends run in this process; "redis" carries
            every link over Redis.
        prefix: Prefix of every Redis key.
        lane: Name of this pipeline among those that share a requests stream.
        model: The model whose requests stream this is, in a deployment of several; "" for a single
            model.
        group: Consumer group of the requests stream.
        shards: Shards of the requests stream and of the results stream on Redis with which a
            deployment begins; `nano-inference shards` changes their number while it runs.
        results_ttl_s: Seconds that a finished request's output stays readable on Redis.
        results_maxlen: Entries kept in the shared results stream.
        kv_events_maxlen: Entries kept in the stream of KV events.
        link_capacity: Messages buffered on one link before its sender waits.
        max_request_bytes: Size limit of a request; larger ones are refused before parsing.
        max_result_bytes: Size limit of one result as JSON; a request that may exceed it is refused.
            Redis takes at most 512 MiB in one value, unless configured lower.
        calls_max_bytes: Bytes of all durable calls of gateways (stored responses, calls with an
            idempotency key, resumable streams), in memory or on Redis. A tenant may use as much as
            is left free: alone a half, two a third each.
        trees_max_bytes: Bytes of the token trees of all sessions, in memory or on Redis, shared by
            tenants as `calls_max_bytes` is. 0 keeps none.
        trees_ttl_s: Seconds that a session's token tree is kept after its first turn.
    """

    SECTION: ClassVar[str] = "bus"
    SECRETS: ClassVar[frozenset[str]] = frozenset(("url",))

    url: str = "memory"
    links: Literal["auto", "redis"] = "auto"
    prefix: str = "nano"
    lane: str = "0"
    model: str = ""
    group: str = "admission"
    shards: Annotated[int, Range(f"from 1 to {MOST_SHARDS}", 1, MOST_SHARDS)] = 1
    results_ttl_s: PositiveInt = 3600
    results_maxlen: PositiveInt = 10_000
    kv_events_maxlen: PositiveInt = 10_000
    link_capacity: PositiveInt = 1024
    max_request_bytes: PositiveInt = 4 << 20
    max_result_bytes: Annotated[int, Range("at least 65536", 1 << 16)] = 256 << 20
    calls_max_bytes: PositiveInt = 128 << 20
    trees_max_bytes: NonNegativeInt = 0
    trees_ttl_s: PositiveInt = 86_400

    def _shown(self, name: str) -> Any:
        return redact(self.url) if name == "url" else super()._shown(name)

    def check(self) -> None:
        if self.url != "memory" and self.url.partition("://")[0] not in REDIS_SCHEMES:
            # Without the value, which may be a password in the wrong place.
            raise ConfigError(
                f"bus.url has {'another scheme' if '://' in self.url else 'no scheme'}",
                "it must be 'memory', or begin with redis://, rediss://, unix://, "
                "redis+sentinel:// or redis+cluster://",
            )
        self.require(
            "prefix",
            bool(self.prefix) and not set(self.prefix) & {"{", "}"},
            "not empty, without braces (which would decide where a cluster keeps all keys)",
        )
        self.require(
            "lane",
            0 < len(self.lane) <= 64
            and self.lane.isprintable()
            and not set(self.lane) & set(": {}"),
            "1 to 64 printable characters, without spaces, colons and braces",
        )
        self.require(
            "model",
            len(self.model) <= MOST_ID_LENGTH
            and (not self.model or self.model.isprintable())
            and not set(self.model) & set(" {}"),
            f"at most {MOST_ID_LENGTH} printable characters, without spaces and braces",
        )
        self.require(
            "shards",
            self.shards == 1 or not self.model,
            "1 in a deployment of several models, each of which has a stream of its own",
        )


class AdmissionConfig(Section, frozen=True, forbid_unknown_fields=True):
    """Admission limits.

    Attributes:
        max_in_flight: Requests inside the pipeline; more wait on the requests stream.
        max_queued: Requests that may wait unread on the Redis requests stream; beyond that, the
            newest requests of the tenant with most waiting are refused as "overloaded".
        max_samples: Largest `n` of one request.
        max_constraint_bytes: Largest `sampling.constraint`, as JSON.
        max_lane_deaths: Consecutive lane failures, without a token in between, after which a
            request moves to the dead letters.
        share_prefixes_across_tenants: Whether tenants share cached KV of equal prompt beginnings.
            If so, a tenant can detect prompts of others by their timing.
        lease_s: Seconds without a heartbeat after which another pipeline on the same requests
            stream takes over this one's requests.
        recipes: Whether each completion has its recipe, with which `replay` computes it again
            (docs/replay.md).
    """

    SECTION: ClassVar[str] = "admission"

    max_in_flight: PositiveInt = 1024
    max_queued: PositiveInt = 10_000
    max_samples: PositiveInt = 64
    max_constraint_bytes: PositiveInt = 65_536
    max_lane_deaths: PositiveInt = 3
    share_prefixes_across_tenants: bool = False
    lease_s: Annotated[float, Range("from 0.05 to 86400 (a day)", 0.05, 86_400)] = 30.0
    recipes: bool = True


MAX_PRIORITY = 1000
"""The highest priority of a request; the lowest is as far below 0."""

BACKGROUND = -MAX_PRIORITY
"""The priority of lines of batches, which run while nothing else does."""


class FairnessConfig(Section, frozen=True, forbid_unknown_fields=True):
    """Scheduling between requests and tenants. docs/fairness.md has the rule and its guarantees.

    Attributes:
        aging_s: Seconds of waiting that equal one priority level.
        prefill_weight: Service counted per computed prompt token.
        decode_weight: Service counted per generated token.
        tenant_weights: Shares of tenants by name; the default is 1.
        locality_tokens: Service by which a tenant may be ahead and still go first because its
            prompt's beginning is probably cached; 0 is off.
        enable_preemption: Whether a high-priority request may preempt a running one of lower
            effective priority that is not high-priority.
        high_priority_threshold: Lowest priority that is high: such requests may preempt, are never
            preempted, and have no time slices.
        max_timeslice_tokens: Tokens after which a sequence pauses if a waiting request goes first;
            0 is off.
        max_preemptions: Preemptions after which a sequence is not preempted again.
        deadline_order: Whether a tenant's requests of equal priority run in order of their
            deadlines.
        expire_hopeless: Whether a request that can't finish before its deadline expires before it
            runs.
        tenant_timeslice_tokens: Generated tokens per paused sequence, when a request of another
            tenant goes first and finds no room; 0 is off.
        background_beside: Sequences of the lowest priority, -1000, that may run beside others. The
            rest of them run only while nothing else waits or runs; they never age.
        exchange_interval_s: Seconds after which lanes of one model send each other what they have
            served to each tenant, so that shares hold over all of them; 0 is off.
    """

    SECTION: ClassVar[str] = "fairness"

    aging_s: Annotated[float, Range("above 0", TINY, HUGE)] = 2.0
    prefill_weight: Annotated[float, Range("finite, at least 0", 0, HUGE)] = 1.0
    decode_weight: Annotated[float, Range("above 0", TINY, HUGE)] = 2.0
    tenant_weights: dict[str, float] = {}  # noqa: RUF012
    locality_tokens: NonNegativeInt = 0
    enable_preemption: bool = False
    high_priority_threshold: int = 5
    max_timeslice_tokens: NonNegativeInt = 0
    max_preemptions: NonNegativeInt = 3
    deadline_order: bool = False
    expire_hopeless: bool = True
    tenant_timeslice_tokens: NonNegativeInt = 64
    background_beside: NonNegativeInt = 0
    exchange_interval_s: Annotated[
        float, Range("from 0.05 to 3600, or 0 (off)", 0.05, 3600, also=0)
    ] = 0.0

    def check(self) -> None:
        self.require(
            "tenant_weights",
            all(math.isfinite(weight) and weight > 0 for weight in self.tenant_weights.values()),
            "finite numbers above 0 by tenant",
        )


class PipelineConfig(Section, frozen=True, forbid_unknown_fields=True):
    """Stages of this process, and their supervision.

    Attributes:
        stages: The stages of this process.
        replicas: Pairs of batching and executor, behind one admission, fairness and streaming stage
            each. All processes of a pipeline must agree.
        replica: The replica that this process runs, from 0; None for all.
        roles: For each replica, "prefill", "decode" or "both"; empty: each does both. A replica
            that prefills computes a prompt and its first token; one that decodes takes over the KV
            and continues.
        max_restarts: Restarts of one stage within `restart_window_s` before the process exits.
        restart_window_s: Seconds after which a failure no longer counts.
        restart_backoff_s: Wait before the second restart within `restart_window_s`; doubles up to
            10 s. The first restart is at once.
        drain_timeout_s: Time limit for requests in flight after SIGTERM.
        stall_timeout_s: Longest time without a token or a step while requests are in flight; then
            `/progressz` and `health --progress` call the pipeline stalled.
        standby: Stages for which `up` keeps a second process, which has loaded all and takes over
            when the first one ends. On a CPU an executor and its standby share the weights that
            they have loaded, but not later updates of them, nor their KV cache.
        start_method: How `up` starts processes: "forkserver" forks them from a process that has
            imported the modules, "spawn" starts each as a program. On other systems than Linux it
            is "spawn".
    """

    SECTION: ClassVar[str] = "pipeline"

    stages: tuple[Stage, ...] = STAGES
    replicas: Annotated[int, Range(f"from 1 to {MOST_REPLICAS}", 1, MOST_REPLICAS)] = 1
    replica: int | None = None
    roles: tuple[ReplicaRole, ...] = ()
    max_restarts: NonNegativeInt = 5
    restart_window_s: FiniteSeconds = 60.0
    restart_backoff_s: FiniteSeconds = 0.2
    drain_timeout_s: FiniteSeconds = 30.0
    stall_timeout_s: FiniteSeconds = 60.0
    standby: tuple[Stage, ...] = ()
    start_method: Literal["forkserver", "spawn"] = "forkserver"

    def check(self) -> None:
        self.require("stages", bool(self.stages), f"some of {', '.join(STAGES)}")
        self.require("stages", len(set(self.stages)) == len(self.stages), "without repetition")
        self.require(
            "replica",
            self.replica is None or 0 <= self.replica < self.replicas,
            f"from 0 to pipeline.replicas - 1, which is {self.replicas - 1}",
        )
        check_roles(self.roles, self.replicas)


def check_roles(roles: Collection[ReplicaRole], replicas: int) -> None:
    """Raise a ConfigError unless these roles fit so many replicas, and serve requests."""
    if not roles:
        return
    if len(roles) != replicas:
        raise ConfigError(
            f"pipeline.roles has {len(roles)} roles for {replicas} replicas "
            "(pipeline.replicas); give one role for each replica"
        )
    for role in ("prefill", "decode"):
        if not {role, "both"}.intersection(roles):
            raise ConfigError(
                f"pipeline.roles has no replica to {role}; give one the role {role} or both"
            )


class TelemetryConfig(Section, frozen=True, forbid_unknown_fields=True):
    """Logs, traces and metrics. Spans are recorded only with an OTLP endpoint or a trace file.

    Attributes:
        log_level: Lowest severity logged.
        log_format: "auto" is coloured text on a terminal and JSON lines elsewhere.
        log_prompts: Log each admitted request with its prompt. Otherwise no line contains text of a
            request or an answer.
        otlp_endpoint: As OTEL_EXPORTER_OTLP_ENDPOINT, which applies if this is empty.
        otlp_protocol: "http" or "grpc" (requires grpcio, extra `grpc`); "auto" is
            OTEL_EXPORTER_OTLP_PROTOCOL, or "http".
        trace_file: File to which spans are also appended, as lines of OTLP JSON. Processes may
            share one; `nano-inference trace` reads it.
        trace_ratio: Share of the traces started here that are recorded. A request with a trace
            context follows its client's decision.
        steps_per_s: Limit on step spans per second and lane.
        service_name: `service.name` of the spans; the stage is a separate attribute.
        metrics_port: Prometheus port of this process; 0 is off. `up` numbers its processes from it:
            admission, the other four stages, two more for each further replica, and last the
            gateway.
        metrics_host: Address of that port.
        metric_names: "vllm" or "sglang" also exposes that engine's metrics, by its names, for its
            dashboards.
    """

    SECTION: ClassVar[str] = "telemetry"

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "text", "json"] = "auto"
    log_prompts: bool = False
    otlp_endpoint: str = ""
    otlp_protocol: Literal["auto", "http", "grpc"] = "auto"
    trace_file: str = ""
    trace_ratio: Annotated[float, Range("from 0 to 1", 0, 1)] = 1.0
    steps_per_s: Annotated[float, Range("from 0 to 1000000", 0, 1e6)] = 4.0
    service_name: str = "nano-inference"
    metrics_port: Annotated[int, Range("a port up to 65531, or 0", 0, 65_531)] = 0
    metrics_host: str = "127.0.0.1"
    metric_names: Literal["nano", "vllm", "sglang"] = "nano"

    def check(self) -> None:
        self.require("metrics_host", bool(self.metrics_host), "an address of this machine")


class DeploymentConfig(Section, frozen=True, forbid_unknown_fields=True):
    """Several models that share a machine; see `models`.

    Attributes:
        max_memory_bytes: Memory limit of all loaded models. To load another, the least recently
            used are unloaded. 0 is no limit.
        load_on_demand: Whether a request for an unloaded model loads it and waits; otherwise it is
            refused.
        idle_unload_s: Time without a request after which a model is unloaded, until a request loads
            it again; needs `load_on_demand`. 0 is never. Pinned models stay, and those with weights
            or adapters that loading would not bring back.
        load_timeout_s: Time limit for loading a model.
    """

    SECTION: ClassVar[str] = "deployment"

    max_memory_bytes: NonNegativeInt = 0
    load_on_demand: bool = False
    idle_unload_s: FiniteSeconds = 0.0
    load_timeout_s: Seconds = 600.0

    def check(self) -> None:
        self.require(
            "idle_unload_s",
            not self.idle_unload_s or self.load_on_demand,
            "0, or deployment.load_on_demand is true, so that a request wakes the model",
        )
