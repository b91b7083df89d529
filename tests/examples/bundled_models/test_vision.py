"""The bundled vision model: its pictures, its questions, and what it has learnt."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bundled_models.vision import evaluation, pictures
from bundled_models.vision.pictures import Scene, Thing
from bundled_models.vision.rows import pixels_of
from bundled_models.vision.settings import VisionSettings

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.config import BUNDLED_VISION_MODEL
from nano_inference.text.images import ImageProcessor
from nano_inference.text.tokenizer import load_tokenizer

MOST_BYTES = 6_000_000
SCENE = Scene((Thing("circle", "red", 0), Thing("circle", "blue", 4), Thing("square", "red", 5)))


@pytest.fixture(scope="module")
def folder() -> Path:
    return EngineConfig(model_path=BUNDLED_VISION_MODEL).model_folder


@pytest.fixture(scope="module")
def engine() -> Iterator[InferenceEngine]:
    config = EngineConfig(model_path=BUNDLED_VISION_MODEL, dtype="float32")
    with InferenceEngine(config) as engine:
        yield engine


# --- pictures and questions -----------------------------------------------------------------------


def test_a_picture_shows_each_shape_at_its_place_in_its_colour() -> None:
    for seed in range(20):
        image = pictures.draw(SCENE, random.Random(seed))
        for thing in SCENE.things:
            row, column = divmod(thing.place, 3)
            middle = [part * pictures.CELL + pictures.CELL // 2 for part in (column, row)]
            pixel = image.getpixel((middle[0], middle[1]))
            assert isinstance(pixel, tuple)
            wanted = pictures.COLOURS[thing.colour]
            assert all(abs(a - b) <= 15 for a, b in zip(pixel, wanted, strict=True))
        empty = image.crop((32, 0, 48, 16)).getcolors()
        assert empty is not None
        assert len(empty) == 1


def test_held_out_scenes_are_never_in_training() -> None:
    rng = random.Random(1)
    train, heldout = (
        {pictures.make_scene(rng, split).key for _ in range(2000)} for split in ("train", "heldout")
    )
    assert not train & heldout
    numbers = [{key for key in keys if key.isdigit()} for keys in (train, heldout)]
    assert len(numbers[0] | numbers[1]) > 80
    assert len(numbers[1]) >= 5


# --- rows -----------------------------------------------------------------------------------------


def test_training_pixels_are_those_of_the_processor(folder: Path) -> None:
    processor = ImageProcessor.of(folder)
    assert processor is not None
    images = [case.image for case in evaluation.cases("describe", 3, seed=1)]
    found = processor.image_processor(images, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(found, pixels_of(images))
    assert processor.num_tokens([(48, 48), (640, 480)]) == [VisionSettings().image_tokens] * 2


# --- the model ------------------------------------------------------------------------------------


def test_the_folder_is_small(folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES


# All held-out shares are in the model's card.
@pytest.mark.parametrize(
    ("task", "count", "least"),
    [("count", 20, 16), ("colour", 20, 13), ("shape", 20, 18), ("number", 20, 18)],
)
def test_held_out_pictures(
    task: str, count: int, least: int, engine: InferenceEngine, folder: Path
) -> None:
    tokenizer = load_tokenizer(folder)
    asked = evaluation.cases(task, count, seed=1)
    prompts = [evaluation.prompt_of(tokenizer, case.question.text) for case in asked]
    samples = engine.generate(
        prompts, SamplingParams(temperature=0, max_tokens=40), images=[c.image for c in asked]
    )
    answers = [
        tokenizer.decode(sample.completion_tokens, skip_special_tokens=True) for sample in samples
    ]
    right = [case.question.answer == text for case, text in zip(asked, answers, strict=True)]
    assert sum(right) >= least


@pytest.mark.parametrize("colour", ["green", "red", "blue"])
def test_answers_follow_the_picture(colour: str, engine: InferenceEngine, folder: Path) -> None:
    """The same words about other pictures, and other words about the same picture."""
    tokenizer = load_tokenizer(folder)
    image = pictures.draw(Scene((Thing("triangle", colour, 4),)), random.Random(1))
    asked = ("What do you see?", "What colour is the triangle?", "How many shapes are there?")
    samples = engine.generate(
        [evaluation.prompt_of(tokenizer, text) for text in asked],
        SamplingParams(temperature=0, max_tokens=10),
        images=[image] * len(asked),
    )
    answers = [
        tokenizer.decode(sample.completion_tokens, skip_special_tokens=True) for sample in samples
    ]
    assert answers == [f"a {colour} triangle", colour, "1"]
