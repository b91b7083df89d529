"""LoRA adapters: several in one batch, over one model.

`peft` reads PEFT's folders and checks them against the model; `table` holds the loaded adapters
and adds their outputs to the layers' in a step.
"""

from .peft import (
    Adapter,
    AdapterLimits,
    adapter_of,
    check_adapter_id,
    next_version,
    read_adapter,
    stamp_of_adapter,
)
from .table import AdapterStep, AdapterTable

__all__ = [
    "Adapter",
    "AdapterLimits",
    "AdapterStep",
    "AdapterTable",
    "adapter_of",
    "check_adapter_id",
    "next_version",
    "read_adapter",
    "stamp_of_adapter",
]
