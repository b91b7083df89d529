"""Metrics are what docs/telemetry.md lists, what a running pipeline shows, and nothing when off."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import socket
import subprocess
import urllib.request
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import httpx
import pytest
import pytest_asyncio
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM

from nano_inference import BusClient
from nano_inference.bus.public import Completion
from nano_inference.bus.weights import FolderWeights
from nano_inference.config import (
    BusConfig,
    Config,
    ConfigError,
    EngineConfig,
    ModelConfig,
    TelemetryConfig,
    load_config,
)
from nano_inference.gateway.gateway import Gateway
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.pipeline.router import Router
from nano_inference.stages.admission.core import AdmissionCore
from nano_inference.store.registry import ModelRecord
from nano_inference.telemetry import Metrics, instruments, setup_metrics
from nano_inference.telemetry.instruments import INSTRUMENTS

from ..cli.servers import free_port
from ..pipeline.test_ranks import mixture
from ..stages.executor.models import make_model
from ..stages.executor.runner.adapters.making import make_adapter

ROOT = Path(__file__).parents[2]
LIMIT_S = 60
FOUR_TOKENS = {"max_tokens": 4, "ignore_eos": True}
# Of the process, without labels of its model.
OF_A_PROCESS = "nano_log_"
# Batching reports it with credits, and fairness then once a second.
REPORTED_LAST = "nano_fairness_tokens_total"

pytestmark = pytest.mark.asyncio(loop_scope="module")


def config_with(port: int, **settings: object) -> Config:
    overrides = {"telemetry.metrics_port": port, "engine.dtype": "float32", **settings}
    return load_config(env={}, overrides=overrides)


class Scraped:
    """The metrics that Prometheus scrapes."""

    def __init__(self, port: int) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            self.families: dict[str, Metric] = {
                family.name: family
                for family in text_string_to_metric_families(reply.read().decode())
            }

    def samples(self) -> dict[str, set[str]]:
        """The labels of each sample, by its name."""
        found: dict[str, set[str]] = {}
        for each in self.families.values():
            for sample in each.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
        return found

    def value(self, name: str, **labels: str) -> float:
        """The sum over all samples of a name that have these labels."""
        return sum(
            sample.value
            for each in self.families.values()
            for sample in each.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


def shown(name: str) -> str:
    return name.replace(".", "_")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipeline() -> AsyncIterator[Pipeline]:
    async with Pipeline(config_with(free_port())) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def speculating() -> AsyncIterator[Pipeline]:
    settings = {"engine.speculation": "auto", "engine.kv_host_bytes": 1 << 20}
    settings |= {"engine.kv_events": True}
    settings |= {"engine.response_cache_bytes": 1 << 20}
    async with Pipeline(config_with(free_port(), **settings)) as running:
        yield running


async def scraped_drafts(pipeline: Pipeline, least: int = 0) -> Scraped:
    """Wait for the metrics of drafts: `least` drafted tokens, and some of each source."""
    names = [
        f"nano_spec_decode_num_{name}_total"
        for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    ]
    async with asyncio.timeout(LIMIT_S):
        while True:
            scraped = await asyncio.to_thread(Scraped, pipeline.config.telemetry.metrics_port)
            _, drafted, accepted, per_position = map(scraped.value, names)
            sources = {
                (sample.name, sample.labels["nano_spec_decode_source"])
                for each in scraped.families.values()
                for sample in each.samples
                if sample.name in names
            }
            everything = set(itertools.product(names, EngineConfig().draft_sources))
            if drafted >= least and per_position == accepted and sources == everything:
                return scraped
            await asyncio.sleep(0.05)


async def scraped_when(pipeline: Pipeline, name: str, least: float, but: str = "") -> Scraped:
    """Wait until a metric, less that in `but`, has reached a value."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            scraped = await asyncio.to_thread(Scraped, pipeline.config.telemetry.metrics_port)
            if scraped.value(name) - (scraped.value(but) if but else 0) >= least:
                return scraped
            await asyncio.sleep(0.05)


async def test_metrics_of_a_running_pipeline(pipeline: Pipeline) -> None:
    prompt = "Ana has 12 + 30 cats and Ben has 7 + 5. "
    sampling = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    for _ in range(2):
        done = await pipeline.complete({"prompt": prompt, "n": 2, "sampling": sampling})
        assert isinstance(done, Completion)
    refused = await pipeline.complete({"prompt": ""})
    prompt_tokens = done.usage.prompt_tokens
    await scraped_when(pipeline, "nano_prefix_lookups_total", 4)
    # The first token of each sample comes from its prefill; the step ahead computes one too many.
    wasted = "nano_tokens_wasted_total"
    value = (await scraped_when(pipeline, "nano_tokens_decoded_total", 76, but=wasted)).value
    assert value("nano_requests_total", nano_request_status="done") == 2
    assert value("nano_requests_total", error_type=refused.error.code) == 1
    for name in ("time_to_first_token", "time_per_output_token", "request_duration"):
        family = f"gen_ai_server_{name}_seconds"
        assert value(f"{family}_count", gen_ai_request_model="tiny") == 2
        assert 0 < value(f"{family}_sum") < LIMIT_S
    usage = "gen_ai_client_token_usage_sum"
    assert value(usage, gen_ai_token_type="input") == 2 * prompt_tokens
    assert value(usage, gen_ai_token_type="output") == 80
    assert value("nano_prefix_hits_total") == 3, "all but the first found the prompt"
    for result, number in (("full", 3), ("partial", 0), ("miss", 1)):
        assert value("nano_prefix_lookups_total", nano_prefix_result=result) == number
    computed = value("nano_tokens_prefilled_total") + value("nano_tokens_cached_total")
    assert computed == 4 * prompt_tokens, "each sample's prompt is computed or found"
    assert value("nano_tokens_decoded_total") == 76 + value(wasted)
    steps = value("nano_batch_size_count")
    assert value("nano_batch_size_sum") >= 76
    assert value("nano_step_schedule_time_seconds_count") == steps
    assert value("nano_step_device_time_seconds_count") == steps
    assert value("nano_token_interval_seconds_count") >= 19 * 2
    assert value("nano_queue_wait_seconds_count") == 2
    phases = [f"nano_request_{name}_duration_seconds" for name in ("queue", "prefill", "decode")]
    for phase in phases:
        assert value(f"{phase}_count", nano_request_priority="0") == 2
    queued, prefilled, decoded = (value(f"{phase}_sum") for phase in phases)
    to_first_token = value("gen_ai_server_time_to_first_token_seconds_sum")
    assert 0 < queued + prefilled < to_first_token
    assert prefilled < to_first_token
    assert decoded < value("gen_ai_server_request_duration_seconds_sum") - queued - prefilled
    assert value("nano_kv_blocks") > value("nano_kv_blocks_cached") > 0
    assert value("nano_stage_ready") == 5
    assert value("nano_requests_replayed_total") == 0
    assert value("nano_moe_requests_total", gen_ai_request_model="tiny") == 0


async def test_metrics_are_split_by_replica() -> None:
    config = config_with(free_port(), **{"pipeline.replicas": 2, "engine.max_batch_size": 2})
    async with Pipeline(config) as running:
        requests = [{"prompt": f"{i} + 1 =", "sampling": FOUR_TOKENS} for i in range(8)]
        await asyncio.gather(*map(running.complete, requests))
        scraped = await scraped_when(running, "nano_prefix_lookups_total", 8)
        lookups = [
            scraped.value("nano_prefix_lookups_total", nano_replica=str(each)) for each in (0, 1)
        ]
        assert sum(lookups) == 8
        assert min(lookups) > 0
        await scraped_when(running, "nano_stage_ready", 7)


async def test_metrics_are_split_by_model(redis_url: str) -> None:
    """Served requests and all other measurements of a process carry its model's name."""
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    shared = {"bus.url": redis_url, "bus.prefix": prefix}
    configs = [
        config_with(free_port(), **shared).of_model(ModelConfig(id=name, path="tiny"))
        for name in "ab"
    ]
    async with Pipeline(configs[0]) as first, Pipeline(configs[1]) as second:
        for _ in range(2):
            assert (await first.complete({"prompt": "1 =", "sampling": FOUR_TOKENS})).model
        assert (await second.complete({"prompt": ""})).status == "error"
        for pipeline, name, ended in ((first, "a", "done"), (second, "b", "error")):
            scraped = await scraped_when(pipeline, "nano_stage_ready", 5)
            told = {
                (sample.labels.get("gen_ai_request_model"), family)
                for family, each in scraped.families.items()
                for sample in each.samples
                if family.startswith(("nano_", "gen_ai_")) and not family.startswith(OF_A_PROCESS)
            }
            assert {model for model, _ in told} == {name}
            requests = "nano_requests_total"
            number = scraped.value(requests, nano_request_status=ended, gen_ai_request_model=name)
            assert number == scraped.value(requests) > 0


async def test_requests_for_models_with_experts_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "experts"
    make_model("mixtral").save_pretrained(folder)
    async with Pipeline(config_with(free_port(), **{"engine.model_path": str(folder)})) as running:
        request = {"prompt_token_ids": [5, 6], "sampling": {"max_tokens": 2}}
        assert (await running.complete(request)).status == "done"
        scraped = await scraped_when(running, "nano_moe_requests_total", 1)
        labels = {"gen_ai_request_model": folder.name}
        assert scraped.value("nano_moe_requests_total", **labels) == 1


async def test_metrics_are_split_by_priority(pipeline: Pipeline) -> None:
    for priority in (2, 77, 78):
        request = {"prompt": "1 =", "priority": priority, "sampling": FOUR_TOKENS}
        assert (await pipeline.complete(request)).status == "done"
    scraped = await scraped_when(pipeline, "nano_request_decode_duration_seconds_count", 5)
    for family in (
        *(f"nano_request_{phase}_duration_seconds" for phase in ("queue", "prefill", "decode")),
        "gen_ai_server_time_to_first_token_seconds",
    ):
        for label, number in (("2", 1), (">8", 2), ("77", 0)):
            assert scraped.value(f"{family}_count", nano_request_priority=label) == number
    async with asyncio.timeout(LIMIT_S):
        while not scraped.value("nano_fairness_tokens_total", nano_request_priority=">8"):
            scraped = await scraped_when(pipeline, "nano_fairness_tokens_total", 1)
    assert scraped.value("nano_fairness_tokens_total", nano_request_priority="77") == 0


async def test_dead_letters_are_counted_by_their_reason(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def admit(self: AdmissionCore, *args: object, **kwargs: object) -> NoReturn:
        raise KeyError("a defect")

    before = await asyncio.to_thread(Scraped, pipeline.config.telemetry.metrics_port)
    assert before.value("nano_requests_buried_total") == 0
    codes = {
        sample.labels["error_type"] for sample in before.families["nano_requests_buried"].samples
    }
    assert codes == {"lane_failed", "message_too_large", "internal_error"}
    with monkeypatch.context() as patched:
        patched.setattr(AdmissionCore, "admit", admit)
        assert (await pipeline.complete({"prompt": "1"})).status == "error"
    scraped = await scraped_when(pipeline, "nano_requests_dead", 1)
    assert scraped.value("nano_requests_buried_total", error_type="internal_error") == 1
    assert scraped.value("nano_requests_buried_total") == 1


async def test_constraints_are_counted_by_their_kind(pipeline: Pipeline) -> None:
    for constraint in ({"regex": "[ab]{3}"}, {"regex": "[ab]{3}"}, {"regex": "("}, {}):
        await pipeline.complete({"prompt": "1", "sampling": {"seed": 1, "constraint": constraint}})
    scraped = await scraped_when(pipeline, "nano_step_mask_wait_seconds_count", 6)
    for kind, error, number in (
        *(("regex", "", 2), ("regex", "invalid_constraint", 1)),
        *(("none", "invalid_constraint", 1), ("none", "", 0)),
    ):
        labels = {"nano_request_constraint": kind, "error_type": error}
        assert scraped.value("nano_constraints_total", **labels) == number
    compiled = "nano_constraint_compile_duration_seconds_count"
    assert scraped.value(compiled, nano_request_constraint="regex") == 3


async def route_one(config: BusConfig, metrics: Metrics) -> None:
    """A request comes to the entrance of a deployment, and goes to its model."""
    async with BusClient.connect(config) as client:
        spec = ModelConfig(id="tiny", path="tiny")
        record = ModelRecord(spec=spec, state="ready", takes_requests=True)
        await client.bus.store.models.put(record)
        await client.publish({"prompt": "1", "model": "tiny"})
        await Router(client.bus, metrics).route_once()


async def test_drafts_are_counted_as_in_usage(pipeline: Pipeline, speculating: Pipeline) -> None:
    """The number of drafts depends on the machine; equal counts everywhere don't."""
    sampling = {"temperature": 0, "max_tokens": 64, "ignore_eos": True}
    accepted = drafted = 0
    for prompt in ("1 2 3 1 2 3 1 2 3", "1 2 3 1 2 3 1 2 3", "a b"):
        alone = await pipeline.complete({"prompt": prompt, "sampling": sampling})
        wanted = alone.samples[0].token_ids
        request = {"prompt": prompt, "sampling": sampling, "prediction": wanted}
        done = await speculating.complete(request)
        assert done.samples[0].token_ids == wanted
        accepted += done.usage.accepted_prediction_tokens
        drafted += done.usage.rejected_prediction_tokens + done.usage.accepted_prediction_tokens
    # What was verified one step ahead, after the end of a sample, is told of no request.
    scraped = await scraped_drafts(speculating, drafted)
    assert scraped.value("nano_spec_decode_num_accepted_tokens_total") >= accepted
    without = await asyncio.to_thread(Scraped, pipeline.config.telemetry.metrics_port)
    assert not [name for name in without.families if "spec_decode" in name]


async def test_every_instrument_is_shown(
    pipeline: Pipeline, speculating: Pipeline, redis_url: str, tmp_path: Path
) -> None:
    await route_one(BusConfig(url=redis_url, prefix="test-metrics"), pipeline.client.metrics)
    folder = EngineConfig().model_folder
    make_adapter(AutoModelForCausalLM.from_pretrained(folder), 0, tmp_path)
    await pipeline.client.load_adapter("a", str(tmp_path))
    await pipeline.client.update_weights(FolderWeights(str(folder)))
    async with (
        Gateway(pipeline.client, pipeline.config) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S) as http,
    ):
        body: dict[str, object] = {"text": "1 + 1 =", "sampling_params": {"max_new_tokens": 4}}
        assert (await http.post("/generate", json=body)).status_code == 200
        body["sampling_params"] = {"regex": "[ab]{3}"}
        assert (await http.post("/generate", json=body)).status_code == 200
        text = {"text_input": "1 + 1 ="}
        assert (await http.post("/v2/models/tiny/generate", json=text)).status_code == 200
        assert (await pipeline.client.kv_session("none", "pin")).outcome == "missing"
        await scraped_when(pipeline, "nano_kv_session_results_total", 1)
        await scraped_when(pipeline, REPORTED_LAST, 1)
        scraped = await scraped_when(pipeline, "nano_gateway_connections", 1)
    calls = "http_server_request_duration_seconds_count"
    assert scraped.value(calls, http_route="/generate", http_response_status_code="200") == 2
    results = "nano_kv_session_results_total"
    assert scraped.value(results, nano_kv_session_outcome="missing") == 1
    assert scraped.value("nano_model_routes_total", gen_ai_request_model="tiny") == 1
    drafting = await scraped_drafts(speculating)
    roles: dict[str, object] = {"pipeline.replicas": 2, "pipeline.roles": ["prefill", "decode"]}
    roles["fairness.exchange_interval_s"] = 0.05
    async with Pipeline(config_with(free_port(), **roles)) as split:
        await split.complete({"prompt": "1 + 1 =" * 9, "sampling": {"max_tokens": 4}})
        handing = await scraped_when(split, "nano_kv_transfer_duration_seconds_count", 1)
    experts: dict[str, object] = {"engine.model_path": str(mixture())}
    experts |= {"engine.tensor_parallel": 2, "engine.expert_parallel": 2}
    config = config_with(free_port(), **experts)
    async with Pipeline(config) as spread:
        await spread.complete({"prompt": "1 + 1 =", "sampling": {"max_tokens": 4}})
        by_rank = await scraped_when(spread, "nano_expert_tokens_total", 1)
    assert by_rank.value("nano_rank_memory_bytes", nano_rank="1", nano_memory_kind="weights") > 0
    families = set[str]().union(*(each.families for each in (scraped, drafting, handing, by_rank)))
    missing = {
        each.name
        for each in INSTRUMENTS
        if not any(name.startswith(shown(each.name)) for name in families)
    }
    assert missing == set()


def queries() -> list[tuple[str, str]]:
    """(where, query) in the dashboard and in the alert rules."""
    dashboard = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
    found = [
        (f"dashboard: {panel['title']}", target["expr"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]
    alerts = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())
    for group in alerts["groups"]:
        found += [(f"alert: {rule['alert']}", rule["expr"]) for rule in group["rules"]]
    return found


async def test_queries_of_dashboard_and_alerts_find_metrics_and_labels(
    pipeline: Pipeline, speculating: Pipeline
) -> None:
    await pipeline.complete({"prompt": "1 + 1 =", "sampling": FOUR_TOKENS})
    await pipeline.client.update_weights(FolderWeights(str(EngineConfig().model_folder)))
    await scraped_when(pipeline, REPORTED_LAST, 1)
    plain = (await scraped_when(pipeline, "nano_kv_blocks", 1)).samples()
    samples = (await scraped_drafts(speculating)).samples() | plain
    asked = [
        (where, name, labels)
        for where, query in queries()
        for labels in [labels_of(query)]
        for name in re.findall(r"\b(?:nano|gen_ai)_\w+(?=[\s{\[)]|$)", query)
        if name not in labels
    ]
    assert len(asked) > 30
    assert [each for each in asked if not each[2] <= samples.get(each[1], set())] == []
    assert {name for _, name, _ in asked} <= {*samples}


async def test_each_alert_has_a_test_of_when_it_fires() -> None:
    rules = [where.removeprefix("alert: ") for where, _ in queries() if where.startswith("alert")]
    tests = yaml.safe_load((ROOT / "deploy" / "alerts-test.yaml").read_text())["tests"]
    fires = {
        case["alertname"]
        for test in tests
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert sorted(fires) == sorted(rules)


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
async def test_alerts_fire_when_they_should() -> None:
    command = ["promtool", "test", "rules", str(ROOT / "deploy" / "alerts-test.yaml")]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_legends_and_annotations_name_labels_of_their_queries() -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
    legends = [
        (target["legendFormat"], target["expr"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]
    alerts = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())
    for rule in (each for group in alerts["groups"] for each in group["rules"]):
        legends += [(text, rule["expr"]) for text in rule["annotations"].values()]
    named = [
        (label, query)
        for text, query in legends
        for label in re.findall(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}", text)
    ]
    assert len(named) > 10
    own = {"instance"}  # Prometheus sets it
    assert [each for each in named if each[0] not in labels_of(each[1]) | own] == []


def labels_of(query: str) -> set[str]:
    """The labels by which a query groups or selects."""
    groups = re.findall(r"\b(?:by|on|without|ignoring) ?\((.*?)\)", query)
    grouped = {name for group in groups for name in re.findall(r"\w+", group)}
    return grouped | set(re.findall(r"(\w+) ?(?:=~|!~|!=|=) ?\"", query))


async def test_documents_list_every_metric() -> None:
    text = (ROOT / "docs" / "telemetry.md").read_text()
    rows = re.findall(
        r"^\| `((?:nano|gen_ai|http)\.[\w.]+)` \| (\w+) \| (.*?) \| (.*) \|$", text, re.M
    )
    wanted = [
        (each.name, each.kind, f"`{each.unit}`" if each.unit else "", each.description)
        for each in INSTRUMENTS
    ]
    assert rows == wanted


async def test_buckets_resolve_milliseconds() -> None:
    for each in INSTRUMENTS:
        assert list(each.buckets) == sorted(set(each.buckets))
        assert bool(each.buckets) == (each.kind == "histogram")
        if each.unit == "s" and each.kind == "histogram" and not each.name.startswith("gen_ai."):
            within = [bound for bound in each.buckets if 0.001 <= bound <= 0.01]
            assert len(within) >= 5


async def test_off_by_default_and_then_nothing_listens() -> None:
    metrics = setup_metrics(TelemetryConfig(), "here")
    assert not metrics.enabled
    metrics.record(instruments.REQUESTS, 1)
    metrics.shutdown()


async def test_a_taken_port_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"telemetry.metrics_port {port}"):
            setup_metrics(TelemetryConfig(metrics_port=port), "here")


async def test_after_shutdown_the_port_is_free() -> None:
    port = free_port()
    for _ in range(2):
        metrics = setup_metrics(TelemetryConfig(metrics_port=port), "here")
        metrics.record(instruments.QUEUE_DEPTH, 3)
        scraped = await asyncio.to_thread(Scraped, port)
        assert scraped.value("nano_queue_depth") == 3
        metrics.shutdown()
    assert isinstance(metrics, Metrics)
