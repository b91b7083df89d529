"""The demonstration, from end to end."""

from __future__ import annotations

import pytest

from .conftest import Run


@pytest.mark.slow
def test_demo(run: Run) -> None:
    ran = run("demo", "--set", "engine.dtype=float32")
    assert (ran.status, ran.stderr) == (0, "")
    assert " 5  98 + 25 =  →  123\n" in ran.stdout
    assert '"get_weather", "arguments": {"city": "Oslo"}}' in ran.stdout
    assert "6 + 6 = 12. ↵ </think> ↵  ↵ 12\n" in ran.stdout
    rows = [line for line in ran.stdout.splitlines() if line.rstrip().endswith(" done")]
    assert [row.split()[0] for row in rows] == [str(number) for number in range(1, 16)]
    for stage in ("admission", "fairness", "batching", "executor", "streaming"):
        assert f"\n{stage} " in ran.stdout
    assert "nano-inference submit" in ran.stdout.splitlines()[-2]
    assert max(len(line) for line in ran.stdout.splitlines() if "→" not in line) <= 80


def test_demo_needs_its_model(run: Run) -> None:
    ran = run("demo", "--set", "engine.model_path=/no/model")
    assert ran.status == 2
    assert "/no/model" in ran.stderr
    assert "Traceback" not in ran.stderr
