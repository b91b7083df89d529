"""The models of a gateway: those of its lane."""

from __future__ import annotations

from ...config import Config
from ..measures import Measures
from ..readiness import Readiness
from ..submissions import Submissions
from ..words import LazyWords
from .models.lane import Lane
from .models.score import ScoreModel
from .models.text import TextModel
from .models.tokens import TokensModel
from .service import InferenceService


def open_service(
    submissions: Submissions,
    config: Config,
    words: LazyWords,
    readiness: Readiness,
    measures: Measures,
) -> InferenceService:
    """The service with all models that there are."""
    service = InferenceService(metrics=measures.metrics)
    lane = Lane(submissions, config, words, readiness)
    for model in (TextModel(lane), TokensModel(lane), ScoreModel(lane)):
        service.add(model)
    return service
