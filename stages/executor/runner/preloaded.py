"""A model that a process loads before it forks, so that its forks share one copy of the weights."""

from __future__ import annotations

import msgspec
import torch

from ....config import EngineConfig, ModelError
from .device import resolve_device
from .loaded_model import LoadedModel
from .model import load_model

_preloaded: list[tuple[bytes, LoadedModel]] = []


def preload(config: EngineConfig) -> None:
    """Load the model of the settings, without starting a thread.

    Does nothing for a model on another device than the CPU, or over several ranks, nor for one that
    can't be loaded: then a fork fails with the reason.
    """
    threads = torch.get_num_threads()
    try:
        if (
            config.num_ranks > 1
            or config.rank_invariant
            or resolve_device(config.device).type != "cpu"
        ):
            return
        torch.set_num_threads(1)
        _preloaded.append((msgspec.json.encode(config), load_model(config)))
    except ModelError:
        return
    finally:
        torch.set_num_threads(threads)


def take(config: EngineConfig) -> LoadedModel | None:
    """Return the preloaded model of these settings, once in a process; None if there is none."""
    if _preloaded and _preloaded[0][0] == msgspec.json.encode(config):
        return _preloaded.pop()[1]
    return None
