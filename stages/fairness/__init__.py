"""The fairness stage: who may run next."""

from .core import FairnessCore

__all__ = ["FairnessCore"]
