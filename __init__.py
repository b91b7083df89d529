"""nano-inference: an LLM inference engine for RL rollouts and for serving.

The public interface. Names are loaded on first use, so that a client process does not load torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bus.public import ChatMessage as ChatMessage
    from .bus.public import Completion as Completion
    from .bus.public import CompletionChunk as CompletionChunk
    from .bus.public import EmbedParams as EmbedParams
    from .bus.public import Fork as Fork
    from .bus.public import GenerateRequest as GenerateRequest
    from .bus.public import KVSession as KVSession
    from .bus.public import KVSessionResult as KVSessionResult
    from .bus.public import Session as Session
    from .bus.weights import ArcWeights as ArcWeights
    from .bus.weights import FolderWeights as FolderWeights
    from .bus.weights import PastWeights as PastWeights
    from .config import Config as Config
    from .config import Constraint as Constraint
    from .config import EngineConfig as EngineConfig
    from .config import SamplingParams as SamplingParams
    from .config import SchedulerConfig as SchedulerConfig
    from .config import load_config as load_config
    from .config.errors import NanoInferenceError as NanoInferenceError
    from .config.errors import RequestError as RequestError
    from .config.errors import WeightsError as WeightsError
    from .gateway.gateway import Gateway as Gateway
    from .pipeline.async_engine import AsyncEngine as AsyncEngine
    from .pipeline.async_engine import RequestOutput as RequestOutput
    from .pipeline.chat_renderer import ChatPrompt as ChatPrompt
    from .pipeline.chat_renderer import ChatRenderer as ChatRenderer
    from .pipeline.client import BusClient as BusClient
    from .pipeline.digest import digest as digest
    from .pipeline.digest import digests as digests
    from .pipeline.engine import InferenceEngine as InferenceEngine
    from .pipeline.exact_forward import ExactForward as ExactForward
    from .pipeline.past import engine_at as engine_at
    from .pipeline.pipeline import Pipeline as Pipeline
    from .pipeline.rollouts import RolloutEngine as RolloutEngine
    from .pipeline.rollouts import TrainingSample as TrainingSample
    from .pipeline.scoring import ScoredCompletion as ScoredCompletion
    from .pipeline.token_tree import SessionSample as SessionSample
    from .pipeline.token_tree import TokenTree as TokenTree
    from .stages.batching import CacheAllocation as CacheAllocation
    from .stages.batching import KVCacheManager as KVCacheManager
    from .stages.batching import SchedulerOutput as SchedulerOutput
    from .stages.batching import Sequence as Sequence
    from .stages.batching import SequenceStatus as SequenceStatus
    from .stages.batching import compute_block_hash as compute_block_hash
    from .stages.batching import schedule as schedule
    from .stages.batching.paged import PagedKVCache as PagedKVCache
    from .stages.batching.radix import RadixKVCache as RadixKVCache
    from .stages.executor import WeightSyncManager as WeightSyncManager
    from .stages.executor import model_forward as model_forward
    from .stages.executor import sample_with_logprobs as sample_with_logprobs
    from .stages.executor.runner.weights.arc import read_arc as read_arc
    from .stages.executor.runner.weights.arc import write_arc as write_arc
    from .stages.executor.runner.weights.delta import WeightDelta as WeightDelta
    from .stages.executor.runner.weights.log import WeightLog as WeightLog
    from .stages.executor.runner.weights.transports import SharedWeights as SharedWeights
    from .stages.executor.runner.weights.transports import WeightsGroup as WeightsGroup

__version__ = "0.1.0"

# Read by OpenMP when torch is loaded. By default a thread that waits for another one spins for
# milliseconds before it sleeps: beside another busy process that is most of the time. This is a
# tenth of a millisecond, longer than the kernels' threads wait with nothing beside them.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_NAMES = {
    ".bus.public": """
        ChatMessage Completion CompletionChunk EmbedParams Fork GenerateRequest KVSession
        KVSessionResult Session
    """,
    ".bus.weights": "ArcWeights FolderWeights PastWeights",
    ".config": """
        Config Constraint EngineConfig NanoInferenceError RequestError SamplingParams
        SchedulerConfig WeightsError load_config
    """,
    ".gateway.gateway": "Gateway",
    ".pipeline.async_engine": "AsyncEngine RequestOutput",
    ".pipeline.chat_renderer": "ChatPrompt ChatRenderer",
    ".pipeline.client": "BusClient",
    ".pipeline.digest": "digest digests",
    ".pipeline.engine": "InferenceEngine",
    ".pipeline.exact_forward": "ExactForward",
    ".pipeline.past": "engine_at",
    ".pipeline.pipeline": "Pipeline",
    ".pipeline.rollouts": "RolloutEngine TrainingSample",
    ".pipeline.scoring": "ScoredCompletion",
    ".pipeline.token_tree": "SessionSample TokenTree",
    ".stages.batching": """
        CacheAllocation KVCacheManager SchedulerOutput Sequence SequenceStatus compute_block_hash
        schedule
    """,
    ".stages.batching.paged": "PagedKVCache",
    ".stages.batching.radix": "RadixKVCache",
    ".stages.executor": "WeightSyncManager model_forward sample_with_logprobs",
    ".stages.executor.runner.weights.arc": "read_arc write_arc",
    ".stages.executor.runner.weights.delta": "WeightDelta",
    ".stages.executor.runner.weights.log": "WeightLog",
    ".stages.executor.runner.weights.transports": "SharedWeights WeightsGroup",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in ("LLM", "AsyncLLM", "AsyncLLMEngine", "LLMEngine", "Engine"):
        own = "AsyncEngine" if name.startswith("Async") else "InferenceEngine"
        raise AttributeError(f"module {__name__!r} has no {name}; use {own} (docs/python.md)")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .config.collector import collector_paused

    with collector_paused():
        return getattr(importlib.import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
