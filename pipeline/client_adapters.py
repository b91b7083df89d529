"""What a client does with the adapters of lanes: load, replace, unload and list them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec.structs import replace

from ..bus import Bus, Outcome
from ..bus.control import LoadAdapter, UnloadAdapter
from ..bus.weights import InFlight, check_in_flight
from ..config import AdapterError, BusError
from ..store.board import LoadedAdapter, StageReport
from .operators import Operators, Recipients, least_version

ANSWER_S = 30.0
"""How long to wait for what should be done at once."""


class AdapterClient:
    """The part of a BusClient that is about adapters."""

    bus: Bus
    _operators: Operators

    async def load_adapter(
        self,
        id: str,
        folder: str,
        *,
        in_flight: InFlight = "keep",
        version: int | None = None,
        timeout_s: float = 300.0,
        lane: str | None = None,
    ) -> int:
        """Loads a LoRA adapter, or gives one that is loaded new weights, while requests run.

        From then on requests name it by `id` in their `model`. Several executors all read and
        check it before the first one changes.

        Args:
            id: 1 to 128 letters, digits and . _ : / @ + -, and no name of a model.
            folder: Where PEFT's `save_pretrained` has written it, for the executors' processes.
            in_flight: What becomes of requests under way that have it. keep: they go on from their
                KV with the new weights. retract: they compute the KV of their tokens again. abort:
                they end with what they have.
            version: What to count from then on, above all that this id has had; None for the next.
            timeout_s: How long reading it may take.
            lane: Only this lane; a gateway lists what every lane has.

        Returns:
            Its version. It can be named from then on.

        Raises:
            AdapterError: It could not be taken: all is as it was. Only as `adapters_differ` some
                executors have changed. `model_exists`: another model has this name, or its adapter.
            BusError: An executor did not answer.
        """
        check_in_flight(in_flight)
        await self._check_free(id)
        load = LoadAdapter(id, folder, in_flight, version)
        executors = await self._operators.started("executor", ANSWER_S, lane)
        if len(executors) > 1:
            checked = await self._ask(executors, replace(load, only_check=True), timeout_s)
            _check(executors, checked, timeout_s)
            if version is None:
                # Some may have had more of this id than others.
                load = replace(load, version=max(each.weight_version for each in checked))
        outcomes = await self._ask(executors, load, timeout_s)
        if any(not outcome.code for outcome in outcomes) and (
            len(outcomes) < len(executors) or any(outcome.code for outcome in outcomes)
        ):
            failed = next((each.message for each in outcomes if each.code), "not all have answered")
            raise AdapterError(
                f"the adapter is in place in some executors only ({failed}); load it again",
                code="adapters_differ",
            )
        return _check(executors, outcomes, timeout_s)

    async def unload_adapter(
        self,
        id: str,
        *,
        in_flight: InFlight = "keep",
        timeout_s: float = 300.0,
        lane: str | None = None,
    ) -> None:
        """Forgets an adapter. New requests that name it are refused at once.

        Args:
            id: Its id.
            in_flight: "abort" ends requests in flight that have it; else they finish first.
            timeout_s: How long that may take. If it is not enough nothing is unloaded, but the
                adapter stays refused until it is loaded again.
            lane: Only this lane.

        Raises:
            AdapterError: `adapter_not_found`.
            BusError: A lane did not answer, or requests are still in flight.
        """
        check_in_flight(in_flight)
        unload, end = UnloadAdapter(id, in_flight), time.monotonic() + timeout_s
        for stage in ("admission", "executor"):
            recipients = await self._operators.started(stage, ANSWER_S, lane)
            left_s = max(0.0, end - time.monotonic()) + (ANSWER_S if stage == "executor" else 0.0)
            outcomes = await self._operators.ask(stage, unload, left_s, recipients)
            missing = [each for each in outcomes if each.code == "adapter_not_found"]
            if len(missing) < len(outcomes):
                # Where it is not any more there is nothing to do.
                outcomes = [each if each not in missing else _done(each) for each in outcomes]
            _check(recipients, outcomes, left_s)

    async def adapters(self, *, lane: str | None = None) -> tuple[LoadedAdapter, ...]:
        """Those that requests can name in every lane of their model, or in one, as of about a
        second ago."""
        return adapters_of(await self.reports(), lane)

    async def reports(self) -> list[StageReport]:
        """As of BusClient."""
        raise NotImplementedError

    async def _check_free(self, id: str) -> None:
        """Of several models one alone may have a name: requests for it would be for the first."""
        own = self.bus.model
        for record in (await self.bus.store.models.read()).values() if own else ():
            spec = record.spec
            if id in ((own, *spec.aliases) if spec.id == own else record.names):
                raise AdapterError(
                    f"the model {spec.id!r} has the name {id!r:.80}; take another",
                    code="model_exists",
                )

    async def _ask(
        self, executors: Recipients, load: LoadAdapter, timeout_s: float
    ) -> list[Outcome]:
        return await self._operators.ask("executor", load, timeout_s + ANSWER_S, executors)


def adapters_of(
    reports: Sequence[StageReport], lane: str | None = None
) -> tuple[LoadedAdapter, ...]:
    """What the admissions of all lanes of a model, or of one lane, agree on; of each model."""
    told: dict[str, dict[str, dict[str, LoadedAdapter]]] = {}
    for report in reports:
        if report.stage == "admission" and lane in (None, report.lane):
            lanes = told.setdefault(report.model, {})
            lanes.setdefault(report.lane, {each.id: each for each in report.adapters})
    return tuple(
        first[id]
        for first, *others in (lanes.values() for lanes in told.values())
        for id in sorted(first)
        if all(id in each for each in others)
    )


def _check(recipients: Recipients, outcomes: Sequence[Outcome], waited_s: float) -> int:
    """As `least_version`; what a stage refused is an AdapterError."""
    for outcome in outcomes:
        if outcome.code:
            where = f"lane {outcome.lane}, {outcome.role}: " if len(recipients) > 1 else ""
            raise AdapterError(where + outcome.message, code=outcome.code)
    if len(outcomes) < len(recipients):
        raise BusError(
            f"{len(recipients) - len(outcomes)} of {len(recipients)} did not answer within "
            f"{waited_s:.0f} s: requests may be in flight, or a stage was started anew; look at "
            "`nano-inference status`",
            code="no_answer",
        )
    return least_version(recipients, outcomes, waited_s)


def _done(outcome: Outcome) -> Outcome:
    return Outcome(lane=outcome.lane, role=outcome.role)
