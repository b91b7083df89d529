"""What the gateway needs of the engine behind it: a client of the bus, seen from here."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Literal, Protocol

from ...bus import StageReport
from ...bus.control import MemoryTag
from ...bus.public import GenerateRequest, Output
from ...bus.weights import InFlight, StagedWeights, WeightsSource


class EngineClient(Protocol):
    """`pipeline.client.BusClient`, whose docstrings hold here; a stage can't import it."""

    def submit(self, request: GenerateRequest) -> AsyncGenerator[Output, None]: ...

    async def cancel(self, request_id: str) -> None: ...

    async def cancel_all(self) -> None: ...

    async def pause(self, in_flight: InFlight) -> None: ...

    async def resume(self) -> None: ...

    async def flush_cache(self) -> None: ...

    async def weight_version(self) -> int: ...

    async def update_weights(
        self,
        weights: WeightsSource | StagedWeights,
        *,
        in_flight: InFlight,
        version: int | None,
        partial: bool,
        timeout_s: float,
    ) -> int: ...

    async def stage_weights(
        self, update: str, weights: WeightsSource, *, timeout_s: float
    ) -> None: ...

    async def join_weights_group(
        self,
        group: str,
        address: str,
        world_size: int,
        *,
        rank_offset: int,
        backend: Literal["gloo", "nccl"],
        timeout_s: float,
    ) -> None: ...

    async def leave_weights_group(self, group: str) -> None: ...

    async def release_memory(self, tags: Iterable[MemoryTag]) -> None: ...

    async def resume_memory(self, tags: Iterable[MemoryTag]) -> None: ...

    async def reports(self) -> list[StageReport]: ...

    async def trouble(self) -> str: ...
