"""How many tokens a prompt and its completion may have together."""

from __future__ import annotations

from ..config import BusError, Config, split_role
from ..pipeline.client import BusClient
from .readiness import ASKED_EVERY_S
from .recent import Recent


class ModelLength:
    """As the executors tell it, which have the model: its own limit may be below the setting."""

    def __init__(self, engine: BusClient, config: Config) -> None:
        self._most = config.engine.max_model_len
        self._reports = Recent(engine.reports, ASKED_EVERY_S)

    async def get(self) -> int:
        """The least that a lane has, since any of them may take a request; this gateway's setting
        where none has told yet."""
        try:
            reports = await self._reports.get()
        except BusError:
            reports = []
        told = [
            int(report.load.get("max_model_len", self._most))
            for report in reports
            if split_role(report.stage)[0] == "executor"
        ]
        return min([self._most, *told])
