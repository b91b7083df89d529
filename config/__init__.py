"""Settings, errors and temporary memory: the ground floor, which imports nothing of ours."""

from .errors import (
    BusError,
    ChannelClosed,
    ConfigError,
    LaneReplaced,
    ModelError,
    NanoInferenceError,
    RequestError,
    WeightsError,
)
from .gateway import GatewayConfig
from .load import API_KEY_VARIABLE, as_environment, load_config, nearest, parse_value, text_in
from .policy import PolicyConfig
from .quoting import MOST_SHOWN, MOST_TEXT, cut, cut_middle, shown
from .redact import REDIS_SCHEMES, redact
from .roles import REPLICATED, all_roles, role_of, role_of_sender, roles_here, split_role
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
    "API_KEY_VARIABLE",
    "BUNDLED_MODEL",
    "DEFAULT_URL",
    "MOST_SHOWN",
    "MOST_TEXT",
    "REDIS_SCHEMES",
    "REPLICATED",
    "STAGES",
    "AdmissionConfig",
    "BusConfig",
    "BusError",
    "ChannelClosed",
    "Config",
    "ConfigError",
    "EngineConfig",
    "FairnessConfig",
    "GatewayConfig",
    "LaneReplaced",
    "ModelError",
    "NanoInferenceError",
    "PipelineConfig",
    "PolicyConfig",
    "RequestError",
    "SamplingParams",
    "SchedulerConfig",
    "Stage",
    "TelemetryConfig",
    "WeightsError",
    "all_roles",
    "as_environment",
    "cut",
    "cut_middle",
    "load_config",
    "nearest",
    "parse_value",
    "redact",
    "role_of",
    "role_of_sender",
    "roles_here",
    "shown",
    "split_role",
    "text_in",
]
