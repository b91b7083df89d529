"""The fairness stage: who may run next, and who must make room."""

from .core import Counts, Dispatched, FairnessCore
from .lanes import Lane, Running, choose_lane

__all__ = ["Counts", "Dispatched", "FairnessCore", "Lane", "Running", "choose_lane"]
