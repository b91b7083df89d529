"""Weights, pauses, the prefix cache and adapters, on a running pipeline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nano_inference.config import Config, EngineConfig
from nano_inference.pipeline import client

from .. import oracle
from ..stages.executor.runner.adapters.making import make_adapter
from .conftest import Run, assert_refused, eventually, serving

MODEL = EngineConfig().model_folder


@pytest.fixture(scope="module")
def served(redis_url: str) -> Iterator[Config]:
    """A pipeline for these tests alone, since its weights change."""
    with serving(redis_url) as config:
        yield config


def version(run: Run) -> int:
    ran = run("weights", "version")
    assert ran.status == 0, ran.stderr
    return int(ran.stdout)


def answer(run: Run, *options: str) -> dict[str, object]:
    ran = run("submit", "98 + 25 =", "--json", *options)
    assert ran.status == 0, ran.stderr
    (sample,) = json.loads(ran.stdout.splitlines()[-1])["samples"]
    return dict(sample)


def test_a_checkpoint_folder_and_back(
    run: Run, on_served: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = version(run)
    weights = oracle.announcing(load_file(MODEL / "model.safetensors"), before + 1)
    save_file(weights, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path.parent)
    # A relative path is meant from here, wherever the executor was started.
    ran = run("weights", "update", "--folder", tmp_path.name)
    assert (ran.status, ran.stdout) == (0, f"{before + 1}\n"), ran.stderr
    assert version(run) == before + 1
    sample = answer(run, "--max-tokens", "2")
    assert sample["weight_version"] == before + 1
    assert sample["token_ids"] == [oracle.token_of(before + 1)] * 2
    again = ("weights", "update", "--folder", str(MODEL), "--in-flight", "retract")
    ran = run(*again, "--version", str(before + 40))
    assert (ran.status, ran.stdout) == (0, f"{before + 40}\n"), ran.stderr
    assert run("submit", "98 + 25 =").stdout.strip() == "123"
    refused = run(*again, "--version", "1")
    assert_refused(refused, "version 1 is not above that of the weights in place")
    assert version(run) == before + 40


@pytest.mark.parametrize(
    "command",
    [
        ("weights", "version"),
        ("weights", "update", "--folder", str(MODEL)),
        ("pause",),
        ("resume",),
        ("flush-cache",),
        ("release-memory",),
        ("resume-memory",),
    ],
)
def test_an_unknown_lane_is_refused(run: Run, on_served: Config, command: tuple[str, ...]) -> None:
    assert_refused(run(*command, "--lane", "b"), "no lane 'b' lives here; living lanes: 0")


def test_only_one_lane(run: Run, on_served: Config) -> None:
    assert run("weights", "version", "--lane", on_served.bus.lane).stdout.strip().isdigit()
    assert run("flush-cache", "--lane", on_served.bus.lane).status == 0


def test_a_part_of_the_weights(run: Run, on_served: Config, tmp_path: Path) -> None:
    before = version(run)
    file = tmp_path / "part.safetensors"
    name = "model.norm.weight"
    save_file({name: load_file(MODEL / "model.safetensors")[name]}, file)
    assert_refused(run("weights", "update", "--folder", str(file)), "which are missing")
    ran = run("weights", "update", "--folder", str(file), "--partial", "--in-flight", "abort")
    assert (ran.status, ran.stdout) == (0, f"{before + 1}\n"), ran.stderr
    assert run("submit", "98 + 25 =").stdout.strip() == "123"


def test_bad_weights_change_nothing(run: Run, on_served: Config, tmp_path: Path) -> None:
    before = version(run)
    nowhere = run("weights", "update", "--folder", str(tmp_path / "nowhere"))
    assert_refused(nowhere, "can't be read: No such file or directory")
    shutil.copy(MODEL / "config.json", tmp_path)
    empty = run("weights", "update", "--folder", str(tmp_path))
    assert_refused(empty, "there is no .safetensors file in")
    assert version(run) == before


def test_weights_may_change_during_a_pause(run: Run, on_served: Config) -> None:
    before = version(run)
    for mode in ("keep", "retract", "abort"):
        assert run("pause", "--in-flight", mode).status == 0
        waiting = run("submit", "98 + 25 =", "--budget", "0.05")
        assert waiting.status == 1
        assert run("weights", "update", "--folder", str(MODEL)).status == 0
        assert run("flush-cache").status == 0
        assert run("resume").status == 0
        assert run("submit", "98 + 25 =").stdout.strip() == "123"
    assert version(run) == before + 3


def test_memory_is_released_and_resumed(run: Run, on_served: Config) -> None:
    before = version(run)
    assert run("release-memory", "--tag", "kv_cache").status == 0
    assert run("submit", "98 + 25 =", "--budget", "0.05").status == 1
    assert run("release-memory").status == 0
    update = ("weights", "update", "--folder", str(MODEL))
    assert_refused(run(*update), "the memory of the weights is released")
    assert run("resume-memory", "--tag", "weights").status == 0
    assert (ran := run(*update)).status == 0, ran.stderr
    assert run("resume-memory").status == 0
    assert run("submit", "98 + 25 =").stdout.strip() == "123"
    assert version(run) == before + 1


def test_an_unknown_memory_tag_is_refused(run: Run, on_nobody: str) -> None:
    assert_refused(run("release-memory", "--tag", "gpu"), "'gpu' is not one of")


def test_without_a_pipeline(run: Run, on_nobody: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_S", 0.2)
    update = run("weights", "update", "--folder", "x", "--timeout", "0.1")
    assert_refused(update, "did not answer within")


def test_an_unknown_pause_mode_is_refused(run: Run, on_nobody: str) -> None:
    assert_refused(run("pause", "--in-flight", "forget"), "'forget' is not one of")


# --- adapters -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("adapter")
    model = AutoModelForCausalLM.from_pretrained(EngineConfig().model_folder)
    make_adapter(model, 0, made, r=2)
    return made


def listed(run: Run) -> list[list[str]]:
    ran = run("adapters", "list")
    assert ran.status == 0, ran.stderr
    return [line.split() for line in ran.stdout.splitlines()[1:]]


def test_an_adapter_is_loaded_replaced_and_unloaded(
    run: Run, on_served: Config, adapter: Path
) -> None:
    assert_refused(run("adapters", "load", "a", str(adapter / "nowhere")), "adapter_config.json")
    assert run("adapters", "load", "a", str(adapter)).stdout == "1\n"
    assert run("adapters", "load", "a", str(adapter), "--version", "7").stdout == "7\n"
    eventually(lambda: [row[:3] for row in listed(run)] == [["a", "7", "2"]])
    assert run("adapters", "unload", "a").status == 0
    assert_refused(run("adapters", "unload", "a"), "no adapter 'a' is loaded")
