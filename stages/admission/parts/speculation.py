"""Predictions: outputs that clients expect, which speculation uses as drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ....bus.parts.speculation import Prediction
from ....config import EngineConfig
from ....text.image_tokens import Expanded
from ..arrivals import PromptImage
from ..prompts import PromptReader
from . import Part


class Predictions(Part):
    """Checks predictions, and sends them along where drafts are on."""

    fields: ClassVar = ("prediction",)

    def __init__(self, engine: EngineConfig) -> None:
        self._on = engine.speculation != "off" and "prediction" in engine.draft_sources

    def check_size(self, reader: PromptReader) -> None:
        reader.check_prediction()

    def read(
        self, reader: PromptReader, prompt: Expanded, media: Sequence[PromptImage]
    ) -> Prediction | None:
        reader.check_prediction()
        token_ids = reader.prediction()
        drafts = self._on and reader.request.sampling.max_draft_tokens != 0
        return Prediction(token_ids) if drafts and token_ids else None
