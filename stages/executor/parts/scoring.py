"""Logprobs of prompts, and of targets in them."""

from __future__ import annotations

from ..driver.sampled import Sampled
from ..driver.step import LaunchedStep
from . import Part


class PromptScoring(Part):
    """Reports the logprobs that a step has computed."""

    def finish(self, step: LaunchedStep, sampled: Sampled) -> None:
        if step.outputs.prompts is not None:
            step.parts.append(step.outputs.prompts)
