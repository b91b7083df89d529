"""Greedy tokens and logprobs of prompts with images equal those of Transformers' `generate`."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from ...soaking import in_soak
from .vision import Completion, ImagePrompt, World, id_of, image_lane, stored, world_of
from .vision_models import ARCHITECTURES

NEW_TOKENS = 6
CHUNKS = {"gemma3": 18, "gemma4": 75, "gemma4-causal": 40, "llava_next": 40}
"""Most tokens of a step, where an image of 16 or 70 has to be computed as a whole, or images have
many tokens."""

ALIKE = ("glm46v", "glm4v_moe", "qwen3_5_moe", "qwen3_vl_moe")
"""Their images are those of another one."""

CUT = [
    name if name in ("gemma3", "qwen2_vl", "qwen3_vl") else in_soak(name) for name in ARCHITECTURES
]
"""Every day those that differ where a prompt is cut: whole images, positions of their own, and
features in several layers."""


def prompts_of(world: World) -> list[ImagePrompt]:
    """With one image, two, text alone, and the first image again after other text."""
    first, second = stored(1), stored(2, 16, 32)
    text = world.text
    return [
        world.prompt(text(5), first, text(4)),
        world.prompt(text(3), first, text(2), second, text(3)),
        world.prompt(text(9)),
        world.prompt(text(2), first, text(1)),
    ]


@cache
def expected(name: str) -> tuple[list[ImagePrompt], list[Completion]]:
    world = world_of(name)
    prompts = prompts_of(world)
    return prompts, [world.generate(prompt, NEW_TOKENS) for prompt in prompts]


@pytest.mark.parametrize(
    "name", [in_soak(name) if name in ALIKE else name for name in ARCHITECTURES]
)
def test_tokens_equal_generate(name: str) -> None:
    world = world_of(name)
    prompts, completions = expected(name)
    lane = image_lane(world, block_size=4)
    assert lane.run(prompts, NEW_TOKENS) == completions
    assert lane.run(prompts, NEW_TOKENS) == completions, "on a warm cache"


@pytest.mark.parametrize("name", CUT)
def test_tokens_equal_generate_when_preempted(name: str) -> None:
    """Victims compute their tokens again, on a cache that is emptied now and then."""
    world = world_of(name)
    prompts, completions = expected(name)
    settings: dict[str, Any] = {
        "max_batch_size": 4,
        "max_tokens_per_batch": CHUNKS.get(name, 11),
    }
    lane = image_lane(world, block_size=4, preempt_every=3, flush_every=2, **settings)
    assert lane.run(prompts, NEW_TOKENS) == completions
    assert lane.preempted > 1
    assert lane.flushed


def test_equal_images_share_kv_and_one_encoding() -> None:
    world = world_of("llava")
    first, other = stored(3), stored(4)
    head, tail = world.text(3), world.text(2)
    lane = image_lane(world, block_size=4)
    prompts = [world.prompt(head, first, tail) for _ in range(3)]
    different = world.prompt(head, other, tail)
    assert prompts[0].token_ids == different.token_ids
    a, b, c = lane.run(prompts, NEW_TOKENS)
    assert a == b == c == world.generate(prompts[0], NEW_TOKENS)
    assert lane.encoded == [id_of(first)]
    (found,) = lane.run([different], NEW_TOKENS)
    assert found == world.generate(different, NEW_TOKENS)
    assert list(lane.cached.values()) == [len(head) + 1], "up to the first placeholder"
    lane.run(prompts[:1], NEW_TOKENS)
    assert list(lane.cached.values()) == [len(different.token_ids) - 1]
    assert lane.encoded == [], "its KV is cached"
