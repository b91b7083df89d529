"""GRPO with a picture in each prompt: the bundled vision model learns to answer better.

    python examples/grpo_images.py --task position --steps 40

Generation and training take turns. The pictures and questions are those of
`bundled_models/vision/`; a picture of one split never occurs in another. The reward is 1 for
exactly the right answer.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bundled_models.vision.evaluation import Case, cases
from bundled_models.vision.pictures import draw, make_scene
from bundled_models.vision.questions import TASKS, question
from bundled_models.vision.rows import pixels_of
from grpo_trainer import Group, Trainer, TrainerSettings
from rich.console import Console
from torch import Tensor

from nano_inference import ChatRenderer, EngineConfig, InferenceEngine, SamplingParams


@dataclass(frozen=True)
class Settings:
    """The parameters of a run.

    Attributes:
        task: Kind of questions.
        steps: Optimizer steps.
        prompts: Questions of each step.
        samples: Answers to each question.
        held_out: Pictures of the evaluation.
        learning_rate: AdamW's.
        seed: Seed of pictures and samples.
    """

    task: str = "position"
    steps: int = 40
    prompts: int = 16
    samples: int = 8
    held_out: int = 200
    learning_rate: float = 1e-4
    seed: int = 1


def endless(task: str, seed: int) -> Iterator[Case]:
    """Pictures to train on, with a question each."""
    rng = random.Random(f"grpo/{seed}")
    while True:
        scene = make_scene(rng, "train")
        if (asked := question(scene, task, rng)) is not None:
            yield Case(draw(scene, rng), asked)


class Asking:
    """Asks the engine, and grades its answers."""

    def __init__(self, engine: InferenceEngine, model_path: str) -> None:
        self._engine, self._chat = engine, ChatRenderer(model_path)

    def groups(self, asked: Sequence[Case], params: SamplingParams, samples: int) -> list[Group]:
        """Return the answers to each question, with their rewards."""
        prompts = [self._prompt(case) for case in asked]
        images = [case.image for case in asked]
        found = self._engine.generate(
            [prompt.token_ids for prompt in prompts], params, samples, images=images
        )
        groups = []
        for place, (case, prompt) in enumerate(zip(asked, prompts, strict=True)):
            answers = found[place * samples : (place + 1) * samples]
            texts = [
                self._chat.read(prompt, answer.completion_tokens, answer.finish_reason)["content"]
                for answer in answers
            ]
            rewards = tuple(float(text == case.question.answer) for text in texts)
            groups.append(Group(tuple(answers), rewards, _pixels(case)))
        return groups

    def accuracy(self, asked: Sequence[Case], params: SamplingParams) -> float:
        """Return the share of right answers, greedy."""
        greedy = SamplingParams(temperature=0.0, max_tokens=params.max_tokens)
        rewards = [group.rewards[0] for group in self.groups(asked, greedy, 1)]
        return sum(rewards) / len(rewards)

    def _prompt(self, case: Case) -> Any:
        content = [{"type": "image"}, {"type": "text", "text": case.question.text}]
        return self._chat.render([{"role": "user", "content": content}])


def _pixels(case: Case) -> Tensor:
    return pixels_of([case.image])[0]


def run(settings: Settings, console: Console) -> dict[str, Any]:
    """Train; return the log of the steps, and the accuracy before and after."""
    torch.manual_seed(settings.seed)
    config = EngineConfig(model_path="tiny-vision", dtype="float32")
    trainer = Trainer(
        TrainerSettings(
            model_folder=config.model_folder,
            steps=settings.steps,
            learning_rate=settings.learning_rate,
            images=True,
        )
    )
    held_out = cases(settings.task, settings.held_out, settings.seed)
    stream = endless(settings.task, settings.seed)
    log = []
    with InferenceEngine(config) as engine:
        asking = Asking(engine, config.model_path)
        before = asking.accuracy(held_out, SamplingParams(max_tokens=40))
        console.print(f"held-out pictures, before: {before:.1%}")
        for step in range(1, settings.steps + 1):
            asked = [next(stream) for _ in range(settings.prompts)]
            params = SamplingParams(max_tokens=40, seed=(settings.seed << 32) + step)
            groups = asking.groups(asked, params, settings.samples)
            reward = sum(sum(group.rewards) for group in groups)
            reward /= settings.prompts * settings.samples
            # Groups whose samples are equally good teach nothing.
            facts = {}
            if informative := [group for group in groups if group.informative]:
                facts = trainer.step(informative)
                engine.update_weights(trainer.weights(), version=step, blocking=True)
            log.append({"reward": reward, "weight_version": engine.get_weight_version(), **facts})
            console.print(f"{step:3d} reward {reward:.3f}")
        after = asking.accuracy(held_out, SamplingParams(max_tokens=40))
        console.print(f"held-out pictures, after: {after:.1%}")
    return {"log": log, "before": before, "after": after}


def main() -> None:
    default = Settings()
    parser = argparse.ArgumentParser(description="GRPO with pictures on the bundled vision model.")
    parser.add_argument("--task", choices=TASKS, default=default.task)
    for name in ("steps", "prompts", "samples", "held_out", "seed"):
        value = getattr(default, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--learning-rate", type=float, default=default.learning_rate)
    run(Settings(**vars(parser.parse_args())), Console())


if __name__ == "__main__":
    main()
