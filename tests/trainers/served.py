"""A server of the bundled model, with a record of its calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from nano_inference.config import Config, load_config
from nano_inference.gateway.app import GatewayApp
from nano_inference.gateway.gateway import Gateway
from nano_inference.gateway.server.measures import Measures
from nano_inference.pipeline.client import BusClient
from nano_inference.pipeline.pipeline import Pipeline

from ..agents.recording import Recorder

MODEL = "tiny"


class RecordedGateway(Gateway):
    """A gateway with a record of its calls."""

    def __init__(self, client: BusClient, config: Config) -> None:
        self.recorder = Recorder()
        super().__init__(client, config)

    async def _application(self, config: Config, measures: Measures) -> GatewayApp:
        app = await super()._application(config, measures)
        app.entrance = self.recorder.around  # type: ignore[attr-defined]
        return app


def trainer_config(folder: Path, settings: Mapping[str, object]) -> Config:
    """Return the settings of a server for a trainer; `folder` is the run's."""
    overrides = {
        # AsyncGRPO names a model by the folder that it has loaded.
        "gateway.model_aliases": {str(Config().engine.model_folder): MODEL},
        "engine.model_path": MODEL,
        "engine.model_id": MODEL,
        "gateway.port": 0,
        "gateway.adapter_folder": str(folder / "adapters"),
    }
    return load_config(env={}, overrides=overrides | settings)


@asynccontextmanager
async def served(config: Config) -> AsyncIterator[RecordedGateway]:
    """Serve the model."""
    async with Pipeline(config) as pipeline, RecordedGateway(pipeline.client, config) as gateway:
        yield gateway
