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
from nano_inference.pipeline import client_weights

from .. import oracle
from ..stages.executor.runner.adapters.making import make_adapter
from .conftest import Run, assert_refused, eventually, serving

MODEL = EngineConfig().model_folder


@pytest.fixture(scope="module")
def served(redis_url: str) -> Iterator[Config]:
    """A pipeline for these tests alone, since its weights change."""
    with serving(redis_url) as config:
        yield config


def done(run: Run, *command: str) -> str:
    """Run a command that succeeds; return its output."""
    ran = run(*command)
    assert ran.status == 0, ran.stderr
    return ran.stdout.strip()


def version(run: Run) -> int:
    return int(done(run, "weights", "version"))


def answer(run: Run, *options: str) -> dict[str, object]:
    (sample,) = json.loads(done(run, "submit", "98 + 25 =", "--json", *options))["samples"]
    return dict(sample)


def test_a_checkpoint_folder_and_back(
    run: Run, on_served: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = version(run)
    weights = oracle.announcing(load_file(MODEL / "model.safetensors"), before + 1)
    save_file(weights, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path.parent)
    # A relative path is meant from here, wherever the executor was started.
    assert done(run, "weights", "update", "--folder", tmp_path.name) == str(before + 1)
    assert version(run) == before + 1
    sample = answer(run, "--max-tokens", "2")
    assert sample["weight_version"] == before + 1
    assert sample["token_ids"] == [oracle.token_of(before + 1)] * 2
    again = ("weights", "update", "--folder", str(MODEL), "--in-flight", "retract")
    assert done(run, *again, "--version", str(before + 40)) == str(before + 40)
    assert done(run, "submit", "98 + 25 =") == "123"
    assert_refused(
        run(*again, "--version", "1"), "version 1 is not above that of the weights in place"
    )
    assert version(run) == before + 40


@pytest.mark.parametrize(
    "command",
    [
        ("weights", "version"),
        ("weights", "update", "--folder", str(MODEL)),
        ("weights", "roll-back", "3"),
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


def test_weights_roll_back_with_a_log_only(run: Run, on_served: Config) -> None:
    assert_refused(run("weights", "roll-back", "3"), "there is no log of weights")
    assert_refused(run("weights", "log"), "--log FOLDER")


def test_a_part_of_the_weights(run: Run, on_served: Config, tmp_path: Path) -> None:
    before = version(run)
    file = tmp_path / "part.safetensors"
    name = "model.norm.weight"
    save_file({name: load_file(MODEL / "model.safetensors")[name]}, file)
    assert_refused(run("weights", "update", "--folder", str(file)), "which are missing")
    update = ("weights", "update", "--folder", str(file), "--partial", "--in-flight", "abort")
    assert done(run, *update) == str(before + 1)
    assert done(run, "submit", "98 + 25 =") == "123"


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
        done(run, "pause", "--in-flight", mode)
        assert run("submit", "98 + 25 =", "--budget", "0.05").status == 1, "it waits"
        for command in (
            ("weights", "update", "--folder", str(MODEL)),
            ("flush-cache",),
            ("resume",),
        ):
            done(run, *command)
        assert done(run, "submit", "98 + 25 =") == "123"
    assert version(run) == before + 3


def test_memory_is_released_and_resumed(run: Run, on_served: Config) -> None:
    before = version(run)
    done(run, "release-memory", "--tag", "kv_cache")
    assert run("submit", "98 + 25 =", "--budget", "0.05").status == 1
    done(run, "release-memory")
    update = ("weights", "update", "--folder", str(MODEL))
    assert_refused(run(*update), "the memory of the weights is released")
    for command in (("resume-memory", "--tag", "weights"), update, ("resume-memory",)):
        done(run, *command)
    assert done(run, "submit", "98 + 25 =") == "123"
    assert version(run) == before + 1


def test_without_a_pipeline(run: Run, on_nobody: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_weights, "ANSWER_S", 0.2)
    update = run("weights", "update", "--folder", "x", "--timeout", "0.1")
    assert_refused(update, "can't answer while it is loading or not running")


# --- adapters -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("adapter")
    model = AutoModelForCausalLM.from_pretrained(EngineConfig().model_folder)
    make_adapter(model, 0, made, r=2)
    return made


def listed(run: Run) -> list[list[str]]:
    return [line.split() for line in done(run, "adapters", "list").splitlines()[1:]]


def test_an_adapter_is_loaded_replaced_and_unloaded(
    run: Run, on_served: Config, adapter: Path
) -> None:
    assert_refused(run("adapters", "load", "a", str(adapter / "nowhere")), "adapter_config.json")
    assert run("adapters", "load", "a", str(adapter)).stdout == "1\n"
    assert run("adapters", "load", "a", str(adapter), "--version", "7").stdout == "7\n"
    eventually(lambda: [row[:3] for row in listed(run)] == [["a", "7", "2"]])
    assert run("adapters", "unload", "a").status == 0
    assert_refused(run("adapters", "unload", "a"), "no adapter 'a' is loaded")
