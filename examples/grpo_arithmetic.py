"""GRPO on the bundled model: it learns to add and subtract numbers of two digits.

    python examples/grpo_arithmetic.py --mode blocking
    python examples/grpo_arithmetic.py --mode in-flight --json run.json --plot run.png
    python examples/grpo_arithmetic.py --kinds add-thinking sub-thinking --max-tokens 40 \
        --problems 32 --prompts 16 --groups 16 --most-prompts 16 --batch 16 --speculation auto

blocking    In turn: generate a batch, train on it, put the new weights in place. One process, and
            with the same seed the same numbers, bit for bit.
in-flight   Generation never stops (PipelineRL, arXiv:2509.19128). The trainer is a process of its
            own; its weights come back through shared memory and are put in place between two steps
            of the engine, while sequences are half-way. They go on with the KV that they have.

Both train on prompts whose answers differ in reward (DAPO's dynamic sampling), with AdamW and
PPO's clipped loss on the logprobs that the engine reports. Held-out sums never occur in training.
With quantised rollouts the trainer's weights are requantised in the engine at each update.
In the last run the model thinks before it answers, and goes over the same problems again and again,
so that drafts of its samples can be taken from earlier ones.
The docs are in docs/rl.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from grpo_rollouts import KINDS, Arithmetic, Rollouts, staleness
from grpo_trainer import Correction, Group, Trainer, TrainerProcess, TrainerSettings
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nano_inference import EngineConfig, InferenceEngine, SamplingParams

Mode = Literal["blocking", "in-flight"]
Speculation = Literal["auto", "off"]
Quantization = Literal["auto", "int8", "int4"]


@dataclass(frozen=True)
class Settings:
    """The parameters of a run.

    Attributes:
        mode: Whether training and generation take turns.
        seed: Seed of problems and samples.
        kinds: The problems, by their names in `KINDS`.
        problems: Problems of each kind, used again and again; 0 for new ones each time.
        steps: Optimizer steps.
        minutes: Minutes of training, after which no further step is begun.
        groups: Most prompts of a step; all with samples that differ in reward.
        samples: Completions of each prompt.
        prompts: Prompts that the engine gets at once (blocking) or works on (in-flight).
        most_prompts: After so many, a step takes what there is.
        batch: Most samples that the engine works on at once; 0 for all that it gets.
        max_tokens: Limit of tokens of a completion.
        temperature: Temperature of the rollouts.
        learning_rate: AdamW's.
        kl_weight: Weight of the KL divergence from the first weights.
        held_out: Problems of each kind before and after.
        split: Their set; "tune" to look for settings, "heldout" to report.
        threads: Threads of torch, in each process.
        speculation: The engine's speculation. In blocking mode it changes the duration of a run and
            nothing else, if the engine is deterministic.
        deterministic: Whether the engine has to be, and not only where that costs nothing; also for
            another number of ranks.
        ranks: Ranks of the engine.
        dtype: The engine's; the trainer's is float32.
        quantization: The engine's; "auto" for none.
        quantization_group: Inputs that share a scale; 0 for the engine's default.
        correction: The trainer's, for rollouts of another policy.
    """

    mode: Mode = "blocking"
    seed: int = 1
    kinds: tuple[str, ...] = ("add", "sub")
    problems: int = 0
    steps: int = 200
    minutes: float = 20.0
    groups: int = 48
    samples: int = 8
    prompts: int = 64
    most_prompts: int = 128
    batch: int = 0
    max_tokens: int = 8
    temperature: float = 1.0
    learning_rate: float = 3e-4
    kl_weight: float = 0.0
    held_out: int = 500
    split: Literal["tune", "heldout"] = "heldout"
    threads: int = 1
    speculation: Speculation = "off"
    deterministic: bool = False
    ranks: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    quantization: Quantization = "auto"
    quantization_group: Literal[0, 32, 64, 128] = 0
    correction: Correction = "ratio"


@dataclass
class Record:
    """The measurements of a run, step by step.

    Attributes:
        facts: Facts of each optimizer step.
        training: (start, end) of each, in ns of `time.monotonic_ns`.
        ages: (tokens, sum, maximum) of the staleness of each step's tokens, in versions.
        mixed: Samples that were trained on and are of more than one version.
        trained: Samples that were trained on.
    """

    facts: list[dict[str, float]] = field(default_factory=list)
    training: list[tuple[int, int]] = field(default_factory=list)
    ages: list[tuple[int, int, int]] = field(default_factory=list)
    mixed: int = 0
    trained: int = 0

    def take(self, groups: list[Group], version: int) -> None:
        """Notes what is handed to the trainer, whose weights are of this version."""
        ages = staleness(groups, version)
        self.ages.append((len(ages), sum(ages), max(ages)))
        for group in groups:
            self.trained += len(group.samples)
            self.mixed += sum(len(sample.weight_versions) > 1 for sample in group.samples)


Report = Callable[[dict[str, float]], None]


def deadline(settings: Settings) -> int:
    """When no further step is begun, in ns of `time.monotonic_ns`."""
    return time.monotonic_ns() + int(settings.minutes * 60e9)


class NothingToLearn(Exception):
    """Among as many prompts as a step may take, none had answers that differ in reward."""


# --- blocking -------------------------------------------------------------------------------------


def run_blocking(
    settings: Settings, rollouts: Rollouts, trainer: Trainer, record: Record, report: Report
) -> None:
    """Generate, train, update, in turn.

    Raises:
        NothingToLearn: All is right, or all is wrong.
    """
    end = deadline(settings)
    while len(record.facts) < settings.steps and time.monotonic_ns() < end:
        report(blocking_step(settings, rollouts, trainer, record))


def blocking_step(
    settings: Settings, rollouts: Rollouts, trainer: Trainer, record: Record
) -> dict[str, float]:
    """Generates, trains and puts the new weights in place; the trainer's facts.

    Raises:
        NothingToLearn: All is right, or all is wrong.
    """
    groups: list[Group] = []
    asked = 0
    while len(groups) < settings.groups and asked < settings.most_prompts:
        groups += [group for group in rollouts.batch(settings.prompts) if group.informative]
        asked += settings.prompts
    groups = groups[: settings.groups]
    if not groups:
        raise NothingToLearn
    record.take(groups, trainer.steps)
    start = time.monotonic_ns()
    facts = trainer.step(groups)
    record.training.append((start, time.monotonic_ns()))
    rollouts.engine.update_weights(trainer.weights(), blocking=True)
    rollouts.counts.used += len(groups)
    return facts


# --- in flight ------------------------------------------------------------------------------------


def run_in_flight(
    settings: Settings, rollouts: Rollouts, trainer: TrainerProcess, record: Record, report: Report
) -> None:
    """Generate without end beside a trainer that takes the newest groups whenever it is free.

    Raises:
        NothingToLearn: All is right, or all is wrong.
    """
    engine = rollouts.engine
    newest: deque[Group] = deque(maxlen=settings.groups)  # the oldest make room
    waits = True  # the trainer
    asked = 0
    end = deadline(settings)
    while len(record.facts) < settings.steps and time.monotonic_ns() < end:
        for group in rollouts.step(settings.prompts):
            asked += 1
            if group.informative:
                newest.append(group)
        if not waits and (trained := trainer.poll()):
            engine.update_weights(trainer.weights, blocking=False)
            record.training.append((trained.start_ns, trained.end_ns))
            report(trained.facts)
            waits = True
            continue  # the next step of the engine puts the weights in place
        if waits and (len(newest) == settings.groups or asked >= settings.most_prompts):
            if not newest:
                raise NothingToLearn
            groups = list(newest)
            record.take(groups, engine.get_weight_version())
            trainer.submit(groups)
            rollouts.counts.used += len(groups)
            newest.clear()
            waits, asked = False, 0


# --- a run ----------------------------------------------------------------------------------------


@contextmanager
def start_trainer(
    settings: Settings, engine: InferenceEngine
) -> Iterator[Trainer | TrainerProcess]:
    """In this process, or in one of its own."""
    own = TrainerSettings(
        model_folder=engine.config.model_folder,
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        temperature=settings.temperature,
        kl_weight=settings.kl_weight,
        correction=settings.correction,
    )
    if settings.mode == "blocking":
        yield Trainer(own)
        return
    with closing(TrainerProcess(own, engine.state_dict(), settings.threads)) as process:
        yield process


def engine_config(settings: Settings) -> EngineConfig:
    """Return the configuration of the run's engine."""
    rows = settings.batch or settings.prompts * settings.samples
    return EngineConfig(
        dtype=settings.dtype,
        quantization=settings.quantization,
        quantization_group=settings.quantization_group,
        deterministic=settings.deterministic or "auto",
        rank_invariant=settings.deterministic,
        tensor_parallel=settings.ranks,
        seed=settings.seed,
        max_batch_size=rows,
        max_tokens_per_batch=max(2048, rows),
        speculation=settings.speculation,
    )


def make_rollouts(settings: Settings, engine: InferenceEngine) -> Rollouts:
    """Build the rollouts that the engine generates."""
    task = Arithmetic(engine.config.model_folder, settings.kinds)
    return Rollouts(
        engine=engine,
        task=task,
        problems=task.epochs(settings.seed, settings.problems)
        if settings.problems
        else task.stream(settings.seed),
        samples=settings.samples,
        params=SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens),
        seed=settings.seed,
    )


def run(settings: Settings, console: Console) -> dict[str, Any]:
    """Trains, and returns what the JSON file holds."""
    torch.set_num_threads(settings.threads)
    with InferenceEngine(engine_config(settings)) as engine:
        rollouts = make_rollouts(settings, engine)
        task = rollouts.task
        problems = task.chosen(settings.split, settings.held_out)
        before = rollouts.accuracy(problems)
        console.print(f"{settings.split} before: {before:.1%} of {len(problems)}")
        record = Record()
        cpu = cpu_seconds()
        with (
            start_trainer(settings, engine) as trainer,
            progress_bar(console, settings, rollouts, record) as report,
        ):
            start = time.monotonic_ns()
            try:
                if isinstance(trainer, Trainer):
                    run_blocking(settings, rollouts, trainer, record, report)
                else:
                    run_in_flight(settings, rollouts, trainer, record, report)
            except NothingToLearn:
                if not record.facts:
                    raise
                console.print("no prompt has answers that differ in reward: nothing left to learn")
            end = time.monotonic_ns()
        cpu = cpu_seconds() - cpu
        rollouts.drain()
        after = rollouts.accuracy(problems)
        version = engine.get_weight_version()
    console.print(f"{settings.split} after: {after:.1%}")
    return {
        "settings": asdict(settings),
        "before": before,
        "after": after,
        "weight_version": version,
        "cpu_minutes": cpu / 60,
        **summary(rollouts, record, start, end),
    }


@contextmanager
def progress_bar(
    console: Console, settings: Settings, rollouts: Rollouts, record: Record
) -> Iterator[Report]:
    """Shows how far it is; gives what takes the facts of each step."""
    columns = (
        TextColumn(f"{settings.mode}, seed {settings.seed}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("reward {task.fields[reward]:.2f}, {task.fields[age]:.1f} versions old"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=settings.steps, reward=0.0, age=0.0)

        def report(facts: dict[str, float]) -> None:
            facts = {**facts, "reward": rollouts.counts.take_reward()}
            record.facts.append(facts)
            tokens, total, _ = record.ages[-1]
            age = total / tokens
            progress.update(bar, advance=1, reward=facts["reward"], age=age)
            if not console.is_terminal and len(record.facts) % 10 == 0:
                console.print(
                    f"step {len(record.facts)}: reward {facts['reward']:.3f}, age {age:.2f}"
                )

        yield report


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its ended children."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, whose))


def summary(rollouts: Rollouts, record: Record, start: int, end: int) -> dict[str, Any]:
    """The figures of a run that lasted from `start` to `end`, in ns."""
    counts, wall = rollouts.counts, end - start
    busy = [span for span in rollouts.busy if start <= span[0] and span[1] <= end]
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(busy)]
    tokens = sum(each[0] for each in record.ages)
    return {
        "minutes": wall / 60e9,
        "generated_tokens": counts.tokens,
        "tokens_per_s": counts.tokens / (wall / 1e9),
        "rollout_tokens_per_s": counts.tokens / (sum(end - start for start, end in busy) / 1e9),
        "drafted_tokens": counts.drafted,
        "accepted_tokens": counts.accepted,
        "groups": counts.groups,
        "groups_trained_on": counts.used,
        "trained_tokens": tokens,
        "staleness_mean": sum(each[1] for each in record.ages) / tokens,
        "staleness_max": max(each[2] for each in record.ages),
        "samples_of_several_versions": record.mixed / record.trained,
        "generating": sum(end - start for start, end in busy) / wall,
        "training": sum(end - start for start, end in record.training) / wall,
        "longest_pause_ms": max(gaps, default=0) / 1e6,
        "rewards": [round(facts["reward"], 4) for facts in record.facts],
        "facts_last": record.facts[-1],
        "kl_behaviour": [facts["kl_behaviour"] for facts in record.facts],
        "time_line": time_line(busy, record.training),
    }


def time_line(
    busy: list[tuple[int, int]], training: list[tuple[int, int]], steps: int = 5
) -> dict[str, Any]:
    """Calls of the engine and training steps, as (start, end) in s, around some steps half-way."""
    middle = training[len(training) // 2 :][: steps + 1]
    start, end = middle[0][0], middle[-1][1]

    def within(spans: list[tuple[int, int]]) -> list[tuple[float, float]]:
        return [
            (round((first - start) / 1e9, 4), round((last - start) / 1e9, 4))
            for first, last in spans
            if first < end and last > start
        ]

    return {"seconds": (end - start) / 1e9, "engine": within(busy), "trainer": within(training)}


def curve(rewards: list[float], width: int = 72, height: int = 10) -> str:
    """The rewards from 0 to 1 as lines of text; each column is the mean of its steps."""
    width = min(width, len(rewards))
    cuts = [len(rewards) * column // width for column in range(width + 1)]
    means = [sum(rewards[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    lines = []
    for row in range(height, 0, -1):
        marks = "".join("\u2588" if mean * height >= row - 0.5 else " " for mean in means)
        lines.append(f"{row / height:5.0%} |{marks}")
    return "\n".join([*lines, f"      +{'-' * width} {len(rewards)} steps"])


def main() -> None:
    default = Settings()
    parser = argparse.ArgumentParser(description="GRPO on arithmetic with the bundled model.")
    parser.add_argument("--mode", choices=get_args(Mode), default=default.mode)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=default.kinds)
    parser.add_argument("--split", choices=("tune", "heldout"), default=default.split)
    parser.add_argument("--speculation", choices=get_args(Speculation), default=default.speculation)
    for name, kinds in (("quantization", Quantization), ("correction", Correction)):
        parser.add_argument(f"--{name}", choices=get_args(kinds), default=getattr(default, name))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=default.dtype)
    numbers = ("seed", "steps", "groups", "samples", "problems", "prompts", "most_prompts")
    for name in (*numbers, "batch", "max_tokens", "held_out", "quantization_group"):
        value = getattr(default, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    for name in ("minutes", "temperature", "learning_rate", "kl_weight"):
        value = getattr(default, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value)
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the model")
    parser.add_argument("--deterministic", action="store_true", help="on any CPU, at any cost")
    parser.add_argument("--threads", type=int, default=default.threads, help="of torch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw the rewards (PNG)")
    arguments = vars(parser.parse_args())
    json_path, plot_path = arguments.pop("json"), arguments.pop("plot")
    console = Console()
    if plot_path and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'nano-inference[plots]'")
    arguments["kinds"] = tuple(arguments["kinds"])
    found = run(Settings(**arguments), console)
    console.print(curve(found["rewards"]))
    hidden = ("settings", "rewards", "kl_behaviour", "time_line")
    console.print({name: value for name, value in found.items() if name not in hidden})
    if json_path:
        json_path.write_text(json.dumps(found) + "\n", encoding="utf-8")
    if plot_path:
        from grpo_plots import draw_rewards

        draw_rewards([found], plot_path)


if __name__ == "__main__":
    main()
