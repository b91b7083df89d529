"""Settings, errors and temporary memory. Imports nothing else of the package.

Reading settings from files and the environment is loaded on first use: an engine is configured in
Python.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .engine import ADAPTER_ID_RULE as ADAPTER_ID_RULE
from .engine import BUNDLED_MODEL as BUNDLED_MODEL
from .engine import BUNDLED_VISION_MODEL as BUNDLED_VISION_MODEL
from .engine import EngineConfig as EngineConfig
from .engine import PoolingKind as PoolingKind
from .engine import is_adapter_id as is_adapter_id
from .engine import missing_model as missing_model
from .errors import NOT_PERMITTED as NOT_PERMITTED
from .errors import AdapterError as AdapterError
from .errors import BusError as BusError
from .errors import ChannelClosed as ChannelClosed
from .errors import ConfigError as ConfigError
from .errors import FieldError as FieldError
from .errors import LaneReplaced as LaneReplaced
from .errors import ModelError as ModelError
from .errors import NanoInferenceError as NanoInferenceError
from .errors import RequestError as RequestError
from .errors import WeightsError as WeightsError
from .errors import field_error as field_error
from .errors import prompt_too_long as prompt_too_long
from .models import ModelConfig as ModelConfig
from .quoting import MOST_SHOWN as MOST_SHOWN
from .quoting import MOST_TEXT as MOST_TEXT
from .quoting import cut as cut
from .quoting import cut_middle as cut_middle
from .quoting import field_name as field_name
from .quoting import line_safe as line_safe
from .quoting import shown as shown
from .redact import REDIS_SCHEMES as REDIS_SCHEMES
from .redact import redact as redact
from .roles import REPLICATED as REPLICATED
from .roles import all_roles as all_roles
from .roles import role_of as role_of
from .roles import role_of_sender as role_of_sender
from .roles import roles_here as roles_here
from .roles import split_role as split_role
from .sampling import MAX_INT64 as MAX_INT64
from .sampling import Constraint as Constraint
from .sampling import Int64 as Int64
from .sampling import SamplingParams as SamplingParams
from .settings import BACKGROUND as BACKGROUND
from .settings import DEFAULT_URL as DEFAULT_URL
from .settings import MAX_PRIORITY as MAX_PRIORITY
from .settings import MOST_SHARDS as MOST_SHARDS
from .settings import STAGES as STAGES
from .settings import AdmissionConfig as AdmissionConfig
from .settings import BusConfig as BusConfig
from .settings import DeploymentConfig as DeploymentConfig
from .settings import FairnessConfig as FairnessConfig
from .settings import PipelineConfig as PipelineConfig
from .settings import ReplicaRole as ReplicaRole
from .settings import SchedulerConfig as SchedulerConfig
from .settings import Stage as Stage
from .settings import TelemetryConfig as TelemetryConfig
from .settings import check_roles as check_roles

_ON_FIRST_USE = {
    "BatchesConfig": ".batches",
    "GatewayConfig": ".gateway",
    "ImagesConfig": ".images",
    "McpConfig": ".mcp",
    "PolicyConfig": ".policy",
    "RayConfig": ".ray",
    "Config": ".whole",
    "API_KEY_VARIABLE": ".load",
    "as_environment": ".load",
    "as_text": ".load",
    "load_config": ".load",
    "nearest": ".load",
    "parse_value": ".load",
    "text_in": ".load",
}
"""The modules of names that are loaded on first use."""

if TYPE_CHECKING:
    from .batches import BatchesConfig as BatchesConfig
    from .gateway import GatewayConfig as GatewayConfig
    from .images import ImagesConfig as ImagesConfig
    from .load import API_KEY_VARIABLE as API_KEY_VARIABLE
    from .load import as_environment as as_environment
    from .load import as_text as as_text
    from .load import load_config as load_config
    from .load import nearest as nearest
    from .load import parse_value as parse_value
    from .load import text_in as text_in
    from .mcp import McpConfig as McpConfig
    from .policy import PolicyConfig as PolicyConfig
    from .ray import RayConfig as RayConfig
    from .whole import Config as Config
else:

    def __getattr__(name: str) -> Any:
        if name not in _ON_FIRST_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_ON_FIRST_USE[name], __name__), name)
