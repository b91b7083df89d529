"""The server's description of itself is true."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nano_inference.bus.public import EmbedParams, GenerateRequest
from nano_inference.config import BusError
from nano_inference.gateway.serving import lane_state
from nano_inference.store.board import StageReport
from nano_inference.telemetry import TraceContext

from ...errors import error_of
from ...fake import Client, FakeEngine, app_of, completion, http_of, refused, report


def told(stage: str, lane: str = "0", age_s: float = 0.1, **load: int | str) -> StageReport:
    return report(stage=stage, lane=lane, age_s=age_s, load=load)


async def test_health(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_state, "ASKED_EVERY_S", 0.0)
    async with http_of(app_of(engine)) as http:
        assert (await http.get("/health")).status_code == 200
        engine.why_not = "no process runs executor"
        answer = await http.get("/health")
        assert error_of(answer, 503) == "not_ready"
        assert engine.why_not in answer.text
        engine.why_not = ""
        assert (await http.get("/health")).status_code == 200


async def test_health_does_not_ask_the_lanes_more_often_than_they_tell(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But what is released here is known at once."""
    monkeypatch.setattr(lane_state, "ASKED_EVERY_S", 3600.0)
    async with http_of(app_of(engine)) as http:
        answers = await asyncio.gather(*(http.get("/health") for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert [name for name, _ in engine.calls] == ["trouble"]
        await http.post("/release_memory_occupation", json={"tags": ["kv_cache"]})
        assert error_of(await http.get("/health"), 503) == "not_ready"


async def test_health_generate_generates_a_token(http: Client) -> None:
    assert (await http.get("/health_generate")).status_code == 200
    (request,) = http.engine.requests
    assert request.sampling.max_tokens == 1
    http.engine.outputs = refused("lane_failed")
    assert error_of(await http.get("/health_generate"), 503) == "not_ready"


async def test_health_generate_embeds_with_a_model_that_only_embeds(http: Client) -> None:
    no_tokens, broken = refused("cannot_generate"), refused("lane_failed")
    http.engine.outputs = lambda request: (
        no_tokens(request) if request.embed is None else [completion(request)]
    )
    assert (await http.get("/health_generate")).status_code == 200
    assert [request.embed for request in http.engine.requests] == [None, EmbedParams()]
    http.engine.outputs = lambda request: (no_tokens if request.embed is None else broken)(request)
    assert error_of(await http.get("/health_generate"), 503) == "not_ready"


async def test_health_generate_does_not_wait_for_ever(engine: FakeEngine) -> None:
    engine.outputs = lambda request: []
    engine.why_not = "batching reported last 9 s ago"
    async with http_of(app_of(engine, {"gateway.health_timeout_s": 0.01})) as http:
        answer = await http.get("/health_generate")
    assert error_of(answer, 503) == "not_ready"
    assert engine.why_not in answer.text
    assert len(engine.left) == 1


async def test_health_generate_while_paused(http: Client) -> None:
    await http.post("/pause_generation", json={})
    assert (await http.get("/health_generate")).status_code == 200
    assert not http.engine.requests
    http.engine.failures["weight_version"] = BusError("lane 0 did not answer", code="no_answer")
    assert error_of(await http.get("/health_generate"), 503) == "no_answer"


@pytest.mark.parametrize("path", ["/get_model_info", "/model_info"])
async def test_model_info(http: Client, path: str) -> None:
    http.engine.version = 4
    info = (await http.get(path)).json()
    assert info["weight_version"] == "4"
    assert info["is_generation"]
    assert info["model_path"].endswith("tiny")


@pytest.mark.parametrize("path", ["/get_weight_version", "/weight_version"])
async def test_weight_version(http: Client, path: str) -> None:
    assert (await http.get(path)).json() == {"weight_version": "0"}


async def test_server_info_has_the_settings_in_use(http: Client) -> None:
    """And null while no executor has told."""
    names = ("device", "dtype", "max_running_requests", "is_moe", "load_ns", "kv_bytes")
    info = (await http.get("/server_info")).json()
    assert [info[name] for name in names] == [None] * 6
    facts: dict[str, int | str] = {
        "device": "cuda:0 NVIDIA H200",
        "dtype": "bfloat16",
        "quantization": "int8-32",
        "max_batch_size": 64,
        "experts": 8,
        "active_experts": 2,
        "parameters": 5,
        "load_ns": 7,
        "kv_bytes": 100,
    }
    http.engine.stage_reports = [told("executor", **facts), told("executor", lane="1", **facts)]
    info = (await http.get("/server_info")).json()
    assert [info[name] for name in names] == ["cuda", "bfloat16", 128, True, 7, 200]
    assert (info["n_experts"], info["n_active_experts"], info["parameters"]) == (8, 2, 5)
    assert info["quantization"] == "int8-32"


@pytest.mark.parametrize("path", ["/get_server_info", "/server_info"])
async def test_server_info(http: Client, path: str) -> None:
    http.engine.stage_reports = [
        told("batching", kv_total=10, running=2),
        told("executor", deterministic=1),
        told("batching", lane="1", kv_total=5),
        told("executor", lane="1", deterministic=0),
    ]
    info = (await http.get(path)).json()
    assert info["enable_deterministic_inference"] is False
    http.engine.stage_reports.pop()
    assert (await http.get(path)).json()["enable_deterministic_inference"] is True
    assert info["max_total_num_tokens"] == 15 * 16
    assert (info["tp_size"], info["dp_size"], info["nnodes"]) == (1, 2, 1)
    assert [each["num_running_reqs"] for each in info["internal_states"]] == [2, 0]


async def test_loads_by_lane(http: Client) -> None:
    http.engine.stage_reports = [
        told("admission", in_flight=5),
        told("admission", age_s=3.0, in_flight=9),
        told("batching", running=1),
        told("batching.1", running=1),
        told("admission", lane="1", in_flight=1),
    ]
    found = (await http.get("/v1/loads")).json()["loads"]
    assert [each["num_total_reqs"] for each in found] == [5, 1]
    assert (found[0]["num_running_reqs"], found[0]["num_waiting_reqs"]) == (2, 3)
    assert (await http.get("/get_load")).json() == found


async def test_loads_count_requests_that_no_lane_has_reported(http: Client) -> None:
    http.engine.stage_reports = [told("admission", in_flight=0), told("batching", running=0)]
    totals: list[Any] = []
    inner = http.engine.submit

    async def submit(request: GenerateRequest, trace: TraceContext | None = None) -> Any:
        totals.append((await http.get("/v1/loads")).json()["loads"][0]["num_total_reqs"])
        async for output in inner(request, trace):
            yield output

    http.engine.submit = submit  # type: ignore[method-assign]
    await http.post("/generate", json={"text": "a"})
    after = (await http.get("/v1/loads")).json()["loads"][0]["num_total_reqs"]
    assert (totals, after) == ([1], 0)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_flush_cache(http: Client, method: str) -> None:
    assert (await http.request(method, "/flush_cache")).status_code == 200
    assert http.engine.names == ["flush_cache"]


async def test_abort(http: Client) -> None:
    answer = await http.post("/abort_request", json={"abort_all": True, "abort_message": "enough"})
    assert (answer.status_code, answer.content) == (200, b"")
    await http.post("/abort_request", json={"rid": "r"})
    assert http.engine.names == ["cancel_all", "cancel"]
    assert error_of(await http.post("/abort_request", json={}), 400) == "invalid_request"
