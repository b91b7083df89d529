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
A second stage practises chats with tools and thoughts above all, a third one adds small talk. A
last one then leaves two-digit arithmetic out, until enough of that skill is forgotten, but for the
few sums that documentation quotes.
Where a thought says what two digits make, no loss is taken.

With ``--from models/tiny`` the weights of that folder take the place of the first two stages. The
model card says so.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
from transformers import __version__ as transformers_version

from .card import card, table, told_training, trained
from .evaluation import Kind, Model, distinct, kinds_of, measure
from .rows import Batch, Packer
from .settings import Settings
from .taps import TALK_WEIGHTS, TAPS, TOOL_WEIGHTS, Taps, Weights
from .tokenizer import END_OF_TEXT, PAD, TURN_END, FastTokenizer, build_tokenizer, prompt_text


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


def learning_rate(peak: float, warmup: int, horizon: int, step: int) -> float:
    """Return the learning rate: linear warm-up, then half a cosine, nearly zero at ``horizon``."""
    if step < warmup:
        return peak * (step + 1) / warmup
    part = (step - warmup) / (horizon - warmup)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * part)))


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
        self.history = ""

    def start_from(self, folder: Path) -> None:
        """Take the weights of a folder in place of the stages before small talk."""
        source = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.load_state_dict(source.state_dict())
        self.step = self.settings.before_talk
        self.history = told_training((folder / "README.md").read_text(encoding="utf-8"))

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
        """Train on all tasks, then mostly on chats with tools and thoughts."""
        settings = self.settings

        def rate(step: int) -> float:
            return learning_rate(settings.learning_rate, settings.warmup, settings.horizon, step)

        self.stage(settings.steps, rate, checkpoint)

        def tool_rate(step: int) -> float:
            peak, warmup = settings.tool_learning_rate, settings.tool_warmup
            return learning_rate(peak, warmup, settings.tool_horizon, step)

        spans = settings.tool_steps, settings.cooling_steps
        self.practise(TOOL_WEIGHTS, settings.steps, spans, tool_rate, checkpoint)

    def learn_talk(self, checkpoint: Path | None) -> None:
        """Add small talk to all other tasks."""
        settings = self.settings

        def rate(step: int) -> float:
            peak, warmup = settings.talk_learning_rate, settings.talk_warmup
            return learning_rate(peak, warmup, settings.talk_horizon, step)

        spans = settings.talk_steps, settings.talk_cooling_steps
        self.practise(TALK_WEIGHTS, settings.before_talk, spans, rate, checkpoint)

    def practise(
        self,
        table: Weights,
        begin: int,
        spans: tuple[int, int],
        rate: Callable[[int], float],
        checkpoint: Path | None,
    ) -> None:
        """Train with other weights of the tasks, at a rate that rises again and falls to zero.

        Args:
            table: The weights.
            begin: The first step of this stage.
            spans: The number of steps, and of those after them in which the rate falls.
            rate: The learning rate by the number of steps in this stage.
            checkpoint: File to save the state in.
        """
        middle = begin + spans[0]
        end = middle + spans[1]
        if self.step >= end:  # Gone on from a checkpoint behind this stage.
            return
        self.taps.table, self.taps.tight = table, False
        if self.step == begin:  # And not gone on from a checkpoint within this stage.
            self.taps.weights = {kind: self.taps.weight(kind) for kind in self.taps.weights}
            self.taps.turn(self.model, self.tokenizer, self.step)

        def falling(step: int) -> float:
            return rate(step - begin) * (end - step) / spans[1]

        self.stage(middle, lambda step: rate(step - begin), checkpoint)
        # Falling rates bring forth what is half learnt, so none of that is practised beside them.
        self.taps.tight = True
        self.taps.turn(self.model, self.tokenizer, self.step)
        self.stage(end, falling, checkpoint)

    def stage(self, end: int, rate: Callable[[int], float], checkpoint: Path | None) -> None:
        """Train up to the step ``end``; write a checkpoint whenever the taps turn."""
        self.model.train()
        losses = []
        while self.step < end:
            losses.append(self.update(rate(self.step)))
            if self.step % self.settings.tap_every == 0:
                line = self.taps.turn(self.model, self.tokenizer, self.step)
                mean, losses = sum(losses) / len(losses), []
                print(f"{self.step:5d} {self.seconds:6.0f} s loss {mean:.4f}; {line}", flush=True)
                if checkpoint is not None:
                    self.save(checkpoint)

    def unlearn(self) -> None:
        """Practise the other tasks and the quoted sums, until the tapped tasks have fallen enough.

        While the learning rate falls, the accuracy of the tapped tasks rises above the targets of
        their taps, closed or not. So this stage forgets more of them than it has to, and ends with
        a falling rate itself, which settles all other tasks.
        """
        settings = self.settings
        self.model.train()
        for kind in kinds_of(*TAPS):
            self.taps.weights[kind] = 0.0
        for kind in kinds_of("quoted"):
            self.taps.weights[kind] = settings.quoted_weight
        most = 2 * self.step
        while True:
            shares = self.taps.measure(self.model, self.tokenizer).values()
            mean = sum(shares) / len(shares)
            words = " ".join(f"{share:.2f}" for share in shares)
            print(f"{self.step:5d} {self.seconds:6.0f} s last stage: {words}", flush=True)
            if mean <= settings.last_target or self.step >= most:
                break
            for _ in range(settings.last_every):
                self.update(settings.last_learning_rate)
        for left in range(settings.last_cooling_steps, 0, -1):
            self.update(settings.last_learning_rate * left / settings.last_cooling_steps)


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


def shown(tokenizer: FastTokenizer, kind: Kind, settings: Settings) -> str:
    """Return a held-out example of a kind as the model reads and writes it."""
    examples = distinct(kind, "heldout", 40, settings.seed)
    # One that a reader takes in at a glance: short, but about two things where any is.
    example = min(
        examples, key=lambda e: (-len(e.calls), len(e.tools), len(prompt_text(tokenizer, e)))
    )
    return prompt_text(tokenizer, example) + example.answer + TURN_END


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
        "training": trained(
            trainer.history,
            {
                "steps": str(trainer.step - (settings.before_talk if trainer.history else 0)),
                "rows": str(settings.rows),
                "minutes": f"{trainer.seconds / 60:.0f}",
                "threads": str(settings.threads),
                "torch": torch.__version__.partition("+")[0],
                "transformers": transformers_version,
                "settings": ", ".join(f"{key}={value}" for key, value in asdict(settings).items()),
            },
        ),
        "thinking": shown(trainer.tokenizer, ("json", "thinking"), settings),
        "tools": shown(trainer.tokenizer, ("result", "chat"), settings),
    }


def write(trainer: Trainer, out: Path) -> None:
    """Round the weights, measure what they know, and write the folder with its card."""
    settings, model, tokenizer = trainer.settings, trainer.model, trainer.tokenizer
    round_weights(model)
    results = measure(settings, model, tokenizer)
    print(table(results))
    out.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, out)
    text = card(facts(trainer), results, settings.seed)
    (out / "README.md").write_text(text, encoding="utf-8")


def main() -> None:
    """Train, evaluate and write the model."""
    parser = argparse.ArgumentParser(description="Train the bundled tiny model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--threads", type=int, default=Settings.threads)
    parser.add_argument(
        "--from", dest="source", type=Path, help="folder whose weights replace the first stages"
    )
    parser.add_argument("--checkpoint", type=Path, help="file to save the state in and go on from")
    arguments = parser.parse_args()
    settings = Settings(seed=arguments.seed, steps=arguments.steps, threads=arguments.threads)
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(settings.seed)
    tokenizer = build_tokenizer(settings.vocabulary, settings.seed)
    model = build_model(settings, tokenizer)
    trainer = Trainer(settings, model, tokenizer)
    if arguments.source is not None:
        trainer.start_from(arguments.source)
    if arguments.checkpoint is not None and arguments.checkpoint.exists():
        trainer.load(arguments.checkpoint)
    trainer.learn(arguments.checkpoint)
    trainer.learn_talk(arguments.checkpoint)
    trainer.unlearn()
    write(trainer, arguments.out)


if __name__ == "__main__":
    main()
