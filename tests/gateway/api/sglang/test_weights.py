"""SGLang's calls about weights, field by field."""

from __future__ import annotations

import asyncio
import threading
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from httpx import Response

from nano_inference.bus.weights import (
    ArcWeights,
    FolderWeights,
    GroupWeights,
    TensorMeta,
    WeightsSource,
)
from nano_inference.config import WeightsError
from nano_inference.gateway.api.sglang import weights as weight_calls

from ...errors import error_of
from ...fake import LIMIT_S, Client

DISTRIBUTED, TENSOR = "/update_weights_from_distributed", "/update_weights_from_tensor"

BROADCAST = {"names": ["a", "b"], "dtypes": ["bfloat16", "torch.float32"], "shapes": [[2, 3], []]}
GROUP = {
    "master_address": "10.0.0.1",
    "master_port": 5000,
    "rank_offset": 1,
    "world_size": 2,
    "group_name": "slime-pp_0",
    "backend": "gloo",
}


def succeeded(answer: Response) -> str:
    assert answer.status_code == 200, answer.text
    assert answer.json()["success"] is True
    return str(answer.json()["message"])


def failed(answer: Response) -> str:
    body = answer.json()
    assert (answer.status_code, body["success"]) == (400, False)
    assert body["message"]
    return str(body["error"]["code"])


def contents(weights: WeightsSource) -> list[bytes]:
    """Those of the files in a folder of weights."""
    assert isinstance(weights, FolderWeights)
    return [file.read_bytes() for file in sorted(Path(weights.path).iterdir())]


async def test_groups(http: Client) -> None:
    succeeded(await http.post("/init_weights_update_group", json=GROUP))
    assert http.engine.last("join_weights_group") == {
        "group": "slime-pp_0",
        "address": "10.0.0.1:5000",
        "world_size": 2,
        "rank_offset": 1,
        "backend": "gloo",
    }
    succeeded(await http.post("/destroy_weights_update_group", json={"group_name": "slime-pp_0"}))
    assert http.engine.last("leave_weights_group") == {"group": "slime-pp_0"}


async def test_a_group_at_an_ipv6_address(http: Client) -> None:
    await http.post("/init_weights_update_group", json=GROUP | {"master_address": "fe80::1"})
    assert http.engine.last("join_weights_group")["address"] == "[fe80::1]:5000"


async def test_from_disk_takes_deltas_in_open_formats(http: Client) -> None:
    body = {"model_path": "/d", "load_format": "arc_v2", "base_version": 4}
    succeeded(await http.post("/update_weights_from_disk", json=body))
    assert http.engine.last("update_weights")["weights"] == ArcWeights("/d", 4, "arc_v2")


async def test_a_group_that_does_not_come_together(http: Client) -> None:
    http.engine.failures["join_weights_group"] = WeightsError("nobody came")
    assert failed(await http.post("/init_weights_update_group", json=GROUP)) == "weights_refused"


async def test_from_distributed(http: Client) -> None:
    body = BROADCAST | {"group_name": "g", "weight_version": "3", "flush_cache": True}
    answer = await http.post(DISTRIBUTED, json=body)
    assert "version 3" in succeeded(answer)
    given = http.engine.last("update_weights")
    tensors = (TensorMeta("a", "bfloat16", (2, 3)), TensorMeta("b", "float32", ()))
    assert given["weights"] == GroupWeights("g", tensors)
    assert given["partial"]


async def test_from_disk(http: Client) -> None:
    body = {"model_path": "/m", "load_format": "auto", "abort_all_requests": True}
    answer = await http.post("/update_weights_from_disk", json=body)
    succeeded(answer)
    assert answer.json()["num_paused_requests"] == 0
    given = http.engine.last("update_weights")
    assert (given["weights"], given["in_flight"], given["partial"]) == (
        FolderWeights("/m"),
        "abort",
        False,
    )


async def test_weights_that_are_refused(http: Client) -> None:
    http.engine.failures["update_weights"] = WeightsError("they don't fit")
    answer = await http.post("/update_weights_from_disk", json={"model_path": "/m"})
    assert failed(answer) == "weights_refused"


async def test_tensors_in_the_body_go_on_as_files(
    http: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bytes] = []
    folders: list[Path] = []

    async def look(weights: WeightsSource, **given: Any) -> int:
        found.extend(contents(weights))
        folders.append(Path(weights.path))  # type: ignore[union-attr]
        assert all(file.suffix == ".safetensors" for file in folders[0].iterdir())
        return 1

    monkeypatch.setattr(http.engine, "update_weights", look)
    succeeded(await http.post(TENSOR, json=tensors(b"first", b"second")))
    assert found == [b"first", b"second"]
    assert not folders[0].exists()


def tensors(*parts: bytes) -> dict[str, Any]:
    """The body of such a call."""
    encoded = [b64encode(part).decode() for part in parts]
    return {"serialized_named_tensors": encoded, "load_format": "safetensors"}


async def test_large_tensors_are_decoded_in_pieces(
    http: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces fit together, wherever a tensor ends."""
    assert weight_calls._PIECE % 4 == 0
    monkeypatch.setattr(weight_calls, "_PIECE", 8)
    parts = [b"0123456789abcdefghij"[:size] for size in range(20)]
    found: list[bytes] = []

    async def look(weights: WeightsSource, **given: Any) -> int:
        found.extend(contents(weights))
        return 1

    monkeypatch.setattr(http.engine, "update_weights", look)
    succeeded(await http.post(TENSOR, json=tensors(*parts)))
    assert found == parts


async def test_tensors_are_decoded_beside_other_calls_one_at_a_time(
    http: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, let_go = threading.Semaphore(0), threading.Semaphore(0)
    at_once = most = 0
    decode = weight_calls.decode_object

    def held(body: bytes) -> dict[str, Any]:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        inside.release()
        assert let_go.acquire(timeout=LIMIT_S)
        at_once -= 1
        return decode(body)

    monkeypatch.setattr(weight_calls, "decode_object", held)
    path, body = TENSOR, tensors(b"first")
    calls = [asyncio.create_task(http.post(path, json=body)) for _ in range(3)]
    for _ in calls:
        assert await asyncio.to_thread(inside.acquire, timeout=LIMIT_S)
        assert (await http.get("/get_weight_version")).status_code == 200
        let_go.release()
    for call in calls:
        succeeded(await call)
    assert most == 1


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
async def test_pickles_are_not_read(http: Client, load_format: str | None) -> None:
    body = {"serialized_named_tensors": ["gASVDgAAAAAA"], "load_format": load_format}
    answer = await http.post(TENSOR, json=body)
    assert error_of(answer, 400) == "unsupported"
    assert "pickles" in answer.json()["error"]["message"]
    assert not http.engine.calls


async def test_the_order_of_slime(http: Client) -> None:
    """Paused, flushed, sent in buckets, continued."""
    await http.post("/pause_generation", json={})
    await http.get("/flush_cache")
    for _ in range(2):
        kept = await http.post(DISTRIBUTED, json=BROADCAST)
        assert "part" in succeeded(kept)
    answer = await http.post("/continue_generation", json={})
    assert answer.json()["status"] == "ok"
    assert http.engine.names == [
        "pause",
        "flush_cache",
        "stage_weights",
        "stage_weights",
        "update_weights",
        "resume",
    ]


@pytest.mark.parametrize(
    ("mode", "in_flight"),
    [(None, "abort"), ("abort", "abort"), ("retract", "retract"), ("in_place", "keep")],
)
async def test_pause_modes(http: Client, mode: str | None, in_flight: str) -> None:
    answer = await http.post("/pause_generation", json={} if mode is None else {"mode": mode})
    assert answer.json()["status"] == "ok"
    assert http.engine.last("pause") == {"in_flight": in_flight}


async def test_a_session(http: Client) -> None:
    succeeded(await http.post("/begin_weight_update", json={"selector": "all"}))
    assert failed(await http.post("/begin_weight_update", json={})) == "weights_busy"
    succeeded(await http.post(DISTRIBUTED, json=BROADCAST))
    assert "version 1" in succeeded(await http.post("/end_weight_update", json={}))
    assert failed(await http.post("/end_weight_update", json={})) == "weights_refused"


async def test_renaming(http: Client) -> None:
    answer = await http.post("/update_weight_version", json={"new_version": "best"})
    succeeded(answer)
    assert "cancel_all" in http.engine.names
    assert (await http.get("/get_weight_version")).json() == {"weight_version": "best"}
    body = {"new_version": "b", "abort_all_requests": False}
    await http.post("/update_weight_version", json=body)
    assert http.engine.names.count("cancel_all") == 1


async def test_memory(http: Client) -> None:
    """Without tags all of it; CUDA graphs go with the rest."""
    for body, tags in (
        ({}, ("weights", "kv_cache")),
        ({"tags": None}, ("weights", "kv_cache")),
        ({"tags": ["kv_cache", "cuda_graph"]}, ("kv_cache",)),
    ):
        answer = await http.post("/release_memory_occupation", json=body)
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")
        assert http.engine.last("release_memory")["tags"] == tags
        assert (await http.get("/health_generate")).status_code == 200
        assert not http.engine.requests
        answer = await http.post("/resume_memory_occupation", json=body)
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")
        assert http.engine.last("resume_memory")["tags"] == tags[-1:]
    assert (await http.get("/health_generate")).status_code == 200
    assert http.engine.requests
    http.engine.failures["resume_memory"] = WeightsError("too little", code="out_of_memory")
    answer = await http.post("/resume_memory_occupation")
    assert error_of(answer, 503) == "out_of_memory"


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/init_weights_update_group", {}, "invalid_request"),
        ("/init_weights_update_group", GROUP | {"backend": "mpi"}, "invalid_request"),
        ("/update_weights_from_disk", {}, "invalid_request"),
        ("/update_weights_from_disk", {"model_path": "m", "load_format": "pt"}, "unsupported"),
        ("/update_weights_from_disk", {"model_path": "m", "is_async": True}, "unsupported"),
        (
            "/update_weights_from_disk",
            {"model_path": "m", "load_format": "arc_v3"},
            "invalid_request",
        ),
        (DISTRIBUTED, BROADCAST | {"dtypes": []}, "invalid_request"),
        (DISTRIBUTED, BROADCAST | {"load_format": "flattened_bucket"}, "unsupported"),
        (DISTRIBUTED, {"names": [], "dtypes": [], "shapes": []}, "invalid_request"),
        (DISTRIBUTED, BROADCAST | {"selector": "draft"}, "unsupported"),
        (TENSOR, tensors() | {"serialized_named_tensors": ["*"]}, "invalid_request"),
        (TENSOR, tensors(), "invalid_request"),
        ("/pause_generation", {"mode": "soon"}, "invalid_request"),
        ("/release_memory_occupation", {"tags": ["gpu"]}, "invalid_request"),
        ("/resume_memory_occupation", {"tags": "weights"}, "invalid_request"),
        ("/begin_weight_update", {"selector": "draft"}, "unsupported"),
        ("/update_weight_version", {}, "invalid_request"),
    ],
)
async def test_refusals(http: Client, path: str, body: dict[str, Any], code: str) -> None:
    assert error_of(await http.post(path, json=body), 400) == code
    assert not http.engine.calls
