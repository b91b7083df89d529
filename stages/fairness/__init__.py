"""The fairness stage: who may run next, and who must pause."""

from .core import FairnessCore
from .outcome import Counts, Dispatched
from .replicas import Replica, Running, choose_replica

__all__ = ["Counts", "Dispatched", "FairnessCore", "Replica", "Running", "choose_replica"]
