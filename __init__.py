"""nano-inference: an LLM inference engine for RL rollouts and for serving.

The public interface. Names are loaded when they are first used, so that a client process does not
pay for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bus.public import (
        ChatMessage,
        Completion,
        CompletionChunk,
        EmbedParams,
        GenerateRequest,
    )
    from .bus.weights import FolderWeights
    from .config import (
        Config,
        Constraint,
        EngineConfig,
        SamplingParams,
        SchedulerConfig,
        load_config,
    )
    from .config.errors import NanoInferenceError, RequestError, WeightsError
    from .gateway.gateway import Gateway
    from .pipeline.chat_renderer import ChatPrompt, ChatRenderer
    from .pipeline.client import BusClient
    from .pipeline.engine import InferenceEngine
    from .pipeline.exact_forward import ExactForward
    from .pipeline.pipeline import Pipeline
    from .pipeline.rollouts import RolloutEngine, TrainingSample
    from .pipeline.scoring import ScoredCompletion
    from .stages.batching import (
        CacheAllocation,
        KVCacheManager,
        PagedKVCache,
        RadixKVCache,
        SchedulerOutput,
        Sequence,
        SequenceStatus,
        compute_block_hash,
        schedule,
    )
    from .stages.executor import WeightSyncManager, model_forward, sample_with_logprobs
    from .stages.executor.runner.weights import SharedWeights, WeightsGroup

__version__ = "0.1.0"

_HOME = {
    "BusClient": ".pipeline.client",
    "CacheAllocation": ".stages.batching",
    "ChatMessage": ".bus.public",
    "ChatPrompt": ".pipeline.chat_renderer",
    "ChatRenderer": ".pipeline.chat_renderer",
    "Completion": ".bus.public",
    "CompletionChunk": ".bus.public",
    "Config": ".config",
    "Constraint": ".config",
    "EmbedParams": ".bus.public",
    "EngineConfig": ".config",
    "Gateway": ".gateway.gateway",
    "ExactForward": ".pipeline.exact_forward",
    "FolderWeights": ".bus.weights",
    "GenerateRequest": ".bus.public",
    "InferenceEngine": ".pipeline.engine",
    "KVCacheManager": ".stages.batching",
    "NanoInferenceError": ".config",
    "PagedKVCache": ".stages.batching",
    "Pipeline": ".pipeline.pipeline",
    "RadixKVCache": ".stages.batching",
    "RequestError": ".config",
    "RolloutEngine": ".pipeline.rollouts",
    "SamplingParams": ".config",
    "SchedulerConfig": ".config",
    "SchedulerOutput": ".stages.batching",
    "ScoredCompletion": ".pipeline.scoring",
    "Sequence": ".stages.batching",
    "SequenceStatus": ".stages.batching",
    "SharedWeights": ".stages.executor.runner.weights",
    "TrainingSample": ".pipeline.rollouts",
    "WeightSyncManager": ".stages.executor",
    "WeightsError": ".config",
    "WeightsGroup": ".stages.executor.runner.weights",
    "compute_block_hash": ".stages.batching",
    "load_config": ".config",
    "model_forward": ".stages.executor",
    "sample_with_logprobs": ".stages.executor",
    "schedule": ".stages.batching",
}

__all__ = [
    "BusClient",
    "CacheAllocation",
    "ChatMessage",
    "ChatPrompt",
    "ChatRenderer",
    "Completion",
    "CompletionChunk",
    "Config",
    "Constraint",
    "EmbedParams",
    "EngineConfig",
    "ExactForward",
    "FolderWeights",
    "Gateway",
    "GenerateRequest",
    "InferenceEngine",
    "KVCacheManager",
    "NanoInferenceError",
    "PagedKVCache",
    "Pipeline",
    "RadixKVCache",
    "RequestError",
    "RolloutEngine",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulerOutput",
    "ScoredCompletion",
    "Sequence",
    "SequenceStatus",
    "SharedWeights",
    "TrainingSample",
    "WeightSyncManager",
    "WeightsError",
    "WeightsGroup",
    "compute_block_hash",
    "load_config",
    "model_forward",
    "sample_with_logprobs",
    "schedule",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
