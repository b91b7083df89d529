"""Images of prompts."""

from __future__ import annotations

from collections.abc import Mapping

from ....bus.control import ReplicaCapacity
from ....bus.parts.images import ImagesPlan, ImagesResult
from ....bus.sections import with_sections
from ....store.images import StoredImage
from ..driver.images import SequenceImages
from ..driver.step import LaunchedStep
from ..runner.interface import MediaEncoder
from . import ExecutorState, Part

NO_IMAGES: Mapping[str, StoredImage] = {}


class Images(Part):
    """Encodes the images of plans.

    Attributes:
        of_sequences: Puts them into steps.
        given: The images that the next plan encodes, by name. Without one its request fails.
    """

    reads = ImagesPlan

    def __init__(self, state: ExecutorState, vision: MediaEncoder) -> None:
        super().__init__(state)
        self.of_sequences = SequenceImages(state.config, state.model, vision, state.table)
        self.given = NO_IMAGES
        state.steps.images = self.of_sequences

    def give(self, images: Mapping[str, StoredImage]) -> None:
        """Set `given`, before the plan is launched."""
        self.given = images

    def apply(self, section: ImagesPlan, step: LaunchedStep) -> None:
        given, self.given = self.given, NO_IMAGES
        self.of_sequences.embeddings.apply(section.forgotten, section.encodes, given)

    def launched(self, step: LaunchedStep) -> None:
        images = self.of_sequences
        if spoiled := images.take_spoiled(step.plan):
            step.parts.append(ImagesResult(spoiled))
        step.failed += images.take_failures()

    def replaced(self) -> None:
        self.of_sequences.embeddings.clear()

    def released(self) -> None:
        self.of_sequences.embeddings.clear()

    def reset(self) -> None:
        self.given = NO_IMAGES
        self.of_sequences.clear()

    def capacity(self, found: ReplicaCapacity) -> ReplicaCapacity:
        return with_sections(found, self.of_sequences.capacity)
