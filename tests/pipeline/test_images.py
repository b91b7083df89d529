"""Images through the whole pipeline: answers equal those of Transformers' `generate`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from nano_inference import Completion, GenerateRequest, Pipeline, SamplingParams
from nano_inference.bus.public import ImageInput
from nano_inference.config import Constraint
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.executor.parts.images import Images
from nano_inference.stages.executor.stage import ExecutorStage

from ..media.pictures import saved
from ..stages.executor.vision_models import make_vision_model
from ..stages.executor.vision_models import picture as picture_array
from ..text.processors import FAMILIES, save_model
from .builders import break_once, end_of, error_code, stage_of
from .conftest import MakeConfig

TOKENS = 12
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


class VisionModel:
    """A small model with M-RoPE in a folder, and its answers by Transformers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = save_model(FAMILIES["qwen2_vl"], folder)
        self.placeholder = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.model = make_vision_model(
            "qwen2_vl",
            placeholder=self.placeholder,
            vision={"patch_size": 14},
            vocab_size=len(self.tokenizer),
        )
        self.model.save_pretrained(folder)
        auto: Any = AutoImageProcessor
        self.processor = auto.from_pretrained(folder, backend="pil")

    @torch.no_grad()
    def answer(self, token_ids: tuple[int, ...], number: int, *seeds: int) -> list[int]:
        """Greedy tokens after a prompt with pictures."""
        ids = torch.tensor([token_ids])
        inputs: dict[str, Any] = {}
        if seeds:
            inputs = dict(self.processor(list(map(picture, seeds)), return_tensors="pt"))
            inputs["mm_token_type_ids"] = (ids == self.placeholder).int()
        output = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=number,
            eos_token_id=None,
            **inputs,
        )
        return output[0, len(token_ids) :].tolist()

    def check(self, completion: Completion, *seeds: int) -> None:
        assert completion.status == "done", completion.error
        number = len(completion.samples[0].token_ids)
        expected = self.answer(completion.prompt_token_ids, number, *seeds)
        for sample in completion.samples:
            assert list(sample.token_ids) == expected


@cache
def picture(seed: int) -> Image.Image:
    return Image.fromarray(picture_array(seed, 56, 40 + 28 * (seed % 2)))


def asked(prompt: str, *seeds: int, n: int = 1, **sampling: Any) -> GenerateRequest:
    """A greedy request with a picture for each PICTURE in its prompt."""
    images = tuple(ImageInput(data=saved(picture(seed))) for seed in seeds)
    wanted = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, **sampling}
    return GenerateRequest(prompt=prompt, images=images, n=n, sampling=SamplingParams(**wanted))


ONE = f"Look: {PICTURE} What is it?"
TWO = f"{PICTURE} and {PICTURE}, compare them"


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    return VisionModel(tmp_path_factory.mktemp("vision"))


@pytest.fixture
async def pipeline(make_config: MakeConfig, vision: VisionModel) -> AsyncIterator[Pipeline]:
    config = make_config(
        engine__model_path=str(vision.folder),
        engine__max_model_len=256,
        engine__speculation="auto",
        pipeline__restart_backoff_s=0.01,
    )
    async with Pipeline(config) as running:
        yield running


async def test_answers_equal_generate(pipeline: Pipeline, vision: VisionModel) -> None:
    one, two, text, several, again = await asyncio.gather(
        pipeline.complete(asked(ONE, 1)),
        pipeline.complete(asked(TWO, 1, 2)),
        pipeline.complete(asked("98 + 25 =")),
        pipeline.complete(asked(ONE, 3, n=3)),
        pipeline.complete(asked(f"Again: {PICTURE}!", 1)),
    )
    vision.check(one, 1)
    vision.check(two, 1, 2)
    vision.check(text)
    vision.check(several, 3)
    vision.check(again, 1)
    warm = await pipeline.complete(asked(ONE, 1))
    vision.check(warm, 1)
    assert warm.usage.cached_tokens == len(warm.prompt_token_ids) - 1
    choice = Constraint(choice=("yes", "no"))
    constrained = await pipeline.complete(asked(ONE, 1, constraint=choice, ignore_eos=False))
    assert constrained.samples[0].text in ("yes", "no")
    images = stage_of(pipeline, ExecutorStage)._core.part(Images).of_sequences
    assert images is not None
    assert images.embeddings.num_encoded == 3, "each picture once"


@pytest.mark.parametrize("make_config", ["redis-links"], indirect=True)
async def test_requests_about_images_go_on_after_failures(
    pipeline: Pipeline, vision: VisionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor fails in the midst of them: its successor encodes their images again."""
    break_once(monkeypatch, ExecutorCore, "execute", after=5)
    streams = [
        end_of(pipeline.submit(msgspec.structs.replace(request, stream=True)))
        for request in (asked(ONE, 1), asked(TWO, 1, 2), asked(ONE, 2))
    ]
    one, two, other = await asyncio.gather(*streams)
    vision.check(one, 1)
    vision.check(two, 1, 2)
    vision.check(other, 2)
    assert not await pipeline.bus.requests.dead_letters()


async def test_another_replica_continues_with_the_kv_of_images(
    make_config: MakeConfig, vision: VisionModel
) -> None:
    config = make_config(
        engine__model_path=str(vision.folder),
        engine__max_model_len=256,
        pipeline__replicas=2,
        pipeline__roles=["prefill", "decode"],
    )
    async with Pipeline(config) as pipeline:
        one, two = await asyncio.gather(
            pipeline.complete(asked(ONE, 1)), pipeline.complete(asked(TWO, 1, 2, n=2))
        )
        vision.check(one, 1)
        vision.check(two, 1, 2)
        encoded = []
        for replica in range(2):
            images = stage_of(pipeline, ExecutorStage, replica)._core.part(Images).of_sequences
            assert images is not None
            encoded.append(images.embeddings.num_encoded)
        assert encoded == [2, 0]


async def test_a_replay_finds_the_image_of_its_tenant(pipeline: Pipeline) -> None:
    """It has a cache_salt of its own, and an operator's replay another tenant."""
    done = await pipeline.complete(msgspec.structs.replace(asked(ONE, 1), tenant="anna"))
    (sample,) = (await pipeline.replay(done)).samples
    assert sample.equal_tokens == len(done.samples[0].token_ids)


async def test_a_lost_image_ends_its_request_alone(
    pipeline: Pipeline, vision: VisionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = pipeline.bus.store.images
    get, lost = store.get, picture(4)

    async def get_others(id: str) -> Any:
        image = await get(id)
        return None if image is not None and image.height == lost.height else image

    monkeypatch.setattr(store, "get", get_others)
    missing, other = await asyncio.gather(
        pipeline.complete(asked(ONE, 4)), pipeline.complete(asked(ONE, 3))
    )
    assert error_code(missing) == "invalid_image"
    vision.check(other, 3)
    monkeypatch.undo()
    vision.check(await pipeline.complete(asked(ONE, 4)), 4)
