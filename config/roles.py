"""Names of stages where batching and executor are there several times, one pair for each device.

A replica is one batching stage and one executor. The stages of replica 0 are called as if it were
the only one, `batching` and `executor`; those of the others `batching.1`, `executor.1` and so on.
Such a name is a role: it says which stage of a pipeline this is, and incarnations begin with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from .settings import STAGES, PipelineConfig

REPLICATED = ("batching", "executor")
"""The stages of a replica."""


def role_of(stage: str, replica: int = 0) -> str:
    """What a stage is called; `replica` counts where it is one of a replica."""
    return f"{stage}.{replica}" if replica and stage in REPLICATED else stage


def split_role(role: str) -> tuple[str, int]:
    """The stage and the replica of a role, 0 for the stages that are there once."""
    stage, _, replica = role.partition(".")
    return stage, int(replica) if replica.isdecimal() else 0


def role_of_sender(sender: str) -> str:
    """The role in whose name an incarnation sends."""
    return sender.partition("-")[0]


def all_roles(replicas: int, stages: Iterable[str] = STAGES) -> tuple[str, ...]:
    """The roles of these stages: first as if there were one replica, then those of the others."""
    stages = tuple(stages)
    further = (
        role_of(stage, replica)
        for replica in range(1, replicas)
        for stage in stages
        if stage in REPLICATED
    )
    return (*stages, *further)


def roles_here(config: PipelineConfig) -> tuple[str, ...]:
    """The roles that a process with these settings has."""
    if config.replica is None:
        return all_roles(config.replicas, config.stages)
    return tuple(role_of(stage, config.replica) for stage in config.stages)
