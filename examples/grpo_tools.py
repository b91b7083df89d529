"""GRPO with tools over several turns, trained from the token tree alone.

    python examples/grpo_tools.py
    python examples/grpo_tools.py --steps 40 --json run.json

An agent of the plainest kind talks to the bundled model over HTTP, in OpenAI's chat messages: it
asks for a product, runs the tool that the model calls, sends the result back, and asks for the next
product in the same conversation. The agent has no tokenizer and keeps no logprobs. It names its
conversation by a header, X-Session-ID. What is trained on are the samples of the sessions' token
trees, `GET /v1/sessions/{id}/samples`: token ids, loss mask and logprobs as they were sampled.

The bundled model was trained on single questions, so it loses the thread after the first: the
reward of a conversation is the share of its questions that are answered before the first mistake.
Each step checks that no token differs between what was sampled and what is trained on.
The docs are in docs/token-tree.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import torch
from grpo_trainer import Batch, Trainer, TrainerSettings
from torch.nn.utils.rnn import pad_sequence

from nano_inference import Gateway, Pipeline, load_config

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}

Question = tuple[int, int]
"""Two numbers, whose product is asked for."""


@dataclass(frozen=True)
class Settings:
    """The parameters of a run.

    Attributes:
        steps: Optimizer steps.
        prompts: Conversations of a step.
        samples: Samples of each conversation.
        questions: Questions of a conversation.
        max_tokens: Limit of tokens of a message.
        learning_rate: AdamW's.
        held_out: Conversations before and after, of other products; greedy.
        seed: Seed of the questions and of the samples.
        threads: Threads of torch.
    """

    steps: int = 40
    prompts: int = 12
    samples: int = 8
    questions: int = 3
    max_tokens: int = 60
    learning_rate: float = 2e-4
    held_out: int = 100
    seed: int = 1
    threads: int = 1


@dataclass
class Episode:
    """One conversation.

    Attributes:
        questions: What is asked, one after the other.
        session: Name of its session; "" for none.
        right: Questions answered before the first mistake.
        sampled: The tokens of all messages of the model, as their answers had them.
        seed: Base of its messages' seeds; None for greedy ones.
    """

    questions: Sequence[Question]
    session: str = ""
    seed: int | None = None
    right: int = 0
    sampled: list[int] = field(default_factory=list)

    @property
    def reward(self) -> float:
        return self.right / len(self.questions)


class Agent:
    """An agent that knows OpenAI's chat interface, and nothing of tokens."""

    def __init__(self, http: httpx2.AsyncClient, max_tokens: int) -> None:
        self._http = http
        self._max_tokens = max_tokens

    async def play(self, episode: Episode) -> None:
        """Hold a conversation, up to the first mistake."""
        messages: list[dict[str, Any]] = []
        for a, b in episode.questions:
            messages.append({"role": "user", "content": f"What is {a} times {b}?"})
            message = await self._answer(episode, messages)
            calls = message.get("tool_calls") or []
            if [_numbers(call) for call in calls] != [[a, b]]:
                return
            messages += [
                message,
                {"role": "tool", "tool_call_id": calls[0]["id"], "content": str(a * b)},
            ]
            message = await self._answer(episode, messages)
            if message.get("content") != f"{a} times {b} is {a * b}.":
                return
            messages.append(message)
            episode.right += 1

    async def _answer(self, episode: Episode, messages: list[dict[str, Any]]) -> dict[str, Any]:
        body = {
            "model": "tiny",
            "messages": messages,
            "tools": [TOOL],
            "max_tokens": self._max_tokens,
            "temperature": 0.0 if episode.seed is None else 1.0,
            "seed": None if episode.seed is None else episode.seed + len(messages),
            # For the check alone: the trainer takes the tokens of the tree.
            "return_token_ids": True,
        }
        headers = {"X-Session-ID": episode.session} if episode.session else {}
        answer = await self._http.post("/v1/chat/completions", json=body, headers=headers)
        answer.raise_for_status()
        (choice,) = answer.json()["choices"]
        episode.sampled += choice["token_ids"]
        message: dict[str, Any] = choice["message"]
        return message


def _numbers(call: dict[str, Any]) -> list[Any]:
    try:
        return list(json.loads(call["function"]["arguments"]).values())
    except (ValueError, AttributeError):
        return []


# --- questions ------------------------------------------------------------------------------------


def is_held_out(question: Question) -> bool:
    """Return whether a product, in either order, is kept for the evaluation."""
    return sum(question) * (1 + abs(question[0] - question[1])) % 5 == 0


def conversations(number: int, rng: random.Random, *, held_out: bool) -> Iterator[list[Question]]:
    """Yield conversations for ever, of so many questions each."""
    while True:
        found: list[Question] = []
        while len(found) < number:
            question = (rng.randrange(2, 100), rng.randrange(2, 100))
            if is_held_out(question) == held_out:
                found.append(question)
        yield found


# --- training -------------------------------------------------------------------------------------


class TokensDiffer(Exception):
    """A token that is to be trained on is not the one that was sampled, or has another place."""


async def read_sample(http: httpx2.AsyncClient, episode: Episode) -> dict[str, Any]:
    """Return the training sample of a conversation, and delete its session.

    Raises:
        TokensDiffer: It is not one path with exactly the sampled tokens.
    """
    path = f"/v1/sessions/{episode.session}"
    answer = await http.get(f"{path}/samples")
    answer.raise_for_status()
    samples: list[dict[str, Any]] = answer.json()["data"]
    await http.delete(path)
    if len(samples) != 1:
        raise TokensDiffer(f"the history was rendered anew: {len(samples)} paths")
    (sample,) = samples
    pairs = zip(sample["token_ids"], sample["loss_mask"], strict=True)
    if [token_id for token_id, mask in pairs if mask] != episode.sampled:
        raise TokensDiffer("the tree has other tokens than the answers")
    return sample


def pack(samples: Sequence[dict[str, Any]], advantages: Sequence[float]) -> Batch:
    """Return the batch of these samples: the loss is on the sampled tokens of all turns."""
    tokens = [torch.tensor(each["token_ids"]) for each in samples]
    learn = [torch.tensor(each["loss_mask"][1:]) for each in samples]
    behaviour = [torch.tensor(each["logprobs"][1:]) for each in samples]
    return Batch(
        tokens=pad_sequence(tokens, batch_first=True),
        learn=pad_sequence(learn, batch_first=True).bool(),
        behaviour=pad_sequence(behaviour, batch_first=True),
        advantages=torch.tensor(advantages)[:, None],
        counts=torch.ones(len(samples), 1),
    )


@dataclass
class Record:
    """The figures of a run, by step.

    Attributes:
        rewards: Mean reward of the conversations.
        ratios: Largest ratio of a token's probability by the trainer to that when it was sampled.
        tokens: Sampled tokens.
        trained: Sampled tokens that were trained on.
        requests: Requests of the agent.
    """

    rewards: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    tokens: int = 0
    trained: int = 0


async def train_step(
    settings: Settings,
    agent: Agent,
    http: httpx2.AsyncClient,
    asked: Iterator[list[Question]],
    trainer: Trainer,
    record: Record,
) -> None:
    """Play, read the samples, and train on those of conversations with different rewards."""
    first = (settings.seed * settings.steps + len(record.rewards)) * settings.prompts
    bases = [place * settings.samples for place in range(first, first + settings.prompts)]
    groups = [
        [
            Episode(questions, uuid.uuid4().hex, 100 * (base + number))
            for number in range(settings.samples)
        ]
        for questions, base in zip(asked, bases, strict=False)
    ]
    episodes = [episode for group in groups for episode in group]
    await asyncio.gather(*map(agent.play, episodes))
    samples = await asyncio.gather(*(read_sample(http, episode) for episode in episodes))
    of = {episode.session: sample for episode, sample in zip(episodes, samples, strict=True)}
    chosen: list[dict[str, Any]] = []
    advantages: list[float] = []
    for group in groups:
        rewards = [episode.reward for episode in group]
        if len(set(rewards)) > 1:
            mean, scale = statistics.fmean(rewards), statistics.pstdev(rewards)
            chosen += [of[episode.session] for episode in group]
            advantages += [(reward - mean) / scale for reward in rewards]
    record.rewards.append(statistics.fmean(episode.reward for episode in episodes))
    record.tokens += sum(len(episode.sampled) for episode in episodes)
    record.trained += sum(sum(each["loss_mask"]) for each in chosen)
    if chosen:
        facts = await asyncio.to_thread(trainer.learn, pack(chosen, advantages))
        record.ratios.append(facts["ratio_max"])


async def accuracy(settings: Settings, agent: Agent) -> float:
    """Return the share of held-out conversations without a mistake, greedy."""
    asked = conversations(settings.questions, random.Random("held out"), held_out=True)
    episodes = [Episode(next(asked)) for _ in range(settings.held_out)]
    await asyncio.gather(*map(agent.play, episodes))
    return statistics.fmean(episode.reward == 1 for episode in episodes)


async def run(settings: Settings) -> dict[str, Any]:
    """Train, and return the figures."""
    torch.set_num_threads(settings.threads)
    rows = settings.prompts * settings.samples
    config = load_config(
        env={},
        overrides={
            "engine.dtype": "float32",
            "engine.max_batch_size": rows,
            "bus.trees_max_bytes": 1 << 28,
            "gateway.continue_by_tokens": True,
            "telemetry.log_level": "warning",
        },
    )
    trainer = Trainer(
        TrainerSettings(config.engine.model_folder, settings.steps, settings.learning_rate)
    )
    asked = conversations(settings.questions, random.Random(settings.seed), held_out=False)
    record = Record()
    async with Pipeline(config) as pipeline, Gateway(pipeline.client, config) as gateway:
        limits = httpx2.Limits(max_connections=rows)
        async with httpx2.AsyncClient(base_url=gateway.url, limits=limits, timeout=600) as http:
            agent = Agent(http, settings.max_tokens)
            before = await accuracy(settings, agent)
            print(f"held out before: {before:.1%} of {settings.held_out} conversations")
            start = time.monotonic()
            for step in range(1, settings.steps + 1):
                await train_step(settings, agent, http, asked, trainer, record)
                await pipeline.client.update_weights(trainer.weights())
                if step % 5 == 0 or step == settings.steps:
                    print(f"step {step}: reward {statistics.fmean(record.rewards[-5:]):.3f}")
            minutes = (time.monotonic() - start) / 60
            after = await accuracy(settings, agent)
            print(f"held out after: {after:.1%}")
    return {
        "settings": asdict(settings),
        "before": before,
        "after": after,
        "minutes": minutes,
        "rewards": [round(each, 4) for each in record.rewards],
        "sampled_tokens": record.tokens,
        "trained_tokens": record.trained,
        "differing_tokens": 0,  # or TokensDiffer
        "ratio_max": max(record.ratios, default=1.0),
    }


def main() -> None:
    default = Settings()
    parser = argparse.ArgumentParser(description="GRPO with tools from the token tree.")
    for name, value in asdict(default).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    arguments = vars(parser.parse_args())
    path = arguments.pop("json")
    found = asyncio.run(run(Settings(**arguments)))
    print({name: value for name, value in found.items() if name not in ("settings", "rewards")})
    if path:
        path.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
