"""Control messages to stages and to the model manager, and atomic updates of several executors."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

import anyio
from msgspec.structs import replace

from ..bus import Bus, Outcome
from ..bus.control import ChecksumWeights, FinishUpdate, LoadAdapter, UnloadAdapter, UpdateWeights
from ..bus.envelope import Message
from ..bus.links import CONTROL, MODEL_MANAGER, MODELS, AnyLink, at
from ..bus.weights import DeltaWeights, StagedWeights, WeightsSource
from ..config import (
    REPLICATED,
    AdapterError,
    BusError,
    NanoInferenceError,
    WeightsError,
    role_of,
    split_role,
)
from ..store.board import StageReport
from ..store.registry import Records
from .health import replicas_of

T = TypeVar("T")

Recipients = list[tuple[str, str]]
"""(lane, role) of each."""

Body = Message | Callable[[int], Message]
"""A message to all recipients, or one for each by its index."""

LOOK_S = 2.0
"""Interval of the check whether the stages that have not answered are still the same ones."""

PARTING_S = 1.0
"""Longest wait for remaining answers after a stage was lost."""

_POLL_S = 0.05


class SharedCall(Generic[T]):
    """One call for many concurrent callers, who share its result.

    A caller gets the result of a call that began after its own, so no result is out of date. All
    callers during one call share the next one: a thousand at a time cost two calls.
    """

    def __init__(self, call: Callable[[], Awaitable[T]]) -> None:
        self._call = call
        self._running: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def result(self) -> T:
        """Return the result of the next call to begin."""
        if self._next is None:
            self._next = asyncio.create_task(self._run_after(self._running))
        return await asyncio.shield(self._next)

    async def _run_after(self, running: asyncio.Task[T] | None) -> T:
        if running is not None:
            await asyncio.wait([running])
        self._running, self._next = self._next, None
        return await self._call()


class StageControl:
    """Finds the stages that a client controls, sends them messages, and collects their outcomes."""

    def __init__(self, bus: Bus, sender: str) -> None:
        """`sender`: the name under which control messages are sent."""
        self._bus = bus
        self._sender = sender
        self._lanes = SharedCall(bus.lanes)
        self._models = SharedCall(bus.store.models.read)

    async def models(self) -> Records:
        """Return the models of the deployment by id; none on the bus of one model."""
        return {} if self._bus.model else await self._models.result()

    async def recipients(self, stage: str, lane: str | None = None) -> Recipients:
        """Return a stage and its replicas in every living lane, or in `lane` alone.

        Raises:
            BusError: `unknown_lane`: the lane is not alive. `model_required`: the bus is that of
                several models (`Bus.of_model`).
        """
        if models := await self.models():
            raise BusError(
                f"there are several models here; name one of them: {', '.join(models)}",
                code="model_required",
            )
        lanes = sorted(await self._lanes.result())
        if lane is not None:
            if lane not in lanes:
                raise BusError(
                    f"no lane {lane!r:.80} lives here; living lanes: {', '.join(lanes)}",
                    code="unknown_lane",
                )
            lanes = [lane]
        if stage not in REPLICATED:
            return [(name, stage) for name in lanes]
        reports = await self._bus.store.board.read()
        return [
            (name, role_of(stage, replica))
            for name in lanes
            for replica in replicas_of(report.stage for report in reports if report.lane == name)
        ]

    async def ready_recipients(
        self, stage: str, limit_s: float, lane: str | None = None
    ) -> Recipients:
        """Return `recipients` once all have loaded: before that they receive no messages.

        A stage that has not reported yet loads, too.

        Raises:
            BusError: Some are still loading after `limit_s`; or as `recipients`.
        """
        recipients, end = await self.recipients(stage, lane), time.monotonic() + limit_s
        while True:
            reports = await self._reports()
            loading = [
                each[1]
                for each in recipients
                if each not in reports or reports[each].state == "starting"
            ]
            if not loading:
                return recipients
            if time.monotonic() > end:
                raise BusError(
                    f"{', '.join(loading)} can't answer while it is loading or not running; wait "
                    "until `nano-inference status` says that it is ready",
                    code="no_answer",
                )
            await anyio.sleep(_POLL_S)

    async def ranks_of(self, executors: Recipients) -> list[int]:
        """Return the number of ranks of each executor."""
        reports = await self._reports()
        return [
            int(reports[each].load.get("ranks", 1)) if each in reports else 1 for each in executors
        ]

    async def send(
        self, stage: str, body: Body, recipients: Recipients, operation_id: str = ""
    ) -> None:
        """Send a message, which may depend on the recipient's index.

        `operation_id`: the id of their answers; "" for no answers.
        """
        if isinstance(body, UpdateWeights):
            _check_size(self._bus, body.source)
        link: AnyLink = MODELS if stage == MODEL_MANAGER else CONTROL[stage]
        senders = [
            self._bus.sender(at(link, split_role(role)[1]), self._sender, lane)
            for lane, role in recipients
        ]
        for index, sender in enumerate(senders):
            await sender.send(body(index) if callable(body) else body, operation_id=operation_id)
        for sender in senders:
            await sender.flush()

    async def request(
        self, stage: str, body: Body, limit_s: float, recipients: Recipients
    ) -> list[Outcome]:
        """Send a message, and return the outcomes that come within `limit_s`.

        A stage that restarts loses the message, which ends the wait. Without a limit, a stage that
        no longer reports ends it, too.
        """
        operation_id, end = uuid.uuid4().hex, time.monotonic() + limit_s
        before = await self._reports()
        await self.send(stage, body, recipients, operation_id)
        replies = self._bus.replies
        while True:
            left_s = max(0.0, end - time.monotonic())
            outcomes = await replies.outcomes(operation_id, len(recipients), min(left_s, LOOK_S))
            if len(outcomes) >= len(recipients) or left_s <= LOOK_S:
                return outcomes
            answered = {(outcome.lane, outcome.role) for outcome in outcomes}
            waiting = [recipient for recipient in recipients if recipient not in answered]
            now = await self._reports()
            gone = any(each not in now for each in waiting) and math.isinf(limit_s)
            if gone or any(_restarted(before.get(each), now.get(each)) for each in waiting):
                # It may have answered before its end.
                return await replies.outcomes(operation_id, len(recipients), PARTING_S)

    async def _reports(self) -> dict[tuple[str, str], StageReport]:
        """Return the last report of each stage, by lane and role."""
        last: dict[tuple[str, str], StageReport] = {}
        for report in await self._bus.store.board.read():  # the youngest of a role comes first
            last.setdefault((report.lane, report.stage), report)
        return last


def _restarted(before: StageReport | None, now: StageReport | None) -> bool:
    if before is None or now is None or not before.incarnation or not now.incarnation:
        return False
    return before.incarnation != now.incarnation


def least_version(
    recipients: Recipients,
    outcomes: Sequence[Outcome],
    waited_s: float,
    error: type[NanoInferenceError] = WeightsError,
) -> int:
    """Return the least version in the outcomes of all recipients.

    Raises:
        NanoInferenceError: A stage refused; of the class `error`.
        BusError: A stage did not answer.
    """
    for outcome in outcomes:
        if outcome.code:
            where = f"lane {outcome.lane}, {outcome.role}: " if len(recipients) > 1 else ""
            raise error(where + outcome.message, code=outcome.code)
    answered = {(outcome.lane, outcome.role) for outcome in outcomes}
    for lane, role in recipients:
        if (lane, role) not in answered:
            raise BusError(
                f"{role} of lane {lane} did not answer within {waited_s:.0f} s: it has restarted, "
                "or still has requests in flight; look at `nano-inference status`",
                code="no_answer",
            )
    return min(outcome.weight_version for outcome in outcomes)


Decide = Callable[[int, str], Awaitable[None]]
"""Records the version of an update that all executors have checked, and its place in the log of
weights."""

MOST_DELTA_BYTES = 64 << 20
"""The most bytes of a delta in a message: a server passes one message at a time."""


def _check_size(bus: Bus, source: WeightsSource | StagedWeights) -> None:
    """Raises WeightsError for a delta that is too large for a message through a server."""
    if isinstance(source, DeltaWeights) and bus.durable:
        size = sum(len(data) for _, data in source.tensors)
        if size > MOST_DELTA_BYTES:
            raise WeightsError(
                f"the delta has {size} bytes, and a message may have {MOST_DELTA_BYTES}; send it "
                "by delta.save(path), SharedWeights(delta) or a group"
            )


GIVE_UP_S = 5.0
"""Longest wait for executors to drop a failed update; without a message they drop it later."""


async def update_weights_together(
    control: StageControl,
    executors: Recipients,
    update: UpdateWeights,
    answer_s: float,
    name: str = "",
    decide: Decide | None = None,
) -> int:
    """Have every executor fetch and check the weights, then put them in place.

    After all checks, an executor can fail to put them in place only by being lost.

    Args:
        control: Reaches the executors.
        executors: (lane, role) of each.
        update: The update; without a version it gets the one after the newest of all executors.
        answer_s: Longest wait for an answer to a short operation.
        name: Name of the update; "" for a new one.
        decide: Records the version in the store. Then no executor keeps the old weights: one that
            is restarted meanwhile is waited for (`finish_together`).

    Returns:
        The version.

    Raises:
        WeightsError: An executor refused and nothing has changed; or, as `weights_differ`, one was
            lost after others had changed. The message names every executor's version.
        BusError: An executor did not answer and nothing has changed.
    """
    name, limit_s = name or uuid.uuid4().hex, update.timeout_s + answer_s
    try:
        prepare = replace(update, prepare_as=name, decided=decide is not None)
        outcomes = await control.request("executor", prepare, limit_s, executors)
        _check_prepared(executors, outcomes, limit_s)
        version = update.version
        if version is None:
            version = 1 + max(max(each.weight_version, each.newest_version) for each in outcomes)
        if decide is not None:
            logged = next((each.logged for each in outcomes if each.logged), "")
            finish = FinishUpdate(name, version, logged)
            await decide(version, logged)
    except BusError as error:
        # The decision may be in the store; without it the executors drop the weights in the end.
        if decide is None or error.code == "no_answer":
            await _drop(control, name, executors)
        raise
    except BaseException:
        await _drop(control, name, executors)
        raise
    if decide is not None:
        return await finish_together(control, finish, update.timeout_s + answer_s)
    outcomes = await control.request("executor", FinishUpdate(name, version), answer_s, executors)
    failed = [outcome for outcome in outcomes if outcome.code]
    if failed or len(outcomes) < len(executors):
        why = f"{_where(failed[0])}: {failed[0].message}" if failed else "not all have answered"
        raise WeightsError(
            f"the update is in place in some executors only ({why}); "
            f"{_versions(executors, outcomes)}; send all weights again",
            code="weights_differ",
        )
    return version


async def finish_together(control: StageControl, finish: FinishUpdate, limit_s: float) -> int:
    """Have every executor put a decided update in place.

    An executor that is restarted meanwhile reads the weights in the log (`engine.weight_log`).

    Returns:
        The version.

    Raises:
        WeightsError: `weights_differ`: an executor has lost the weights.
        BusError: An executor did not answer in time.
    """
    version, end = finish.version or 0, time.monotonic() + limit_s
    while True:
        left_s = max(end - time.monotonic(), 0.0)
        executors = await control.ready_recipients("executor", left_s)
        outcomes = await control.request("executor", finish, left_s, executors)
        failed = [outcome for outcome in outcomes if outcome.code]
        lasting = [each for each in failed if each.code not in _PASSING]
        if lasting:
            raise WeightsError(
                f"the update is decided as version {version}, and {_where(lasting[0])} can't put "
                f"it in place ({lasting[0].message}); {_versions(executors, outcomes)}; send all "
                "weights again",
                code="weights_differ",
            )
        if not failed and len(outcomes) >= len(executors):
            return version
        if time.monotonic() + LOOK_S > end:
            raise BusError(
                f"the update is decided as version {version}, and not all executors have answered "
                f"in time: {_versions(executors, outcomes)}; call again",
                code="no_answer",
            )
        await anyio.sleep(_POLL_S)


async def checksums_of(control: StageControl, answer_s: float) -> dict[str, str]:
    """Return the checksums of every executor's parameters.

    Raises:
        WeightsError: An executor can't compute them.
        BusError: An executor did not answer.
    """
    executors = await control.ready_recipients("executor", answer_s)
    outcomes = await control.request("executor", ChecksumWeights(), answer_s, executors)
    least_version(executors, outcomes, answer_s)
    return {
        f"{each.lane}/{each.role}:{name}": checksum
        for each in outcomes
        for name, checksum in (each.checksums or {}).items()
    }


_PASSING = ("weights_busy", "weights_interrupted")
"""Codes of executors that can do it later."""


async def _drop(control: StageControl, name: str, executors: Recipients) -> None:
    with anyio.move_on_after(GIVE_UP_S, shield=True), suppress(NanoInferenceError):
        await control.request("executor", FinishUpdate(name), GIVE_UP_S, executors)


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


async def unload_adapter_together(
    control: StageControl, unload: UnloadAdapter, limit_s: float, answer_s: float, lane: str | None
) -> None:
    """Have admissions refuse an adapter and end its requests, then executors forget it.

    Raises:
        AdapterError: `adapter_not_found`.
        BusError: A lane did not answer, or requests are still in flight.
    """
    end = time.monotonic() + limit_s
    for stage in ("admission", "executor"):
        recipients = await control.ready_recipients(stage, answer_s, lane)
        left_s = max(0.0, end - time.monotonic()) + (answer_s if stage == "executor" else 0.0)
        outcomes = await control.request(stage, unload, left_s, recipients)
        if any(each.code != "adapter_not_found" for each in outcomes):
            # Lanes without the adapter are done.
            outcomes = [
                replace(each, code="") if each.code == "adapter_not_found" else each
                for each in outcomes
            ]
        least_version(recipients, outcomes, left_s, AdapterError)
