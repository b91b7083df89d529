"""A short run of benchmarks/chaos.py: no fault damages a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ..commands import Command
from ..rig import load
from . import short_model

pytestmark = pytest.mark.slow


HTTP_EVERY_DAY: dict[str, Any] = {"requests": 21, "kills": 7, "concurrency": 7, "longest": 30}
HTTP_SOAK: dict[str, Any] = {"requests": 200, "kills": 20, "concurrency": 24, "longest": 120}


@pytest.fixture(autouse=True)
def quick_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start processes as forks that have the imports, with a model of one layer."""

    def start(arguments: Sequence[str], log: Path) -> Command:
        return Command(*arguments, log=log)

    monkeypatch.setattr(load("chaos_rig"), "start_command", start)
    monkeypatch.setenv("NANO_INFERENCE_ENGINE__MODEL_PATH", str(short_model.folder()))


def take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches and short time slices: at any moment some sequences are preempted."""
    monkeypatch.setenv("NANO_INFERENCE_ENGINE__MAX_BATCH_SIZE", "4")
    monkeypatch.setenv("NANO_INFERENCE_FAIRNESS__MAX_TIMESLICE_TOKENS", "8")


def check(chaos: Any, result: dict[str, Any], size: dict[str, Any]) -> None:
    report = json.dumps(result, indent=1)
    assert set(result["kills"]) == set(chaos.TARGETS), report
    assert sum(result["kills"].values()) == size["kills"], report
    assert (result["completed"], result["clean"]) == (size["requests"], True), report


@pytest.mark.soak
async def test_streams_survive_kills_of_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soak: bool
) -> None:
    """Gateways too: their clients resume at the other one. Every day sequences take turns."""
    chaos, chaos_http = load("chaos"), load("chaos_http")
    if not soak:
        take_turns(monkeypatch)
    size = HTTP_SOAK if soak else HTTP_EVERY_DAY
    result = await chaos_http.http_storm(tmp_path, chaos.SETTINGS, seed=3, **size)
    report = json.dumps(result, indent=1)
    assert sum(result["kills"].values()) == size["kills"], report
    assert set(result["kills"]) == set(chaos_http.TARGETS), report
    assert result["returns"] > 0, report
    assert (result["completed"], result["clean"]) == (size["requests"], True), report


def test_the_checker_finds_faults_of_an_http_reading() -> None:
    chaos_http = load("chaos_http")

    def event(start: int, *tokens: int, reason: str | None = None) -> str:
        spans = [{"version": 0, "start": start, "end": start + len(tokens)}]
        choice = {"index": 0, "text": "x" * len(tokens), "finish_reason": reason}
        choice |= {"token_ids": tokens, "weight_versions": spans if tokens else []}
        return json.dumps({"choices": [choice]})

    def read(*events: str) -> Any:
        reading = chaos_http.Reading()
        for data in events:
            assert not reading.take("a.1", data)
        return reading

    done, error = "[DONE]", json.dumps({"error": {"code": "lane_failed"}})
    calm = read(event(0, 5, 6), event(2, 7, reason="length"), done)
    cases = {
        "": read(event(0, 5), event(1, 6, 7, reason="length"), done),
        "lost": read(event(0, 5, 6)),
        "doubled": read(event(0, 5, 6), event(1, 6, 7, reason="length"), done),
        "gaps": read(event(0, 5), event(2, 7, reason="length"), done),
        "different": read(event(0, 5, 6), event(2, 8, reason="length"), done),
    }
    for wanted, reading in cases.items():
        found = chaos_http.compared([reading], [calm], [{"temperature": 0}])
        assert {name for name in chaos_http.HTTP_FAULTS if found[name]} == {wanted} - {""}
        assert found["clean"] == (not wanted)
    failed = read(event(0, 5, 6), error, done)
    assert chaos_http.compared([failed], [calm], [{"temperature": 0}])["lost"] == 1
    sampled = chaos_http.compared([cases["different"]], [calm], [{"temperature": 1}])
    assert (sampled["different_sampled"], sampled["clean"]) == (1, True)


def test_the_checker_finds_faults_of_a_stream() -> None:
    chaos, rig = load("chaos"), load("chaos_rig")
    request = {"n": 1, "stream": True, "sampling": {"temperature": 0}}
    sample = {"sample_index": 0, "token_ids": [5, 6, 7], "text": "abc", "finish_reason": "length"}
    outputs: list[dict[str, object]] = [
        {"type": "chunk", "sample_index": 0, "token_offset": i, "token_ids": [5 + i], "text": text}
        for i, text in enumerate("abc")
    ]
    outputs.append({"type": "completion", "status": "done", "samples": [sample]})

    def found(*numbers_and_outputs: tuple[int, int]) -> set[str]:
        entries = [rig.Entry(1, n, outputs[i], 0.0) for n, i in numbers_and_outputs]
        return set(chaos.faults_of(entries, request))

    assert found((1, 0), (2, 1), (3, 2), (4, 3)) == set()
    assert found((1, 0), (2, 1), (3, 2)) == {"lost"}
    assert found() == {"lost"}
    assert found((1, 0), (2, 2), (3, 3)) == {"gaps"}
    assert "duplicated" in found((1, 0), (2, 1), (3, 1), (4, 2), (5, 3))
    assert "duplicated" in found((1, 0), (2, 1), (3, 2), (4, 3), (5, 3))
    assert found((1, 0), (2, 1), (4, 2), (5, 3)) == {"gaps"}
    whole = [rig.Entry(1, n + 1, output, 0.0) for n, output in enumerate(outputs)]
    other = {**outputs[3], "samples": [{**sample, "token_ids": [5, 6, 8]}]}
    report = chaos.compare([request], [whole], [[*whole[:3], rig.Entry(2, 4, other, 0.0)]])
    assert (report["mismatched"], report["clean"]) == (1, False)
