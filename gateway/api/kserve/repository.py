"""The models of a gateway: those of its engine, and those of other packages."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from typing import NamedTuple

from ....config import Config, ConfigError, nearest
from ....kserve.pool import BufferPool
from ...serving.services import Services
from .models.best_of import POOL_BYTES, POOL_SLOTS, BestOfModel
from .models.engine_models import EmbedModel, ScoreModel, TextModel, TokensModel
from .served import ServedModel
from .service import InferenceService

ENTRY_POINTS = "nano_inference.kserve_models"
"""The entry-point group of packages with models. An entry's name is the name in `gateway.models`;
its function takes a ModelContext and returns models."""


class ModelContext(NamedTuple):
    """The service and settings, for a package's models.

    Attributes:
        service: The served models. A model calls another one by `infer` or `infer_once` with its
            own `ModelCall.call`, so that limits and deadline hold.
        config: The gateway's settings.
    """

    service: InferenceService
    config: Config


def open_service(services: Services) -> InferenceService:
    """Return the service of an engine's models. A single engine's has packages' models as well.

    Raises:
        ConfigError: `gateway.models` names an unknown package, or a name is taken.
    """
    config = services.config
    service = InferenceService(metrics=services.measures.metrics)
    pool = BufferPool(POOL_BYTES, POOL_SLOTS, use_shm=False, name="best_of")
    models = [kind(services) for kind in (TextModel, TokensModel, ScoreModel, EmbedModel)]
    for model in (*models, BestOfModel(service, services, pool)):
        suffix = model.spec.name.removeprefix(config.engine.model_name)
        service.add(model, [f"{alias}{suffix}" for alias in config.engine.model_aliases])
    if not config.bus.model:
        add_packages(service, config)
    return service


def add_packages(service: InferenceService, config: Config) -> None:
    """Serve the models that `gateway.models` names.

    Raises:
        ConfigError: It names an unknown package, or a model's name is taken.
    """
    for name in config.gateway.models:
        known = {each.name: each for each in metadata.entry_points(group=ENTRY_POINTS)}
        if (found := known.get(name)) is None:
            there = nearest(name, known) if known else "; no installed package has any"
            raise ConfigError(f"gateway.models names {name!r}{there}")
        models: Iterable[ServedModel] = found.load()(ModelContext(service, config))
        for model in models:
            service.add(model)
