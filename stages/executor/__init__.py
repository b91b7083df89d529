"""The executor stage: the model, its KV cache and the sampler.

`core.ExecutorCore` is the whole stage without its shell; `sampling.sample_with_logprobs` and
`inputs.model_forward` are pure functions that work without any engine.
"""

from .core import ExecutorCore
from .driver.sampling import sample_with_logprobs, uniform
from .runner.batch import Rows
from .runner.inputs import InputBuilder, model_forward
from .runner.kv_cache import KVCache
from .runner.loaded_model import LoadedModel
from .runner.model import load_model, wrap_model
from .runner.weights.sync_manager import WeightSyncManager

__all__ = [
    "ExecutorCore",
    "InputBuilder",
    "KVCache",
    "LoadedModel",
    "Rows",
    "WeightSyncManager",
    "load_model",
    "model_forward",
    "sample_with_logprobs",
    "uniform",
    "wrap_model",
]
