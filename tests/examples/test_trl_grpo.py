"""TRL's own trainer runs on our rollouts, and its weights reach the engine after each step."""

from __future__ import annotations

import pytest

pytest.importorskip("trl", reason="TRL is not installed; it comes with the extra `trl`")

from trl_grpo import parse, train


@pytest.mark.slow
def test_trl_trains_on_our_rollouts() -> None:
    found = train(parse(["--steps", "3", "--groups", "4", "--samples", "4", "--held-out", "5"]))
    assert [entry["staleness"] for entry in found["log"]] == [0, 0, 0]
    assert found["weight_version"] == 3
    assert all(0 <= entry["reward"] <= 1 for entry in found["log"])
    assert any(entry["grad_norm"] > 0 for entry in found["log"])
