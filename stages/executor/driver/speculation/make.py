"""The speculator that the settings ask for."""

from __future__ import annotations

from collections.abc import Callable

from .....config import EngineConfig
from ..constraints import Constraints
from ..sequences import SequenceTable
from .control import CostControl
from .costs import StepCosts
from .drafts import DraftSource
from .forced import ForcedSource
from .ngram import NgramSource
from .prediction import PredictionSource
from .speculator import Speculator
from .suffix import SuffixSource


def make_speculator(
    config: EngineConfig,
    table: SequenceTable,
    constraints: Constraints,
    measure: Callable[[], StepCosts],
    draft_model: DraftSource | None = None,
) -> Speculator | None:
    """The sources and the control of a lane's drafts; None where there are to be none.

    `measure`: finds out what steps cost; it is called only where there are drafts.
    """
    if config.speculation == "off":
        return None
    makers: dict[str, Callable[[], DraftSource]] = {
        "prediction": PredictionSource,
        "grammar": lambda: ForcedSource(constraints),
        "suffix": lambda: SuffixSource(table, config.suffix_index_tokens),
        "ngram": NgramSource,
    }
    sources = [makers[name]() for name in config.draft_sources]
    return Speculator(table, constraints, sources, CostControl(measure()), draft_model)
