"""The plan of a pipeline on Ray, without Ray: actors, bundles, resources, restarts, the order of
the end. `test_ray.py` runs it on a cluster.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from nano_inference.cli.ray.plan import LanePlan, plan_of, settings_of, stop_order, sum_of
from nano_inference.config import Config, ConfigError, as_environment, load_config

from .conftest import Run, assert_refused

BUS = "redis://127.0.0.1:6390"


def config_of(**settings: Any) -> Config:
    overrides = {name.replace("__", "."): value for name, value in settings.items()}
    return load_config(env={}, overrides={"bus.url": BUS, **overrides})


def plan(**settings: Any) -> LanePlan:
    return plan_of(config_of(**settings))


def by_bundle(planned: LanePlan) -> list[list[str]]:
    found: list[list[str]] = [[] for _ in planned.bundles]
    for actor in planned.actors:
        found[actor.bundle].append(actor.name)
    return found


def test_a_replica_with_its_ranks_is_one_bundle() -> None:
    """A bundle is never spread over nodes, and ranks share memory."""
    planned = plan(
        pipeline__replicas=2, engine__tensor_parallel=2, gateway__port=8000, ray__gateways=2
    )
    assert by_bundle(planned) == [
        ["0/admission", "0/fairness", "0/streaming"],
        ["0/batching", "0/executor"],
        ["0/batching.1", "0/executor.1"],
        ["0/gateway"],
        ["0/gateway.1"],
    ]
    assert planned.bundles == [{"CPU": 1.5}, {"CPU": 2.5}, {"CPU": 2.5}, {"CPU": 0.5}, {"CPU": 0.5}]
    assert planned.strategy == "SPREAD"
    assert (planned.namespace, planned.lane) == ("nano-inference/nano", "0")


def test_actors_take_the_resources_of_their_bundles() -> None:
    planned = plan(
        **{"engine__tensor_parallel": 2, "ray__rank_gpus": 1, "ray__rank_cpus": 4},
        ray__rank_resources={"h100": 0.5},
    )
    executor = planned.actors[-1]
    assert executor.role == "executor"
    assert executor.resources == {"CPU": 8, "GPU": 2, "h100": 1}
    options = executor.options(planned.namespace)
    assert (options["num_cpus"], options["num_gpus"], options["resources"]) == (8, 2, {"h100": 1})
    for bundle, reserved in enumerate(planned.bundles):
        actors = [actor for actor in planned.actors if actor.bundle == bundle]
        assert sum_of(actor.resources for actor in actors) == reserved


def test_ray_restarts_processes_and_repeats_no_call() -> None:
    planned = plan(bus__lane="a", bus__prefix="b")
    for actor in planned.actors:
        options = actor.options(planned.namespace)
        # Names are unique in a namespace: a second actor of one stage is refused.
        assert options["name"] == f"a/{actor.role}"
        assert options["namespace"] == "nano-inference/b"
        assert options["lifetime"] == "detached"
        assert options["max_restarts"] == -1
        assert options["max_task_retries"] == 0


def test_each_process_has_a_port_for_its_metrics() -> None:
    planned = plan(pipeline__replicas=2, gateway__port=8000, telemetry__metrics_port=9000)
    ports = [actor.settings["telemetry.metrics_port"] for actor in planned.actors]
    assert ports == list(range(9000, 9008))


def test_other_nodes_get_every_setting() -> None:
    """They have neither the driver's file nor its environment."""
    config = config_of(
        engine__tensor_parallel=2, engine__adapters={}, gateway__grpc_port=0, bus__lane="7"
    )
    settings = settings_of(config)
    assert settings["bus.url"] == BUS
    assert "engine.dtype" not in settings
    assert load_config(env=as_environment(settings, {})) == config


def test_gateways_stop_before_admission_and_admission_before_the_rest() -> None:
    planned = plan(pipeline__replicas=2, gateway__port=8000, ray__gateways=2)
    gateways, admission, rest = stop_order(actor.name for actor in planned.actors)
    assert gateways == ["0/gateway", "0/gateway.1"]
    assert admission == ["0/admission"]
    assert len(rest) == 6


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"bus__url": "memory"}, "--bus"),
        ({"models": [{"id": "a", "path": "tiny"}]}, "one model"),
        ({"ray__rank_gpus": 1.5}, "whole number"),
        ({"engine__tensor_parallel": 3, "ray__rank_gpus": 0.5}, "whole number"),
        ({"ray__rank_resources": {"h100": 0}}, "above 0"),
    ],
)
def test_settings_without_a_plan_are_refused(settings: dict[str, Any], reason: str) -> None:
    models = settings.pop("models", None)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        config = config_of(**settings)
        if models:
            env = as_environment({}, {"NANO_INFERENCE_MODELS": str(models)})
            config = load_config(env=env, overrides={"bus.url": BUS})
        plan_of(config)


def test_refusals_on_the_command_line(run: Run, closed_port: int) -> None:
    assert_refused(run("up", "--ray", "auto"), "--bus")
    assert_refused(run("up", "--detach"), "--ray")
    bus = f"redis://127.0.0.1:{closed_port}"
    assert_refused(run("up", "--ray", "auto", "--bus", bus), "can't reach Redis")
