"""Names of stages when batching and executor exist once per replica.

A replica is one batching and one executor stage. In replica 0 they are named `batching` and
`executor`, in the others `batching.1`, `executor.1` and so on. Such a name is a role; incarnations
begin with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from .settings import STAGES, PipelineConfig

REPLICATED = ("batching", "executor")
"""The stages of a replica."""


def role_of(stage: str, replica: int = 0) -> str:
    """Return a stage's role; `replica` counts for stages of a replica."""
    return f"{stage}.{replica}" if replica and stage in REPLICATED else stage


def split_role(role: str) -> tuple[str, int]:
    """Return a role's stage and replica; 0 for stages outside replicas."""
    stage, _, replica = role.partition(".")
    return stage, int(replica) if replica.isdecimal() else 0


def role_of_sender(sender: str) -> str:
    """Return the role of a sending incarnation."""
    return sender.partition("-")[0]


def all_roles(replicas: int, stages: Iterable[str] = STAGES) -> tuple[str, ...]:
    """Return the roles of these stages, those of replica 0 first."""
    stages = tuple(stages)
    further = (
        role_of(stage, replica)
        for replica in range(1, replicas)
        for stage in stages
        if stage in REPLICATED
    )
    return (*stages, *further)


def roles_here(config: PipelineConfig) -> tuple[str, ...]:
    """Return the roles of a process with these settings."""
    if config.replica is None:
        return all_roles(config.replicas, config.stages)
    return tuple(role_of(stage, config.replica) for stage in config.stages)
