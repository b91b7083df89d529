"""The executor stage: the model, its KV cache and the sampler.

`core.ExecutorCore` is the whole stage without its shell; `sampling.sample_with_logprobs` and
`inputs.model_forward` are pure functions that work without any engine.
"""

from .core import ExecutorCore as ExecutorCore
from .driver.sampling import sample_with_logprobs as sample_with_logprobs
from .driver.sampling import uniform as uniform
from .runner.batch import Rows as Rows
from .runner.inputs import InputBuilder as InputBuilder
from .runner.inputs import model_forward as model_forward
from .runner.kv_cache import KVCache as KVCache
from .runner.loaded_model import LoadedModel as LoadedModel
from .runner.model import load_model as load_model
from .runner.model import wrap_model as wrap_model
from .runner.weights.sync_manager import WeightSyncManager as WeightSyncManager
