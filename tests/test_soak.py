"""Violations that benchmarks/soak.py and chaos_days.py find: growth, other tokens, two ends, lost
requests.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from nano_inference import Completion
from nano_inference.bus.public import CompletionSample, Recipe, Timings, Usage

from .rig import load

HOUR_S = 3600


def series(slope: float, *, lives: int = 1, noise: float = 0.3, steps: float = 0.0) -> list[Any]:
    """An hour of a process that is replaced at times, each life on a level of its own."""
    watch, rng = load("soak_watch"), random.Random(1)
    found = []
    for number in range(720):
        life = number * lives // 720
        born = life * 720 // lives
        value = 100 + 7 * life + slope * (number - born) / 720 + rng.gauss(0, noise)
        value += steps * (number % 60 < 30)
        found.append(watch.Sample(number * 5.0, 1 + life, value))
    return found


@pytest.mark.parametrize(
    ("samples", "verdict"),
    [
        (series(0), "flat"),
        (series(0, lives=4), "flat"),
        (series(20), "grows"),
        (series(20, lives=4), "grows"),
        (series(-20), "falls"),
        (series(4, noise=30), "unsure"),
        (series(0, steps=4, lives=2), "flat"),
        (series(0)[:30], "unsure"),
    ],
)
def test_growth_is_distinguished_from_noise_and_restarts(samples: list[Any], verdict: str) -> None:
    found = load("soak_watch").trend(samples, 100.0, 2.0)
    assert found.verdict == verdict, found
    if verdict == "grows":
        assert found.low < 20 < found.high


def completion(name: str, *tokens: int, version: int = 0, unexplained_ns: int = 0) -> Completion:
    sample = CompletionSample(
        sample_index=0,
        text="",
        token_ids=tokens,
        finish_reason="length",
        logprobs=(-1.0,) * len(tokens),
        weight_version=version,
        weight_versions=((version, 0),),
    )
    return Completion(
        request_id=name,
        entry_id=f"{name}-0",
        model="main",
        status="done",
        samples=(sample,),
        prompt_token_ids=(1, 2),
        usage=Usage(time={"own_decode": 100 - unexplained_ns}),
        timings=Timings(published_ns=1, finished_ns=101),
        recipe=Recipe(),
    )


def test_the_ledger_finds_two_ends_other_tokens_and_time_without_a_cause() -> None:
    ledger = load("soak_ledger").Ledger(10, random.Random(1))
    for each in (
        completion("a", 5, 6),
        completion("b", 5, 6, version=2),  # the same weights
        completion("c", 7, 8, version=1),  # the others
        completion("d", 5, 7),
        completion("e", 5, 6, unexplained_ns=3),
        completion("e", 5, 6),
    ):
        ledger.take(each)
    found = ledger.result()
    assert found["two_ends"] == ["('e', 'e-0') x 2"]
    assert found["different_on_the_bus"] == ["d d-0"]
    assert found["compared_on_the_bus"] == 4
    (wrong,) = found["times"]["wrong"]
    assert wrong.startswith("e: 3 ns have no cause")
    assert len(ledger.kept) == 6


def test_the_judge_counts_differences_from_the_undisturbed_answers() -> None:
    interfaces, judge = load("interfaces"), load("soak_ledger").Judge()
    ask = interfaces.Ask("1-1", "plain", "http", {"model": ""})
    guest = ask._replace(kind="guest", request={"model": interfaces.GUEST})
    for content in ("of A", "of B"):
        judge.learn(ask, interfaces.Answer(content))
    assert judge.take(ask, interfaces.Answer("of B")) == set()
    assert judge.take(ask, interfaces.Answer("of C")) == {"different"}
    assert judge.take(ask, interfaces.Answer("of C"), crossed=True) == set()
    assert judge.take(ask, interfaces.Answer("of A", faults={"doubled"})) == {"doubled"}
    assert judge.take(ask, interfaces.Answer(refused="unknown_model")) == {"lost"}
    assert judge.take(guest, interfaces.Answer(refused="unknown_model")) == set()
    assert judge.counts["wrong"] == {"different": 1, "doubled": 1, "lost": 1}
    assert len(judge.remarks) == 3
