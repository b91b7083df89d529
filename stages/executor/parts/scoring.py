"""Logprobs of prompts."""

from __future__ import annotations

from ....bus.parts.scoring import PromptScores
from ..driver.sampled import Sampled
from ..driver.step import LaunchedStep
from . import Part


class PromptScoring(Part):
    """Reports the logprobs that a step has computed."""

    def finish(self, step: LaunchedStep, sampled: Sampled) -> None:
        if step.outputs.prompts:
            step.parts.append(PromptScores(step.outputs.prompts))
