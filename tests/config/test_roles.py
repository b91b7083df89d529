"""The names of stages when batching and executor run several times."""

from __future__ import annotations

import pytest

from nano_inference.config import (
    STAGES,
    PipelineConfig,
    all_roles,
    role_of,
    role_of_sender,
    roles_here,
    split_role,
)


def test_one_replica_has_the_names_of_the_stages() -> None:
    assert all_roles(1) == STAGES
    assert roles_here(PipelineConfig()) == STAGES


def test_further_replicas_are_numbered() -> None:
    assert all_roles(3) == (*STAGES, "batching.1", "executor.1", "batching.2", "executor.2")
    assert role_of("streaming", 2) == "streaming", "there is one"


@pytest.mark.parametrize("role", all_roles(12))
def test_a_role_says_stage_and_replica(role: str) -> None:
    stage, replica = split_role(role)
    assert stage in STAGES
    assert role_of(stage, replica) == role
    assert role_of_sender(f"{role}-3f2a") == role


@pytest.mark.parametrize("name", ["client", "pipeline", "up", "batching.x", ""])
def test_other_names_are_no_replicas_role(name: str) -> None:
    assert split_role(name)[1] == 0


def test_a_process_may_have_one_replica_or_all() -> None:
    stages = ("batching", "executor")
    assert roles_here(PipelineConfig(stages=stages, replicas=2)) == all_roles(2, stages)
    one = PipelineConfig(stages=stages, replicas=2, replica=1)
    assert roles_here(one) == ("batching.1", "executor.1")
