"""Train the bundled tiny model from nothing.

Command, run at the root of the repository, which writes the whole folder `models/tiny` anew:

    python -m examples.bundled_models.train --out models/tiny

The script makes its text (`tasks.py`), trains a byte-level BPE tokenizer
and a small Qwen2-architecture model on it, rounds the weights to bfloat16, measures greedy exact
match on held-out examples and writes the model card. With the same seed, library versions, number
of threads and machine it gives the same weights.

Two-digit arithmetic must stay half learnt, so that reinforcement learning has something to
improve. Each operator and form has a tap: every `tap_every` steps its accuracy on the `tune` split
is measured, and above a target, examples of its kind become rare. A second stage practises chats
with tools and thoughts above all, a third one adds small talk. The last stage leaves two-digit
arithmetic out, except for the few sums that documentation quotes, until enough of that skill is
forgotten. Two-digit results in thoughts have no loss.

With `--from models/tiny` the weights of that folder take the place of the first two stages. The
model card says so.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    GenerationConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers import __version__ as transformers_version

from . import tasks
from .evaluation import SAMPLES, Kind, Model, Result, kinds_of, measure
from .rows import TAPPED, Batch, Packer, Taps
from .settings import TrainingSettings, TrainingStage
from .tokenizer import END_OF_TEXT, PAD, TURN_END, FastTokenizer, build_tokenizer, prompt_text

CARD = Path(__file__).with_name("card.md").read_text(encoding="utf-8")

CONTINUED = """\
These weights are not from one run. The stages for small talk and for forgetting went on from the
weights of an earlier run, whose card said:

{}

The last run:

"""


def table(results: list[Result]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| task | form | held-out prompts | greedy right | greedy | sampled, temperature 1 |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for r in results:
        sampled = "" if r.sampled is None else f"{r.sampled / (r.count * SAMPLES):.1%}"
        lines.append(
            f"| {r.task} | {r.form} | {r.count} | {r.greedy} | {r.greedy / r.count:.1%} "
            f"| {sampled} |"
        )
    return "\n".join(lines)


def training_section(text: str) -> str:
    """Return the section about training of a model card."""
    return text.partition("\n## Training\n")[2].partition("\n## Licence\n")[0].strip("\n")


def card(facts: Mapping[str, object], results: list[Result], seed: int) -> str:
    """Return the text of the model card.

    Args:
        facts: The result of `train.facts`.
        results: The held-out evaluation.
        seed: Chooses the example of each kind.
    """
    examples = [
        f"| {kind[0]} | {kind[1]} | `{e.prompt}` | `{e.answer}` |"
        for kind in kinds_of(*tasks.TASKS)
        if kind[1] != "thinking"
        for e in tasks.distinct(*kind, "heldout", 1, seed)
    ]
    talk = [
        f"| {task} | `{e.prompt}` | `{e.answer}` |"
        for task in tasks.TALK_TASKS
        for e in tasks.distinct(task, "chat", "heldout", 1, seed)
    ]
    return CARD.format(
        examples="\n".join(examples),
        talk="\n".join(talk),
        samples=SAMPLES,
        quoted=" and ".join(f"`{expression}`" for expression in tasks.QUOTED),
        table=table(results),
        **facts,
    )


def build_model(settings: TrainingSettings, tokenizer: FastTokenizer) -> Model:
    """Return the untrained model."""
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden,
        "intermediate_size": settings.intermediate,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        "pad_token_id": tokenizer.convert_tokens_to_ids(PAD),
    }
    model: Model
    if settings.architecture == "hybrid":
        width = settings.hidden // 4
        heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "head_dim": width}
        widths = {"linear_key_head_dim": width, "linear_value_head_dim": width}
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**common, **heads, **widths))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**common, max_window_layers=settings.layers))
    generation: Any = GenerationConfig
    model.generation_config = generation(
        do_sample=False,
        eos_token_id=[tokenizer.convert_tokens_to_ids(t) for t in (END_OF_TEXT, TURN_END)],
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    return model


def learning_rate(stage: TrainingStage, step: int) -> float:
    """Return the rate: linear warm-up, half a cosine, nearly zero at the horizon, then to zero."""
    if step < stage.warmup:
        return stage.rate * (step + 1) / stage.warmup
    part = (step - stage.warmup) / (stage.horizon - stage.warmup)
    rate = stage.rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * part)))
    left = stage.steps + stage.cooling - step
    return rate * left / stage.cooling if left <= stage.cooling else rate


def build_optimizer(settings: TrainingSettings, model: Model) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.stages[0].rate, betas=(0.9, 0.98))


def loss_of(model: Model, batch: Batch) -> torch.Tensor:
    """Return the mean loss over the answers; only their positions pass the output layer."""
    states = model.model(
        input_ids=batch.tokens,
        position_ids=batch.positions,
        attention_mask=batch.mask,
        use_cache=False,
    ).last_hidden_state
    chosen = batch.learn.bool()
    return F.cross_entropy(model.lm_head(states[chosen]), batch.targets[chosen])


@dataclass
class Trainer:
    """A model in training and its state. `checkpoint` is the file to save it in."""

    settings: TrainingSettings
    model: Model
    tokenizer: FastTokenizer
    checkpoint: Path | None

    def __post_init__(self) -> None:
        self.taps = Taps(self.settings)
        self.packer = Packer(self.settings, self.tokenizer, self.taps)
        self.optimizer = build_optimizer(self.settings, self.model)
        self.step = 0
        self.seconds = 0.0
        self.history = ""

    def start_from(self, folder: Path) -> None:
        """Take the weights of a folder in place of the stages before small talk."""
        source = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.load_state_dict(source.state_dict())
        self.step = self.settings.before_talk
        self.history = training_section((folder / "README.md").read_text(encoding="utf-8"))

    def save(self) -> None:
        """Write the checkpoint, if there is a file for it."""
        if self.checkpoint is None:
            return
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"rng": self.packer.rng.getstate(), "weights": self.taps.weights}
        state |= {"waiting": self.packer.waiting}
        torch.save(state | {"step": self.step, "seconds": self.seconds}, self.checkpoint)

    def resume(self) -> None:
        """Continue from the checkpoint, if there is one."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.packer.rng.setstate(state["rng"])
        self.packer.waiting = state["waiting"]
        self.taps.weights = state["weights"]
        self.step, self.seconds = state["step"], state["seconds"]

    def update(self, rate: float) -> float:
        """Make one step with the learning rate `rate`; return the loss."""
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

    def learn(self) -> None:
        """Train on all tasks, then mostly on chats with tools and thoughts, then on small talk."""
        begin = 0
        for number, stage in enumerate(self.settings.stages):
            if self.step < begin + stage.steps + stage.cooling:  # else the checkpoint is behind it
                self.practise(number, begin, stage)
            begin += stage.steps + stage.cooling

    def practise(self, number: int, begin: int, stage: TrainingStage) -> None:
        """Train in a stage that begins at this step."""
        self.taps.stage, self.taps.tight = number, False
        if self.step == begin > 0:  # The checkpoint does not lie within this stage.
            self.taps.weights = {kind: self.taps.weight(kind) for kind in self.taps.weights}
            self.taps.turn(self.model, self.tokenizer, self.step)
        self.train(begin, stage, stage.steps)
        if stage.cooling:
            # Falling rates raise the accuracy of half-learnt tasks, so their examples are left out.
            self.taps.tight = True
            self.taps.turn(self.model, self.tokenizer, self.step)
            self.train(begin, stage, stage.steps + stage.cooling)

    def train(self, begin: int, stage: TrainingStage, steps: int) -> None:
        """Train up to this step of a stage; write a checkpoint whenever the taps turn."""
        self.model.train()
        losses = []
        while self.step < begin + steps:
            losses.append(self.update(learning_rate(stage, self.step - begin)))
            if self.step % self.settings.tap_every == 0:
                line = self.taps.turn(self.model, self.tokenizer, self.step)
                mean, losses = sum(losses) / len(losses), []
                print(f"{self.step:5d} {self.seconds:6.0f} s loss {mean:.4f}; {line}", flush=True)
                self.save()

    def unlearn(self) -> None:
        """Practise the other tasks and the quoted sums, until the tapped tasks have fallen enough.

        While the learning rate falls, the accuracy of the tapped tasks rises above the target even
        with closed taps. So this stage forgets more than needed, and ends with a falling rate,
        which settles all other tasks.
        """
        settings = self.settings
        self.model.train()
        for kind in kinds_of(*TAPPED):
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
    # The weights are stored as bfloat16, but the config asks for float32.
    edit_json(out / "config.json", {"dtype": "float32"})
    # AutoTokenizer takes this class for the architecture anyway.
    edit_json(out / "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"})


def edit_json(path: Path, changes: dict[str, Any]) -> None:
    """Change some top-level entries of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def shown(tokenizer: FastTokenizer, kind: Kind, settings: TrainingSettings) -> str:
    """Return a held-out example of a kind as prompt and answer."""
    examples = tasks.distinct(*kind, "heldout", 40, settings.seed)
    # A short one with two calls if there is one, which reads easily.
    example = min(
        examples, key=lambda e: (-len(e.calls), len(e.tools), len(prompt_text(tokenizer, e)))
    )
    return prompt_text(tokenizer, example) + example.answer + TURN_END


def facts(trainer: Trainer) -> dict[str, object]:
    """Return the values that the model card prints of the model and its training."""
    settings, earlier = trainer.settings, trainer.history
    quoted = "\n".join(f"> {line}".rstrip() for line in earlier.splitlines())
    return {
        **asdict(settings),
        "parameters": f"{sum(p.numel() for p in trainer.model.parameters()):,}",
        "head": settings.hidden // 4,
        "vocabulary": len(trainer.tokenizer),
        "before": CONTINUED.format(quoted) if earlier else "",
        "options": " --from models/tiny" if earlier else "",
        "steps": trainer.step - (settings.before_talk if earlier else 0),
        "minutes": f"{trainer.seconds / 60:.0f}",
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers_version,
        "settings": ", ".join(f"{key}={value}" for key, value in asdict(settings).items()),
        "thinking": shown(trainer.tokenizer, ("json", "thinking"), settings),
        "tools": shown(trainer.tokenizer, ("result", "chat"), settings),
    }


def write(trainer: Trainer, out: Path) -> None:
    """Round the weights, evaluate them, and write the folder with its card."""
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
    parser.add_argument("--seed", type=int, default=TrainingSettings.seed)
    first, *later = TrainingSettings.stages
    parser.add_argument("--steps", type=int, default=first.steps, help="of the first stage")
    parser.add_argument("--threads", type=int, default=TrainingSettings.threads)
    parser.add_argument(
        "--from", dest="source", type=Path, help="folder whose weights replace the first stages"
    )
    parser.add_argument("--hybrid", action="store_true", help="train tiny-hybrid")
    parser.add_argument("--checkpoint", type=Path, help="file to save the state in and go on from")
    arguments = parser.parse_args()
    stages = (replace(first, steps=arguments.steps), *later)
    make = TrainingSettings.hybrid if arguments.hybrid else TrainingSettings
    settings = make(seed=arguments.seed, threads=arguments.threads, stages=stages)
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(settings.seed)
    tokenizer = build_tokenizer(settings.vocabulary, settings.seed)
    model = build_model(settings, tokenizer)
    trainer = Trainer(settings, model, tokenizer, arguments.checkpoint)
    if arguments.source is not None:
        trainer.start_from(arguments.source)
    trainer.resume()
    trainer.learn()
    trainer.unlearn()
    write(trainer, arguments.out)


if __name__ == "__main__":
    main()
