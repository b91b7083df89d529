"""LoRA adapters: many beside one model, in one batch.

`peft` reads a folder that PEFT has written and holds it against the model; `table` has the adapters
that are loaded; `step` adds what they give to the layers' outputs in one step.
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
from .step import AdapterStep
from .table import AdapterTable

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
