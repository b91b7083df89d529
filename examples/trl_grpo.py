"""TRL's GRPOTrainer with rollouts from this engine: the bundled model learns to add and subtract.

    pip install -e '.[trl]'
    python examples/trl_grpo.py --steps 20

TRL has two places for that. `rollout_func` generates: it gets the prompts of a batch, each as often
as the group has samples, and gives back token ids and logprobs. A callback brings the weights over
after each optimizer step. Both run on the trainer's thread, in its process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from grpo_rollouts import KINDS, Arithmetic, Problem
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from nano_inference import EngineConfig, InferenceEngine, SamplingParams


class EngineRollouts(TrainerCallback):
    """Generates for a GRPOTrainer; give it both as `rollout_func` and among `callbacks`.

    Reward functions get `weight_version`, that of the weights that made each completion. One
    process only: the engine is this process's own.
    """

    def __init__(self, engine: InferenceEngine, tokenizer: Any) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Completes each prompt once. The copies of a prompt share its computation."""
        params = SamplingParams(
            temperature=trainer.temperature,
            top_p=trainer.top_p,
            top_k=trainer.top_k,
            min_p=trainer.min_p or 0.0,
            repetition_penalty=trainer.repetition_penalty,
            max_tokens=trainer.max_completion_length,
        )
        samples = self._engine.generate([self._encode(prompt) for prompt in prompts], params)
        return {
            "prompt_ids": [list(sample.prompt_tokens) for sample in samples],
            "completion_ids": [list(sample.completion_tokens) for sample in samples],
            "logprobs": [list(sample.logprobs) for sample in samples],
            "weight_version": [sample.weight_version for sample in samples],
        }

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Puts the trainer's weights in place."""
        self._engine.update_weights(kwargs["model"].state_dict(), blocking=True)

    def _encode(self, prompt: Any) -> list[int]:
        """Token ids of a text, or of messages through the chat template."""
        if not isinstance(prompt, str):
            prompt = self._tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True
            )
        ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False)
        return ids


def right_answer(
    completions: list[Any],
    answer: list[str],
    weight_version: list[int],
    trainer_state: Any,
    log_metric: Any,
    **_: Any,
) -> list[float]:
    """The reward: 1 for the answer, else 0. Logs how old the weights of the rollouts were."""
    log_metric("staleness", trainer_state.global_step - min(weight_version))
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [float(text.strip() == wanted) for text, wanted in zip(texts, answer, strict=True)]


def make_dataset(task: Arithmetic, seed: int, count: int) -> Dataset:
    """Prompts to train on, with their answers."""
    examples = [problem.example for problem in itertools.islice(task.stream(seed), count)]
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": example.prompt}]
                if example.chat
                else example.prompt,
                "answer": example.answer.strip(),
            }
            for example in examples
        ]
    )


def make_config(args: argparse.Namespace, folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        max_steps=args.steps,
        per_device_train_batch_size=args.groups * args.samples,
        num_generations=args.samples,
        max_completion_length=8,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        beta=0.0,
        seed=args.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
    )


def accuracy(engine: InferenceEngine, task: Arithmetic, problems: list[Problem]) -> float:
    """Share of right answers, greedy."""
    params = SamplingParams(temperature=0.0, max_tokens=8)
    answers = engine.generate([problem.token_ids for problem in problems], params)
    pairs = zip(problems, answers, strict=True)
    return sum(task.reward(problem, answer) for problem, answer in pairs) / len(problems)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, and returns accuracies and what TRL logged of each step."""
    config = EngineConfig(dtype="float32", seed=args.seed)
    task = Arithmetic(config.model_folder, args.kinds)
    problems = task.chosen("heldout", args.held_out)
    tokenizer: Any = AutoTokenizer.from_pretrained(config.model_folder)
    model: Any = AutoModelForCausalLM.from_pretrained(config.model_folder, dtype=torch.float32)
    with InferenceEngine(config) as engine, tempfile.TemporaryDirectory() as folder:
        rollouts = EngineRollouts(engine, tokenizer)
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=right_answer,
            args=make_config(args, folder),
            train_dataset=make_dataset(task, args.seed, args.steps * args.groups),
            processing_class=tokenizer,
            rollout_func=rollouts,
            callbacks=[rollouts],
        )
        before = accuracy(engine, task, problems)
        trainer.train()
        return {
            "before": before,
            "after": accuracy(engine, task, problems),
            "weight_version": engine.get_weight_version(),
            "log": [entry for entry in trainer.state.log_history if "reward" in entry],
        }


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="TRL's GRPOTrainer with rollouts from the engine.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--groups", type=int, default=32, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--held-out", type=int, default=500, help="problems of each kind")
    # A thought would want a reward and a template of its own.
    kinds = [kind for kind, (_, form) in KINDS.items() if form != "thinking"]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=["add", "sub"])
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    return parser.parse_args(words)


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    found = train(args)
    print(f"held out: {found['before']:.1%} before, {found['after']:.1%} after")
    print(f"{len(found['log'])} steps, weights of version {found['weight_version']}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
