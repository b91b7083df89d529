"""All that the driver imports of the model runner."""

from .adapters import AdapterTable
from .adapters.table import NO_ADAPTER
from .attention.choose import choose_backend
from .batch import IntArray, Rows, Uploader, flatten_rows, order_rows
from .encoder import encode
from .fast_modules.modules import FastModules
from .fixed_tiles import elementwise
from .graphs import DecodeGraphs, DecodeStep
from .inputs import InputBuilder, StepInputs, model_forward
from .kernels import cpu
from .kernels.cpu import forbid, softmax_sums
from .kv_cache import KVCache
from .loaded_model import LoadedModel
from .model import load_model

__all__ = [
    "NO_ADAPTER",
    "AdapterTable",
    "DecodeGraphs",
    "DecodeStep",
    "FastModules",
    "InputBuilder",
    "IntArray",
    "KVCache",
    "LoadedModel",
    "Rows",
    "StepInputs",
    "Uploader",
    "choose_backend",
    "cpu",
    "elementwise",
    "encode",
    "flatten_rows",
    "forbid",
    "load_model",
    "model_forward",
    "order_rows",
    "softmax_sums",
]
