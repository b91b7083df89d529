"""The models of a gateway: those of its lanes, and those that other packages have."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from typing import NamedTuple

from ....config import Config, ConfigError, nearest
from ....kserve.pool import BufferPool
from ...serving.lane_state import Readiness
from ...serving.measures import Measures
from ...serving.submissions import Submissions
from ...serving.words import LazyWords
from .models.best_of import POOL_BYTES, POOL_SLOTS, BestOfModel
from .models.embed import EmbedModel
from .models.lane import Lane
from .models.score import ScoreModel
from .models.text import TextModel
from .models.tokens import TokensModel
from .served import ServedModel
from .service import InferenceService

ENTRY_POINTS = "nano_inference.kserve_models"
"""The group in which a package registers a function that takes a ModelContext and gives models,
under the name that `gateway.models` then has."""


class ModelContext(NamedTuple):
    """What a package's function makes its models of.

    Attributes:
        service: The models that there are; what asks one of them asks by `infer` or `infer_once`,
            with the origin of the call that it serves, so that limits and time hold.
        config: The gateway's settings.
    """

    service: InferenceService
    config: Config


def open_service(
    submissions: Submissions,
    config: Config,
    words: LazyWords,
    readiness: Readiness,
    measures: Measures,
    *,
    packages: bool = True,
) -> InferenceService:
    """The service with all models that there are.

    Args:
        packages: Whether those of packages are among them.

    Raises:
        ConfigError: `gateway.models` names what nobody has, or what can't be used.
    """
    service = InferenceService(metrics=measures.metrics)
    add_lane(service, Lane(submissions, config, words, readiness), config.engine.model_aliases)
    if packages:
        add_packages(service, config)
    return service


def add_lane(service: InferenceService, lane: Lane, aliases: Iterable[str] = ()) -> None:
    """Serves the models that a lane offers, under other names of it as well.

    Raises:
        ConfigError: There is another model of such a name.
    """
    pool = BufferPool(POOL_BYTES, POOL_SLOTS, use_shm=False, name="best_of")
    offered: list[ServedModel] = [
        TextModel(lane),
        TokensModel(lane),
        ScoreModel(lane),
        EmbedModel(lane),
        BestOfModel(service, lane, pool),
    ]
    for model in offered:
        behind = model.spec.name.removeprefix(lane.name)
        service.add(model, [f"{alias}{behind}" for alias in aliases])


def add_packages(service: InferenceService, config: Config) -> None:
    """Serves the models that `gateway.models` names.

    Raises:
        ConfigError: It names what nobody has, or what can't be used.
    """
    for name in config.gateway.models:
        for model in _made(name, ModelContext(service, config)):
            service.add(model)


def _made(name: str, context: ModelContext) -> Iterable[ServedModel]:
    """The models of a package."""
    known = {each.name: each for each in metadata.entry_points(group=ENTRY_POINTS)}
    if (found := known.get(name)) is None:
        there = nearest(name, known) if known else "; no installed package has any"
        raise ConfigError(f"gateway.models names {name!r}{there}")
    models: Iterable[ServedModel] = found.load()(context)
    return models
