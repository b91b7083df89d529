"""`up`: how it starts and ends, and the processes of several models."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from transformers import LlamaConfig, LlamaForCausalLM

from nano_inference import BusClient, Completion
from nano_inference.cli.processes import Processes
from nano_inference.cli.up import MetricsPorts
from nano_inference.config import STAGES, ConfigError, as_text, load_config, parse_value
from nano_inference.pipeline.models import ModelStatus
from nano_inference.pipeline.supervisor import StageFailed
from nano_inference.store.board import StageReport

from ..commands import Command
from ..pipeline import reference, short_model
from ..pipeline.deployments import eventually, own_prefix
from ..processes import processes_of
from .conftest import Run, assert_refused
from .servers import free_port

LIMIT_S = 120


def test_an_address_that_others_reach(run: Run, closed_port: int) -> None:
    """Is refused before there is any process; asked for it, `up` goes on, to a bus that is away."""
    bus = f"redis://127.0.0.1:{closed_port}"
    options = ("up", "--bus", bus, "--gateway", "1", "--set", "gateway.host=0.0.0.0")
    assert_refused(run(*options), "without keys whoever reaches it may replace the weights")
    assert_refused(run(*options, "--insecure"), "can't reach Redis")


def test_busy_port(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        assert_refused(run("up", "--port", str(port)), f"can't start on port {port}")


@pytest.mark.slow
def test_all_processes_end_with_a_killed_parent(tmp_path: Path) -> None:
    """The stages too where they do nothing by themselves, as in one long call."""
    port = free_port()
    up = Command("up", "--port", str(port), log=tmp_path / "log")
    with Redis(port=port, retry=Retry(ConstantBackoff(0.05), LIMIT_S * 20)) as redis:
        server = os.pidfd_open(redis.info("server")["process_id"])
        # The stages come after whatever else `up` has to prepare.
        while not redis.xlen("nano:stages") or len(stages_of(up)) < len(STAGES):
            assert up.poll() is None
            time.sleep(0.05)
    stages = stages_of(up)
    assert len(stages) == len(STAGES)
    for stage in stages:
        os.kill(stage, signal.SIGSTOP)
    ends = [server, *map(os.pidfd_open, stages)]
    os.kill(up.pid, signal.SIGKILL)
    up.wait()
    up.close()
    # A process's descriptor is readable once the process has ended.
    for end in ends:
        gone, _, _ = select.select([end], [], [], LIMIT_S)
        os.close(end)
        assert gone
    with socket.create_server(("127.0.0.1", port)):
        pass  # the next one can have the port


def stages_of(up: Command) -> list[int]:
    """The processes of the stages that an `up` has started."""
    children = Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split()
    titles = {int(each): Path(f"/proc/{each}/cmdline").read_text() for each in children}
    return [pid for pid, title in titles.items() if "run --with-parent" in title]


def test_a_lost_replica_is_tolerated_while_another_runs() -> None:
    def processes(replicas: int) -> Processes:
        return processes_of(load_config(env={}, overrides={"pipeline.replicas": replicas}))

    error = StageFailed("it failed too often")
    three = processes(3)
    three.give_up("executor.2", error)
    three.give_up("batching.2", error)
    three.give_up("executor", error)
    with pytest.raises(StageFailed):
        three.give_up("batching.1", error)
    with pytest.raises(StageFailed):
        processes(3).give_up("streaming", error)
    with pytest.raises(StageFailed):
        processes(1).give_up("executor", error)


# --- several models -------------------------------------------------------------------------------


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


async def models_of(client: BusClient) -> dict[str, ModelStatus]:
    return {each.id: each for each in await client.models()}


async def settled(client: BusClient) -> bool:
    found = await models_of(client)
    states = {name: status.state for name, status in found.items()}
    return states == {"a": "ready", "b": "ready", "broken": "failed"}


def asking(name: str, tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    return {"prompt": "12 + 30 =", "model": name, "sampling": sampling}


async def executor_of(client: BusClient, model: str) -> StageReport:
    of_model = client.of_model(model)
    reports = await of_model.reports()
    await of_model.aclose()
    return next(report for report in reports if report.stage == "executor")


@pytest.mark.slow
async def test_the_processes_of_each_model(redis_url: str, tmp_path: Path) -> None:
    """A killed process is replaced, those of an unloaded model end, and other models continue."""
    bus = own_prefix(redis_url)
    models = [
        {"id": "a", "path": str(short_model.folder()), "dtype": "float32"},
        {"id": "b", "path": str(wide_model(tmp_path / "wide"))},
        {"id": "broken", "path": str(tmp_path / "nothing")},
    ]
    settings = tmp_path / "settings.yaml"
    settings.write_text(yaml.safe_dump({"models": models, "pipeline": {"restart_backoff_s": 0.05}}))
    log = tmp_path / "log"
    async with BusClient.connect(bus) as client:
        options = ("--bus", bus.url, "--set", f"bus.prefix={bus.prefix}", "--config", str(settings))
        with Command("up", *options, log=log) as up:
            await eventually(lambda: settled(client))
            found = await models_of(client)
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
                failed = (await models_of(client))["broken"]
                assert failed.state == "failed"
                assert str(tmp_path / "nothing") in failed.reason
                status = await client.unload_model("a")
            assert (status.state, status.memory_bytes) == ("unloaded", 0)
            with pytest.raises(ProcessLookupError):
                os.kill(successor.pid, 0)
            assert (await client.complete(asking("b", 3))).status == "done"
            up.terminate()
            assert up.wait() == 0
        assert {each.state for each in await client.models()} == {"unloaded"}
    text = log.read_text()
    assert "\na      admission  " in text
    assert "\nbroken executor   nano-inference: " in text


def test_each_process_has_a_port_for_its_metrics() -> None:
    ports = MetricsPorts(9000)
    assert tuple(ports.gateway) == (9001,)
    assert ports.of("a", 5) == range(9002, 9007)
    assert ports.of("b", 7) == range(9007, 9014)
    assert ports.of("a", 5) == range(9002, 9007)
    assert MetricsPorts(0).of("a", 5) == MetricsPorts(0).gateway == ()
    with pytest.raises(ConfigError, match="metrics_port"):
        MetricsPorts(65_530).of("a", 5)


@pytest.mark.parametrize(
    "value", ["a: b # c", "7", 7, 1.5, True, ["x", "7", "a b"], {"a": "/b c"}, [], "x" * 200]
)
def test_settings_of_a_model_get_through_a_command_line(value: Any) -> None:
    assert parse_value(as_text(value)) == value
    assert "\n" not in as_text(value)
