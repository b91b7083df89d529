"""Greedy tokens of prompts with images equal those of Transformers' `generate`."""

from __future__ import annotations

import pytest

from .vision import ImagePrompt, World, image_lane, stored, world_of
from .vision_models import ARCHITECTURES

NEW_TOKENS = 6


def prompts_of(world: World) -> list[ImagePrompt]:
    """With one image, two, text alone, and the first image again behind other text."""
    first, second = stored(1), stored(2, 16, 32)
    text = world.text
    return [
        world.prompt(text(5), first, text(4)),
        world.prompt(text(3), first, text(2), second, text(3)),
        world.prompt(text(9)),
        world.prompt(text(2), first, text(1)),
    ]


_answers: dict[str, tuple[list[ImagePrompt], list[list[int]]]] = {}


def expected(world: World) -> tuple[list[ImagePrompt], list[list[int]]]:
    if world.name not in _answers:
        prompts = prompts_of(world)
        found = [world.generate(prompt, NEW_TOKENS) for prompt in prompts]
        assert min(lead for _, lead in found) > 1e-4, "a near tie"
        _answers[world.name] = prompts, [tokens for tokens, _ in found]
    return _answers[world.name]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_equal_generate(name: str) -> None:
    world = world_of(name)
    prompts, tokens = expected(world)
    lane = image_lane(world, block_size=4)
    assert lane.run(prompts, NEW_TOKENS) == tokens
    assert lane.run(prompts, NEW_TOKENS) == tokens, "on a warm cache"
