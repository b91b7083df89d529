"""New weights for the model: transports, checks, and the write in place."""

from .checks import limits_of
from .sync_manager import WeightSyncManager, weights_lost
from .transports import SharedWeights, WeightGroups, WeightsGroup, fetch

__all__ = [
    "SharedWeights",
    "WeightGroups",
    "WeightSyncManager",
    "WeightsGroup",
    "fetch",
    "limits_of",
    "weights_lost",
]
