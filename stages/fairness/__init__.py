"""The fairness stage: which sequences run next, and which must pause."""

from .core import FairnessCore
from .queue import Running
from .replicas import Replica, choose_replica
from .state import Counts, Dispatched

__all__ = ["Counts", "Dispatched", "FairnessCore", "Replica", "Running", "choose_replica"]
