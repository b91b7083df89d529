"""Settings and errors: the ground floor, which imports nothing of ours."""

from .errors import (
    BusError,
    ChannelClosed,
    ConfigError,
    LaneReplaced,
    ModelError,
    NanoInferenceError,
    RequestError,
)
from .load import load_config, nearest, parse_value
from .settings import (
    BUNDLED_MODEL,
    DEFAULT_URL,
    STAGES,
    AdmissionConfig,
    BusConfig,
    Config,
    EngineConfig,
    FairnessConfig,
    PipelineConfig,
    SamplingParams,
    SchedulerConfig,
    Stage,
    TelemetryConfig,
)

__all__ = [
    "BUNDLED_MODEL",
    "DEFAULT_URL",
    "STAGES",
    "AdmissionConfig",
    "BusConfig",
    "BusError",
    "ChannelClosed",
    "Config",
    "ConfigError",
    "EngineConfig",
    "FairnessConfig",
    "LaneReplaced",
    "ModelError",
    "NanoInferenceError",
    "PipelineConfig",
    "RequestError",
    "SamplingParams",
    "SchedulerConfig",
    "Stage",
    "TelemetryConfig",
    "load_config",
    "nearest",
    "parse_value",
]
