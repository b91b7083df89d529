"""Adapters of a running pipeline: loaded, replaced, unloaded and brought back after a failure."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from nano_inference import Completion, EngineConfig, InferenceEngine, Pipeline, SamplingParams
from nano_inference.bus.public import CompletionChunk
from nano_inference.config import AdapterError
from nano_inference.pipeline.supervisor import StageFailed
from nano_inference.stages.executor.core import ExecutorCore

from ..stages.executor.runner.adapters.making import make_adapter
from . import short_model
from .conftest import MakeConfig, both_buses
from .test_life import break_once

SHORT_MODEL = True
LIMIT_S = 90
PROMPT = "12 + 30 ="
TOKENS = 60


@cache
def base() -> Any:
    return AutoModelForCausalLM.from_pretrained(short_model.folder(), dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two")):
        make_adapter(base(), seed, made / name)
    return made


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[str, tuple[int, ...]]:
    """The tokens of the model alone and of each adapter, by an engine of their own."""
    config = EngineConfig(model_path=str(short_model.folder()), dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    found = {}
    for name in ("", "one", "two"):
        with InferenceEngine(config) as engine:
            if name:
                engine.load_adapter(name, folder / name)
            (sample,) = engine.generate([PROMPT], params, adapter=name)
            found[name] = sample.completion_tokens
    assert len(set(found.values())) == 3
    return found


@pytest.fixture
async def limit() -> AsyncIterator[None]:
    async with asyncio.timeout(LIMIT_S):
        yield


def request(model: str = "", tokens: int = TOKENS, **fields: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    return {"prompt": PROMPT, "model": model, "sampling": sampling, **fields}


async def say(pipeline: Pipeline, model: str = "") -> tuple[int, ...]:
    completion = await pipeline.complete(request(model))
    assert completion.status == "done", completion.error
    return completion.samples[0].token_ids


async def refusal(pipeline: Pipeline, model: str) -> str:
    """The code of the error; "" if there was none."""
    completion = await pipeline.complete(request(model, tokens=2))
    return "" if completion.error is None else completion.error.code


@both_buses
async def test_many_in_one_batch(
    make_config: MakeConfig, folder: Path, wanted: dict[str, tuple[int, ...]]
) -> None:
    async with asyncio.timeout(LIMIT_S), Pipeline(make_config()) as pipeline:
        client = pipeline.client
        assert await refusal(pipeline, "one") == "unknown_model"
        for name in ("one", "two"):
            assert await client.load_adapter(name, str(folder / name)) == 1
        names = ["", "one", "two"] * 3
        answers = await asyncio.gather(*(pipeline.complete(request(name)) for name in names))
        for name, answer in zip(names, answers, strict=True):
            assert answer.samples[0].token_ids == wanted[name]
            assert answer.samples[0].adapter_version == bool(name)
            assert answer.model == (name or pipeline.config.engine.model_name)
        while [each.id for each in await client.adapters()] != ["one", "two"]:  # noqa: ASYNC110
            await asyncio.sleep(0)  # stages report every second
        await client.unload_adapter("one")
        assert await refusal(pipeline, "one") == "unknown_model"
        assert await say(pipeline, "two") == wanted["two"]
        with pytest.raises(AdapterError) as missing:
            await client.unload_adapter("one")
        assert missing.value.code == "adapter_not_found"
        # Another one under its name: nobody finds the former's KV.
        assert await client.load_adapter("one", str(folder / "two")) == 2
        assert await say(pipeline, "one") == wanted["two"]


async def test_tokens_are_stamped(
    pipeline: Pipeline, folder: Path, wanted: dict[str, tuple[int, ...]], limit: None
) -> None:
    await pipeline.client.load_adapter("a", str(folder / "one"))
    versions: list[int] = []
    tokens: list[int] = []
    async for output in pipeline.submit(request("a", 1000)):
        if isinstance(output, CompletionChunk):
            versions += [output.adapter_version] * len(output.token_ids)
            tokens += output.token_ids
            if len(tokens) == 5:
                assert await pipeline.client.load_adapter("a", str(folder / "two")) == 2
        else:
            assert output.samples[0].adapter_version == 1
    assert set(versions) == {1, 2}
    assert versions == sorted(versions)
    assert tuple(tokens[: versions.index(2)])[:TOKENS] == wanted["one"][: versions.index(2)]
    assert await say(pipeline, "a") == wanted["two"]


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
async def test_unloading_while_requests_run(
    pipeline: Pipeline, folder: Path, in_flight: Any, limit: None
) -> None:
    client = pipeline.client
    await client.load_adapter("a", str(folder / "one"))
    unloading: asyncio.Task[None] | None = None
    completion: Completion | None = None
    async for output in pipeline.submit(request("a", 1000)):
        if isinstance(output, Completion):
            completion = output
        elif unloading is None:
            unloading = asyncio.create_task(client.unload_adapter("a", in_flight=in_flight))
            while await refusal(pipeline, "a") != "unknown_model":
                pass
            assert in_flight == "abort" or not unloading.done()
    assert unloading is not None
    assert completion is not None
    await unloading
    if in_flight == "abort":
        assert completion.status == "cancelled"
        assert completion.error is not None
        assert completion.error.code == "aborted"
    else:
        assert completion.status == "done"
        assert len(completion.samples[0].token_ids) == 1000


async def test_an_executor_that_starts_anew_has_them_again(
    make_config: MakeConfig,
    folder: Path,
    tmp_path: Path,
    wanted: dict[str, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One is there again, in its version; of one the folder is gone, and those that need it end."""
    shutil.copytree(folder / "two", tmp_path / "two")
    adapters = {"settings": str(folder / "one")}
    config = make_config(pipeline__restart_backoff_s=0.01, engine__adapters=adapters)
    async with asyncio.timeout(LIMIT_S), Pipeline(config) as pipeline:
        client = pipeline.client
        await client.load_adapter("kept", str(folder / "one"), version=6)
        await client.load_adapter("lost", str(tmp_path / "two"))
        await client.load_adapter("settings", str(folder / "two"))
        shutil.rmtree(tmp_path / "two")
        break_once(monkeypatch, ExecutorCore, "execute", after=20)
        names = ["", "kept", "lost", "settings"]
        answers = await asyncio.gather(*(pipeline.complete(request(name)) for name in names))
        by_name = dict(zip(names, answers, strict=True))
        for name, tokens in (("", ""), ("kept", "one"), ("settings", "two")):
            assert by_name[name].samples[0].token_ids == wanted[tokens], name
        assert by_name["kept"].samples[0].adapter_version == 6
        assert by_name["settings"].samples[0].adapter_version == 2
        error = by_name["lost"].error
        assert error is not None
        assert error.code == "adapter_unloaded"
        assert await refusal(pipeline, "lost") == "unknown_model"
        assert await client.load_adapter("lost", str(folder / "two")) == 2


async def test_replicas_have_the_same(
    make_config: MakeConfig, folder: Path, wanted: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    config = make_config(pipeline__replicas=2)
    async with asyncio.timeout(LIMIT_S), Pipeline(config) as pipeline:
        assert await pipeline.client.load_adapter("a", str(folder / "one")) == 1
        answers = await asyncio.gather(*(say(pipeline, "a") for _ in range(12)))
        assert set(answers) == {wanted["one"]}
        with pytest.raises(AdapterError) as refused:
            await pipeline.client.load_adapter("a", str(tmp_path))
        assert refused.value.code == "adapter_refused"
        assert await say(pipeline, "a") == wanted["one"]
        await pipeline.client.unload_adapter("a")
        assert await refusal(pipeline, "a") == "unknown_model"


async def test_adapters_of_the_settings_that_are_not_there(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(engine__adapters={"a": str(tmp_path)}, pipeline__max_restarts=0)
    with pytest.raises(StageFailed, match="the executor stage"):
        async with asyncio.timeout(LIMIT_S), Pipeline(config):
            pass
