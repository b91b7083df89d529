"""Images of requests in the store: held while in flight, also over failures, and no longer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from redis import Redis

from nano_inference import GenerateRequest, Pipeline
from nano_inference.bus.public import Completion, ImageInput
from nano_inference.config import Config
from nano_inference.media import decode_process
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.store.images import ImageUsage

from .builders import begin, break_once, end_of, error_code, kill, until
from .conftest import MakeConfig, both_buses
from .test_images import ONE, VisionModel, asked, picture

TOKENS = {"max_tokens": 40}


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    return VisionModel(tmp_path_factory.mktemp("vision"))


def settings(make_config: MakeConfig, vision: VisionModel, **more: Any) -> Config:
    return make_config(
        engine__model_path=str(vision.folder),
        engine__max_model_len=256,
        pipeline__restart_backoff_s=0.01,
        **more,
    )


@pytest.fixture
async def pipeline(make_config: MakeConfig, vision: VisionModel) -> AsyncIterator[Pipeline]:
    async with Pipeline(settings(make_config, vision)) as running:
        yield running


def id_of(seed: int) -> str:
    image = picture(seed)
    return decode_process.id_of(*image.size, image.tobytes())


def by_id(request: GenerateRequest, seed: int) -> GenerateRequest:
    return msgspec.structs.replace(request, images=(ImageInput(id=id_of(seed)),))


@both_buses("redis-links")
async def test_an_image_is_held_while_its_request_is_in_flight(
    pipeline: Pipeline, vision: VisionModel
) -> None:
    images = pipeline.bus.store.images
    async with aclosing(pipeline.submit(asked(ONE, 1, **TOKENS))) as outputs:
        await anext(outputs)
        size = (await images.usage()).num_bytes
        assert size > 0
        assert await images.usage() == ImageUsage(1, 1, size)
        await end_of(outputs)
    admission = pipeline._actors["admission"]
    await until(lambda: not admission._images.held)  # type: ignore[attr-defined]
    assert await images.usage() == ImageUsage(1, 0, size)
    vision.check(await pipeline.complete(by_id(asked(ONE), 1)), 1)
    unknown = await pipeline.complete(by_id(asked(ONE), 2))
    assert error_code(unknown) == "unknown_image"


class Lost:
    """A Redis server that loses all images."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._url, self._prefix = pipeline.config.bus.url, pipeline.config.bus.prefix

    def now(self) -> int:
        with Redis.from_url(self._url) as redis:
            keys = list(redis.scan_iter(f"{{{self._prefix}:images}}:*"))
            return int(redis.delete(*keys)) if keys else 0


@pytest.mark.parametrize("make_config", ["redis-links"], indirect=True)
async def test_images_that_the_server_lost_are_stored_again_from_their_entries(
    pipeline: Pipeline, vision: VisionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aclosing(pipeline.submit(asked(ONE, 1, **TOKENS))) as outputs:
        await anext(outputs)
        assert Lost(pipeline).now()
        break_once(monkeypatch, ExecutorCore, "execute", after=1)
        completion = await end_of(outputs)
    assert len(completion.samples[0].token_ids) == 40
    vision.check(completion, 1)


@pytest.mark.parametrize("make_config", ["redis-links"], indirect=True)
async def test_a_request_about_an_image_survives_its_pipeline(
    make_config: MakeConfig, vision: VisionModel
) -> None:
    """Killed without a word; and the images are gone as well."""
    config = settings(make_config, vision, admission__lease_s=0.5)
    first = await begin(Pipeline(config))
    request = msgspec.structs.replace(asked(ONE, 1, **TOKENS), request_id="mine", stream=True)
    outputs = first.submit(request)
    await anext(outputs)
    lost = Lost(first)
    await kill(first)
    assert lost.now()
    async with Pipeline(config) as second:
        completion = await end_of(second.client.follow("mine"))
        assert isinstance(completion, Completion)
        vision.check(completion, 1)
        admission = second._actors["admission"]
        await until(lambda: not admission._images.held)  # type: ignore[attr-defined]
        assert (await second.bus.store.images.usage()).held == 0
