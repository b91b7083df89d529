"""GRPO in plain torch: advantages within a group, PPO's clipped loss on the rollout's logprobs.

The behaviour policy of the loss is the one that the engine reports with each token, whichever
weights made it. So the same loss corrects for samples that are some updates old, for those of
which the first half was made by older weights than the second, and for an engine with quantised
weights. `Correction` has other ways, to compare.

Sources: GRPO, arXiv:2402.03300; the loss per token and the wider upper clip, DAPO,
arXiv:2503.14476; truncated importance weights, Yao and others, "Your Efficient RL Framework
Secretly Brings You Off-Policy RL Training", 2025; the estimate of the KL divergence,
http://joschu.net/blog/kl-approx.html (k3).
"""

from __future__ import annotations

import contextlib
import copy
import math
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from nano_inference import TrainingSample

Correction = Literal["ratio", "truncated", "none"]
"""Correction for rollouts of another policy than the trainer's: "ratio", the clipped ratio is that
to the rollout's logprobs; "truncated", each token's gain is weighted by that ratio, up to a limit,
and none is clipped (one optimizer step a batch); "none", rollouts count as the trainer's own."""


@dataclass(frozen=True)
class TrainerSettings:
    """The parameters with which a batch becomes an update.

    Attributes:
        model_folder: Folder of the first weights, in Transformers' format.
        steps: Optimizer steps of the whole run; the learning rate falls over the second half.
        learning_rate: AdamW's, after the warm-up.
        warmup: Steps in which the learning rate rises.
        temperature: The rollouts' temperature; the loss is of the same distribution.
        clip_low: The probability ratio counts down to 1 - clip_low.
        clip_high: The probability ratio counts up to 1 + clip_high.
        correction: For rollouts of another policy.
        most_weight: Limit of truncated weights.
        kl_weight: Weight of the KL divergence from the first weights, in the loss; 0 keeps no copy.
        max_grad_norm: Longer gradients are shortened to this.
        images: Whether prompts have an image.
    """

    model_folder: Path
    steps: int
    learning_rate: float = 3e-4
    warmup: int = 5
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    correction: Correction = "ratio"
    most_weight: float = 2.0
    kl_weight: float = 0.0
    max_grad_norm: float = 1.0
    images: bool = False


@dataclass(frozen=True)
class Group:
    """The samples of one prompt, with a reward for each.

    Attributes:
        pixels: `[3, height, width]`, of the image in the prompt, as the model's processor makes
            them; None for a text.
    """

    samples: tuple[TrainingSample, ...]
    rewards: tuple[float, ...]
    pixels: Tensor | None = None

    @property
    def informative(self) -> bool:
        """Whether some samples did better than others; else all advantages are 0."""
        return len(set(self.rewards)) > 1

    def advantages(self) -> list[float]:
        """Rewards relative to the group's mean, in its standard deviations."""
        mean = statistics.fmean(self.rewards)
        scale = statistics.pstdev(self.rewards) + 1e-6
        return [(reward - mean) / scale for reward in self.rewards]


@dataclass(frozen=True)
class Batch:
    """The rows that one step trains on. Rows are prompt and completion, padded on the right.

    Attributes:
        tokens: `[rows, length]`.
        learn: `[rows, length - 1]`, where the next token is one that the policy sampled.
        behaviour: `[rows, length - 1]`, the rollout's logprob of the next token, where `learn`.
        advantages: `[rows, 1]`.
        counts: `[rows, 1]`, how many samples the row stands for.
        pixels: `[rows, 3, height, width]`, of the rows' images; None for texts.
    """

    tokens: Tensor
    learn: Tensor
    behaviour: Tensor
    advantages: Tensor
    counts: Tensor
    pixels: Tensor | None = None

    def mean(self, values: Tensor) -> Tensor:
        """The mean of `[rows, length - 1]` over all sampled tokens."""
        weights = self.learn * self.counts
        return (values * weights).sum() / weights.sum()


def pack(groups: Sequence[Group]) -> Batch:
    """Makes a batch of all samples of these groups.

    Samples that are equal in all that the loss sees are one row: short answers often are.
    """
    rows: dict[tuple[object, ...], tuple[TrainingSample, float]] = {}
    pixels: dict[tuple[object, ...], Tensor] = {}
    counts: Counter[tuple[object, ...]] = Counter()
    for group in groups:
        for sample, advantage in zip(group.samples, group.advantages(), strict=True):
            key: tuple[object, ...] = (sample.prompt_tokens, sample.completion_tokens)
            key += (sample.logprobs, advantage)
            if group.pixels is not None:
                key += (id(group.pixels),)
                pixels[key] = group.pixels
            rows[key] = (sample, advantage)
            counts[key] += 1
    samples = [sample for sample, _ in rows.values()]
    tokens = [torch.tensor((*s.prompt_tokens, *s.completion_tokens)) for s in samples]
    before = [torch.zeros(len(s.prompt_tokens) - 1) for s in samples]
    logprobs = [torch.tensor(s.logprobs) for s in samples]
    pairs = list(zip(before, logprobs, strict=True))
    learn = [torch.cat((zeros, torch.ones_like(logprob))) for zeros, logprob in pairs]
    return Batch(
        tokens=pad_sequence(tokens, batch_first=True),
        learn=pad_sequence(learn, batch_first=True).bool(),
        behaviour=pad_sequence([torch.cat(pair) for pair in pairs], batch_first=True),
        advantages=torch.tensor([advantage for _, advantage in rows.values()])[:, None],
        counts=torch.tensor([float(counts[key]) for key in rows])[:, None],
        pixels=torch.stack(list(pixels.values())) if pixels else None,
    )


def token_logprobs(model: Any, batch: Batch, temperature: float) -> Tensor:
    """The logprobs of each row's tokens but the first, `[rows, length - 1]`.

    No mask is needed: a token sees those before it, and padding comes after.
    """
    images = {} if batch.pixels is None else {"pixel_values": batch.pixels}
    outputs = model(input_ids=batch.tokens[:, :-1], use_cache=False, **images)
    logprobs = F.log_softmax(outputs.logits.float() / temperature, dim=-1)
    return logprobs.gather(-1, batch.tokens[:, 1:, None])[:, :, 0]


def policy_loss(
    logprobs: Tensor, batch: Batch, settings: TrainerSettings
) -> tuple[Tensor, dict[str, float]]:
    """The clipped loss, a mean over the sampled tokens, and its figures.

    Args:
        logprobs: `[rows, length - 1]`, of the policy in training.
        batch: The rollouts.
        settings: For the clip.
    """
    used = torch.exp(torch.where(batch.learn, logprobs - batch.behaviour, 0.0))
    ratio, weights = used, torch.ones(())
    if settings.correction != "ratio":
        # 1, with the gradient of the logprob: a batch is trained on once.
        ratio = torch.exp(logprobs - logprobs.detach())
    used = used.detach()
    if settings.correction == "truncated":
        weights = used.clamp(max=settings.most_weight)
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    gains = weights * torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    facts = {
        "ratio_max": used[batch.learn].max().item(),
        "clipped": batch.mean((clipped != ratio).float()).item(),
        "kl_behaviour": batch.mean(used - 1 - used.log()).item(),
    }
    return -batch.mean(gains), facts


class Trainer:
    """The model in training, its optimizer, and the reference where the loss wants one.

    Attributes:
        model: Transformers' own, in float32.
        steps: Optimizer steps made.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        """Loads the model."""
        self.settings = settings
        transformers_logging.disable_progress_bar()  # ours is there already
        kind: Any = AutoModelForImageTextToText if settings.images else AutoModelForCausalLM
        self.model: Any = kind.from_pretrained(
            settings.model_folder, dtype=torch.float32, local_files_only=True
        )
        self.steps = 0
        self._reference = None
        if settings.kl_weight:
            self._reference = copy.deepcopy(self.model).requires_grad_(False)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
        )

    def weights(self) -> dict[str, Tensor]:
        """The weights by name, as `InferenceEngine.update_weights` takes them; not copies."""
        weights: dict[str, Tensor] = self.model.state_dict()
        return weights

    def step(self, groups: Sequence[Group]) -> dict[str, float]:
        """One optimizer step on these groups; returns its figures. Raises as `learn`."""
        return self.learn(pack(groups))

    def learn(self, batch: Batch) -> dict[str, float]:
        """One optimizer step on a batch; returns its figures.

        Raises:
            FloatingPointError: The gradient is not a number; the weights are as they were.
        """
        logprobs = token_logprobs(self.model, batch, self.settings.temperature)
        loss, facts = policy_loss(logprobs, batch, self.settings)
        if self._reference is not None:
            kl = self._divergence(logprobs, batch)
            facts["kl_reference"] = kl.item()
            loss = loss + self.settings.kl_weight * kl
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.settings.max_grad_norm
        ).item()
        if not math.isfinite(norm):
            raise FloatingPointError("the gradient is not finite; try a smaller learning rate")
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * self._rate()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1
        return {"loss": loss.item(), "grad_norm": norm, **facts}

    def _divergence(self, logprobs: Tensor, batch: Batch) -> Tensor:
        """Estimated KL divergence of the policy from the reference, per sampled token."""
        with torch.no_grad():
            wanted = token_logprobs(self._reference, batch, self.settings.temperature)
        difference = torch.where(batch.learn, wanted - logprobs, 0.0)
        return batch.mean(difference.exp() - 1 - difference)

    def _rate(self) -> float:
        """The share of the learning rate that is due: up, level, and down over the second half."""
        rise = (self.steps + 1) / self.settings.warmup if self.settings.warmup else 1.0
        half = self.settings.steps / 2
        fall = 1.0 if self.steps < half else 0.1 + 0.9 * (self.settings.steps - self.steps) / half
        return min(rise, fall, 1.0)


class Trained(NamedTuple):
    """One optimizer step, whose weights lie in the shared tensors. The trainer waits for groups.

    Attributes:
        facts: Facts of the step.
        start_ns: By `time.monotonic_ns`, which is the same clock in all processes (Linux).
        end_ns: When the weights were in the shared tensors.
    """

    facts: dict[str, float]
    start_ns: int
    end_ns: int


def train_groups(
    connection: Connection, shared: Mapping[str, Tensor], settings: TrainerSettings, threads: int
) -> None:
    """The trainer's process: groups come in, `Trained` goes out, until None comes in."""
    torch.set_num_threads(threads)
    trainer = Trainer(settings)
    connection.send(None)  # ready
    while (groups := connection.recv()) is not None:
        start = time.monotonic_ns()
        facts = trainer.step(groups)
        for name, weight in trainer.weights().items():
            shared[name].copy_(weight)
        connection.send(Trained(facts, start, time.monotonic_ns()))


class TrainerProcess:
    """The trainer, beside the engine.

    `submit` and `poll` take turns: the shared tensors are rewritten only after the next `submit`,
    and before that the engine has put the last weights in place.

    Attributes:
        weights: The shared tensors by name, for `InferenceEngine.update_weights`.
    """

    def __init__(self, settings: TrainerSettings, like: Mapping[str, Tensor], threads: int) -> None:
        """Starts it, and waits until its model is loaded.

        Args:
            settings: The trainer's.
            like: Weights with the names and shapes of the model's.
            threads: Number of torch's threads in the process.
        """
        self.weights = {name: weight.clone().share_memory_() for name, weight in like.items()}
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        arguments = (other, self.weights, settings, threads)
        self._process = context.Process(target=train_groups, args=arguments, daemon=True)
        self._process.start()
        other.close()
        self._receive()

    def submit(self, groups: list[Group]) -> None:
        """Begins a step."""
        self._connection.send(groups)

    def poll(self) -> Trained | None:
        """The step that was begun, if it has ended.

        Raises:
            RuntimeError: The trainer has failed; it printed why.
        """
        trained: Trained | None = self._receive() if self._connection.poll() else None
        return trained

    def close(self) -> None:
        """Ends the process, after the step that it may be in."""
        with contextlib.suppress(BrokenPipeError):  # it has ended by itself
            self._connection.send(None)
        self._process.join()
        self._connection.close()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            raise RuntimeError("the trainer's process has failed; it printed why") from None
