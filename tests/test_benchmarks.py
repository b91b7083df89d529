"""The benchmark programs' figures and tables, and the models that they write."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_inference import EngineConfig, SamplingParams

from .rig import FOLDER, load
from .soaking import in_soak

NEAR, BETWEEN, FAR = (60.0, 2.0), (200.0, 2.0), (350.0, 1.9)
SHARED, BUSY = (60.0, 1.05), (60.0, 1.5)
FIRST = 300
VOCAB_SIZE = 1024


@pytest.mark.parametrize(
    ("before", "after", "state"),
    [
        (NEAR, NEAR, "near"),
        (FAR, FAR, "far"),
        (NEAR, FAR, "changing"),
        (FAR, NEAR, "changing"),
        (BETWEEN, BETWEEN, "changing"),
        (SHARED, SHARED, "shared"),
        (NEAR, SHARED, "changing"),
        (BUSY, BUSY, "changing"),
        (None, None, "unknown"),
    ],
)
def test_a_turn_has_a_state_if_the_machine_was_in_it_before_and_after(
    before: tuple[float, float] | None, after: tuple[float, float] | None, state: str
) -> None:
    machine = load("machine")
    ends = (end and machine.State(*end) for end in (before, after))
    assert machine.state_around(*ends) == state


def turn(state: str, total_s: float) -> dict[str, Any]:
    return {"state": state, "steps_s": [], "prefill_s": total_s, "total_s": total_s}


def test_a_figure_has_turns_of_one_state_only() -> None:
    run = load("run")
    ours = [turn("near", 2.0), turn("far", 8.0), turn("near", 4.0), turn("changing", 100.0)]
    peer = [turn("far", 16.0), turn("near", 6.0), turn("changing", 1.0), turn("near", 6.0)]
    by_state = run.figures_by_state({"W1": {"ours": ours, "peer": peer}})
    assert {state: figures["W1 total, s"] for state, figures in by_state.items()} == {
        "near": {"ours": [2.0, 4.0], "peer": [6.0, 6.0]},
        "far": {"ours": [8.0], "peer": [16.0]},
    }
    line = run.table(by_state["near"], ["ours", "peer"]).splitlines()[-1]
    assert line == "| W1 total, s | 3 [2 to 4, 2] | 6 [6 to 6, 2], 2.00 x |"


def test_an_engines_peak_memory_excludes_the_program_that_started_it() -> None:
    """`ru_maxrss` includes the parent's peak, here that of a test run with torch."""
    folder = Path(FOLDER)
    program = f"import sys; sys.path[:0] = {[str(folder / 'engines'), str(folder)]}\n"
    program += "import worker; print(worker.peak_bytes())"
    held = b"x" * (300 << 20)
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert 0 < int(child.stdout) < len(held)


def test_a_model_of_known_text_generates_it(tmp_path: Path) -> None:
    models, workloads = load("random_models"), load("workloads")
    shape = workloads.qwen2(128, 128, 2, (2, 1), VOCAB_SIZE)
    shape |= {"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1}
    successors = workloads.random_successors(VOCAB_SIZE, FIRST, seed=1)
    models.write_known_text_model(tmp_path / "model", shape, successors)
    prompt = list(range(FIRST, FIRST + 8))
    answer = [successors[prompt[-1]]]
    while len(answer) < 32:
        answer.append(successors[answer[-1]])
    with load("timed_engine").TimedEngine(
        EngineConfig(model_path=str(tmp_path / "model"))
    ) as engine:
        (sample,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=32))
        (completion,) = engine.completions.values()
    assert list(sample.completion_tokens) == list(completion.samples[0].token_ids) == answer
    assert completion.timings.first_token_ns > 0
    assert len(set(answer)) == 32


SECTIONS = ["checks", "device", "steps", "batches", "nano_vllm", "workloads", "peers"]


@pytest.mark.parametrize("sections", [SECTIONS[1:3], in_soak(SECTIONS)], ids=len)
def test_the_program_for_a_device_writes_each_section_as_it_ends(
    sections: list[str], tmp_path: Path
) -> None:
    gpu, path = load("gpu"), tmp_path / "found.json"
    report = gpu.Report(path, time.monotonic() + 600)
    assert gpu.run(gpu.DRY, "cpu", report, ["S"], sections)
    found = json.loads(path.read_text())
    assert [name for name in SECTIONS if name in {*found, *found["S"]}] == sections
    assert found["S"]["steps"]["1"]["step_ms"] > 0


def test_a_section_for_a_device_that_is_late_or_fails_keeps_its_figures(tmp_path: Path) -> None:
    gpu, path = load("gpu"), tmp_path / "found.json"
    report = gpu.Report(path, time.monotonic() + 600)

    def late() -> Iterator[tuple[str, int]]:
        yield "first", 1
        while True:
            pass

    def fails() -> Iterator[tuple[str, int]]:
        yield "first", 2
        raise AssertionError("no graphs")

    assert not report.section("steps", late(), 0.01, "S")
    assert not report.section("checks", fails(), 60)
    report.deadline = 0
    assert not report.section("device", fails(), 60)
    assert json.loads(path.read_text()) == {
        "S": {"steps": {"first": 1, "ended by": "TimeoutError: it took more than 0 s"}},
        "checks": {"first": 2, "ended by": "AssertionError: no graphs"},
        "device": {"ended by": "TimeoutError: no time was left"},
    }


@pytest.mark.parametrize("path", load("tables").DOCUMENTS, ids=lambda path: path.name)
def test_tables_equal_the_result_files(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert text == load("tables").written(text), "run `python benchmarks/tables.py`"


def test_long_prompts_delay_streams_of_a_simulated_lane_only_without_roles() -> None:
    model = load("roles_model")
    device = model.Device()
    load_of_a_lane = {"streams": 4, "length": 512, "every_s": 0.2, "seconds": 1.0}
    unified = model.interference(device, (), 512, **load_of_a_lane)
    roles = model.interference(device, ("prefill", "decode"), 512, **load_of_a_lane)
    prefill_ms = 512 * device.prefill_token_ns / 1e6
    assert unified["itl_most"] > prefill_ms > roles["itl_most"]
    assert min(unified["first_p50"], roles["first_p50"]) > prefill_ms


def test_each_turn_of_a_conversation_continues_an_earlier_one() -> None:
    conversations = load("kv_conversations")
    turns = conversations.make_turns(3)
    assert len(turns) == 3 * conversations.TURNS
    texts = [turn.prompt + turn.answer for turn in turns]
    for number, turn in enumerate(turns):
        continued = [text for text in texts[:number] if turn.prompt[: len(text)] == text]
        assert bool(continued) is not turn.begins


def test_all_reduces_of_ranks_are_timed_in_processes() -> None:
    found = load("ranks").measure(2, [(1, 64), (3, 64)], turns=2, number=3)
    assert list(found) == [
        f"[{rows}, 64] {dtype}" for dtype in ("float32", "bfloat16") for rows in (1, 3)
    ]
    for times in found.values():
        assert list(times) == ["ours", "gloo"]
        assert all(len(each) == 2 and min(each) > 0 for each in times.values())
