"""A trainer with no code of ours broadcasts weights, and tells SGLang's interface of them.

The HTTP calls and their order are those of slime's `UpdateWeightFromDistributed`, and the group is
made as it makes it (see `peer.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from nano_inference.config import load_config
from nano_inference.pipeline.gateway import Gateway
from nano_inference.pipeline.pipeline import Pipeline

from ..oracle import announcing, token_of
from ..stages.executor.transports.peers import Peer
from . import reference

LIMIT_S = 120.0


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    overrides = {"engine.dtype": "float32", "gateway.port": 0}
    config = load_config(env={}, overrides=overrides)
    async with (
        asyncio.timeout(2 * LIMIT_S),
        Pipeline(config) as pipeline,
        Gateway(pipeline.client, pipeline.config) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S) as client,
    ):
        yield client


async def call(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def send_bucket(http: httpx.AsyncClient, peer: Peer, file: Path, version: int) -> Any:
    """Tells of a bucket, and broadcasts it meanwhile."""
    tensors = sorted(load_file(file).items())
    peer.tell("send", file)
    return await call(
        http,
        "/update_weights_from_distributed",
        {
            "names": [name for name, _ in tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
            "group_name": peer.group,
            "weight_version": str(version),
        },
    )


async def test_rounds_of_slime(http: httpx.AsyncClient, tmp_path: Path) -> None:
    loaded = dict(reference.model().state_dict())
    with Peer("slime-pp_0") as peer:
        host, _, port = peer.address.partition(":")
        group = {
            "master_address": host,
            "master_port": int(port),
            "rank_offset": 1,
            "world_size": 2,
            "group_name": peer.group,
            "backend": "gloo",
        }
        assert (await call(http, "/init_weights_update_group", group))["success"]
        assert await asyncio.to_thread(peer.hear) == "joined"
        for version in (1, 2):
            await call(http, "/pause_generation", {})
            (await http.get("/flush_cache")).raise_for_status()
            weights = sorted(announcing(loaded, version).items())
            for half in range(2):
                file = tmp_path / f"{version}-{half}.safetensors"
                save_file(dict(weights[half::2]), file)
                assert (await send_bucket(http, peer, file, version))["success"]
                assert await asyncio.to_thread(peer.hear) == "send"
            await call(http, "/continue_generation", {})
            answer = await call(
                http,
                "/generate",
                {
                    "input_ids": [5, 6, 7],
                    "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True},
                    "return_logprob": True,
                },
            )
            found = [each[1] for each in answer["meta_info"]["output_token_logprobs"]]
            assert found == [token_of(version)] * 2
            assert answer["meta_info"]["weight_version"] == str(version)
        left = await call(http, "/destroy_weights_update_group", {"group_name": peer.group})
        assert left["success"]
