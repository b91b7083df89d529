"""Trainers' weight updates through any interface: many parts, one change."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager

import anyio

from ...bus.control import MemoryTag
from ...bus.weights import GroupWeights, InFlight, StagedWeights, WeightsSource
from ...config import NanoInferenceError, WeightsError
from ...config.logger import get_logger
from ...pipeline.client import BusClient

_MORE_S = 30.0
"""Seconds that a call waits for the calls before it, beyond the time limit of a part."""

_KEPT_LABELS = 1000


class VersionLabels:
    """Clients' names of the weight versions that came through this gateway.

    The last thousand names are kept. A version without a name is called by its number.
    """

    def __init__(self) -> None:
        self._labels: dict[int, str] = {}

    def of(self, version: int) -> str:
        """Return a version's name."""
        return self._labels.get(version, str(version))

    def put(self, version: int, label: str) -> None:
        """Set a version's name."""
        self._labels.pop(version, None)
        if label != str(version):
            self._labels[version] = label
        while len(self._labels) > _KEPT_LABELS:
            del self._labels[min(self._labels)]


def number_of(label: str | None, present: int) -> int | None:
    """The version to count from when a label is a number above the present one, else None."""
    if label is None or not (label.isascii() and label.isdecimal()) or len(label) > 18:
        return None
    return int(label) if int(label) > present else None


class _Parts:
    """The parts of one update.

    Attributes:
        update: The executors' name of the update.
        count: The number of staged parts.
        failure: Why a part was not staged; then none will be put in place.
        label: The client's name of the version that they make.
        in_flight: The fate of requests in flight when they are put in place.
    """

    def __init__(self) -> None:
        self.update = uuid.uuid4().hex
        self.count = 0
        self.failure = ""
        self.label: str | None = None
        self.in_flight: InFlight = "keep"


class WeightSync:
    """Trainers' weight updates, each of one or many parts.

    While generation is paused, memory is released or a session is open, each call brings a part:
    it is fetched, checked and kept, and all parts change together, when generation goes on, the KV
    cache's memory is resumed, or the session ends. So no token is ever made by half of them. When
    a part fails, its call says so, and nothing changes until an update is begun anew.

    Outside of that each call is an update of its own.

    Calls are taken one at a time, in order. One that waits for others too long is refused with a
    WeightsError, `weights_busy`, and has changed nothing.

    Attributes:
        paused: Whether generation was paused through this gateway.
        released: The memory that was released through it.
    """

    def __init__(self, client: BusClient, labels: VersionLabels, timeout_s: float) -> None:
        self.paused = False
        self.released: set[MemoryTag] = set()
        self._client = client
        self._labels = labels
        self._timeout_s = timeout_s
        self._lock = anyio.Lock()
        self._session = False
        self._parts = _Parts()

    async def pause(self, in_flight: InFlight) -> int:
        """Pauses generation and begins an update; returns how many parts of another it dropped."""
        async with self._turn():
            await self._client.pause(in_flight)
            self.paused = True
            return 0 if self._session else self._begin()

    async def open(self) -> int:
        """Begins an update; returns how many parts of another it dropped.

        Raises:
            WeightsError: A session is open.
        """
        async with self._turn():
            if self._session:
                raise WeightsError(
                    "a weight update session is open already; end it first", code="weights_busy"
                )
            self._session = True
            return self._begin()

    async def close(self) -> int | None:
        """Ends a session: its parts are put in place.

        Returns:
            The version in place by that; None when there were no parts.

        Raises:
            WeightsError: No session is open, or a part has failed.
        """
        async with self._turn():
            if not self._session:
                raise WeightsError("no weight update session is open; begin one first")
            self._session = False
            return await self._put_in_place()

    async def resume(self) -> int | None:
        """Puts the parts in place, and lets generation go on, also when that fails.

        Returns:
            As `close`.

        Raises:
            WeightsError: A part has failed. The old weights are in place.
        """
        async with self._turn():
            try:
                return None if self._session else await self._put_in_place()
            finally:
                await self._client.resume()
                self.paused = False

    async def release_memory(self, tags: Iterable[MemoryTag]) -> int:
        """Releases memory and begins an update; returns how many parts of another it dropped.

        Raises:
            WeightsError: A weight update is under way.
        """
        async with self._turn():
            await self._client.release_memory(tags)
            self.released.update(tags)
            return 0 if self.paused or self._session else self._begin()

    async def resume_memory(self, tags: Collection[MemoryTag]) -> int | None:
        """Takes memory again, and before the last of it puts the parts in place.

        The parts are a copy of the weights, for which there may be no room beside the KV cache.

        Returns:
            As `close`.

        Raises:
            WeightsError: There is not enough memory; or a part has failed, and memory is there.
        """
        async with self._turn():
            if "weights" in tags:
                await self._client.resume_memory(("weights",))
                self.released.discard("weights")
            wait = self.paused or self._session or self.released - set(tags)
            try:
                return None if wait else await self._put_in_place()
            finally:
                if "kv_cache" in tags:
                    await self._client.resume_memory(("kv_cache",))
                    self.released.discard("kv_cache")

    async def take(
        self, weights: WeightsSource, label: str | None, *, abort: bool = False, whole: bool = False
    ) -> int | None:
        """Takes new weights, as a part or at once.

        Args:
            weights: Their source.
            label: The client's name of the version that they make.
            abort: Whether requests in flight end when they are put in place.
            whole: Whether they are all the weights that there are, unless they are a part.

        Returns:
            The version in place; None when they are kept until later.

        Raises:
            WeightsError: They could not be taken.
        """
        async with self._turn():
            if not (self.paused or self._session or self.released):
                return await self._update_weights(
                    weights, label, "abort" if abort else "keep", partial=not whole
                )
            parts = self._parts
            if parts.failure:
                if isinstance(weights, GroupWeights):
                    # So that a trainer that broadcasts does not wait for the executors.
                    await self._client.leave_weights_group(weights.group)
                raise WeightsError(
                    f"a part of this update has failed ({parts.failure}); begin anew with "
                    "a pause or a session, and send all parts",
                    code="weights_incomplete",
                )
            try:
                await self._client.stage_weights(parts.update, weights, timeout_s=self._timeout_s)
            except NanoInferenceError as error:
                parts.failure = error.message
                raise
            parts.count += 1
            parts.label = label if label is not None else parts.label
            if abort:
                parts.in_flight = "abort"
            return None

    async def rename(self, label: str) -> None:
        """Gives the version in place another name."""
        async with self._turn():
            self._labels.put(await self._client.weight_version(), label)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait for the calls before, up to a time limit."""
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
            yield
        finally:
            self._lock.release()

    def _begin(self) -> int:
        """Forgets the parts that there are; returns how many were forgotten."""
        dropped, self._parts = self._parts.count, _Parts()
        return dropped

    async def _put_in_place(self) -> int | None:
        parts, self._parts = self._parts, _Parts()
        if parts.failure:
            raise WeightsError(
                f"the weights are as they were, since a part of the update failed: {parts.failure}",
                code="weights_incomplete",
            )
        if not parts.count:
            return None
        staged = StagedWeights(parts.update, parts.count)
        return await self._update_weights(staged, parts.label, parts.in_flight, partial=True)

    async def _update_weights(
        self,
        weights: WeightsSource | StagedWeights,
        label: str | None,
        in_flight: InFlight,
        *,
        partial: bool,
    ) -> int:
        number = None
        if label is not None:
            number = number_of(label, await self._client.weight_version())
        version = await self._client.update_weights(
            weights, in_flight=in_flight, version=number, partial=partial, timeout_s=self._timeout_s
        )
        if label is not None:
            self._labels.put(version, label)
        get_logger().info("weights_updated", version=version, label=label)
        return version
