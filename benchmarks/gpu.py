"""A CUDA device in ten minutes: its correctness, and its speed beside the floor and Transformers.

    python benchmarks/gpu.py [--shapes S,L] [--sections checks,steps] [--minutes 9] [--dry]
                             [--json FILE]

Sections run in the order below. Each has a time limit, and every figure, or why a section ended, is
in the file before the next one begins: a device that is taken away leaves what was measured.

- `checks`: small random models in float32 and bfloat16 against Transformers, with and without CUDA
  graphs. If it fails, only `device` follows.
- `device`: bandwidth of a copy and speed of a matrix product, which give the floors.
- `steps` of each shape: decode steps with 1, 16, 64 and 256 sequences of 128 tokens, as a share of
  the bandwidth, greedy and within top_p; and the kernels of a step.
- `batches` of each shape: tokens and logprobs of a sequence alone, bit for bit, against those in
  batches. Deterministic mode is not offered on CUDA; this is how far it is.
- `nano_vllm` of each shape: 256 sequences, 100 to 1,024 tokens in and out (that engine's own
  benchmark).
- `workloads` of each shape: those of `workloads.py`.
- `peers` of each shape, after all others: `generate` and `generate_batch`.

Models have random weights. Ours is batching and executor as in the pipeline, one step ahead,
without messages. `--dry` runs it with tiny models on the CPU, to test the program. Without a CUDA
device the program says so and ends.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from cores import Ours, Outcome
from harness import options, percentile, refuse_unknown, write
from random_models import random_model
from torch.profiler import ProfilerActivity, profile
from transformers_peer import generate, generate_batch
from workloads import SHAPES, WORKLOADS, Request, Workload, make_requests, qwen2

CHECKED = qwen2(256, 512, 4, (8, 2), 4096)
LIMITS_S = {
    "checks": 60,
    "device": 20,
    "steps": 80,
    "batches": 50,
    "nano_vllm": 50,
    "workloads": 50,
    "peers": 90,
}
"""Seconds of each section, for one shape."""


@dataclass(frozen=True)
class Sizes:
    """What is run.

    Attributes:
        shapes: Settings of models by name.
        sequences: Numbers of sequences.
        steps: Tokens of their prompts, and tokens to generate.
        vllm: nano-vllm's workload.
        workloads: Further ones.
        checked: The model and the workload of the checks.
    """

    shapes: dict[str, dict[str, Any]]
    sequences: tuple[int, ...]
    steps: tuple[int, int]
    vllm: Workload
    workloads: dict[str, Workload]
    checked: tuple[dict[str, Any], Workload]


FULL = Sizes(
    shapes=SHAPES,
    sequences=(1, 16, 64, 256),
    steps=(128, 64),
    vllm=Workload(256, 100, 1024, (100, 1024), temperature=0.6, uniform=True),
    workloads={
        "W3": WORKLOADS["W3"],
        "W5": WORKLOADS["W5"],
        "W3 256": replace(WORKLOADS["W3"], prompts=32),
        "W4": replace(WORKLOADS["W4"], rate=16.0),
    },
    checked=(CHECKED, Workload(12, 5, 200, (20, 60))),
)
_TINY = qwen2(64, 128, 1, (2, 1), 512)
DRY = Sizes(
    shapes=dict.fromkeys(FULL.shapes, _TINY),
    sequences=(1, 3),
    steps=(8, 4),
    vllm=Workload(4, 4, 9, (2, 5), temperature=0.6, uniform=True),
    workloads={"W3": Workload(1, 8, 8, (4, 4), samples=2, temperature=1.0)},
    checked=(_TINY, Workload(3, 5, 20, (4, 6))),
)


# --- correctness ------------------------------------------------------------------------------


def scores(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return Transformers' logprobs at the places of these tokens, `[tokens, vocab]` in float32."""
    ids = torch.tensor([prompt + tokens], device=model.device)
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)


def distance(model: Any, requests: list[Request], outcome: Outcome) -> tuple[float, float]:
    """Return the mean difference of reported logprobs from the model's, and the largest shortfall
    of a chosen token's logprob."""
    differences, short = [], 0.0
    for seq_id, request in enumerate(requests):
        tokens = outcome.tokens[seq_id]
        table = scores(model, request.token_ids, tokens)
        chosen = table.gather(1, torch.tensor(tokens, device=table.device)[:, None])[:, 0]
        reported = torch.tensor(outcome.logprobs[seq_id], device=table.device)
        differences.append(float((chosen - reported).abs().mean()))
        short = max(short, float((table.amax(-1) - chosen).max()))
    return statistics.mean(differences), short


def check(
    device: str, settings: dict[str, Any], work: Workload
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Compare small models with Transformers, and yield what was found.

    Raises:
        AssertionError: A check fails.
    """
    requests = make_requests(work, settings["vocab_size"], seed=1)
    exact = random_model(settings, torch.float32, device)
    for dtype in (torch.float32, torch.bfloat16):
        reference = random_model(settings, torch.float32, device).to(dtype)
        outcomes = {}
        for graphs in (True, False):
            ours = Ours(random_model(settings, torch.float32, device).to(dtype), graphs=graphs)
            if graphs and device == "cuda":
                why = ours.core.off.get("graphs", "")
                assert not why, f"no graphs: {why}"
            outcomes[graphs] = outcome = ours.run(requests, work)
            own, short = distance(exact, requests, outcome)
            row = {"mean difference of logprobs from float32": own, "falls short by": short}
            if dtype == torch.float32:
                assert own < 1e-4, row
                assert short < 1e-3, row
            else:
                theirs = []
                for seq_id, request in enumerate(requests):
                    pair = request.token_ids, outcome.tokens[seq_id]
                    at = torch.tensor(pair[1], device=device)[:, None]
                    gap = scores(reference, *pair) - scores(exact, *pair)
                    theirs.append(float(gap.gather(1, at).abs().mean()))
                row["Transformers' own"] = statistics.mean(theirs)
                assert own <= 1.5 * row["Transformers' own"] + 1e-3, row
            yield f"{dtype}, graphs {'on' if graphs else 'off'}", row
        same = [outcomes[True].tokens[i] == outcomes[False].tokens[i] for i in range(len(requests))]
        yield f"{dtype}, sequences equal with graphs on and off", f"{sum(same)} of {len(same)}"
        if dtype == torch.float32:
            mine = [outcomes[True].tokens[i] for i in range(len(requests))]
            theirs_ids = [generate(exact, [each], work)[0].tolist() for each in requests]
            equal = sum(a == b for a, b in zip(mine, theirs_ids, strict=True))
            yield "sequences equal to generate's", f"{equal} of {len(mine)}"


# --- speed ------------------------------------------------------------------------------------


def seconds(run: Callable[[], object]) -> float:
    _finish()
    start = time.perf_counter()
    run()
    _finish()
    return time.perf_counter() - start


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def floors(device: str) -> dict[str, float]:
    """Return the device's best bandwidth of a copy, and speed of a matrix product."""
    numbers, side = (1 << 30, 8192) if device == "cuda" else (1 << 20, 256)
    source, target = (torch.empty(numbers, dtype=torch.bfloat16, device=device) for _ in range(2))
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    copies = [seconds(lambda: target.copy_(source)) for _ in range(10)]
    products = [seconds(lambda: left @ right) for _ in range(10)]
    return {
        "copy_gb_s": 2 * source.nbytes / min(copies) / 1e9,
        "matmul_tflops": 2 * side**3 / min(products) / 1e12,
    }


def describe(workload: Workload, outcome: Outcome) -> dict[str, Any]:
    row: dict[str, Any] = {"total_s": outcome.seconds}
    row["step_ms"] = 1e3 * statistics.median(outcome.steps_s)
    row["prefill_s"] = max(outcome.first_s.values())
    row["tokens_per_s"] = sum(map(len, outcome.tokens.values())) / outcome.seconds
    if workload.rate:
        waits, gaps = [], []
        for seq_id, first in outcome.first_s.items():
            waits.append(1e3 * (first - outcome.arrival_s[seq_id]))
            gaps.append(1e3 * (outcome.last_s[seq_id] - first) / (len(outcome.tokens[seq_id]) - 1))
        for name, values in (("ttft_ms", waits), ("tpot_ms", gaps)):
            row[name] = {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}
    return row


@dataclass
class Shape:
    """One shape of model.

    Attributes:
        settings: Its settings.
        device: The device.
        sizes: What is run.
        bandwidth: Of a copy, GB/s; 0 if unknown.
    """

    settings: dict[str, Any]
    device: str
    sizes: Sizes
    bandwidth: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def ours(self) -> Ours:
        module = random_model(self.settings, torch.bfloat16, self.device)
        size = sum(each.nbytes for each in module.parameters())
        if not self.settings["tie_word_embeddings"]:
            size -= module.get_input_embeddings().weight.nbytes  # a step reads only some rows
        self.floor_ms = size / self.bandwidth / 1e6 if self.bandwidth else 0.0
        return Ours(module)

    def run(self, workload: Workload, seed: int) -> Outcome:
        requests = make_requests(workload, self.settings["vocab_size"], seed)
        return self.ours.run(requests, workload)

    def measured(self, workload: Workload, repeat: int = 2) -> dict[str, Any]:
        """Return the figures of the fastest run after a first one."""
        self.run(workload, 0)
        outcomes = [self.run(workload, 1 + number) for number in range(repeat)]
        row = describe(workload, min(outcomes, key=lambda each: each.seconds))
        row["of_bandwidth"] = self.floor_ms / row["step_ms"]
        return row

    def plain(self, sequences: int, **options: Any) -> Workload:
        prompt, new = self.sizes.steps
        return Workload(sequences, prompt, prompt, (new, new), **options)

    def steps(self) -> Iterator[tuple[str, Any]]:
        yield "start_s", self.ours.start_s
        yield "floor_ms", self.floor_ms
        yield "graphs", self.ours.core.off.get("graphs", "on")
        for count in self.sizes.sequences:
            yield f"{count}", self.measured(self.plain(count))
        for count in self.sizes.sequences[:2]:
            within = self.plain(count, temperature=1.0, top_p=0.95)
            yield f"{count}, top_p", self.measured(within)
        for count in self.sizes.sequences[:2]:
            yield f"{count}, kernels", self.profiled(self.plain(count))

    def profiled(self, workload: Workload) -> list[dict[str, Any]]:
        """Return the kernels that take most of prefill and decode steps, in us per step."""
        activities = [ProfilerActivity.CPU]
        if self.device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            self.run(workload, 99)
        kernels = sorted(profiler.key_averages(), key=lambda each: -each.self_device_time_total)
        return [
            {
                "name": each.key,
                "calls": each.count,
                "us_per_step": each.self_device_time_total / (workload.new_tokens[0] - 1),
            }
            for each in kernels[:20]
        ]

    def batches(self) -> Iterator[tuple[str, Any]]:
        most = max(self.sizes.sequences)
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            workload = self.plain(most, temperature=temperature)
            requests = make_requests(workload, self.settings["vocab_size"], seed=7)
            together = {
                each: self.ours.run(requests[:each], workload) for each in self.sizes.sequences
            }
            first = together.pop(1)
            for count, outcome in together.items():
                yield (
                    f"{name}, 1 in {count}",
                    {
                        "tokens": outcome.tokens[0] == first.tokens[0],
                        "bits": outcome.logprobs[0] == first.logprobs[0],
                    },
                )
            again = self.ours.run(requests, workload)
            whole = together[most]
            equal = [again.logprobs[each] == whole.logprobs[each] for each in again.logprobs]
            yield f"{name}, repeated", f"{sum(equal)} of {len(equal)} with equal bits"

    def nano_vllm(self) -> Iterator[tuple[str, Any]]:
        yield "first run", describe(self.sizes.vllm, self.run(self.sizes.vllm, 0))
        yield "second run", describe(self.sizes.vllm, self.run(self.sizes.vllm, 1))

    def workloads(self) -> Iterator[tuple[str, Any]]:
        for name, workload in self.sizes.workloads.items():
            yield name, self.measured(workload)

    def peers(self) -> Iterator[tuple[str, Any]]:
        # Before ours, whose cache takes nearly all memory.
        peer = random_model(self.settings, torch.bfloat16, self.device)
        counts = self.sizes.sequences[:2]
        several = {f"{count}": self.plain(count) for count in counts}
        several["W3"] = self.sizes.workloads["W3"]
        for name, workload in several.items():
            requests = make_requests(workload, self.settings["vocab_size"], seed=1)
            # The second takes half a minute on a CPU.
            for call in (generate, generate_batch)[: 1 + (self.device == "cuda")]:
                try:
                    call(peer, requests, workload)
                    took = seconds(lambda c=call, r=requests, w=workload: c(peer, r, w))
                except TimeoutError:
                    raise
                except Exception as error:  # noqa: BLE001  (a peer's failure is a finding)
                    yield f"{name}, {call.__name__}", repr(error)
                    continue
                ours_s = self.run(workload, 1).seconds
                row = {"total_s": took, "times_faster": took / ours_s}
                yield f"{name}, {call.__name__}", row


# --- sections ---------------------------------------------------------------------------------


@contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Raise TimeoutError in the block after so many seconds, once a call of the device returns."""

    def end(*_: object) -> None:
        raise TimeoutError(f"it took more than {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Report:
    """The figures, written whenever there is a new one.

    Attributes:
        path: The file.
        deadline: The end of all sections, `time.monotonic()`.
        content: The figures.
    """

    path: Path | None
    deadline: float
    content: dict[str, Any] = field(default_factory=dict)

    def section(
        self, name: str, figures: Iterator[tuple[str, Any]], limit_s: float, shape: str = ""
    ) -> bool:
        """Run a section, and return whether it ended well; its figures so far stay in any case."""
        found: dict[str, Any] = self.content
        for key in (shape, name):
            found = found.setdefault(key, {}) if key else found
        title = f"{shape} {name}".strip()
        left_s = min(limit_s, self.deadline - time.monotonic())
        try:
            if left_s <= 0:
                raise TimeoutError("no time was left")
            with limited(left_s):
                for key, value in figures:
                    found[key] = value
                    print(f"{title}, {key}: {json.dumps(value, default=str)[:400]}", flush=True)
                    write(self.path, self.content)
        except Exception as error:  # noqa: BLE001  (other sections go on)
            found["ended by"] = f"{type(error).__name__}: {error}"
            print(f"{title}: {found['ended by']}", flush=True)
        write(self.path, self.content)
        return "ended by" not in found


def run(
    sizes: Sizes,
    device: str,
    report: Report,
    shapes: list[str],
    sections: list[str],
) -> bool:
    """Run sections; return whether all ended well."""
    well = True
    if "checks" in sections:
        figures = check(device, *sizes.checked)
        well = report.section("checks", figures, LIMITS_S["checks"])
    if "device" in sections:
        figures = iter(floors(device).items())
        report.section("device", figures, LIMITS_S["device"])
    if not well:
        return False
    bandwidth = report.content.get("device", {}).get("copy_gb_s", 0.0)
    own = [each for each in sections if each not in ("checks", "device", "peers")]
    for some in (own, [each for each in sections if each == "peers"]):
        for name in shapes if some else ():
            shape = Shape(sizes.shapes[name], device, sizes, bandwidth)
            for section in some:
                figures = getattr(shape, section)()
                well &= report.section(section, figures, LIMITS_S[section], name)
            if "ours" in vars(shape):
                shape.ours.core.close()
            del shape, figures
            if device == "cuda":
                torch.cuda.empty_cache()
    return well


def main() -> int:
    parser = options(
        __doc__,
        shapes=["S", "L"],
        sections=[*LIMITS_S],
        minutes=9.0,
        dry=False,
    )
    arguments = parser.parse_args()
    refuse_unknown(parser, arguments.sections, LIMITS_S)
    refuse_unknown(parser, arguments.shapes, SHAPES)
    deadline = time.monotonic() + 60 * arguments.minutes
    if arguments.dry:
        report = Report(arguments.json, deadline)
        return not run(DRY, "cpu", report, arguments.shapes, arguments.sections)
    if not torch.cuda.is_available():
        print("There is no CUDA device here: nothing was checked and nothing was measured.")
        return 1
    name = torch.cuda.get_device_name()
    slug = name.lower().replace(" ", "-")
    path = arguments.json or Path(__file__).parent / "results" / f"gpu-{slug}.json"
    content = {"device_name": name, "torch": torch.__version__, "cuda": torch.version.cuda}
    report = Report(path, deadline, content)
    well = run(FULL, "cuda", report, arguments.shapes, arguments.sections)
    print(f"written to {path}")
    return not well


if __name__ == "__main__":
    sys.exit(main())
