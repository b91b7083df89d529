"""`up` with several models: processes of each, which end and come while others serve."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from nano_inference import BusClient, Completion
from nano_inference.cli.several_models import MetricsPorts, _written
from nano_inference.config import BusConfig, ConfigError, parse_value
from nano_inference.pipeline.models import ModelStatus
from nano_inference.store.board import StageReport

from ..commands import Command
from ..pipeline import reference, short_model

LIMIT_S = 120


def wide_model(folder: Path) -> Path:
    """A random model of another width, with the bundled one's tokenizer."""
    shutil.copytree(
        reference.FOLDER, folder, ignore=shutil.ignore_patterns("*.safetensors", "*config.json")
    )
    shutil.copy(reference.FOLDER / "tokenizer_config.json", folder)
    vocabulary = json.loads((reference.FOLDER / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@contextmanager
def running(bus: BusConfig, settings: Path, log: Path) -> Iterator[Command]:
    options = ("--bus", bus.url, "--set", f"bus.prefix={bus.prefix}")
    with Command("up", *options, "--config", str(settings), log=log) as up:
        yield up


async def until_settled(client: BusClient) -> dict[str, ModelStatus]:
    async with asyncio.timeout(LIMIT_S):
        while True:
            found = {each.id: each for each in await client.models()}
            states = {name: status.state for name, status in found.items()}
            if states == {"a": "ready", "b": "ready", "broken": "failed"}:
                return found
            await asyncio.sleep(0.05)


def asking(name: str, tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    return {"prompt": "12 + 30 =", "model": name, "sampling": sampling}


async def executor_of(client: BusClient, model: str) -> StageReport:
    of_model = client.of_model(model)
    reports = await of_model.reports()
    await of_model.aclose()
    return next(report for report in reports if report.stage == "executor")


def stop(up: Command) -> int:
    up.send_signal(signal.SIGTERM)
    return up.wait()


@pytest.mark.slow
async def test_the_processes_of_each_model(redis_url: str, tmp_path: Path) -> None:
    """One that is killed is replaced, one that is unloaded is gone, and nobody else notices."""
    bus = BusConfig(url=redis_url, prefix=f"test-{uuid.uuid4().hex[:12]}")
    models = [
        {"id": "a", "path": str(short_model.folder()), "dtype": "float32"},
        {"id": "b", "path": str(wide_model(tmp_path / "wide"))},
        {"id": "broken", "path": str(tmp_path / "nothing")},
    ]
    settings = tmp_path / "settings.yaml"
    settings.write_text(yaml.safe_dump({"models": models, "pipeline": {"restart_backoff_s": 0.05}}))
    log = tmp_path / "log"
    async with BusClient.connect(bus) as client:
        with running(bus, settings, log) as up:
            found = await until_settled(client)
            assert found["a"].memory_bytes > 0 < found["b"].parameters != found["a"].parameters
            killed = await executor_of(client, "a")
            answers = [asyncio.create_task(client.complete(asking(name, 60))) for name in "aabb"]
            async with asyncio.timeout(LIMIT_S):
                os.kill(killed.pid, signal.SIGKILL)
                done: list[Completion] = await asyncio.gather(*answers)
                assert [(each.status, each.model) for each in done] == [
                    ("done", name) for name in "aabb"
                ]
                successor = await executor_of(client, "a")
                assert successor.pid != killed.pid
                # The reason is what the process said.
                failed = {each.id: each for each in await client.models()}["broken"]
                assert failed.state == "failed"
                assert str(tmp_path / "nothing") in failed.reason
                status = await client.unload_model("a")
            assert (status.state, status.memory_bytes) == ("unloaded", 0)
            with pytest.raises(ProcessLookupError):
                os.kill(successor.pid, 0)
            assert (await client.complete(asking("b", 3))).status == "done"
            assert stop(up) == 0
        assert {each.state for each in await client.models()} == {"unloaded"}
    text = log.read_text()
    assert "\na      admission  " in text
    assert "\nbroken executor   nano-inference: " in text


def test_each_process_has_a_port_for_its_metrics() -> None:
    ports = MetricsPorts(9000)
    assert ports.gateway == (9001,)
    assert ports.of("a", 5) == (9002, 9003, 9004, 9005, 9006)
    assert ports.of("b", 7) == tuple(range(9007, 9014))
    assert ports.of("a", 5) == (9002, 9003, 9004, 9005, 9006)
    assert MetricsPorts(0).of("a", 5) == MetricsPorts(0).gateway == ()
    with pytest.raises(ConfigError, match="metrics_port"):
        MetricsPorts(65_530).of("a", 5)


@pytest.mark.parametrize(
    "value", ["a: b # c", "7", 7, 1.5, True, ["x", "7", "a b"], {"a": "/b c"}, [], "x" * 200]
)
def test_settings_of_a_model_get_through_a_command_line(value: Any) -> None:
    assert parse_value(_written(value)) == value
    assert "\n" not in _written(value)
