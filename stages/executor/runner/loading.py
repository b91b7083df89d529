"""Loading of the model of the settings, on one rank or several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....config import EngineConfig
from ....config.forks import begin_computing
from ...read_ahead import stop_reading
from .loaded_model import LoadedModel
from .model import load_model
from .preloaded import take

if TYPE_CHECKING:
    from .ranks.processes import Ranks


def load_ranks(config: EngineConfig) -> tuple[Ranks | None, LoadedModel]:
    """Load the model of the settings; over several ranks, start the others, and load each one's
    shard.

    Returns:
        The other ranks, None if there are none, and the model or rank 0's shard.

    Raises:
        ModelError: The model can't be loaded; or this is a fork of a process with an engine.
        RankError: A rank has ended.
    """
    begin_computing()
    if config.num_ranks == 1 and not config.rank_invariant:
        try:
            return None, take(config) or load_model(config)
        finally:
            stop_reading()
    from .leader import load_shards

    return load_shards(config)
