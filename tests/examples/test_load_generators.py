"""AIPerf and GuideLLM load `serve`, and count what was asked for and what it counts itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ..telemetry.test_metrics import Scraped
from .environments import run_example

REQUESTS = 20
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 16

pytestmark = [pytest.mark.slow, pytest.mark.soak]


class Counted:
    """The counts of a server between two reads of its metrics."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2])
        self._before = Scraped(self._port)

    def look(self) -> None:
        self._after = Scraped(self._port)

    def value(self, name: str, **labels: str) -> float:
        return self._after.value(name, **labels) - self._before.value(name, **labels)

    def tokens(self, kind: str) -> float:
        return self.value("gen_ai_client_token_usage_sum", gen_ai_token_type=kind)


def load(name: str, url: str, programs: Callable[[str], Path], folder: Path) -> Counted:
    """Runs a script that loads a server; what that has counted meanwhile."""
    calls = programs(name)
    counted = Counted(url)
    run_example(name, url, calls, folder)
    counted.look()
    assert counted.value("nano_requests_total") == REQUESTS
    assert counted.value("nano_requests_total", nano_request_status="done") == REQUESTS
    assert counted.value("gen_ai_server_time_to_first_token_seconds_count") == REQUESTS
    assert counted.tokens("output") == REQUESTS * OUTPUT_TOKENS
    return counted


def test_aiperf_and_the_server_count_the_same(
    serving: str, programs: Callable[[str], Path], tmp_path: Path
) -> None:
    counted = load("aiperf.sh", serving, programs, tmp_path)
    told = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert told["is_complete"]
    assert not told["was_cancelled"]
    assert told["error_summary"] == []
    assert told["request_count"]["avg"] == told["completed_request_count"]["avg"] == REQUESTS
    assert told["total_osl"]["avg"] == counted.tokens("output")
    assert told["total_isl"]["avg"] == counted.tokens("input") > REQUESTS * PROMPT_TOKENS
    cached = told["total_usage_prompt_cache_read_tokens"]["avg"]
    assert cached == counted.value("nano_tokens_cached_total")
    first, whole = told["time_to_first_token"], told["request_latency"]
    assert first["count"] == whole["count"] == REQUESTS
    assert first["min"] > 0
    assert first["avg"] < whole["avg"]
    assert told["inter_token_latency"]["count"] == REQUESTS
    # It finds our metrics where it looks for them, and understands them.
    found = json.loads((tmp_path / "server_metrics_export.json").read_text())
    assert found["summary"]["endpoints_successful"] == [f"{serving}/metrics"]
    assert {"nano_requests", "gen_ai_server_time_to_first_token_seconds"} <= set(found["metrics"])


def test_guidellm_and_the_server_count_the_same(
    serving: str, programs: Callable[[str], Path], tmp_path: Path
) -> None:
    counted = load("guidellm.sh", serving, programs, tmp_path)
    (told,) = json.loads((tmp_path / "guidellm.json").read_text())["benchmarks"]
    made = told["scheduler_metrics"]["requests_made"]
    assert made == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    requests = told["requests"]["successful"]
    assert len(requests) == REQUESTS
    assert all(each["output_tokens"] == OUTPUT_TOKENS for each in requests)
    assert sum(each["prompt_tokens"] for each in requests) == counted.tokens("input")
    cached = sum(each["cached_tokens"] for each in requests)
    assert cached == counted.value("nano_tokens_cached_total")
    for each in requests:
        assert each["response_id"].startswith("chatcmpl-")
        assert 0 < each["time_to_first_token_ms"] < 1000 * each["request_latency"]
        assert each["inter_token_latency_ms"] > 0
