"""The actors of a pipeline on a Ray cluster, with each actor's reservation and options.

Without Ray: the driver gives these plans to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ...config import Config, ConfigError, role_of, split_role
from ..processes import GATEWAY

NAMESPACE = "nano-inference"

_FRONT = ("admission", "fairness", "streaming")
_CONCURRENT_CALLS = 4
"""So that an actor that drains still reports its state."""

_STOP_ORDER = (GATEWAY, "admission")


class ActorPlan(msgspec.Struct, frozen=True):
    """One actor, which runs one process of the pipeline.

    Attributes:
        name: In Ray: the lane and the role.
        role: Role of the process, such as "executor.1" or "gateway".
        bundle: Index of its bundle in the placement group.
        resources: Resources that Ray reserves, within the bundle.
        settings: Settings of this process only, by dotted name.
        number: Number of the gateway, from 0.
    """

    name: str
    role: str
    bundle: int
    resources: dict[str, float]
    settings: dict[str, Any] = {}
    number: int = 0

    def options(self, namespace: str) -> dict[str, Any]:
        """Return the options of the actor in Ray.

        It outlives the driver, and Ray starts it again wherever its bundle is placed, as often as
        its process or node is lost. A call that may have run is never repeated.
        """
        others = {
            name: amount for name, amount in self.resources.items() if name not in ("CPU", "GPU")
        }
        return {
            "name": self.name,
            "namespace": namespace,
            "lifetime": "detached",
            "num_cpus": self.resources.get("CPU", 0.0),
            "num_gpus": self.resources.get("GPU", 0.0),
            "resources": others,
            "max_restarts": -1,
            "max_task_retries": 0,
            "max_concurrency": _CONCURRENT_CALLS,
        }


class LanePlan(msgspec.Struct, frozen=True):
    """A lane's placement group and its actors.

    Attributes:
        namespace: Namespace of the actors.
        lane: Name of the placement group, and beginning of the actors' names.
        strategy: Strategy of the placement group.
        bundles: Resources of each bundle. A bundle is always on one node, and ranks share memory:
            a replica with all its ranks is one.
        actors: In the order in which they start.
    """

    namespace: str
    lane: str
    strategy: str
    bundles: list[dict[str, float]]
    actors: list[ActorPlan]


def namespace_of(config: Config) -> str:
    """Return the namespace of a deployment's actors."""
    return f"{NAMESPACE}/{config.bus.prefix}"


def lane_of(config: Config) -> str:
    """Return the name of a lane on the cluster."""
    return f"{config.bus.model}/{config.bus.lane}" if config.bus.model else config.bus.lane


def plan_of(config: Config) -> LanePlan:
    """Return the plan of a lane.

    Raises:
        ConfigError: The settings can't run on a cluster.
    """
    _check(config)
    stage = {"CPU": config.ray.stage_cpus}
    ranks = config.engine.num_ranks
    executor = {
        name: amount * ranks
        for name, amount in {
            "CPU": config.ray.rank_cpus,
            "GPU": config.ray.rank_gpus,
            **config.ray.rank_resources,
        }.items()
        if amount
    }
    groups: list[list[tuple[str, dict[str, float]]]] = [[(role, stage) for role in _FRONT]]
    groups += [
        [(role_of("batching", replica), stage), (role_of("executor", replica), executor)]
        for replica in range(config.pipeline.replicas)
    ]
    gateways = config.ray.gateways if config.gateway.listens else 0
    groups += [[(GATEWAY, stage)] for _ in range(gateways)]
    lane, first = lane_of(config), config.telemetry.metrics_port
    actors: list[ActorPlan] = []
    for bundle, group in enumerate(groups):
        for role, resources in group:
            number = sum(each.role == GATEWAY for each in actors) if role == GATEWAY else 0
            shown = f"{role}.{number}" if number else role
            port = {"telemetry.metrics_port": first + len(actors)} if first else {}
            actors.append(ActorPlan(f"{lane}/{shown}", role, bundle, resources, port, number))
    bundles = [sum_of(resources for _, resources in group) for group in groups]
    return LanePlan(namespace_of(config), lane, config.ray.strategy, bundles, actors)


def _check(config: Config) -> None:
    if config.bus.url == "memory":
        raise ConfigError(
            "a pipeline on Ray needs a Redis or Valkey server that all nodes reach; give its URL "
            "with --bus"
        )
    if config.models:
        raise ConfigError(
            "up --ray serves one model; leave `models` out, and start a pipeline with a bus.prefix "
            "of its own for each model"
        )
    gpus = config.ray.rank_gpus * config.engine.num_ranks
    if gpus > 1 and gpus != int(gpus):
        raise ConfigError(
            f"ray.rank_gpus {config.ray.rank_gpus:g} are {gpus:g} GPUs for "
            f"{config.engine.num_ranks} ranks; above one, GPUs must be a whole number"
        )


def sum_of(each: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the sum of resources, without zeros."""
    total: dict[str, float] = {}
    for resources in each:
        for name, amount in resources.items():
            total[name] = total.get(name, 0.0) + amount
    return {name: amount for name, amount in total.items() if amount}


def settings_of(config: Config) -> dict[str, Any]:
    """Return the settings that differ from the defaults, by dotted name.

    Other nodes have neither the file nor the environment that they come from.
    """
    found: dict[str, Any] = {}
    default = Config()
    for section in msgspec.structs.fields(Config):
        ours, theirs = getattr(config, section.name), getattr(default, section.name)
        if not isinstance(ours, msgspec.Struct):
            continue
        for field in msgspec.structs.fields(type(ours)):
            value = getattr(ours, field.name)
            if value != getattr(theirs, field.name):
                found[f"{section.name}.{field.name}"] = msgspec.to_builtins(value)
    return found


def stop_order(names: Iterable[str]) -> list[list[str]]:
    """Return actors by name in the order in which they stop: gateways, which end their calls, then
    admission, which drains, then all others."""
    groups: list[list[str]] = [[], [], []]
    for name in sorted(names):
        stage, _ = split_role(name.rpartition("/")[2])
        groups[_STOP_ORDER.index(stage) if stage in _STOP_ORDER else -1].append(name)
    return groups
