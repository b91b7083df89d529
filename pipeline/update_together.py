"""Atomic updates of several executors: all of them change, or none does."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress

import anyio
from msgspec.structs import replace

from ..bus import Outcome
from ..bus.control import FinishUpdate, LoadAdapter, UpdateWeights
from ..config import AdapterError, BusError, NanoInferenceError, WeightsError
from .stage_control import Recipients, StageControl, least_version

GIVE_UP_S = 5.0
"""Longest wait for executors to drop a failed update; without a message they drop it later."""


async def update_weights_together(
    control: StageControl, executors: Recipients, update: UpdateWeights, answer_s: float
) -> int:
    """Have every executor fetch and check the weights, then put them in place.

    After all checks, an executor can fail to put them in place only by being lost.

    Args:
        control: Reaches the executors.
        executors: (lane, role) of each.
        update: The update; without a version it gets the one after the newest of all executors.
        answer_s: Longest wait for an answer to a short operation.

    Returns:
        The version.

    Raises:
        WeightsError: An executor refused and nothing has changed; or, as `weights_differ`, one was
            lost after others had changed. The message names every executor's version.
        BusError: An executor did not answer and nothing has changed.
    """
    name, limit_s = uuid.uuid4().hex, update.timeout_s + answer_s
    try:
        prepare = replace(update, prepare_as=name)
        outcomes = await control.request("executor", prepare, limit_s, executors)
        _check_prepared(executors, outcomes, limit_s)
    except BaseException:
        with anyio.move_on_after(GIVE_UP_S, shield=True), suppress(NanoInferenceError):
            await control.request("executor", FinishUpdate(name), GIVE_UP_S, executors)
        raise
    version = update.version
    if version is None:
        version = 1 + max(max(each.weight_version, each.newest_version) for each in outcomes)
    finish = FinishUpdate(name, version)
    outcomes = await control.request("executor", finish, answer_s, executors)
    failed = [outcome for outcome in outcomes if outcome.code]
    if failed or len(outcomes) < len(executors):
        why = f"{_where(failed[0])}: {failed[0].message}" if failed else "not all have answered"
        raise WeightsError(
            f"the update is in place in some executors only ({why}); "
            f"{_versions(executors, outcomes)}; send all weights again",
            code="weights_differ",
        )
    return version


def _check_prepared(executors: Recipients, outcomes: Sequence[Outcome], waited_s: float) -> None:
    unchanged = f"no executor has changed: {_versions(executors, outcomes)}"
    for outcome in outcomes:
        if outcome.code:
            message = f"{_where(outcome)}: {outcome.message}; {unchanged}"
            raise WeightsError(message, code=outcome.code)
    if len(outcomes) < len(executors):
        raise BusError(
            f"not all executors answered within {waited_s:.0f} s, or one has restarted; "
            f"{unchanged}; look at `nano-inference status`",
            code="no_answer",
        )


def _versions(executors: Recipients, outcomes: Sequence[Outcome]) -> str:
    """Return a text with every executor's version of the weights."""
    known = {(outcome.lane, outcome.role): outcome.weight_version for outcome in outcomes}
    return ", ".join(
        f"{role} of lane {lane} has version {known[lane, role]}"
        if (lane, role) in known
        else f"{role} of lane {lane} did not answer"
        for lane, role in executors
    )


def _where(outcome: Outcome) -> str:
    return f"lane {outcome.lane}, {outcome.role}"


async def load_adapter_together(
    control: StageControl, executors: Recipients, load: LoadAdapter, limit_s: float
) -> int:
    """Have every executor check an adapter, then load it.

    Returns:
        The version.

    Raises:
        AdapterError: An executor refused and nothing has changed; or, as `adapters_differ`, some
            have loaded it.
        BusError: An executor did not answer.
    """
    if len(executors) > 1:
        check = replace(load, only_check=True)
        checked = await control.request("executor", check, limit_s, executors)
        least_version(executors, checked, limit_s, AdapterError)
        if load.version is None:
            # Executors may have had different numbers of versions of this id.
            load = replace(load, version=max(each.weight_version for each in checked))
    outcomes = await control.request("executor", load, limit_s, executors)
    failed = [outcome.message for outcome in outcomes if outcome.code]
    if len(failed) < len(outcomes) and (failed or len(outcomes) < len(executors)):
        why = failed[0] if failed else "not all have answered"
        raise AdapterError(
            f"the adapter is in place in some executors only ({why}); load it again",
            code="adapters_differ",
        )
    return least_version(executors, outcomes, limit_s, AdapterError)
