"""The settings of the bundled tiny model and of its training."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TrainingStage:
    """A stage of training. Its learning rate rises, falls as half a cosine, and at last to zero.

    Attributes:
        steps: Before the end.
        horizon: The step at which the cosine would be at its lowest.
        rate: The highest learning rate.
        warmup: Steps in which the rate rises.
        cooling: Steps of the end.
    """

    steps: int
    horizon: int
    rate: float
    warmup: int
    cooling: int = 0


@dataclass(frozen=True)
class TrainingSettings:
    """Hyperparameters of model and training.

    `architecture` is "qwen2", or "hybrid": Qwen3.5's, three layers of Gated DeltaNet to one of
    attention.
    """

    seed: int = 1
    threads: int = 1
    # All tasks; mostly chats with tools and thoughts; small talk added.
    stages: tuple[TrainingStage, ...] = (
        TrainingStage(4000, 4500, 1.2e-3, 200),
        TrainingStage(1100, 2400, 8e-4, 50, 700),
        TrainingStage(900, 1800, 6e-4, 50, 500),
    )
    rows: int = 4
    length: int = 384
    joined: float = 0.2
    weight_decay: float = 0.1
    vocabulary: int = 768
    hidden: int = 128
    intermediate: int = 448
    layers: int = 5
    tap_every: int = 100
    tap_prompts: int = 60
    last_learning_rate: float = 4e-4
    last_every: int = 20
    quoted_weight: float = 2.0
    last_target: float = 0.5
    last_cooling_steps: int = 250
    heldout: int = 500
    heldout_chats: int = 200
    architecture: str = "qwen2"

    @classmethod
    def hybrid(cls, **changes: Any) -> "TrainingSettings":
        """Return the settings of `tiny-hybrid`, which has about as many parameters."""
        return cls(**{"architecture": "hybrid", "layers": 4, "intermediate": 512} | changes)

    @property
    def before_talk(self) -> int:
        """The number of steps before small talk is added."""
        return sum(stage.steps + stage.cooling for stage in self.stages[:-1])
