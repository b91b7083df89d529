"""How many tokens a prompt and its completion may have together."""

from __future__ import annotations

import anyio.to_thread

from ...config import BusError, Config, split_role
from ...pipeline.client import BusClient
from ...text.context_length import longest_context_of
from .readiness import ASKED_EVERY_S
from .recent import Recent


class ModelLength:
    """As the executors tell it, which have the model: its own limit may be below the setting.

    Of a model that is not loaded it is what its files say.
    """

    def __init__(self, engine: BusClient, config: Config) -> None:
        self._most = config.engine.max_model_len
        self._folder = config.engine.model_folder
        self._of_files: int | None = None
        self._reports = Recent(engine.reports, ASKED_EVERY_S)

    async def get(self) -> int:
        """The least that a lane has, since any of them may take a request; where none has told
        yet, this gateway's setting or what the model's files say, whichever is less."""
        try:
            reports = await self._reports.get()
        except BusError:
            reports = []
        told = [
            int(report.load["max_model_len"])
            for report in reports
            if split_role(report.stage)[0] == "executor" and "max_model_len" in report.load
        ]
        return min([self._most, *(told or [await self._of_the_files()])])

    async def _of_the_files(self) -> int:
        if self._of_files is None:
            found = await anyio.to_thread.run_sync(longest_context_of, self._folder)
            self._of_files = found or self._most
        return self._of_files
