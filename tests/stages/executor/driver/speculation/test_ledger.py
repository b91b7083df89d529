"""A draft model is asked as long as its drafts save more than they take."""

from __future__ import annotations

from nano_inference.stages.executor.driver.speculation.ledger import DraftLedger


def asked(saved: float, steps: int, ledger: DraftLedger | None = None) -> int:
    """In how many steps a model is asked whose drafts take a second and save so many."""
    ledger = ledger or DraftLedger(256)
    count = 0
    for _ in range(steps):
        if ledger.may_ask():
            count += 1
            ledger.settle(1.0, saved, least_gain=1.05)
    return count


def test_one_that_pays_is_always_asked() -> None:
    assert asked(1.2, 1000) == 1000


def test_one_that_costs_more_than_it_saves_is_asked_more_and_more_seldom() -> None:
    assert asked(1.0, 16 + 16 + 16 + 32) == 32
    assert asked(0.0, 10_000) < 800


def test_one_that_begins_to_pay_is_soon_always_asked_again() -> None:
    ledger = DraftLedger(256)
    asked(0.5, 5000, ledger)
    asked(2.0, 300, ledger)
    assert asked(2.0, 1000, ledger) == 1000


def asked_behind_prompts(reading: float, answer: int, prompts: int) -> float:
    """In what share of steps a model is asked that reads a prompt for so long, then drafts for so
    many steps, in each of which it saves twice what it takes."""
    ledger, count = DraftLedger(256), 0
    for number in range(prompts * (answer + 1)):
        if ledger.may_ask():
            count += 1
            if number % (answer + 1):
                ledger.settle(1.0, 2.0, least_gain=1.05)
            else:
                ledger.owe(reading, least_gain=1.05)
    return count / (prompts * (answer + 1))


def test_long_prompts_have_to_be_earned_by_what_follows() -> None:
    assert asked_behind_prompts(200.0, answer=400, prompts=20) == 1
    # Ten steps save ten seconds more than they take.
    assert asked_behind_prompts(5.0, answer=10, prompts=500) == 1
    assert asked_behind_prompts(30.0, answer=10, prompts=500) < 0.2


def test_one_that_only_reads_is_asked_seldom() -> None:
    assert asked_behind_prompts(1.0, answer=0, prompts=10_000) < 0.1
