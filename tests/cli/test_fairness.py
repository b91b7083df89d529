"""The commands for fairness's settings, on a running pipeline."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import pytest

from nano_inference.config import Config, FairnessConfig

from .conftest import Run, assert_refused, eventually


def in_force(run: Run) -> dict[str, object]:
    ran = run("fairness", "show", "--json")
    assert ran.status == 0, ran.stderr
    (settings,) = json.loads(ran.stdout).values()
    return dict(settings)


@pytest.fixture
def on_fresh(run: Run, on_served: Config) -> Iterator[Config]:
    """The served pipeline, whose settings are put back afterwards."""
    eventually(lambda: not run("fairness", "show").status)  # at its first heartbeat
    yield on_served
    defaults = msgspec.structs.asdict(FairnessConfig())
    changes = [f"{name}={json.dumps(value)}" for name, value in defaults.items()]
    assert run("fairness", "set", *changes).status == 0


def test_show_prints_the_configured_settings(run: Run, on_fresh: Config) -> None:
    assert in_force(run) == msgspec.to_builtins(on_fresh.fairness)
    shown = run("fairness", "show").stdout.splitlines()
    assert shown[0].split() == ["setting", "lane", "0"]
    rows = {line.split()[0]: line.split()[1] for line in shown[1:]}
    wanted = {"aging_s": "2.0", "enable_preemption": "false", "tenant_weights": "(none)"}
    assert rows.items() >= wanted.items()
    assert list(rows) == list(FairnessConfig.__struct_fields__)


def test_set_changes_only_the_named_settings(run: Run, on_fresh: Config) -> None:
    ran = run("fairness", "set", "max_timeslice_tokens=64", "tenant_weights.gold=3", "--json")
    assert ran.status == 0, ran.stderr
    wanted = FairnessConfig(max_timeslice_tokens=64, tenant_weights={"gold": 3.0})
    assert json.loads(ran.stdout) == {"0": msgspec.to_builtins(wanted)}
    assert in_force(run) == msgspec.to_builtins(wanted)
    assert run("fairness", "set", "tenant_weights.iron=0.5").status == 0
    assert in_force(run)["tenant_weights"] == {"gold": 3.0, "iron": 0.5}
    assert run("submit", "98 + 25 =", "--tenant", "gold").stdout.strip() == "123"


def test_shares_shows_the_service_of_tenants(run: Run, on_fresh: Config) -> None:
    assert run("fairness", "shares").stdout.startswith("no lane tells what it has served")
    assert run("fairness", "set", "exchange_interval_s=0.05").status == 0
    assert run("submit", "98 + 25 =", "--tenant", "gold").stdout.strip() == "123"
    eventually(lambda: "gold" in run("fairness", "shares").stdout)
    head, row = run("fairness", "shares").stdout.splitlines()
    assert head.split() == ["priority", "tenant", "lane", "0", "all", "share"]
    assert row.split()[:2] + row.split()[-1:] == ["0", "gold", "100.0%"]
    ((lane, epoch, number, ((_, _, cost),)),) = json.loads(
        run("fairness", "shares", "--json").stdout
    )
    assert (lane, epoch > 0, number, cost > 0) == ("0", True, 1, True)

    def load() -> dict[str, float]:
        (lane,) = json.loads(run("status", "--json").stdout)["lanes"]
        return dict(lane["stages"]["fairness"]["load"])

    eventually(lambda: load().get("service", 0) > 0)  # at its next heartbeat


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("aging_s=0", "fairness.aging_s is 0.0; it must be above 0"),
        ("aging_s=soon", "fairness.aging_s is 'soon'; it must be a number"),
        ("agin_s=1", "fairness has no setting 'agin_s'; did you mean 'aging_s'?"),
        ("aging_s", "a change is name=value, not 'aging_s'"),
        ("aging_s.x=1", "fairness.aging_s has no parts; give aging_s=value"),
        ("max_preemptions=-1", "fairness.max_preemptions is -1; it must be at least 0"),
        ("tenant_weights.gold=0", "it must be finite numbers above 0 by tenant"),
    ],
)
def test_one_bad_change_and_nothing_changes(
    run: Run, on_fresh: Config, change: str, sentence: str
) -> None:
    before = in_force(run)
    refused = run("fairness", "set", "max_timeslice_tokens=9", change)
    assert_refused(refused, sentence)
    assert in_force(run) == before


def test_without_a_pipeline(run: Run, on_nobody: str) -> None:
    assert_refused(run("fairness", "show"), "no fairness stage of a pipeline reports")


def test_an_unknown_lane_is_refused(run: Run, on_fresh: Config) -> None:
    refused = run("fairness", "set", "aging_s=3", "--lane", "west")
    assert_refused(refused, "no fairness stage of lane west reports")
    assert in_force(run)["aging_s"] == 2.0
