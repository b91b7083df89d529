"""vLLM's and SGLang's metrics by their names, as their published dashboards ask for them."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from nano_inference.config import TelemetryConfig, load_config
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.telemetry import Metrics, instruments, names, setup_metrics

from ..cli.servers import free_port
from ..pipeline.builders import until

DOCUMENT = Path(__file__).parents[2] / "docs" / "telemetry.md"

# The queries of https://github.com/vllm-project/vllm/tree/main/examples/observability.
VLLM = {
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:generation_tokens": "counter",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:prompt_tokens": "counter",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_success": "counter",
    "vllm:time_per_output_token_seconds": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
}
# Those of https://github.com/sgl-project/sglang/tree/main/examples/monitoring/grafana.
SGLANG = {
    "sglang:cache_hit_rate": "gauge",
    "sglang:e2e_request_latency_seconds": "histogram",
    "sglang:gen_throughput": "gauge",
    "sglang:num_queue_reqs": "gauge",
    "sglang:num_running_reqs": "gauge",
    "sglang:time_to_first_token_seconds": "histogram",
}
NAMED = r"`((?:vllm|sglang):[a-z0-9_]+)`"


# The header of Prometheus.
ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


def families(metrics: Metrics) -> dict[str, Metric]:
    exposed = metrics.exposition(ACCEPT)
    assert exposed is not None
    found = text_string_to_metric_families(exposed[0].decode())
    return {family.name: family for family in found}


def values(family: Metric) -> dict[str, float]:
    """The value of each sample but of buckets, by its name and last label."""
    assert all(sample.labels["model_name"] == "tiny" for sample in family.samples)
    return {
        sample.name + sample.labels.get("finished_reason", ""): sample.value
        for sample in family.samples
        if "le" not in sample.labels and not sample.name.endswith("_created")
    }


async def test_vllm_s_dashboards_find_their_metrics_in_a_pipeline() -> None:
    overrides = {"telemetry.metric_names": "vllm", "engine.dtype": "float32"}
    async with Pipeline(load_config(env={}, overrides=overrides), with_metrics=True) as pipeline:
        sampling = {"max_tokens": 4, "ignore_eos": True}
        asked = {"prompt": "12 + 30 =", "n": 2, "sampling": sampling}
        done = await pipeline.complete(asked)

        def generated() -> bool:
            tokens = values(families(pipeline.metrics)["vllm:generation_tokens"])
            return tokens.get("vllm:generation_tokens_total") == 8

        await until(generated)
        found = families(pipeline.metrics)
    assert {name: found[name].type for name in VLLM} == VLLM
    assert all(found[name].samples for name in VLLM)
    prompt = done.usage.prompt_tokens
    assert values(found["vllm:request_success"]) == {"vllm:request_success_totallength": 2}
    assert values(found["vllm:request_prompt_tokens"])["vllm:request_prompt_tokens_sum"] == prompt
    assert values(found["vllm:prompt_tokens"])["vllm:prompt_tokens_total"] == 2 * prompt
    longest = "vllm:request_max_num_generation_tokens"
    assert values(found[longest])[f"{longest}_sum"] == 4
    first = found["vllm:time_to_first_token_seconds"].samples
    bounds = [float(each.labels["le"]) for each in first if "le" in each.labels]
    assert (bounds[0], bounds[-2], len(bounds)) == (0.001, 2560.0, 23)
    assert found["gen_ai_server_time_to_first_token_seconds"].samples, "its own are there, too"


async def test_sglang_s_dashboard_finds_its_metrics() -> None:
    config = TelemetryConfig(metric_names="sglang")
    metrics = setup_metrics(config, "here", without_port=True, model="tiny")
    record = metrics.record
    record(instruments.RUNNING, 3)
    record(instruments.QUEUE_DEPTH, 2)
    record(instruments.SEQUENCES_WAITING, 4)
    record(instruments.PREFILLED, 30)
    record(instruments.CACHED, 10)
    record(instruments.DECODED, 5)
    await asyncio.sleep(0)
    record(instruments.DECODED, 5)
    record(instruments.TIME_TO_FIRST_TOKEN, 0.05, {names.REQUEST_MODEL: "tiny"})
    record(instruments.REQUEST_DURATION, 0.5, {names.REQUEST_MODEL: "tiny"})
    found = families(metrics)
    metrics.shutdown()
    assert {name: found[name].type for name in SGLANG} == SGLANG
    single = {name: list(values(found[name]).values())[-1] for name in SGLANG}
    assert single["sglang:num_running_reqs"] == 3
    assert single["sglang:num_queue_reqs"] == 2 + 4
    assert single["sglang:cache_hit_rate"] == 0.25
    assert single["sglang:gen_throughput"] > 0
    assert single["sglang:e2e_request_latency_seconds"] == 0.5


def test_prometheus_gets_names_with_colons_from_a_port_too() -> None:
    config = TelemetryConfig(metric_names="vllm", metrics_port=free_port())
    metrics = setup_metrics(config, "here", model="tiny")
    metrics.record(instruments.RUNNING, 3)
    url = f"http://127.0.0.1:{config.metrics_port}/metrics"
    request = urllib.request.Request(url, headers={"Accept": ACCEPT})
    with urllib.request.urlopen(request, timeout=10) as reply:
        text = reply.read().decode()
    metrics.shutdown()
    assert '\nvllm:num_requests_running{engine="0",model_name="tiny"} 3.0\n' in text


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_document_lists_each_name_that_is_there(engine: str) -> None:
    metrics = setup_metrics(TelemetryConfig(metric_names=engine), "here", without_port=True)
    there = {
        name.removesuffix("_total") for name in families(metrics) if name.startswith(f"{engine}:")
    }
    metrics.shutdown()
    text = DOCUMENT.read_text()
    section = text[text.index("## Dashboards of other engines") :]
    listed, missing = section.split("Not available", 1)
    assert {name for name in re.findall(NAMED, listed) if name.startswith(engine)} == there
    assert not there & set(re.findall(NAMED, missing))
