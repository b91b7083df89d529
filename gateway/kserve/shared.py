"""What HTTP and gRPC have in common: both serve the same models, out of the same memory."""

from __future__ import annotations

from importlib import metadata
from typing import NamedTuple

from .regions import Regions
from .service import InferenceService

SERVER_NAME = "nano_inference"
"""What the server says that it is called."""

VERSION = metadata.version("nano-inference")

EXTENSIONS = (
    "binary_tensor_data",
    "cuda_shared_memory",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
    "system_shared_memory",
)
"""Those of Triton's that there are, by its names. Of CUDA's memory there is as much as clients ask
for who use none."""


class KServe(NamedTuple):
    """What is served.

    Attributes:
        service: The models.
        regions: The shared memory that clients have registered.
    """

    service: InferenceService
    regions: Regions
