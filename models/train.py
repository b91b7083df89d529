"""Train the bundled tiny model from nothing.

Command, run at the root of the repository, which writes the whole folder ``models/tiny`` anew::

    python -m nano_inference.models.train --out models/tiny

The script makes its text (:mod:`nano_inference.models.tasks`), trains a byte-level BPE tokenizer
and a small Qwen2-architecture model on it, rounds the weights to bfloat16, measures greedy exact
match on held-out examples and writes the model card. With the same seed, library versions, number
of threads and machine it gives the same weights.

Two-digit arithmetic must stay half learnt, so that reinforcement learning has something to
improve. A tap for each operator and form sees to that: it looks at the accuracy on the ``tune``
split every so many steps, and while that has reached its target, examples of its kind are rare.
A last stage then practises the other tasks only, until enough of the two-digit skill is forgotten.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
from transformers import __version__ as transformers_version

from . import tasks
from .card import SAMPLES, Result, card, table
from .tokenizer import (
    END_OF_TEXT,
    PAD,
    SYSTEM_MESSAGES,
    TURN_END,
    FastTokenizer,
    build_tokenizer,
    chat_text,
    encode,
)

Example = tasks.Example

# How often an example of each task is drawn, as (plain, chat) weights.
WEIGHTS: dict[str, tuple[float, float]] = {
    "add1": (10.0, 6.0),
    "sub1": (10.0, 6.0),
    "add2": (30.0, 12.0),
    "sub2": (30.0, 12.0),
    "json": (6.0, 5.0),
    "story": (3.0, 3.0),
}


@dataclass(frozen=True)
class Tap:
    """How the weight of a task follows its accuracy on the tune split."""

    target: float  # From this accuracy on, the weight is multiplied by ``closed``.
    closed: float
    opening: int  # The step before which the tap stays closed.


# One-digit arithmetic comes first: the other digits of a sum build on the same table of facts.
TAPS: dict[str, Tap] = {
    "add2": Tap(0.52, 0.05, 600),
    "sub2": Tap(0.52, 0.05, 600),
}
SAMPLED = ("add2", "sub2")

# The annotations of Transformers do not pass mypy's strict mode, so models and tokenizers are Any.
Model = Any
Kind = tuple[str, bool]  # A task and whether it is in its chat form.


@dataclass(frozen=True)
class Settings:
    """Everything that decides what is trained."""

    seed: int = 1
    threads: int = 1
    steps: int = 4000
    rows: int = 4
    length: int = 256
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
    last_learning_rate: float = 2e-4
    last_every: int = 20
    last_target: float = 0.6
    heldout: int = 500


def build_model(settings: Settings, tokenizer: FastTokenizer) -> Model:
    """Return the untrained model."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        max_window_layers=settings.layers,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    model: Model = Qwen2ForCausalLM(config)
    generation: Any = GenerationConfig
    model.generation_config = generation(
        do_sample=False,
        eos_token_id=[tokenizer.convert_tokens_to_ids(t) for t in (END_OF_TEXT, TURN_END)],
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    return model


class Taps:
    """Hold the weights of all kinds of examples, small ones where a kind is known well enough."""

    def __init__(self, settings: Settings) -> None:
        """Open the taps that have no opening step."""
        kinds = [(task, chat) for task in tasks.TASKS for chat in (False, True)]
        self.weights: dict[Kind, float] = {kind: WEIGHTS[kind[0]][kind[1]] for kind in kinds}
        self.prompts: dict[Kind, list[Example]] = {}
        for task, chat in kinds:
            if task in TAPS:
                self.prompts[task, chat] = tasks.distinct(
                    task, "tune", settings.tap_prompts, settings.seed, chat=chat
                )
                self.set((task, chat), is_open=TAPS[task].opening == 0)

    def set(self, kind: Kind, *, is_open: bool) -> None:
        """Open or close the tap of ``kind``."""
        task, chat = kind
        self.weights[kind] = WEIGHTS[task][chat] * (1.0 if is_open else TAPS[task].closed)

    def measure(self, model: Model, tokenizer: FastTokenizer) -> dict[Kind, float]:
        """Return the accuracy of each tapped kind on the tune split."""
        return {
            kind: evaluate(model, tokenizer, prompts) / len(prompts)
            for kind, prompts in self.prompts.items()
        }

    def turn(self, model: Model, tokenizer: FastTokenizer, step: int) -> str:
        """Open or close the taps whose step has come, and return a line for the log."""
        words = []
        if all(step < tap.opening for tap in TAPS.values()):
            return "taps closed"
        for (task, chat), share in self.measure(model, tokenizer).items():
            is_open = step >= TAPS[task].opening and share < TAPS[task].target
            self.set((task, chat), is_open=is_open)
            form = "chat" if chat else "plain"
            words.append(f"{task} {form} {share:.2f}{'+' if is_open else '-'}")
        return ", ".join(words)


@dataclass(frozen=True)
class Batch:
    """The rows of one training step."""

    tokens: torch.Tensor
    positions: torch.Tensor  # Counted from the beginning of each document.
    mask: torch.Tensor  # True where a token (third axis) sees another one (fourth axis).
    targets: torch.Tensor
    learn: torch.Tensor  # Nonzero where the target is a part of an answer.


class Packer:
    """Make rows of training tokens: examples one after another, each part with its loss weight."""

    def __init__(self, settings: Settings, tokenizer: FastTokenizer, taps: Taps) -> None:
        """Start the stream of documents that the seed stands for."""
        self.settings = settings
        self.tokenizer = tokenizer
        self.taps = taps
        self.rng = random.Random(settings.seed)
        self.end_of_text = encode(tokenizer, END_OF_TEXT)
        self.turn_end = encode(tokenizer, TURN_END)

    def draw(self, *, only_chat: bool = False) -> Example:
        """Draw the next example."""
        kinds = [kind for kind in self.taps.weights if kind[1] or not only_chat]
        weights = [self.taps.weights[kind] for kind in kinds]
        task, chat = self.rng.choices(kinds, weights)[0]
        return tasks.draw(task, "train", self.rng, chat=chat)

    def document(self) -> tuple[list[int], list[bool]]:
        """Return a completion or a chat of one or more turns, and which tokens to learn."""
        example = self.draw()
        if not example.chat:
            prompt = encode(self.tokenizer, example.prompt)
            answer = encode(self.tokenizer, example.answer) + self.end_of_text
            return prompt + answer, [False] * len(prompt) + [True] * len(answer)
        messages = []
        if self.rng.random() < 0.2:
            messages.append({"role": "system", "content": self.rng.choice(SYSTEM_MESSAGES)})
        ids: list[int] = []
        learn: list[bool] = []
        done = ""
        while True:
            messages.append({"role": "user", "content": example.prompt})
            text = chat_text(self.tokenizer, messages)
            prompt = encode(self.tokenizer, text[len(done) :])
            answer = encode(self.tokenizer, example.answer) + self.turn_end
            ids += prompt + answer
            learn += [False] * len(prompt) + [True] * len(answer)
            if self.rng.random() >= 0.2 or len(ids) > 150:
                break
            done = text + example.answer + TURN_END
            messages.append({"role": "assistant", "content": example.answer})
            example = self.draw(only_chat=True)
        return ids + self.end_of_text, [*learn, False]

    def row(self) -> list[tuple[int, bool, int, int]]:
        """Return a row of ``length`` + 1 tokens as (token, learn it, document, position).

        The last document may be cut. In some rows, all documents count as a single long one.
        """
        size = self.settings.length + 1
        joined = self.rng.random() < self.settings.joined
        row: list[tuple[int, bool, int, int]] = []
        number = 0
        while len(row) < size:
            start = 0 if joined else len(row)
            for token, learn in zip(*self.document(), strict=True):
                row.append((token, learn, number, len(row) - start))
            number += not joined
        return row[:size]

    def batch(self) -> Batch:
        """Return the rows of one step."""
        rows = torch.tensor([self.row() for _ in range(self.settings.rows)])
        tokens, learn, documents, positions = rows.unbind(-1)
        documents = documents[:, :-1]
        earlier = torch.ones(self.settings.length, self.settings.length, dtype=torch.bool).tril()
        mask = (documents[:, :, None] == documents[:, None, :]) & earlier
        return Batch(tokens[:, :-1], positions[:, :-1], mask[:, None], tokens[:, 1:], learn[:, 1:])


@torch.no_grad()
def evaluate(
    model: Model,
    tokenizer: FastTokenizer,
    examples: Iterable[Example],
    *,
    sample: bool = False,
) -> int:
    """Return how many of the examples the model answers exactly, greedy or at temperature 1.

    Prompts of the same length go together, so no padding has a part in the result.
    """
    model.eval()
    groups: dict[int, list[tuple[Example, list[int]]]] = {}
    for example in examples:
        text = example.prompt
        if example.chat:
            text = chat_text(tokenizer, [{"role": "user", "content": text}])
        ids = encode(tokenizer, text)
        groups.setdefault(len(ids), []).append((example, ids))
    how: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0} if sample else {}
    right = 0
    for length, group in sorted(groups.items()):
        longest = max(len(encode(tokenizer, example.answer)) for example, _ in group)
        prompts = torch.tensor([ids for _, ids in group])
        output = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=longest + 2,
            **how,
        )
        for (example, _), ids in zip(group, output.tolist(), strict=True):
            text = tokenizer.decode(ids[length:], skip_special_tokens=True)
            right += tasks.grade(example, text)
    model.train()
    return right


def learning_rate(settings: Settings, step: int) -> float:
    """Return the learning rate: linear warm-up, then half a cosine down to nearly zero."""
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    part = (step - settings.warmup) / (settings.steps - settings.warmup)
    return settings.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * part)))


def build_optimizer(settings: Settings, model: Model) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98))


def loss_of(model: Model, batch: Batch) -> torch.Tensor:
    """Return the mean loss over the answers; only their places pass the output layer."""
    states = model.model(
        input_ids=batch.tokens,
        position_ids=batch.positions,
        attention_mask=batch.mask,
        use_cache=False,
    ).last_hidden_state
    chosen = batch.learn.bool()
    return F.cross_entropy(model.lm_head(states[chosen]), batch.targets[chosen])


class Trainer:
    """A model in training with all that changes from step to step."""

    def __init__(self, settings: Settings, model: Model, tokenizer: FastTokenizer) -> None:
        """Stand before the first step."""
        self.settings = settings
        self.model = model
        self.tokenizer = tokenizer
        self.taps = Taps(settings)
        self.packer = Packer(settings, tokenizer, self.taps)
        self.optimizer = build_optimizer(settings, model)
        self.step = 0
        self.seconds = 0.0

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"rng": self.packer.rng.getstate(), "weights": self.taps.weights}
        torch.save(state | {"step": self.step, "seconds": self.seconds}, path)

    def load(self, path: Path) -> None:
        """Go back to where a checkpoint was written."""
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.packer.rng.setstate(state["rng"])
        self.taps.weights = state["weights"]
        self.step, self.seconds = state["step"], state["seconds"]

    def update(self, rate: float) -> float:
        """Make one step with the learning rate ``rate``; return the loss."""
        start = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(self.model, self.packer.batch())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.seconds += time.perf_counter() - start
        return loss.item()

    def learn(self, checkpoint: Path | None) -> None:
        """Train on all tasks; a checkpoint is written whenever the taps turn."""
        self.model.train()
        losses = []
        while self.step < self.settings.steps:
            losses.append(self.update(learning_rate(self.settings, self.step)))
            if self.step % self.settings.tap_every == 0:
                line = self.taps.turn(self.model, self.tokenizer, self.step)
                mean, losses = sum(losses) / len(losses), []
                print(f"{self.step:5d} {self.seconds:6.0f} s loss {mean:.4f}; {line}", flush=True)
                if checkpoint is not None:
                    self.save(checkpoint)

    def unlearn(self) -> None:
        """Practise the other tasks only, until the tapped ones have fallen to their last target.

        While the learning rate falls, the accuracy of the tapped tasks rises above the targets of
        their taps, closed or not. This stage ends where enough of it is forgotten.
        """
        self.model.train()
        for kind in self.taps.prompts:
            self.taps.weights[kind] = 0.0
        while True:
            shares = self.taps.measure(self.model, self.tokenizer).values()
            mean = sum(shares) / len(shares)
            words = " ".join(f"{share:.2f}" for share in shares)
            print(f"{self.step:5d} {self.seconds:6.0f} s last stage: {words}", flush=True)
            if mean <= self.settings.last_target or self.step >= 2 * self.settings.steps:
                return
            for _ in range(self.settings.last_every):
                self.update(self.settings.last_learning_rate)


def measure(settings: Settings, model: Model, tokenizer: FastTokenizer) -> list[Result]:
    """Evaluate every kind of example on held-out prompts."""
    results = []
    torch.manual_seed(settings.seed)
    for task in tasks.TASKS:
        for chat in (False, True):
            prompts = tasks.distinct(task, "heldout", settings.heldout, settings.seed, chat=chat)
            greedy = evaluate(model, tokenizer, prompts)
            sampled = None
            if task in SAMPLED:
                sampled = evaluate(model, tokenizer, prompts * SAMPLES, sample=True)
            form = "chat" if chat else "plain"
            results.append(Result(task, form, len(prompts), greedy, sampled))
    return results


def round_weights(model: Model) -> None:
    """Round the float32 weights to values that bfloat16 can hold."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())


def save(model: Model, tokenizer: FastTokenizer, out: Path) -> None:
    """Write model and tokenizer: the weights as bfloat16, to be computed with in float32."""
    model.to(torch.bfloat16).save_pretrained(out)
    model.to(torch.float32)
    tokenizer.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    # The weights are stored small, but a run that takes the dtype of the config uses float32.
    edit_json(out / "config.json", {"dtype": "float32"})
    # AutoTokenizer takes this class for the architecture anyway; tokenizer.json says the same.
    edit_json(out / "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"})


def edit_json(path: Path, changes: dict[str, Any]) -> None:
    """Change some top-level entries of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def facts(trainer: Trainer) -> dict[str, str]:
    """What the card tells of the model and its training, as it is printed there."""
    settings = trainer.settings
    return {
        "parameters": f"{sum(p.numel() for p in trainer.model.parameters()):,}",
        "layers": str(settings.layers),
        "hidden": str(settings.hidden),
        "head": str(settings.hidden // 4),
        "intermediate": str(settings.intermediate),
        "length": str(settings.length),
        "vocabulary": str(len(trainer.tokenizer)),
        "steps": str(trainer.step),
        "rows": str(settings.rows),
        "minutes": f"{trainer.seconds / 60:.0f}",
        "threads": str(settings.threads),
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers_version,
        "settings": ", ".join(f"{key}={value}" for key, value in asdict(settings).items()),
    }


def main() -> None:
    """Train, evaluate and write the model."""
    parser = argparse.ArgumentParser(description="Train the bundled tiny model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--threads", type=int, default=Settings.threads)
    parser.add_argument("--checkpoint", type=Path, help="file to save the state in and go on from")
    arguments = parser.parse_args()
    settings = Settings(seed=arguments.seed, steps=arguments.steps, threads=arguments.threads)
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(settings.seed)
    tokenizer = build_tokenizer(settings.vocabulary, settings.seed)
    model = build_model(settings, tokenizer)
    trainer = Trainer(settings, model, tokenizer)
    if arguments.checkpoint is not None and arguments.checkpoint.exists():
        trainer.load(arguments.checkpoint)
    trainer.learn(arguments.checkpoint)
    trainer.unlearn()
    round_weights(model)
    results = measure(settings, model, tokenizer)
    print(table(results))
    arguments.out.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, arguments.out)
    text = card(facts(trainer), results, settings.seed)
    (arguments.out / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
