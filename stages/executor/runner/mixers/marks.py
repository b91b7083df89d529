"""The mark of modelling files with recurrent mixers, found without importing the operators."""

from __future__ import annotations

import sys

MARKS = ("causal_conv1d_fn", "LightningAttention", "CCAProjection")
"""Ends of names, one of which each of these files defines."""


def has_mixers(model_class: type) -> bool:
    """Return whether the file of a model's class may have mixers that our operators can run."""
    names = vars(sys.modules[model_class.__module__])
    return any(name.endswith(MARKS) for name in names)
