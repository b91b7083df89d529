"""Every setting with its default, as frozen structs. Ranges are checked where a struct is built."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, get_args

import msgspec

from .base import Section
from .engine import EngineConfig
from .errors import ConfigError
from .gateway import GatewayConfig
from .models import MOST_ID_LENGTH, ModelConfig, check_models, default_of, with_default
from .policy import PolicyConfig
from .redact import REDIS_SCHEMES, redact

Stage = Literal["admission", "fairness", "batching", "executor", "streaming"]

STAGES: tuple[Stage, ...] = get_args(Stage)
"""The five stages, in the order in which a request meets them."""

MOST_REPLICAS = 64
"""Largest `pipeline.replicas`."""

DEFAULT_URL = "redis://127.0.0.1:6390"
"""Where `up` starts its embedded server and where clients look for it.

Not 6379, so that neither a stray local Redis nor its data is touched without being asked for.
"""


class SchedulerConfig(Section, frozen=True, forbid_unknown_fields=True):
    """The limits that `schedule()` works within, all per step."""

    max_batch_size: int
    max_tokens_per_batch: int
    block_size: int

    def check(self) -> None:
        for name in self.__struct_fields__:
            self.require(name, getattr(self, name) >= 1, "at least 1")


class BusConfig(Section, frozen=True, forbid_unknown_fields=True):
    """What carries the messages.

    Attributes:
        url: "memory", or a Redis URL: redis://, rediss:// or unix:// for one server,
            redis+sentinel://host:port,host:port/service for the master that sentinels name,
            redis+cluster://host:port,host:port for a cluster.
        links: "auto" keeps a link in memory when both of its ends run in this process;
            "redis" carries every link over Redis.
        prefix: First part of every Redis key.
        lane: Names this pipeline among those that serve the same requests stream.
        model: Whose requests stream this is, in a deployment of several models; "" where one model
            is all that there is.
        group: Consumer group of the requests stream.
        results_ttl_s: How long a finished request's output stays readable on Redis.
        results_maxlen: Entries kept in the shared results stream.
        link_capacity: Messages that may wait on one link before its sender has to wait.
        max_request_bytes: A larger request is refused before it is parsed.
        max_result_bytes: A request whose result, as JSON, may be larger is refused. Redis takes at
            most 512 MiB in one piece, unless it was set to less.
    """

    SECTION: ClassVar[str] = "bus"
    SECRETS: ClassVar[frozenset[str]] = frozenset(("url",))

    url: str = "memory"
    links: Literal["auto", "redis"] = "auto"
    prefix: str = "nano"
    lane: str = "0"
    model: str = ""
    group: str = "admission"
    results_ttl_s: int = 3600
    results_maxlen: int = 10_000
    link_capacity: int = 1024
    max_request_bytes: int = 4 << 20
    max_result_bytes: int = 256 << 20

    def check(self) -> None:
        if self.url != "memory" and self.url.partition("://")[0] not in REDIS_SCHEMES:
            raise ConfigError(
                f"bus.url is {redact(self.url)!r}; it must be 'memory' or a URL that starts with "
                "redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://"
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
        for name in ("results_ttl_s", "results_maxlen", "link_capacity", "max_request_bytes"):
            self.require(name, getattr(self, name) >= 1, "at least 1")
        self.require("max_result_bytes", self.max_result_bytes >= 1 << 16, "at least 65536")


class AdmissionConfig(Section, frozen=True, forbid_unknown_fields=True):
    """Limits on what is let in.

    Attributes:
        max_in_flight: Requests inside the pipeline; more wait on the requests stream.
        max_queued: Requests that may wait unread on the Redis requests stream; beyond that the
            newest of the tenants that have most waiting are refused as "overloaded".
        max_samples: Largest `n` of one request.
        max_constraint_bytes: Largest `sampling.constraint`, as JSON.
        max_lane_deaths: A request during which the lane failed so often, without a token in
            between, is given up and put among the dead letters.
        share_prefixes_across_tenants: KV of a prompt's beginning is found by all tenants, not by
            its own alone. Then each can learn what the others have sent.
        lease_s: Seconds after which another pipeline on the same requests stream takes over the
            requests of one that gives no sign of life.
    """

    SECTION: ClassVar[str] = "admission"

    max_in_flight: int = 1024
    max_queued: int = 10_000
    max_samples: int = 64
    max_constraint_bytes: int = 16_384
    max_lane_deaths: int = 3
    share_prefixes_across_tenants: bool = False
    lease_s: float = 30.0

    def check(self) -> None:
        for name in (
            "max_in_flight",
            "max_queued",
            "max_samples",
            "max_constraint_bytes",
            "max_lane_deaths",
        ):
            self.require(name, getattr(self, name) >= 1, "at least 1")
        self.require("lease_s", 0.05 <= self.lease_s <= 86_400, "from 0.05 to 86400 (a day)")


class FairnessConfig(Section, frozen=True, forbid_unknown_fields=True):
    """Who runs next. docs/fairness.md has the rule and what it promises.

    Attributes:
        aging_s: Seconds of waiting that are worth one level of priority.
        prefill_weight: What a prompt token that has to be computed counts as service.
        decode_weight: What a generated token counts.
        tenant_weights: Shares of tenants by name; all others have 1.
        locality_tokens: How much service a tenant may be ahead and still go first because its
            prompt's beginning is probably cached; 0 is off.
        enable_preemption: Whether a request of high priority may take the place of one that runs
            with a lower effective priority and is not of high priority.
        high_priority_threshold: Priorities from here on are high: they may preempt, are never
            preempted, and have no time slices.
        max_timeslice_tokens: After so many tokens a sequence pauses, if somebody waits who
            goes first; 0 is off.
        max_preemptions: A sequence that was preempted so often is left alone.
        deadline_order: Among a tenant's requests of one priority the earliest deadline goes first.
        expire_hopeless: A request that can't be done in its time any more ends before it runs.
        tenant_timeslice_tokens: Of so many tokens that are made, one sequence pauses for a request
            of another tenant, if one waits that goes first and finds no place; 0 is off.
    """

    SECTION: ClassVar[str] = "fairness"

    aging_s: float = 2.0
    prefill_weight: float = 1.0
    decode_weight: float = 2.0
    tenant_weights: dict[str, float] = {}  # noqa: RUF012
    locality_tokens: int = 0
    enable_preemption: bool = False
    high_priority_threshold: int = 5
    max_timeslice_tokens: int = 0
    max_preemptions: int = 3
    deadline_order: bool = False
    expire_hopeless: bool = True
    tenant_timeslice_tokens: int = 64

    def check(self) -> None:
        for name in ("aging_s", "decode_weight"):
            value = getattr(self, name)
            self.require(name, math.isfinite(value) and value > 0, "above 0")
        self.require(
            "prefill_weight",
            math.isfinite(self.prefill_weight) and self.prefill_weight >= 0,
            "finite, at least 0",
        )
        self.require(
            "tenant_weights",
            all(math.isfinite(weight) and weight > 0 for weight in self.tenant_weights.values()),
            "finite numbers above 0 by tenant",
        )
        for name in (
            "locality_tokens",
            "max_timeslice_tokens",
            "max_preemptions",
            "tenant_timeslice_tokens",
        ):
            self.require(name, getattr(self, name) >= 0, "at least 0")


class PipelineConfig(Section, frozen=True, forbid_unknown_fields=True):
    """Which stages run in this process, and how they are looked after.

    Attributes:
        stages: The stages of this process.
        replicas: How many pairs of batching and executor the pipeline has, behind one admission,
            one fairness and one streaming stage. All of its processes must agree on it.
        replica: Which of them this process runs, from 0; all that there are when None.
        max_restarts: Restarts of one stage within `restart_window_s` before the process gives up.
        restart_window_s: Failures longer ago than this are forgotten.
        restart_backoff_s: Wait before the first restart; doubles with each further one, up to 10 s.
        drain_timeout_s: How long requests in flight may take to finish after SIGTERM.
        start_method: How `up` starts processes: "forkserver" forks them from one that has imported
            what they need, "spawn" starts each as a program. Elsewhere than on Linux it is "spawn".
    """

    SECTION: ClassVar[str] = "pipeline"

    stages: tuple[Stage, ...] = STAGES
    replicas: int = 1
    replica: int | None = None
    max_restarts: int = 5
    restart_window_s: float = 60.0
    restart_backoff_s: float = 0.2
    drain_timeout_s: float = 30.0
    start_method: Literal["forkserver", "spawn"] = "forkserver"

    def check(self) -> None:
        self.require("stages", bool(self.stages), f"some of {', '.join(STAGES)}")
        self.require("stages", len(set(self.stages)) == len(self.stages), "without repetition")
        self.require("replicas", 1 <= self.replicas <= MOST_REPLICAS, f"from 1 to {MOST_REPLICAS}")
        self.require(
            "replica",
            self.replica is None or 0 <= self.replica < self.replicas,
            f"from 0 to pipeline.replicas - 1, which is {self.replicas - 1}",
        )
        self.require("max_restarts", self.max_restarts >= 0, "at least 0")
        for name in ("restart_window_s", "restart_backoff_s", "drain_timeout_s"):
            value = getattr(self, name)
            self.require(name, math.isfinite(value) and value >= 0, "finite, at least 0")


class TelemetryConfig(Section, frozen=True, forbid_unknown_fields=True):
    """Logs, traces and metrics. Spans are made only where an OTLP endpoint or a file is set.

    Attributes:
        log_level: Least severity that is printed.
        log_format: "auto" is coloured text on a terminal and JSON lines elsewhere.
        log_prompts: Log each request that is let in, with its prompt. Without it no line has any
            text of a request or an answer.
        otlp_endpoint: As in OTEL_EXPORTER_OTLP_ENDPOINT, which is read when this is empty.
        otlp_protocol: "http" or "grpc", which needs grpcio (extra `grpc`); "auto" takes what
            OTEL_EXPORTER_OTLP_PROTOCOL says, or "http".
        trace_file: Spans are appended to this file as well, as lines of OTLP's JSON. Processes may
            share one; `nano-inference trace` reads it.
        trace_ratio: Share of the traces begun here that are recorded. A request that comes with a
            trace is recorded when its client's is.
        steps_per_s: At most so many steps of the lane a second get a span of their own.
        service_name: The `service.name` of the spans; the stage is an attribute of its own.
        metrics_port: Where Prometheus reads this process's metrics; 0 is off. `up` gives each of
            its processes a port of its own: this one to admission, the next four to the others, two
            more to each further replica, and the last one to the gateway.
        metrics_host: The address on which that port listens.
    """

    SECTION: ClassVar[str] = "telemetry"

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "text", "json"] = "auto"
    log_prompts: bool = False
    otlp_endpoint: str = ""
    otlp_protocol: Literal["auto", "http", "grpc"] = "auto"
    trace_file: str = ""
    trace_ratio: float = 1.0
    steps_per_s: float = 4.0
    service_name: str = "nano-inference"
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"

    def check(self) -> None:
        self.require("trace_ratio", 0 <= self.trace_ratio <= 1, "from 0 to 1")
        self.require("steps_per_s", 0 <= self.steps_per_s <= 1e6, "from 0 to 1000000")
        self.require("metrics_port", 0 <= self.metrics_port <= 65_531, "a port up to 65531, or 0")
        self.require("metrics_host", bool(self.metrics_host), "an address of this machine")


class DeploymentConfig(Section, frozen=True, forbid_unknown_fields=True):
    """How several models share a machine; see `models`.

    Attributes:
        max_memory_bytes: What the loaded models may take together. To load one more, those that
            were not asked for longest are unloaded first. 0 is no limit.
        load_on_demand: Whether a request for a model that is not loaded loads it, and waits
            meanwhile; else it is refused.
        load_timeout_s: How long a model may take to load.
    """

    SECTION: ClassVar[str] = "deployment"

    max_memory_bytes: int = 0
    load_on_demand: bool = False
    load_timeout_s: float = 600.0

    def check(self) -> None:
        self.require("max_memory_bytes", self.max_memory_bytes >= 0, "at least 0")
        self.require(
            "load_timeout_s", 0 < self.load_timeout_s <= 86_400, "above 0, at most 86400 (a day)"
        )


class Config(Section, frozen=True, forbid_unknown_fields=True):
    """All settings of a process.

    Attributes:
        models: The models of a deployment that serves several; what is set in the sections holds
            for all of them. Without any it serves the one of `engine.model_path`.
    """

    engine: EngineConfig = EngineConfig()
    bus: BusConfig = BusConfig()
    admission: AdmissionConfig = AdmissionConfig()
    fairness: FairnessConfig = FairnessConfig()
    pipeline: PipelineConfig = PipelineConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    gateway: GatewayConfig = GatewayConfig()
    policy: PolicyConfig = PolicyConfig()
    deployment: DeploymentConfig = DeploymentConfig()
    models: tuple[ModelConfig, ...] = ()

    def of_model(self, model: ModelConfig) -> Config:
        """The settings of the processes that serve one of its models.

        Raises:
            ConfigError: What is set for this model can't be.
        """
        tree = msgspec.to_builtins(self)
        for dotted, value in model.overrides.items():
            section, _, name = dotted.partition(".")
            known = type(getattr(self, section)).__struct_fields__
            if name not in known:
                raise ConfigError(f"models: {model.id!r} sets {dotted!r:.80}, which is no setting")
            tree[section][name] = value
        try:
            return msgspec.convert(tree, Config)
        except msgspec.ValidationError as error:
            raise ConfigError(f"models: {model.id!r}: bad setting: {error}") from None
        except ConfigError as error:
            raise ConfigError(f"models: {model.id!r}: {error.message}") from None

    @property
    def default_model(self) -> str:
        """The id of the model of requests that name none; "" where `models` is empty."""
        return default_of(self.models)

    @property
    def gateway_places(self) -> int:
        """`gateway.max_in_flight`, with its default worked out, which is for each lane.

        One tenant alone has half of the places. Two full batches are enough for that half to keep
        all executors busy, on whatever device.
        """
        if self.gateway.max_in_flight is not None:
            return self.gateway.max_in_flight
        batches = self.engine.batch_size_on("cuda") * self.pipeline.replicas
        return max(2, self.admission.max_in_flight * 3 // 4, 2 * batches)

    def check(self) -> None:
        check_models(self.models)
        # Said of the model itself, since whoever reads of it elsewhere does not know their order.
        msgspec.structs.force_setattr(self, "models", with_default(self.models))
        if self.bus.url == "memory" and set(self.pipeline.stages) != set(STAGES):
            missing = ", ".join(s for s in STAGES if s not in self.pipeline.stages)
            raise ConfigError(
                f"the memory bus stays within one process, so it needs all five stages there; "
                f"missing: {missing}. Set bus.url to a Redis URL to split them"
            )
        if self.bus.url == "memory" and self.pipeline.replica is not None:
            raise ConfigError(
                "the memory bus stays within one process, which then runs all replicas; leave "
                "pipeline.replica out, or set bus.url to a Redis URL to split them"
            )
        if self.bus.url == "memory" and self.bus.links == "redis":
            raise ConfigError("bus.links is 'redis', which needs bus.url to be a Redis URL")
