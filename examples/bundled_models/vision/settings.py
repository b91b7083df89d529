"""The settings of the bundled vision model and of its training."""

from dataclasses import dataclass

from ..settings import TrainingStage
from .pictures import SIDE

NAMING = TrainingStage(2400, 2600, 2e-3, 50)
ANSWERING = TrainingStage(2380, 2700, 1.5e-3, 50, 120)


@dataclass(frozen=True)
class VisionSettings:
    """Hyperparameters of model and training."""

    seed: int = 1
    threads: int = 1
    patch: int = 8
    hidden: int = 128
    intermediate: int = 384
    vision_layers: int = 3
    layers: int = 4
    vocabulary: int = 416
    # The vision tower alone, then the whole model.
    naming: TrainingStage = NAMING
    answering: TrainingStage = ANSWERING
    pictures: int = 16
    questions: int = 6
    weight_decay: float = 0.05
    naming_weight: float = 0.5
    heldout: int = 100

    @property
    def steps(self) -> int:
        """Steps of both stages."""
        return self.naming.steps + self.answering.steps + self.answering.cooling

    @property
    def image_tokens(self) -> int:
        """Tokens of a picture."""
        return (SIDE // self.patch) ** 2
