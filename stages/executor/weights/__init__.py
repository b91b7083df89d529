"""New weights for the model that runs: how they come, are checked, and are put in place.

`updates.WeightUpdates` is the executor shell's part in it, `sync_manager.WeightSyncManager` what
writes them, and `transports` the ways by which they come.
"""

from .arguments import check_arguments
from .limits import limits_of
from .sync_manager import WeightSyncManager, weights_lost
from .transports import SharedWeights, WeightGroups, WeightsGroup, fetch
from .updates import WeightUpdates

__all__ = [
    "SharedWeights",
    "WeightGroups",
    "WeightSyncManager",
    "WeightUpdates",
    "WeightsGroup",
    "check_arguments",
    "fetch",
    "limits_of",
    "weights_lost",
]
