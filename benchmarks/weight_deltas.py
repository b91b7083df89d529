"""Size of weight deltas in GRPO, and the pause of an update by them.

First GRPO on the bundled model: after each optimizer step the trainer's weights, in bfloat16, are
sent as a delta. Then large weights with random changes: the time to make a delta, to check and
prepare it beside the steps, and the pause, beside those of a whole update. Repetitions are
interleaved.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import options, print_table, record, timed
from torch import Tensor
from weights import make_weights

from nano_inference import InferenceEngine, WeightDelta
from nano_inference.stages.executor import WeightSyncManager
from nano_inference.stages.executor.runner.weights.received_delta import ReceivedDelta

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from grpo_arithmetic import Settings, engine_config, make_rollouts
from grpo_trainer import Trainer, TrainerSettings


def measure_grpo(rate: float, steps: int) -> list[dict[str, float]]:
    """Return the figures of each update in a run."""
    settings = Settings(dtype="bfloat16", learning_rate=rate, steps=steps, seed=1)
    found = []
    with InferenceEngine(engine_config(settings)) as engine:
        rollouts = make_rollouts(settings, engine)
        folder = engine.config.model_folder
        trainer = Trainer(TrainerSettings(folder, steps=steps, learning_rate=rate, warmup=0))
        own = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        elements = sum(each.numel() for name, each in own.items() if name != "lm_head.weight")
        for version in range(steps):
            groups = [each for each in rollouts.batch(settings.prompts) if each.informative]
            trainer.step(groups)
            new = {name: tensor.to(torch.bfloat16) for name, tensor in trainer.weights().items()}
            delta = WeightDelta.between(own, new, base_version=version)
            engine.update_weights(delta, blocking=True)
            own = {name: tensor.clone() for name, tensor in new.items()}
            figures = {"changed": delta.elements / elements, "bytes": delta.num_bytes}
            found.append(figures | {"whole": 2 * elements})
    return found


def changed(weights: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """Return weights of which a share of the elements is a bit larger."""
    dice = torch.Generator().manual_seed(1)
    new = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in new.values():
        number = max(int(share * tensor.numel()), 1)
        places = torch.randint(tensor.numel(), (number,), generator=dice)
        tensor.view(-1).view(torch.int16)[places] += 1
    return new


def measure_update(megabytes: int, shares: list[float], repeat: int) -> dict[str, Any]:
    """Return the seconds of each part of an update."""
    _, weights = make_weights(megabytes)
    module = torch.nn.Module()
    for name, tensor in weights.items():
        parameter = torch.nn.Parameter(tensor.clone(), requires_grad=False)
        module.register_parameter(name, parameter)
    manager = WeightSyncManager(module)
    found: dict[str, Any] = {"bytes": sum(each.nbytes for each in weights.values())}

    def update(prepare: Callable[[], Any], base: int | None) -> tuple[float, float]:
        start = time.perf_counter()
        prepared = manager.prepare(prepare())
        manager.start_sync(prepared, partial=True, base=base)
        return time.perf_counter() - start, timed(manager.maybe_finish_sync)

    for share in shares:
        new = changed(weights, share)
        figures: dict[str, list[float]] = {}
        for _ in range(repeat):
            start = time.perf_counter()
            delta = WeightDelta.between(weights, new, base_version=manager.version)
            rows = {"make": time.perf_counter() - start}
            received = partial(ReceivedDelta, delta, manager)
            rows["fetch"], rows["pause"] = update(
                lambda received=received: received().new_weights(), manager.version
            )
            rows["whole fetch"], rows["whole pause"] = update(
                lambda: {name: tensor.clone() for name, tensor in weights.items()}, None
            )
            for name, seconds in rows.items():
                figures.setdefault(name, []).append(seconds)
        found[f"{share:g}"] = {"bytes": delta.num_bytes, "seconds": figures}
    return found


def main() -> None:
    parser = options(
        __doc__,
        rates=([3e-4, 1e-5, 1e-6], "learning rates of GRPO"),
        steps=(10, "optimizer steps for each"),
        megabytes=(1000, "of weights, for the pause"),
        shares=([0.0001, 0.001, 0.01, 0.1], "of their elements that change"),
        repeat=(3, "repetitions"),
    )
    arguments: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(1)
    grpo = {f"{rate:g}": measure_grpo(rate, arguments.steps) for rate in arguments.rates}
    rows = {
        f"learning rate {rate}": {
            name: statistics.median(each[name] for each in steps) for name in steps[0]
        }
        for rate, steps in grpo.items()
    }
    columns = {"changed": "{changed:.3%}", "bytes": "{bytes:,.0f}", "whole": "{whole:,.0f}"}
    print_table(columns, rows, "medians of the steps")
    updates = measure_update(arguments.megabytes, arguments.shares, arguments.repeat)
    names = ("make", "fetch", "pause", "whole fetch", "whole pause")
    rows = {
        f"{float(share):.2%} changed": {
            "bytes": updates[share]["bytes"],
            **{
                name.replace(" ", "_"): 1e3 * statistics.median(updates[share]["seconds"][name])
                for name in names
            },
        }
        for share in updates
        if share != "bytes"
    }
    columns = {"bytes": "{bytes:,.0f}"} | {
        f"{name}, ms": f"{{{name.replace(' ', '_')}:.1f}}" for name in names
    }
    print()
    print_table(columns, rows, f"{updates['bytes'] / 1e6:.0f} MB of weights")
    record(arguments, grpo=grpo, updates=updates)


if __name__ == "__main__":
    main()
