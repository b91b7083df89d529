"""Settings, errors and temporary memory. This floor imports nothing else of the package."""

from .engine import ADAPTER_ID_RULE, BUNDLED_MODEL, EngineConfig, PoolingKind, is_adapter_id
from .errors import (
    NOT_PERMITTED,
    AdapterError,
    BusError,
    ChannelClosed,
    ConfigError,
    LaneReplaced,
    ModelError,
    NanoInferenceError,
    RequestError,
    WeightsError,
    prompt_too_long,
)
from .gateway import GatewayConfig
from .load import API_KEY_VARIABLE, as_environment, load_config, nearest, parse_value, text_in
from .model_paths import missing_model
from .models import ModelConfig
from .policy import PolicyConfig
from .quoting import MOST_SHOWN, MOST_TEXT, cut, cut_middle, field_name, shown, told_of
from .redact import REDIS_SCHEMES, redact
from .roles import REPLICATED, all_roles, role_of, role_of_sender, roles_here, split_role
from .sampling import MAX_INT64, Constraint, Int64, SamplingParams
from .settings import (
    DEFAULT_URL,
    STAGES,
    AdmissionConfig,
    BusConfig,
    Config,
    DeploymentConfig,
    FairnessConfig,
    PipelineConfig,
    SchedulerConfig,
    Stage,
    TelemetryConfig,
)

__all__ = [
    "ADAPTER_ID_RULE",
    "API_KEY_VARIABLE",
    "BUNDLED_MODEL",
    "DEFAULT_URL",
    "MAX_INT64",
    "MOST_SHOWN",
    "MOST_TEXT",
    "NOT_PERMITTED",
    "REDIS_SCHEMES",
    "REPLICATED",
    "STAGES",
    "AdapterError",
    "AdmissionConfig",
    "BusConfig",
    "BusError",
    "ChannelClosed",
    "Config",
    "ConfigError",
    "Constraint",
    "DeploymentConfig",
    "EngineConfig",
    "FairnessConfig",
    "GatewayConfig",
    "Int64",
    "LaneReplaced",
    "ModelConfig",
    "ModelError",
    "NanoInferenceError",
    "PipelineConfig",
    "PolicyConfig",
    "PoolingKind",
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
    "field_name",
    "is_adapter_id",
    "load_config",
    "missing_model",
    "nearest",
    "parse_value",
    "prompt_too_long",
    "redact",
    "role_of",
    "role_of_sender",
    "roles_here",
    "shown",
    "split_role",
    "text_in",
    "told_of",
]
