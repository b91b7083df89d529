"""Time that adds up, in whole pipelines (docs/time.md)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from nano_inference import Pipeline
from nano_inference.bus.public import Usage
from nano_inference.gateway.gateway import Gateway
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.streaming.stage import StreamingStage
from nano_inference.telemetry import now_ns
from nano_inference.telemetry.trace_tree import find_trace

from ..rig import load
from .builders import asking, break_once, stage_of, until_batched
from .conftest import LIMIT_S, MakeConfig, both_buses

SHORT_MODEL = True


checks: Any = load("time_checks")


@both_buses("redis-links")
async def test_causes_add_up_and_bills_are_the_busy_time(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small cache preempts; time slices pause; generation is paused, and a stage fails."""
    config = make_config(
        engine__kv_cache_bytes=96 << 10,
        engine__max_model_len=128,
        engine__max_batch_size=4,
        fairness__max_timeslice_tokens=8,
        pipeline__restart_backoff_s=0.01,
    )
    async with Pipeline(config) as pipeline:
        requests = [
            asking("12 + 30 =" * (1 + i % 3), 40, n=1 + i % 2, tenant=f"t{i % 2}") for i in range(6)
        ]
        running = [asyncio.create_task(pipeline.complete(each)) for each in requests]
        await until_batched(pipeline, 4)
        await pipeline.client.pause()
        await pipeline.client.resume()
        break_once(monkeypatch, ExecutorCore, "execute", after=9)
        cancelled = asyncio.create_task(pipeline.complete(asking(tokens=400, request_id="c")))
        completions = await asyncio.gather(*running)
        await pipeline.client.cancel("c")
        completions.append(await cancelled)
        refused = asking(request_id="refused", model="unknown")
        completions.append(await pipeline.complete(refused))
        reports = pipeline.stages()
    assert checks.wrong_times(completions) == []
    assert checks.wrong_bills(reports, completions) == []
    assert "overhead" in completions[-1].usage.time, "the refused one has its time"
    causes = {cause for each in completions for cause in each.usage.time}
    assert causes >= {"credits", "weights", "recovery", "preemption", "own_prefill", "own_decode"}
    # Rows that were computed when their sequences had ended are nobody's.
    assert checks.unbilled_share(reports) < 0.2
    wrong = msgspec.structs.replace(completions[0], usage=Usage(time={"queue": 1}, billed_ns=1))
    assert checks.wrong_times([wrong, *completions])
    assert checks.wrong_bills(reports, [wrong, *completions])


async def test_time_over_http_is_that_of_the_call_and_in_its_trace(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """From its first byte to its usage, also in a stream; the trace has it by its root."""
    file = tmp_path / "traces.jsonl"
    config = make_config(telemetry__trace_file=str(file))
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": "12 + 30 =",
        "max_tokens": 12,
        "ignore_eos": True,
    }
    async with Pipeline(config, with_metrics=True) as pipeline:
        async with (
            Gateway(pipeline.client, config) as gateway,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", timeout=LIMIT_S) as http,
        ):
            started_ns = now_ns()
            answer = (await http.post("/v1/completions", json=body)).json()
            passed_ns = now_ns() - started_ns
            options = {"stream": True, "stream_options": {"include_usage": True}}
            streamed = (await http.post("/v1/completions", json=body | options)).text
            messages = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            said = (await http.post("/v1/messages", json={"model": "tiny"} | messages)).json()
            generated = {"text": "hi", "sampling_params": {"max_new_tokens": 4}}
            meta = (await http.post("/generate", json=generated)).json()["meta_info"]
            embedded = (await http.post("/v1/embeddings", json={"input": "hi"})).json()["usage"]
            infer = await http.post("/v2/models/tiny/generate", json={"text_input": "hi"})
            told = infer.json()["parameters"]
        load = stage_of(pipeline, StreamingStage).load()
    lines = [line for line in streamed.splitlines() if line.startswith("data: {")]
    time, last = answer["usage"]["time"], json.loads(lines[-1].removeprefix("data: "))
    assert 0.5 * passed_ns < sum(time.values()) <= passed_ns
    assert {"http", "own_prefill", "own_decode", "delivery"} <= time.keys()
    assert 0 < answer["usage"]["billed_ns"] <= time["own_prefill"] + time["own_decode"]
    for usage in (last["usage"], said["usage"], meta, embedded):
        assert {"http", "own_prefill", "delivery"} <= usage["time"].keys()
    assert {"time_http_ns", "time_own_decode_ns", "billed_ns"} <= told.keys()
    assert 0 < told["billed_ns"] <= told["time_own_prefill_ns"] + told["time_own_decode_ns"]
    found = find_trace(file, answer["id"])
    assert found.time == time
    shares = [share for name, share in load.items() if name.startswith("time_")]
    assert 990 <= sum(shares) <= 1010
