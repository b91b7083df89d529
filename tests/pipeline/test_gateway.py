"""A trainer that uses SGLang's interface alone drives a whole round.

The calls, their order and the fields read are those of slime's and miles' clients
(backends/sglang_utils/sglang_engine.py, rollout/sglang_rollout.py of slime; miles' have the same
names). The program that broadcasts is made by what slime and SGLang document (`peers.py`).
"""

from __future__ import annotations

import asyncio
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
from ..stages.executor.runner.weights.transports.peers import Peer
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


@both_buses()
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


@pytest.mark.slow
@pytest.mark.parametrize("make_config", ["redis-links"], indirect=True)
async def test_a_trainer_s_group_runs_its_rounds(
    trainer: Trainer, weights: Mapping[str, Tensor], tmp_path: Path
) -> None:
    """From another process, in buckets; the call is on its way while rank 0 broadcasts."""
    group = {"group_name": "slime-pp_0"}
    with Peer(group["group_name"]) as peer:
        host, port = peer.address.split(":")
        place = {"master_address": host, "master_port": int(port), "backend": "gloo"}
        ranks = {"rank_offset": 1, "world_size": 2}
        joined = await trainer.make_request("init_weights_update_group", group | place | ranks)
        assert joined["success"]
        assert await asyncio.to_thread(peer.hear) == "joined"
        for version in (1, 2):
            await trainer.pause_generation("retract")
            await trainer.flush_cache()
            for half in in_halves(announcing(weights, version), tmp_path / str(version)):
                file = half / "x.safetensors"
                tensors = sorted(safetensors.torch.load_file(file).items())
                peer.tell("send", file)
                bucket = {
                    "names": [name for name, _ in tensors],
                    "dtypes": [str(each.dtype).removeprefix("torch.") for _, each in tensors],
                    "shapes": [list(each.shape) for _, each in tensors],
                    "flush_cache": False,
                    "weight_version": str(version),
                }
                sent = await trainer.make_request("update_weights_from_distributed", group | bucket)
                assert sent["success"]
                assert await asyncio.to_thread(peer.hear) == "send"
            assert await trainer.get_weight_version() == str(version - 1)
            await trainer.continue_generation()
            sample = await trainer.generate([20, 21], 3)
            assert sample["tokens"] == [token_of(version)] * 3
            assert sample["weight_version"] == str(version)
        left = await trainer.make_request("destroy_weights_update_group", group)
        assert left["success"]


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


@both_buses()
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
