"""A trainer that uses SGLang's interface alone drives a whole round.

The calls, their order and the fields read are those of slime's and miles' clients
(backends/sglang_utils/sglang_engine.py, rollout/sglang_rollout.py of slime; miles' have the same
names), as far as they are HTTP. `test_gateway_group.py` has the broadcast group.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
from torch import Tensor

from nano_inference.config import ConfigError, load_config
from nano_inference.gateway.gateway import Gateway
from nano_inference.pipeline.pipeline import Pipeline

from ..oracle import announcing, token_of
from ..servers import until
from .builders import in_halves
from .conftest import MakeConfig, both_buses


class Trainer:
    """The HTTP calls of slime's SGLangEngine, by their names there."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def make_request(self, endpoint: str, payload: dict[str, Any]) -> Any:
        response = await self.http.post(f"/{endpoint}", json=payload)
        response.raise_for_status()
        return response.json()

    async def wait_server_healthy(self) -> None:
        for path in ("/health_generate", "/flush_cache"):
            response = await self.http.get(path)
            response.raise_for_status()

    async def flush_cache(self) -> None:
        (await self.http.get("/flush_cache")).raise_for_status()

    async def pause_generation(self, mode: str) -> None:
        """miles gives the mode; slime posts an empty object."""
        await self.make_request("pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        await self.make_request("continue_generation", {})

    async def release_memory_occupation(self, tags: list[str] | None = None) -> Any:
        """slime flushes before; miles gives tags."""
        await self.flush_cache()
        return await self.make_request("release_memory_occupation", {"tags": tags})

    async def resume_memory_occupation(self, tags: list[str] | None = None) -> Any:
        return await self.make_request("resume_memory_occupation", {"tags": tags})

    async def get_weight_version(self) -> str:
        response = await self.http.get("/get_weight_version")
        response.raise_for_status()
        return str(response.json()["weight_version"])

    async def update_weights_from_disk(self, model_path: str, weight_version: str) -> Any:
        payload = {"model_path": model_path, "weight_version": weight_version}
        return await self.make_request("update_weights_from_disk", payload)

    async def generate(self, prompt_ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        """Generate with slime's payload, and parse the answer as slime does."""
        payload = {
            "sampling_params": {
                "temperature": 0.0,
                "top_p": 1.0,
                "top_k": -1,
                "max_new_tokens": max_new_tokens,
                "stop": None,
                "stop_token_ids": None,
                "skip_special_tokens": False,
                "no_stop_trim": True,
                "spaces_between_special_tokens": False,
            },
            "return_logprob": True,
            "input_ids": prompt_ids,
        }
        output = await self.make_request("generate", payload)
        meta = output["meta_info"]
        status = {"length": "truncated", "abort": "aborted", "stop": "completed"}
        return {
            "text": output["text"],
            "tokens": [item[1] for item in meta["output_token_logprobs"]],
            "log_probs": [item[0] for item in meta["output_token_logprobs"]],
            "weight_version": meta.get("weight_version"),
            "status": status[meta["finish_reason"]["type"]],
            "cached": meta["cached_tokens"],
            "prompt": meta["prompt_tokens"],
        }

    async def abort_until_idle(self) -> None:
        while True:
            (await self.http.post("/abort_request", json={"abort_all": True})).raise_for_status()
            response = await self.http.get("/v1/loads?include=core,disagg,queues")
            loads = response.json()["loads"]
            if sum(load["num_total_reqs"] for load in loads) <= 0:
                return
            await asyncio.sleep(0.05)


@pytest.fixture
async def pipeline(make_config: MakeConfig) -> AsyncIterator[Pipeline]:
    async with Pipeline(make_config(engine__kv_cache_bytes=1 << 24)) as running:
        yield running


@pytest.fixture
def trainer(http: httpx.AsyncClient) -> Trainer:
    return Trainer(http)


@pytest.fixture
def weights(pipeline: Pipeline) -> Mapping[str, Tensor]:
    """Those of the bundled model."""
    return safetensors.torch.load_file(pipeline.config.engine.model_folder / "model.safetensors")


@pytest.fixture
def spell(weights: Mapping[str, Tensor], tmp_path: Path) -> Callable[[int], str]:
    """Writes weights that spell a version to a folder."""

    def write(version: int) -> str:
        folder = tmp_path / f"v{version}"
        folder.mkdir()
        tensors = announcing(weights, version)
        safetensors.torch.save_file(tensors, folder / "model.safetensors")
        return str(folder)

    return write


async def in_flight(pipeline: Pipeline) -> int:
    """Requests that admission holds."""
    reports = {report.stage: report for report in pipeline.stages()}
    return int(reports["admission"].load["in_flight"])


async def at_rest(pipeline: Pipeline) -> bool:
    return not await in_flight(pipeline)


@both_buses
async def test_a_trainer_runs_its_rounds(trainer: Trainer, spell: Callable[[int], str]) -> None:
    """Pause, flush, new weights, continue, generate: the version is that of the tokens."""
    await trainer.wait_server_healthy()
    before = await trainer.generate([20, 21, 22], 4)
    assert before["weight_version"] == await trainer.get_weight_version() == "0"
    for version in (1, 2):
        await trainer.pause_generation("retract")
        await trainer.flush_cache()
        await trainer.update_weights_from_disk(spell(version), str(version))
        assert await trainer.get_weight_version() == str(version - 1)
        await trainer.continue_generation()
        assert await trainer.get_weight_version() == str(version)
        sample = await trainer.generate([20, 21, 22], 4)
        assert sample["tokens"] == [token_of(version)] * 4
        assert len(sample["log_probs"]) == 4
        assert (sample["weight_version"], sample["status"]) == (str(version), "truncated")
        assert (sample["cached"], sample["prompt"]) == (0, 3)


async def test_buckets_become_visible_together(
    trainer: Trainer, weights: Mapping[str, Tensor], tmp_path: Path
) -> None:
    """Half of the new weights are refused a place, whatever way generation goes on."""
    folders = in_halves(announcing(weights, 1), tmp_path)
    before = await trainer.generate([20, 21, 22], 4)
    await trainer.pause_generation("in_place")
    waiting = asyncio.create_task(trainer.generate([20, 21, 22], 4))
    await trainer.update_weights_from_disk(str(folders[0]), "1")
    with pytest.raises(httpx.HTTPStatusError) as refused:
        await trainer.update_weights_from_disk(str(tmp_path / "none"), "1")
    assert refused.value.response.status_code == 400
    with pytest.raises(httpx.HTTPStatusError):
        await trainer.continue_generation()
    sample = await waiting
    assert sample["tokens"] == before["tokens"]
    assert sample["weight_version"] == await trainer.get_weight_version() == "0"

    await trainer.pause_generation("in_place")
    for folder in folders:
        await trainer.update_weights_from_disk(str(folder), "1")
    await trainer.continue_generation()
    sample = await trainer.generate([20, 21, 22], 4)
    assert sample["tokens"] == [token_of(1)] * 4
    assert sample["weight_version"] == "1"


async def test_a_trainer_on_the_same_device_runs_its_rounds(
    trainer: Trainer, pipeline: Pipeline, weights: Mapping[str, Tensor], tmp_path: Path
) -> None:
    """Release, train, weights, buckets, KV cache, generate; requests wait meanwhile."""
    for version in (1, 2):
        await trainer.release_memory_occupation([None, ["kv_cache", "weights"]][version - 1])
        waiting = asyncio.create_task(trainer.generate([20, 21, 22], 4))
        await until(lambda: in_flight(pipeline), "the request in flight")
        (await trainer.http.get("/health_generate")).raise_for_status()
        await trainer.resume_memory_occupation(["weights"])
        for folder in in_halves(announcing(weights, version), tmp_path / str(version)):
            await trainer.update_weights_from_disk(str(folder), str(version))
        await trainer.resume_memory_occupation(["kv_cache"])
        sample = await waiting
        assert sample["tokens"] == [token_of(version)] * 4
        assert sample["weight_version"] == await trainer.get_weight_version() == str(version)


async def test_released_weights_are_not_generated_from(
    trainer: Trainer, pipeline: Pipeline, spell: Callable[[int], str]
) -> None:
    """Memory is there, weights are not: half of them are refused, and requests wait for all."""
    await trainer.release_memory_occupation()
    await trainer.resume_memory_occupation()
    waiting = asyncio.create_task(trainer.generate([20, 21, 22], 4))
    await until(lambda: in_flight(pipeline), "the request in flight")
    await trainer.update_weights_from_disk(spell(1), "1")
    assert (await waiting)["tokens"] == [token_of(1)] * 4


@both_buses
async def test_aborted_requests_return_partial_samples(
    trainer: Trainer, pipeline: Pipeline
) -> None:
    """As slime stops a rollout: it aborts until nothing runs, and keeps the partial samples."""
    body = {
        "input_ids": [20, 21, 22],
        "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True},
        "return_logprob": True,
        "stream": True,
    }
    async with trainer.http.stream("POST", "/generate", json=body) as response:
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        await trainer.abort_until_idle()
        events = [line async for line in lines if line]
    assert events[-1] == "data: [DONE]"
    meta = json.loads(events[-2].removeprefix("data: "))["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert 0 < len(meta["output_token_logprobs"]) == meta["completion_tokens"] < 1500


@both_buses
async def test_a_dropped_connection_frees_the_lane(trainer: Trainer, pipeline: Pipeline) -> None:
    """While generation is paused, so that the request can't end by itself."""
    await trainer.pause_generation("in_place")
    generating = asyncio.create_task(trainer.generate([20, 21, 22], 4))
    await until(lambda: in_flight(pipeline), "the request in flight")
    generating.cancel()
    await until(lambda: at_rest(pipeline), "a lane at rest")
    await trainer.continue_generation()


async def test_a_single_model_has_the_same_status_routes(
    http: httpx.AsyncClient, pipeline: Pipeline
) -> None:
    (found,) = (await http.get("/admin/models")).json()["data"]
    assert (found["id"], found["state"], found["device"]) == ("tiny", "ready", "cpu")
    assert min(found["load_ns"], found["kv_bytes"], found["weight_bytes"]) > 0
    assert (found["is_moe"], found["n_experts"]) == (False, 0)
    assert (await http.get("/admin/models/tiny")).json()["load_ns"] == found["load_ns"]
    info = (await http.get("/server_info")).json()
    assert (info["device"], info["is_moe"]) == ("cpu", False)
    assert info["max_running_requests"] == pipeline.config.engine.batch_size_on("cpu")
    for name in ("load_ns", "kv_bytes", "weight_bytes", "dtype"):
        assert info[name] == found[name]
    assert (await http.get("/admin/models/other")).status_code == 404
    for method, path in (("POST", ""), ("POST", "/tiny/load"), ("DELETE", "/tiny")):
        refused = await http.request(method, f"/admin/models{path}", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported")


async def test_a_taken_port_is_an_error(pipeline: Pipeline) -> None:
    async with Gateway(pipeline.client, pipeline.config) as gateway:
        config = load_config(env={}, overrides={"gateway.port": gateway.port})
        with pytest.raises(ConfigError, match=f"port {gateway.port}"):
            await Gateway(pipeline.client, config).__aenter__()
