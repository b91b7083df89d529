"""One update in several executors: all of them change, or none does."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import anyio
import msgspec

from ..bus import Outcome
from ..bus.control import FinishUpdate, UpdateWeights
from ..config import BusError, NanoInferenceError, WeightsError

Ask = Callable[[UpdateWeights | FinishUpdate, float], Awaitable[list[Outcome]]]
"""Tells all executors something, and waits so many seconds for their answers."""

GIVE_UP_S = 5.0
"""How long to wait until all know that an update is given up; they drop it by themselves later."""


async def update_together(
    ask: Ask, executors: Sequence[tuple[str, str]], update: UpdateWeights, answer_s: float
) -> int:
    """Has every executor fetch and check the weights, and then put them in place.

    Once all have checked them, an executor can fail to put them in place only by being lost.

    Args:
        ask: Reaches the executors.
        executors: (lane, role) of each.
        update: What each is to do. Without a version it will be the one after the newest of all.
        answer_s: How long to wait for an answer to what is done at once.

    Returns:
        The version.

    Raises:
        WeightsError: An executor refused and nothing has changed; or, as `weights_differ`, one was
            lost before it changed and others have. The message names every executor's version.
        BusError: One did not answer and nothing has changed.
    """
    name = uuid.uuid4().hex
    prepare = msgspec.structs.replace(update, prepare_as=name)
    try:
        outcomes = await ask(prepare, update.timeout_s + answer_s)
        _check_prepared(executors, outcomes, update.timeout_s + answer_s)
    except BaseException:
        with anyio.move_on_after(GIVE_UP_S, shield=True):
            # They drop it by themselves later, and what went wrong before says more.
            with suppress(NanoInferenceError):
                await ask(FinishUpdate(name), GIVE_UP_S)
        raise
    version = update.version
    if version is None:
        version = 1 + max(
            max(outcome.weight_version, outcome.newest_version) for outcome in outcomes
        )
    outcomes = await ask(FinishUpdate(name, version), answer_s)
    failed = [outcome for outcome in outcomes if outcome.code]
    if failed or len(outcomes) < len(executors):
        why = f"{_who(failed[0])}: {failed[0].message}" if failed else "not all have answered"
        raise WeightsError(
            f"the update is in place in some executors only ({why}); "
            f"{versions(executors, outcomes)}; send all weights again",
            code="weights_differ",
        )
    return version


def _check_prepared(
    executors: Sequence[tuple[str, str]], outcomes: Sequence[Outcome], waited_s: float
) -> None:
    unchanged = f"no executor has changed: {versions(executors, outcomes)}"
    for outcome in outcomes:
        if outcome.code:
            message = f"{_who(outcome)}: {outcome.message}; {unchanged}"
            raise WeightsError(message, code=outcome.code)
    if len(outcomes) < len(executors):
        raise BusError(
            f"not all executors answered within {waited_s:.0f} s, or one was started anew; "
            f"{unchanged}; look at `nano-inference status`",
            code="no_answer",
        )


def versions(executors: Sequence[tuple[str, str]], outcomes: Sequence[Outcome]) -> str:
    """Which executor has which version of the weights, in words."""
    known = {(outcome.lane, outcome.role): outcome.weight_version for outcome in outcomes}
    return ", ".join(
        f"{role} of lane {lane} has version {known[lane, role]}"
        if (lane, role) in known
        else f"{role} of lane {lane} did not answer"
        for lane, role in executors
    )


def _who(outcome: Outcome) -> str:
    return f"lane {outcome.lane}, {outcome.role}"
