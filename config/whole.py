"""All settings of a process, of which most modules need only a section."""

from __future__ import annotations

import msgspec

from .base import Section
from .batches import BatchesConfig
from .engine import EngineConfig
from .errors import ConfigError
from .gateway import GatewayConfig
from .images import ImagesConfig
from .mcp import McpConfig
from .models import ModelConfig, check_models, default_of, with_default
from .policy import PolicyConfig
from .ray import RayConfig
from .settings import (
    STAGES,
    AdmissionConfig,
    BusConfig,
    DeploymentConfig,
    FairnessConfig,
    PipelineConfig,
    TelemetryConfig,
)


class Config(Section, frozen=True, forbid_unknown_fields=True):
    """All settings of a process.

    Attributes:
        models: The models of a deployment of several; the other sections apply to all of them.
            Empty: it serves `engine.model_path`.
    """

    engine: EngineConfig = EngineConfig()
    bus: BusConfig = BusConfig()
    admission: AdmissionConfig = AdmissionConfig()
    fairness: FairnessConfig = FairnessConfig()
    pipeline: PipelineConfig = PipelineConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    images: ImagesConfig = ImagesConfig()
    gateway: GatewayConfig = GatewayConfig()
    policy: PolicyConfig = PolicyConfig()
    batches: BatchesConfig = BatchesConfig()
    mcp: McpConfig = McpConfig()
    deployment: DeploymentConfig = DeploymentConfig()
    ray: RayConfig = RayConfig()
    models: tuple[ModelConfig, ...] = ()

    def of_model(self, model: ModelConfig) -> Config:
        """Return the settings of the processes that serve one of the models.

        Raises:
            ConfigError: The model's own settings are invalid.
        """
        tree = msgspec.to_builtins(self)
        for dotted, value in model.overrides.items():
            section, _, name = dotted.partition(".")
            known = type(getattr(self, section)).__struct_fields__
            if name not in known:
                raise ConfigError(f"models: {model.id!r} sets {dotted!r:.80}; it must be a setting")
            tree[section][name] = value
        try:
            return msgspec.convert(tree, Config)
        except msgspec.ValidationError as error:
            from .wrong_values import told_of

            raise ConfigError(f"models: {model.id!r}: {told_of(error)}") from None
        except ConfigError as error:
            raise ConfigError(f"models: {model.id!r}: {error.message}") from None

    @property
    def default_model(self) -> str:
        """Id of the model for requests that name none; "" if `models` is empty."""
        return default_of(self.models)

    @property
    def gateway_places(self) -> int:
        """`gateway.max_in_flight`, or its default per lane.

        One tenant alone may use half of the places. Two full batches keep all executors busy with
        that half.
        """
        if self.gateway.max_in_flight is not None:
            return self.gateway.max_in_flight
        batches = self.engine.batch_size_on("cuda") * self.pipeline.replicas
        return max(2, self.admission.max_in_flight * 3 // 4, 2 * batches)

    def check(self) -> None:
        check_models(self.models)
        self.bus.require(
            "shards",
            self.bus.shards == 1 or not self.models,
            "1 in a deployment of several models, each of which has a stream of its own",
        )
        # Stored with the model: readers of a single model don't have the list's order.
        msgspec.structs.force_setattr(self, "models", with_default(self.models))
        engine = self.engine
        if "executor" in self.pipeline.standby and (engine.kv_disk_path or engine.num_ranks > 1):
            raise ConfigError(
                "pipeline.standby can't have the executor of a model on several ranks, or with "
                "engine.kv_disk_path, whose folder has one user at a time; leave one of them out"
            )
        if self.pipeline.roles and self.engine.num_ranks > 1:
            raise ConfigError(
                "pipeline.roles needs models on one rank; leave it out, or set "
                "engine.tensor_parallel and engine.pipeline_parallel to 1"
            )
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
