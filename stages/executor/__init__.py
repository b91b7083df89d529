"""The executor stage: the model, its KV cache and the sampler.

`core.ExecutorCore` is the whole stage without its shell; `sampling.sample_with_logprobs` and
`inputs.model_forward` are pure functions that work without any engine.
"""

from .batch import Rows
from .core import ExecutorCore
from .inputs import InputBuilder, StepInputs, model_forward
from .kv_cache import KVCache
from .loaded_model import LoadedModel
from .model import load_model, wrap_model
from .sampling import sample_with_logprobs, uniform
from .weights import WeightSyncManager

__all__ = [
    "ExecutorCore",
    "InputBuilder",
    "KVCache",
    "LoadedModel",
    "Rows",
    "StepInputs",
    "WeightSyncManager",
    "load_model",
    "model_forward",
    "sample_with_logprobs",
    "uniform",
    "wrap_model",
]
