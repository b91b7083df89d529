"""Rollouts for GRPO on arithmetic: the prompts, their rewards, and what the engine generates."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bundled_models import tasks
from grpo_trainer import Group
from transformers import AutoTokenizer

from nano_inference import InferenceEngine, SamplingParams, TrainingSample

Kind = tuple[str, tasks.Form]
"""A task of bundled_models/tasks.py, and its form."""

KINDS: dict[str, Kind] = {
    "add": ("add2", "plain"),
    "sub": ("sub2", "plain"),
    "add-chat": ("add2", "chat"),
    "sub-chat": ("sub2", "chat"),
    "add-thinking": ("add2", "thinking"),
    "sub-thinking": ("sub2", "thinking"),
}
"""`98 + 25 =`, `38 - 21 =`, the same as questions to the chat template, and such with a thought."""

_END_OF_THOUGHT = "</think>"


@dataclass(frozen=True)
class Problem:
    """A prompt as the engine takes it, and its only right answer."""

    example: tasks.Example
    token_ids: tuple[int, ...]


class Arithmetic:
    """Problems from one split, and their grades.

    The split of a sum is decided by its operands (bundled_models/tasks.py), so no sum of one split
    occurs in another, in any wording or order.
    """

    def __init__(self, model_folder: Path, kinds: Sequence[str]) -> None:
        """Loads the tokenizer."""
        self._kinds = [KINDS[kind] for kind in kinds]
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)

    def stream(self, seed: int) -> Iterator[Problem]:
        """Problems to train on, for ever, the kinds in turn."""
        rng = random.Random(f"grpo/{seed}")
        while True:
            for task, form in self._kinds:
                yield self._problem(tasks.draw(task, form, "train", rng))

    def epochs(self, seed: int, count: int) -> Iterator[Problem]:
        """The same `count` problems of each kind again and again, each time in another order."""
        rng = random.Random(f"grpo/epochs/{seed}")
        problems = self.chosen("train", count)
        while True:
            rng.shuffle(problems)
            yield from problems

    def chosen(self, split: tasks.Split, count: int) -> list[Problem]:
        """The same `count` different problems of each kind every time."""
        return [
            self._problem(example)
            for task, form in self._kinds
            for example in tasks.distinct(task, form, split, count, seed=0)
        ]

    def reward(self, problem: Problem, sample: TrainingSample) -> float:
        """1 for exactly the answer and its end, else 0; what was thought before does not count."""
        text = self._tokenizer.decode(sample.completion_tokens, skip_special_tokens=True)
        _, closed, said = text.rpartition(_END_OF_THOUGHT)
        _, due, wanted = problem.example.answer.rpartition(_END_OF_THOUGHT)
        right = closed == due and said.strip() == wanted.strip()
        return float(sample.finish_reason == "stop" and right)

    def _problem(self, example: tasks.Example) -> Problem:
        text = example.prompt
        if example.chat:
            text = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": text}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=example.thinking,
            )
        return Problem(example, tuple(self._tokenizer.encode(text, add_special_tokens=False)))


@dataclass
class Counts:
    """Counts of all generated samples so far.

    Attributes:
        tokens: Sampled tokens of finished requests.
        drafted: Drafted tokens that were verified for them, where the engine speculates.
        accepted: Drafted tokens that equal the sampled ones.
        groups: Finished requests.
        used: Groups that were trained on.
        rewards: Sum of their groups' mean rewards, since the last call of `take_reward`.
        rewarded: Number of groups in that sum.
    """

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    groups: int = 0
    used: int = 0
    rewards: float = 0.0
    rewarded: int = 0

    def add(self, group: Group) -> None:
        """Counts a finished request."""
        self.tokens += sum(len(sample.completion_tokens) for sample in group.samples)
        self.drafted += sum(sample.num_draft_tokens for sample in group.samples)
        self.accepted += sum(sample.num_accepted_draft_tokens for sample in group.samples)
        self.groups += 1
        self.rewards += sum(group.rewards) / len(group.rewards)
        self.rewarded += 1

    def take_reward(self) -> float:
        """Mean reward of all groups since the last call."""
        mean = self.rewards / max(self.rewarded, 1)
        self.rewards, self.rewarded = 0.0, 0
        return mean


@dataclass
class Rollouts:
    """Generates groups, in batches or without end.

    Attributes:
        engine: Generates.
        task: Makes the problems and grades the answers.
        problems: The next problems.
        samples: Number of samples per prompt.
        params: Sampling parameters; each request gets a seed of its own.
        seed: Base of the requests' seeds.
        counts: Counts of the generated samples.
        now_ns: The clock of `busy`.
        busy: (start, end) of every call of the engine.
    """

    engine: InferenceEngine
    task: Arithmetic
    problems: Iterator[Problem]
    samples: int
    params: SamplingParams
    seed: int
    counts: Counts = field(default_factory=Counts)
    now_ns: Callable[[], int] = time.monotonic_ns
    busy: list[tuple[int, int]] = field(default_factory=list)
    _asked: dict[tuple[int, ...], Problem] = field(default_factory=dict)
    _added: int = 0

    def batch(self, size: int) -> list[Group]:
        """Asks `size` problems and waits for all answers."""
        problems = [next(self.problems) for _ in range(size)]
        params = [self._next_params() for _ in problems]
        prompts = [problem.token_ids for problem in problems]
        found = self._timed(lambda: self.engine.generate(prompts, params, self.samples))
        return [
            self._group(problem, found[index * self.samples : (index + 1) * self.samples])
            for index, problem in enumerate(problems)
        ]

    def step(self, concurrency: int) -> list[Group]:
        """One step of the engine with so many requests under way; the groups that it finished."""
        while self._added - self.counts.groups < concurrency:
            problem = next(self.problems)
            self._asked[problem.token_ids] = problem
            self.engine.add_request(problem.token_ids, self._next_params(), self.samples)
        found = self._timed(self.engine.step)
        # The samples of a request come together.
        return [
            self._group(self._asked[found[at].prompt_tokens], found[at : at + self.samples])
            for at in range(0, len(found), self.samples)
        ]

    def drain(self) -> None:
        """Lets what is under way end, unseen."""
        while self.engine.has_pending():
            self.engine.step()

    def accuracy(self, problems: Sequence[Problem]) -> float:
        """Share of right answers, greedy. Nothing else may be under way."""
        prompts = [problem.token_ids for problem in problems]
        params = SamplingParams(temperature=0.0, max_tokens=self.params.max_tokens)
        answers = self.engine.generate(prompts, params)
        pairs = zip(problems, answers, strict=True)
        return sum(self.task.reward(problem, answer) for problem, answer in pairs) / len(prompts)

    def _next_params(self) -> SamplingParams:
        self._added += 1
        return SamplingParams(
            temperature=self.params.temperature,
            max_tokens=self.params.max_tokens,
            seed=(self.seed << 32) + self._added,
        )

    def _group(self, problem: Problem, samples: Sequence[TrainingSample]) -> Group:
        rewards = tuple(self.task.reward(problem, sample) for sample in samples)
        group = Group(tuple(samples), rewards)
        self.counts.add(group)
        return group

    def _timed(self, call: Callable[[], list[TrainingSample]]) -> list[TrainingSample]:
        start = self.now_ns()
        found = call()
        self.busy.append((start, self.now_ns()))
        return found


def staleness(groups: Sequence[Group], version: int) -> list[int]:
    """For each sampled token, how many versions older than `version` its weights are."""
    ages: list[int] = []
    for group in groups:
        for sample in group.samples:
            starts = [start for _, start in sample.weight_versions]
            ends = [*starts[1:], len(sample.completion_tokens)]
            for (made_by, start), end in zip(sample.weight_versions, ends, strict=True):
                ages += [version - made_by] * (end - start)
    return ages
