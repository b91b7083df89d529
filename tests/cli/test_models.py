"""Commands on a deployment of several models: all of them, one by its name, or none that is one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator

import pytest
from anyio.from_thread import start_blocking_portal

from nano_inference.bus import RequestEntry, open_bus
from nano_inference.bus.public import ErrorInfo, GenerateRequest
from nano_inference.config import BusConfig, ModelConfig
from nano_inference.store.registry import ModelRecord

from ..pipeline.deployments import model, own_prefix, serving
from .conftest import Run, assert_refused, use_bus

LIMIT_S = 60


async def _note_one_that_is_off(config: BusConfig) -> None:
    spec = ModelConfig(id="off", path="/nowhere")
    record = ModelRecord(spec=spec, state="failed", reason="there is no folder")
    async with contextlib.aclosing(open_bus(config)) as bus:
        await bus.store.models.put(record)


@pytest.fixture(scope="module")
def served(redis_url: str) -> Iterator[BusConfig]:
    """Two models that serve, and one that is not loaded."""
    config = own_prefix(redis_url)
    specs = (model("a", aliases=("first",), default=True), model("b"))
    with start_blocking_portal() as portal, contextlib.ExitStack() as stack:
        stack.enter_context(portal.wrap_async_context_manager(serving(config, *specs)))
        portal.call(_note_one_that_is_off, config)
        yield config


@pytest.fixture(autouse=True)
def on_served(served: BusConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    use_bus(monkeypatch, served.url, served.prefix)


# --- models -----------------------------------------------------------------------------------


def test_models_are_shown_with_how_they_are(run: Run) -> None:
    ran = run("models")
    assert ran.status == 0
    rows = {line.split()[0]: line for line in ran.stdout.splitlines() if line.strip()}
    assert "(default)" in rows["a"]
    assert "first" in rows["a"]
    assert "ready" in rows["b"]
    assert "failed" in rows["off"]
    assert "there is no folder" in " ".join(ran.stdout.split())


def test_models_as_json_have_their_numbers(run: Run) -> None:
    lines = run("models", "--json").stdout.splitlines()
    found = {each["id"]: each for each in map(json.loads, lines)}
    assert sorted(found) == ["a", "b", "off"]
    assert (found["a"]["state"], found["a"]["aliases"]) == ("ready", ["first"])
    assert found["a"]["parameters"] > 0
    assert found["a"]["max_model_len"] > 0
    assert (found["off"]["state"], found["off"]["parameters"]) == ("failed", 0)


@pytest.mark.parametrize("command", ["load", "unload", "remove"])
def test_loading_needs_a_manager(run: Run, command: str) -> None:
    assert_refused(run("models", command, "a"), "no process loads and unloads models here")


def test_contradictory_options_are_refused(run: Run) -> None:
    assert_refused(run("models", "load", "c", "--alias", "x"), "--path")
    assert_refused(run("models", "--json", "load", "c"), "give options after `load`")
    assert_refused(run("models", "load"), "missing argument", "models load --help")
    assert_refused(run("models", "load", "a b", "--path", "/x"), "can't name a model")
    assert_refused(run("models", "unload", "a", "--timeout", "-1"), "--timeout")


# --- requests ---------------------------------------------------------------------------------


def test_requests_go_to_the_named_model(run: Run) -> None:
    for name, answered in (("b", "b"), ("first", "a")):
        ran = run("submit", "1 =", "--json", "--max-tokens", "2", "--model", name)
        assert json.loads(ran.stdout)["model"] == answered
    ran = run("submit", "1 =", "--json", "--max-tokens", "2")
    assert json.loads(ran.stdout)["model"] == "a", "the default"
    ran = run("submit", "1 =", "--json", "--model", "off")
    assert (ran.status, json.loads(ran.stdout)["error"]["code"]) == (1, "model_not_loaded")
    ran = run("complete", "1 =", "--model", "b", "--max-tokens", "2")
    assert ran.status == 0


def test_scores_are_those_of_the_named_model(
    run: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("score") / "given.jsonl"
    file.write_text('{"prompt_token_ids": [0, 5], "token_ids": [6]}\n')
    assert len(json.loads(run("score", str(file), "--model", "b").stdout)["logprobs"]) == 1
    assert_refused(run("score", str(file), "--model", "c"), "there is no model 'c' here")


# --- operators --------------------------------------------------------------------------------

OPERATIONS = [["pause"], ["resume"], ["flush-cache"], ["weights", "version"]]


@pytest.mark.parametrize("operation", OPERATIONS, ids=" ".join)
def test_an_operation_is_done_to_one_model(run: Run, operation: list[str]) -> None:
    assert_refused(run(*operation), "name one of them: a, b, off")
    assert run(*operation, "--model", "b").status == 0
    assert_refused(
        run(*operation, "--model", "bb"), "there is no model 'bb' here", "did you mean 'b'"
    )
    if operation == ["pause"]:
        assert run("resume", "--model", "b").status == 0


def test_fairness_is_shown_of_all_and_set_of_one(run: Run) -> None:
    shown = json.loads(run("fairness", "show", "--json").stdout)
    assert sorted(shown) == ["a:0", "b:0"]
    assert_refused(run("fairness", "set", "aging_s=3"), "name one of them")
    assert run("fairness", "set", "aging_s=3", "--model", "b").status == 0
    end = time.monotonic() + LIMIT_S
    while json.loads(run("fairness", "show", "--json").stdout)["b:0"]["aging_s"] != 3:
        assert time.monotonic() < end
    assert json.loads(run("fairness", "show", "--json").stdout)["a:0"] == shown["a:0"]


def test_cancelling_an_unknown_request_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nano_inference.cli.cancel._LOOKS_S", (0.0,))
    assert run("cancel", "unknown").status == 1


# --- looking ----------------------------------------------------------------------------------


def test_status_shows_lanes_by_model(run: Run) -> None:
    ran = run("status")
    assert ran.status == 0
    for word in ("a ready", "b ready", "off failed", "model a, lane 0", "model b, lane 0"):
        assert word in ran.stdout
    found = json.loads(run("status", "--json").stdout)
    assert found["models"] == {"a": "ready", "b": "ready", "off": "failed"}
    assert {lane["model"] for lane in found["lanes"]} == {"a", "b"}
    assert "a:plans" in found["links"]
    one = json.loads(run("status", "--json", "--model", "b").stdout)
    assert {lane["model"] for lane in one["lanes"]} == {"b"}
    off = run("status", "--model", "off")
    assert off.status == 1
    assert "model off: it is failed" in " ".join(off.stdout.split())
    assert_refused(run("status", "--model", "c"), "there is no model 'c' here")


def test_top_shows_lanes_by_model(run: Run) -> None:
    ran = run("top", "--once")
    assert "model a, lane 0" in ran.stdout
    assert "model b, lane 0" in ran.stdout
    assert "model a" not in run("top", "--once", "--model", "b").stdout


def test_health_checks_the_models_that_run_here(run: Run) -> None:
    assert run("health", "--ready").stdout == "ready\n"
    assert run("health", "--live", "--model", "b").stdout == "live\n"
    ran = run("health", "--ready", "--host", "elsewhere")
    assert ran.status == 1
    assert "on elsewhere: not heard of" in ran.stdout


# --- dead letters -----------------------------------------------------------------------------


async def _add_dead_letter(config: BusConfig, name: str) -> None:
    bus = open_bus(config).of_model(name)
    entry = RequestEntry("1-1", GenerateRequest(prompt="1 =", model="gone", stream=False))
    await bus.requests.add_dead_letter(entry, ErrorInfo(code="lane_failed", message="it failed"), 3)
    await bus.aclose()


def test_dead_letters_go_back_to_the_model_that_had_them(run: Run, served: BusConfig) -> None:
    for name in ("b", "off"):
        asyncio.run(_add_dead_letter(served, name))
    assert len(run("dlq", "list", "--json").stdout.splitlines()) == 2
    (letter,) = map(json.loads, run("dlq", "list", "--json", "--model", "b").stdout.splitlines())
    assert letter["model"] == "b"
    assert "model     b" in run("dlq", "show", letter["letter_id"]).stdout
    ran = run("dlq", "retry", "--all", "--yes", "--json", "--model", "b")
    entry_id = json.loads(ran.stdout)["request_id"]

    async def answered() -> str:
        async with contextlib.aclosing(open_bus(served)) as bus, asyncio.timeout(LIMIT_S):
            *_, last = [each async for each in bus.results.follow("", entry_id)]
            return last.model  # type: ignore[union-attr]

    assert asyncio.run(answered()) == "b"
    assert_refused(run("dlq", "retry", "--all", "--yes"), "'off' takes no requests: it is failed")
    assert len(run("dlq", "list", "--json").stdout.splitlines()) == 1, "it stays"
    assert run("dlq", "drop", "--all", "--yes").status == 0
