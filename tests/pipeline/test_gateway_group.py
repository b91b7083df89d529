"""A trainer in another process broadcasts its weights, and tells of them over HTTP.

The program is made by what slime and SGLang document (`peer.py`), the calls are slime's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
from torch import Tensor

from nano_inference.pipeline.pipeline import Pipeline

from ..oracle import announcing, token_of
from ..stages.executor.runner.weights.transports.peers import Peer
from .builders import in_halves
from .conftest import LIMIT_S, MakeConfig

GROUP = "slime-pp_0"

pytestmark = pytest.mark.slow


@pytest.fixture
async def pipeline(make_config: MakeConfig) -> AsyncIterator[Pipeline]:
    config = make_config(gateway__sync_timeout_s=20.0, engine__kv_cache_bytes=1 << 24)
    async with asyncio.timeout(LIMIT_S), Pipeline(config) as running:
        yield running


@pytest.fixture
def weights(pipeline: Pipeline) -> Mapping[str, Tensor]:
    return safetensors.torch.load_file(pipeline.config.engine.model_folder / "model.safetensors")


async def post(http: httpx.AsyncClient, path: str, **payload: Any) -> httpx.Response:
    return await http.post(path, json=payload)


async def joined(http: httpx.AsyncClient, peer: Peer) -> None:
    host, port = peer.address.split(":")
    answer = await post(
        http,
        "/init_weights_update_group",
        master_address=host,
        master_port=int(port),
        rank_offset=1,
        world_size=2,
        group_name=GROUP,
        backend="gloo",
    )
    assert answer.json()["success"], answer.text
    assert await asyncio.to_thread(peer.hear) == "joined"


async def bucket(
    http: httpx.AsyncClient, peer: Peer, file: Path, version: str, command: str = "send"
) -> httpx.Response:
    """As slime sends one: the call is on its way while rank 0 broadcasts."""
    tensors = sorted(safetensors.torch.load_file(file).items())
    peer.tell(command, file)
    return await post(
        http,
        "/update_weights_from_distributed",
        names=[name for name, _ in tensors],
        dtypes=[str(each.dtype).removeprefix("torch.") for _, each in tensors],
        shapes=[list(each.shape) for _, each in tensors],
        group_name=GROUP,
        flush_cache=False,
        weight_version=version,
    )


def in_buckets(new: Mapping[str, Tensor], folder: Path) -> list[Path]:
    return [half / "x.safetensors" for half in in_halves(dict(new), folder)]


async def sample(http: httpx.AsyncClient) -> tuple[list[int], str]:
    body = {"input_ids": [20, 21], "sampling_params": {"temperature": 0, "max_new_tokens": 3}}
    answer = (await http.post("/generate", json=body)).json()
    return answer["output_ids"], answer["meta_info"]["weight_version"]


@pytest.mark.parametrize("make_config", ["redis-links"], indirect=True)
async def test_a_trainer_s_group_runs_whole_rounds(
    http: httpx.AsyncClient, weights: Mapping[str, Tensor], tmp_path: Path
) -> None:
    with Peer(GROUP) as peer:
        await joined(http, peer)
        for version in (1, 2):
            assert (await post(http, "/pause_generation", mode="retract")).status_code == 200
            assert (await http.get("/flush_cache")).status_code == 200
            for file in in_buckets(announcing(weights, version), tmp_path / str(version)):
                answer = await bucket(http, peer, file, str(version))
                assert answer.json()["success"], answer.text
                assert await asyncio.to_thread(peer.hear) == "send"
            told = (await http.get("/get_weight_version")).json()["weight_version"]
            assert told == str(version - 1)
            assert (await post(http, "/continue_generation")).status_code == 200
            assert await sample(http) == ([token_of(version)] * 3, str(version))
        answer = await post(http, "/destroy_weights_update_group", group_name=GROUP)
        assert answer.json()["success"]


async def test_a_trainer_killed_midway_changes_no_weights(
    http: httpx.AsyncClient, weights: Mapping[str, Tensor], tmp_path: Path
) -> None:
    before = await sample(http)
    with Peer(GROUP) as peer:
        await joined(http, peer)
        await post(http, "/pause_generation", mode="in_place")
        first, second = in_buckets(announcing(weights, 1), tmp_path)
        assert (await bucket(http, peer, first, "1")).json()["success"]
        assert await asyncio.to_thread(peer.hear) == "send"
        sending = asyncio.create_task(bucket(http, peer, second, "1", "half"))
        assert await asyncio.to_thread(peer.hear) == "half"
        peer.kill()
        answer = await sending
    assert answer.status_code >= 400
    assert not answer.json()["success"]
    assert (await post(http, "/continue_generation")).json()["error"]["code"] == (
        "weights_incomplete"
    )
    assert await sample(http) == before

    with Peer(GROUP) as peer:
        await joined(http, peer)
        await post(http, "/pause_generation", mode="in_place")
        for file in (first, second):
            assert (await bucket(http, peer, file, "1")).json()["success"]
            assert await asyncio.to_thread(peer.hear) == "send"
        assert (await post(http, "/continue_generation")).status_code == 200
        assert await sample(http) == ([token_of(1)] * 3, "1")
