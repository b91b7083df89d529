"""What HTTP and gRPC have in common: both serve the same models, out of the same memory."""

from __future__ import annotations

from importlib import metadata
from typing import NamedTuple, Protocol

from starlette.requests import Request

from .regions import Regions
from .service import InferenceService

SERVER_NAME = "nano_inference"
"""What the server says that it is called."""

VERSION = metadata.version("nano-inference")

_EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
)
_SHARED_MEMORY = "system_shared_memory"

NO_CUDA = "memory of CUDA can't be shared; use that of the system, or send tensors in the body"
NO_TRACING = "traces are set up by the gateway's settings (docs/telemetry.md)"
NO_LOGGING = "logs are set up by the gateway's settings (docs/telemetry.md)"
"""Why some of Triton's calls are refused, in both."""


class ModelRepository(Protocol):
    """Where models are that may be loaded and unloaded."""

    async def load(self, request: Request, model: str) -> object:
        """Has a model loaded for a call, and returns when it is.

        Raises:
            NanoInferenceError: It can't be.
        """

    async def unload(self, request: Request, model: str) -> object:
        """The same the other way. Raises as `load`."""


class KServe(NamedTuple):
    """What is served.

    Attributes:
        service: The models.
        regions: The shared memory that clients have registered.
        repository: Where they come from; None where there is one, which stays.
    """

    service: InferenceService
    regions: Regions
    repository: ModelRepository | None = None

    @property
    def extensions(self) -> tuple[str, ...]:
        """Triton's extensions that are switched on, by Triton's names."""
        return (*_EXTENSIONS, _SHARED_MEMORY) if self.regions.is_on else _EXTENSIONS
