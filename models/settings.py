"""The settings of the bundled tiny model and of its training."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingSettings:
    """Hyperparameters of model and training."""

    seed: int = 1
    threads: int = 1
    steps: int = 4000
    horizon: int = 4500
    rows: int = 4
    length: int = 384
    joined: float = 0.2
    learning_rate: float = 1.2e-3
    warmup: int = 200
    weight_decay: float = 0.1
    vocabulary: int = 768
    hidden: int = 128
    intermediate: int = 448
    layers: int = 5
    tap_every: int = 100
    tap_prompts: int = 60
    tool_steps: int = 1100
    tool_horizon: int = 2400
    tool_learning_rate: float = 8e-4
    tool_warmup: int = 50
    cooling_steps: int = 700
    talk_steps: int = 900
    talk_horizon: int = 1800
    talk_learning_rate: float = 6e-4
    talk_warmup: int = 50
    talk_cooling_steps: int = 500
    last_learning_rate: float = 4e-4
    last_every: int = 20
    quoted_weight: float = 2.0
    last_target: float = 0.5
    last_cooling_steps: int = 250
    heldout: int = 500
    heldout_chats: int = 200

    @property
    def before_talk(self) -> int:
        """The number of steps before small talk is added."""
        return self.steps + self.tool_steps + self.cooling_steps
