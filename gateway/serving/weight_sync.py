"""Trainers' weight updates through any interface: many parts, one change."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager

import anyio
from msgspec.structs import replace

from ...bus.control import MemoryTag
from ...bus.weights import GroupWeights, InFlight, PauseMode, StagedWeights, WeightsSource
from ...config import NanoInferenceError, WeightsError
from ...config.logger import get_logger
from ...pipeline.client import BusClient
from ...store.weight_update import Stored, WeightUpdateRecord, WeightUpdateState

_MORE_S = 30.0
"""Seconds that a call waits for the calls before it, beyond the time limit of a part."""

_KEPT_LABELS = 1000

MOST_LABEL = 1000
"""Characters of a version's name."""


class VersionLabels:
    """Trainers' names of weight versions, as last read from the store.

    The last thousand names are kept. A version without a name is called by its number.
    """

    def __init__(self, record: WeightUpdateRecord | None = None) -> None:
        """`record`: where all gateways keep them; None for this process alone."""
        self._record = record
        self._labels: dict[int, str] = {}

    async def refresh(self) -> None:
        """Read the names that other gateways may have set. Raises BusError."""
        if self._record is not None:
            self._labels = await self._record.labels()

    def of(self, version: int) -> str:
        """Return a version's name."""
        return self._labels.get(version, str(version))

    def put(self, version: int, label: str) -> dict[int, str]:
        """Set a version's name; return all names."""
        self._labels.pop(version, None)
        if label != str(version):
            self._labels[version] = label
        while len(self._labels) > _KEPT_LABELS:
            del self._labels[min(self._labels)]
        return self._labels


def number_of(label: str | None, present: int) -> int | None:
    """The version to count from when a label is a number above the present one, else None."""
    if label is None or not (label.isascii() and label.isdecimal()) or len(label) > 18:
        return None
    return int(label) if int(label) > present else None


class NoSession(WeightsError):
    """The call needs an open session."""


class WeightSync:
    """Trainers' weight updates, each of one or many parts.

    While generation is paused, memory is released or a session is open, each call brings a part:
    it is fetched, checked and kept, and all parts change together, when generation goes on, the KV
    cache's memory is resumed, or the session ends. So no token is ever made by half of them. When
    a part fails, its call says so, and nothing changes until an update is begun anew.

    Outside of that each call is an update of its own, which is decided likewise.

    The state is a record in the store, so that any gateway continues an update, also after this one
    is killed. All executors check the parts, then the record gets the version (the decision), then
    they change: before the decision every executor keeps the old weights, and after it every one
    gets the new ones. A decided update that its gateway didn't complete is completed by the next
    call, by `recover`, or by the executors.

    Calls are taken one at a time, in order. One that waits for others too long is refused with a
    WeightsError, `weights_busy`, and has changed nothing.
    """

    def __init__(self, client: BusClient, labels: VersionLabels, timeout_s: float) -> None:
        self._client = client
        self._record = client.bus.store.weight_update
        self._labels = labels
        self._timeout_s = timeout_s
        self._lock = anyio.Lock()
        self._stored = Stored(WeightUpdateState(), b"")

    @property
    def state(self) -> WeightUpdateState:
        """The state as this gateway last read it."""
        return self._stored.state

    @property
    def paused(self) -> bool:
        """Whether generation was paused through a gateway."""
        return self.state.paused

    @property
    def released(self) -> frozenset[str]:
        """The memory that was released through a gateway."""
        return frozenset(self.state.released)

    async def refresh(self) -> WeightUpdateState:
        """Return the state as all gateways have it now. Raises BusError."""
        self._stored = await self._record.read()
        return self.state

    async def recover(self) -> None:
        """Complete an update that a killed gateway has decided.

        Raises:
            WeightsError: Some executor has lost the weights.
            BusError: An executor does not answer.
        """
        await self._labels.refresh()
        if (await self.refresh()).committed:
            async with self._turn():
                pass

    async def pause(self, in_flight: PauseMode, *, asleep: bool = False) -> int:
        """Pause generation and begin an update; return how many parts of another it dropped.

        `asleep`: whether `resume_memory` of everything ends the pause.
        """
        async with self._turn():
            await self._client.pause(in_flight)
            state = self.state
            begun = state if state.session else _begun(state)
            await self._save(replace(begun, paused=True, asleep=asleep))
            return 0 if state.session else state.parts

    async def open(self, *, drop: bool = False) -> int:
        """Begin an update; return how many parts of another it dropped.

        Args:
            drop: Whether an open session is dropped, parts and all.

        Raises:
            WeightsError: A session is open.
        """
        async with self._turn():
            state = self.state
            if state.session and not drop:
                raise WeightsError(
                    "a weight update session is open already; end it first", code="weights_busy"
                )
            await self._save(replace(_begun(state), session=True))
            return state.parts

    async def meet(self, group: str, packed_bytes: int) -> None:
        """Note a new trainer's group, "" for none; the open session of a former one is dropped."""
        async with self._turn():
            state = replace(self.state, group=group, packed_bytes=packed_bytes)
            await self._save(replace(_begun(state), session=False) if state.session else state)

    async def close(self, label: str | None = None, *, again: bool = False) -> int | None:
        """End a session: its parts are put in place.

        Args:
            label: The trainer's name of the version; None for that of the parts.
            again: Whether a repeated call returns what the first one did.

        Returns:
            The version in place by that; None when there were no parts.

        Raises:
            WeightsError: No session is open, or a part has failed.
        """
        async with self._turn() as completed:
            state = self.state
            if not state.session:
                repeated = state.last_label == (label or state.last_label)
                if state.last and repeated and (again or completed):
                    return state.last
                why = f" (the last one failed: {state.last_failure})" if state.last_failure else ""
                raise NoSession(f"no weight update session is open{why}; begin one first")
            if label is not None:
                await self._save(replace(state, label=_checked(label)))
            return await self._put_in_place(end_session=True)

    async def resume(self) -> int | None:
        """Put the parts in place, and let generation go on, also when that fails.

        Returns:
            As `close`.

        Raises:
            WeightsError: A part has failed. The old weights are in place.
        """
        async with self._turn():
            try:
                return None if self.state.session else await self._put_in_place()
            finally:
                await self._client.resume()
                await self._save(replace(self.state, paused=False, asleep=False))

    async def release_memory(self, tags: Iterable[MemoryTag]) -> int:
        """Release memory and begin an update; return how many parts of another it dropped.

        Raises:
            WeightsError: A weight update is under way.
        """
        async with self._turn():
            await self._client.release_memory(tags)
            state = self.state
            keeps = state.paused or state.session
            released = tuple(sorted({*state.released, *tags}))
            await self._save(replace(state if keeps else _begun(state), released=released))
            return 0 if keeps else state.parts

    async def resume_memory(self, tags: Collection[MemoryTag]) -> int | None:
        """Take memory again, and before the last of it put the parts in place.

        The parts are a copy of the weights, for which there may be no room beside the KV cache.
        The pause of a sleep ends with the last of the memory.

        Returns:
            As `close`.

        Raises:
            WeightsError: There is not enough memory; or a part has failed, and memory is there.
        """
        async with self._turn():
            if "weights" in tags:
                await self._client.resume_memory(("weights",))
                await self._returned("weights")
            state = self.state
            wakes = state.asleep and not self.released - set(tags)
            wait = state.session or self.released - set(tags) or (state.paused and not wakes)
            try:
                return None if wait else await self._put_in_place()
            finally:
                if "kv_cache" in tags:
                    await self._client.resume_memory(("kv_cache",))
                    await self._returned("kv_cache")
                if wakes:
                    await self._client.resume()
                    await self._save(replace(self.state, paused=False, asleep=False))

    async def take(
        self,
        weights: WeightsSource,
        label: str | None,
        *,
        abort: bool = False,
        whole: bool = False,
        in_session: bool = False,
    ) -> int | None:
        """Take new weights, as a part or at once.

        Args:
            weights: Their source.
            label: The trainer's name of the version that they make.
            abort: Whether requests in flight end when they are put in place.
            whole: Whether they are all the weights that there are, unless they are a part.
            in_session: Whether they must be a part of an open session.

        Returns:
            The version in place; None when they are kept until later.

        Raises:
            WeightsError: They could not be taken.
        """
        async with self._turn():
            label = None if label is None else _checked(label)
            state = self.state
            if in_session and not state.session:
                raise NoSession("no weight update session is open; begin one first")
            if not (state.paused or state.session or state.released):
                await self._save(replace(_begun(state), label=label))
                version = await self._update_weights(
                    weights,
                    label,
                    "abort" if abort else "keep",
                    partial=not whole,
                    decide=self.state.update,
                )
                await self._completed(version)
                return version
            if state.failure:
                if isinstance(weights, GroupWeights):
                    # So that a trainer that broadcasts does not wait for the executors.
                    await self._client.leave_weights_group(weights.group)
                raise WeightsError(
                    f"a part of this update has failed ({state.failure}); begin anew with "
                    "a pause or a session, and send all parts",
                    code="weights_incomplete",
                )
            try:
                # With its number: a part that came while its gateway was killed may come again.
                await self._client.stage_weights(
                    state.update, weights, part=state.parts, timeout_s=self._timeout_s
                )
            except NanoInferenceError as error:
                await self._save(replace(state, failure=error.message))
                raise
            label = label if label is not None else state.label
            taken = replace(state, parts=state.parts + 1, label=label, abort=state.abort or abort)
            await self._save(taken)
            return None

    async def rename(self, label: str) -> None:
        """Give the version in place another name."""
        async with self._turn():
            version = await self._client.weight_version()
            await self._save(self.state, self._labels.put(version, _checked(label)))

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[bool]:
        """Wait for the calls before, up to a time limit; yield whether an update of a killed
        gateway was completed."""
        limit_s = self._timeout_s + _MORE_S
        try:
            with anyio.fail_after(limit_s):
                await self._lock.acquire()
        except TimeoutError:
            raise WeightsError(
                f"other calls about weights took all of {limit_s:g} s, and nothing was done; call "
                "again when they have ended, or end them by leaving the group that they wait for",
                code="weights_busy",
            ) from None
        try:
            committed = (await self.refresh()).committed
            if committed:
                await self._complete(committed)
            yield bool(committed)
        finally:
            self._lock.release()

    async def _save(self, state: WeightUpdateState, labels: dict[int, str] | None = None) -> None:
        stored = await self._record.replace(self._stored, state, labels)
        if stored is None:
            raise WeightsError(
                "another gateway, or an executor whose time was up, has changed this update at the "
                "same time; look at the version in place, and begin the update anew",
                code="weights_busy",
            )
        self._stored = stored

    async def _returned(self, tag: str) -> None:
        left = tuple(each for each in self.state.released if each != tag)
        await self._save(replace(self.state, released=left))

    async def _put_in_place(self, *, end_session: bool = False) -> int | None:
        state = self.state
        session = state.session and not end_session
        ended = replace(_begun(state), session=session, last_failure=state.failure)
        if state.failure or not state.parts:
            await self._save(ended)
            if not state.failure:
                return None
            raise WeightsError(
                f"the weights are as they were, since a part of the update failed: {state.failure}",
                code="weights_incomplete",
                remedy="send all parts again",
            )
        staged = StagedWeights(state.update, state.parts)
        try:
            version = await self._update_weights(
                staged,
                state.label,
                "abort" if state.abort else "keep",
                partial=True,
                decide=state.update,
            )
        except NanoInferenceError as error:
            if not self.state.committed and error.code != "weights_busy":  # the parts are gone
                await self._save(replace(ended, last_failure=error.message))
            raise
        await self._completed(version)
        return version

    async def _complete(self, version: int) -> None:
        """Complete a decided update."""
        try:
            await self._client.finish_update(
                self.state.update, version, self.state.logged, timeout_s=self._timeout_s
            )
        except WeightsError as error:
            # Some executor has lost the weights: only another update makes all alike.
            ended = replace(_begun(self.state), session=False, last_failure=error.message)
            await self._save(ended)
            raise
        await self._completed(version)

    async def _completed(self, version: int) -> None:
        """Record that the decided update is in place."""
        state = self.state
        done = replace(_begun(state), session=False, last=version, last_label=state.label)
        await self._save(done)

    async def _decide(self, version: int, logged: str) -> None:
        """Record that the parts become this version, and their name."""
        label = self.state.label
        labels = None if label is None else self._labels.put(version, label)
        await self._save(replace(self.state, committed=version, logged=logged), labels)

    async def _update_weights(
        self,
        weights: WeightsSource | StagedWeights,
        label: str | None,
        in_flight: InFlight,
        *,
        partial: bool,
        decide: str,
    ) -> int:
        """Have all executors check the weights, decide, and have them change. `decide`: the name of
        the update."""
        number = None
        if label is not None:
            number = number_of(label, await self._client.weight_version())
        version = await self._client.update_weights(
            weights,
            in_flight=in_flight,
            version=number,
            partial=partial,
            timeout_s=self._timeout_s,
            name=decide,
            decide=self._decide,
        )
        get_logger().info("weights_updated", version=version, label=label)
        return version


def _begun(state: WeightUpdateState) -> WeightUpdateState:
    """Return the state with a new update, which has no parts."""
    return replace(
        state,
        update=uuid.uuid4().hex,
        parts=0,
        failure="",
        label=None,
        abort=False,
        committed=0,
        logged="",
        last=0,
        last_label=None,
        last_failure="",
    )


def _checked(label: str) -> str:
    if len(label) > MOST_LABEL:
        raise WeightsError(
            f"a version's name may have {MOST_LABEL} characters; this one has {len(label)}",
            code="invalid_request",
        )
    return label
