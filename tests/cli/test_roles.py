"""The commands for the replicas' roles, on a running pipeline."""

from __future__ import annotations

import json

import pytest

from nano_inference.config import Config

from .conftest import Run, assert_refused, eventually


def test_roles_are_set_and_shown(run: Run, on_served: Config) -> None:
    eventually(lambda: not run("roles", "show").status)  # at its first heartbeat
    assert json.loads(run("roles", "show", "--json").stdout) == {"0": ["both"]}
    assert run("roles", "set", "both").status == 0
    shown = run("roles", "show").stdout.splitlines()
    assert [line.split() for line in shown] == [["lane", "replica", "role"], ["0", "0", "both"]]


@pytest.mark.parametrize(
    ("roles", "sentence"),
    [
        (["encode"], "there is no role 'encode'; roles are prefill, decode, both"),
        (["prefill", "decode"], "has 2 roles for 1 replicas"),
        (["prefill"], "has no replica to decode"),
    ],
)
def test_bad_roles_change_nothing(
    run: Run, on_served: Config, roles: list[str], sentence: str
) -> None:
    eventually(lambda: not run("roles", "show").status)
    assert_refused(run("roles", "set", *roles), sentence)
    assert json.loads(run("roles", "show", "--json").stdout) == {"0": ["both"]}
