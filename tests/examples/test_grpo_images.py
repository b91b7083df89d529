"""GRPO with pictures: the loss sees the picture as the engine did, and new weights reach it."""

from __future__ import annotations

import pytest
from grpo_images import Settings, run
from rich.console import Console


def test_two_updates_with_a_picture_in_each_prompt() -> None:
    settings = Settings(task="exists", steps=2, prompts=4, samples=4, held_out=5)
    found = run(settings, Console(quiet=True))
    first, second = found["log"]
    # The trainer's logprobs are the engine's, before and after an update; so it saw the pictures.
    assert first["ratio_max"] == pytest.approx(1, abs=1e-3)
    assert second["ratio_max"] == pytest.approx(1, abs=1e-3)
    assert [first["weight_version"], second["weight_version"]] == [1, 2]
    assert min(first["grad_norm"], second["grad_norm"]) > 0
