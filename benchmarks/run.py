"""Compares engines on the workloads of `workloads.py`, interleaved in one run.

    python benchmarks/run.py [--workloads W1,W2,W3,W5] [--shape S] [--peers transformers,...]
        [--repeat 5] [--python openvino=PATH] [--folder DIR] [--json FILE] [--plot FILE]

An engine is in bfloat16, or in another format after a colon: `ours:int8`, `ours:int4-32`,
`ours:int8-a8` (activations in 8 bits), `llamacpp:Q8_0`, `openvino:int4`, `vllm:int4`. After
`ngram-` it is the most tokens that an engine drafts by n-grams of its text: `vllm:ngram-5`.

Each engine is a separate process that loads the model once. Engines take turns workload by
workload, in rotating order, so that other load affects all of them. The distance between the cores
is measured around every turn: a shared machine has states that differ in speed by a factor of two,
and only turns in one state are compared (`machine.py`). A peer that is not installed is named and
left out. Models have random weights, written by this program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jsonschema
import machine
from harness import (
    Worker,
    end_on_sigterm,
    markdown,
    model_folder,
    options,
    percentile,
    record,
    refuse_unknown,
    rotated,
)
from workloads import SHAPES, WORKLOADS, make_requests

Runs = dict[str, dict[str, list[dict[str, Any]]]]
"""By workload and engine, the times of each turn."""

Figures = dict[str, dict[str, list[float]]]
"""By figure and engine, one number per turn."""

ENGINES = Path(__file__).parent / "engines"

PROGRAMS = {
    "ours": "ours.py",
    "transformers": "hf.py",
    "generate_batch": "hf.py",
    "llamacpp": "llamacpp.py",
    "openvino": "ov_genai.py",
    "vllm": "vllm_cpu.py",
}


def _engine_of(name: str) -> str:
    return name.partition(":")[0]


class Peer(Worker):
    """An engine's process; raises EOFError if it can't start.

    Attributes:
        about: Its version and memory, by the engine's program.
    """

    def __init__(self, name: str, python: str, folder: Path, shape: str, threads: int) -> None:
        self.name = name
        program = PROGRAMS[_engine_of(name)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
        self._log = folder.with_name(f"{name.replace(':', '-')}.log").open("w+")
        command = [python, ENGINES / program, folder, shape, threads, name]
        super().__init__(*command, stderr=self._log, env=environment)
        self.about = self.answer()

    def answer(self) -> Any:
        try:
            return super().answer()
        except EOFError:
            self._log.seek(0)
            lines = self._log.read().strip().splitlines() or ["no message"]
            raise EOFError(f"{self.name}: {lines[-1]}") from None


def measure(
    peers: list[Peer], workloads: list[str], repeat: int, threads: int
) -> tuple[Runs, list[dict[str, float]]]:
    """Return all turns after the warm-up, and the machine's states; on Ctrl-C or SIGTERM those
    until then."""
    runs: Runs = {workload: {peer.name: [] for peer in peers} for workload in workloads}
    states: list[dict[str, float]] = []
    with contextlib.suppress(KeyboardInterrupt, SystemExit, EOFError):
        for workload in workloads:
            for repetition in range(repeat + 1):
                machine.note(states, threads)
                for peer in rotated(peers, repetition):
                    if (times := turn(peer, workload, repetition, states)) and repetition:
                        runs[workload][peer.name].append(times)
                print(".", end="", file=sys.stderr, flush=True)
            print(f" {workload}", file=sys.stderr)
    return runs, states


def turn(
    peer: Peer, workload: str, repetition: int, states: list[dict[str, float]]
) -> dict[str, Any] | None:
    """Return the times of a turn, with the machine's state; None if the engine can't."""
    around: list[dict[str, float]] = []
    before = machine.note(around)
    times: dict[str, Any] | None = peer.ask([workload, repetition])
    after = machine.note(around)
    if times is None:
        return None
    states += around
    times["state"] = machine.state_around(before, after)
    texts = times.pop("texts")
    if WORKLOADS[workload].whole:
        constraint = make_requests(WORKLOADS[workload], 1000, repetition)[0].constraint
        times["valid"] = [is_valid(text, constraint) for text in texts]
    return times


def is_valid(text: str, constraint: dict[str, Any]) -> bool:
    """Return whether a whole text has the form of a constraint."""
    if "json_schema" in constraint:
        try:
            jsonschema.validate(json.loads(text), constraint["json_schema"])
        except (ValueError, jsonschema.ValidationError):
            return False
        return True
    if "regex" in constraint:
        return re.fullmatch(constraint["regex"], text) is not None
    return text in constraint["choice"]


def figures_by_state(runs: Runs) -> dict[str, Figures]:
    """Return the figures of the turns in each state of the machine, most frequent state first.

    Turns with a changed state are dropped, unless there are no others.
    """
    count = Counter(
        turn["state"] for engines in runs.values() for turns in engines.values() for turn in turns
    )
    names = [name for name, _ in count.most_common() if name != "changing"] or list(count)
    return {name: figures_of(runs, name) for name in names}


def figures_of(runs: Runs, state: str) -> Figures:
    """Return the figures of the turns in a state."""
    figures: Figures = {}

    def add(figure: str, engine: str, values: list[float]) -> None:
        if values:
            figures.setdefault(figure, {})[engine] = values

    for workload, engines in runs.items():
        for engine, turns in engines.items():
            times = [turn for turn in turns if turn["state"] == state]
            if WORKLOADS[workload].rate:
                for part, label in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
                    for share, place in (("p50", 0.5), ("p99", 0.99)):
                        values = [1e3 * percentile(each[part], place) for each in times]
                        add(f"{workload} {label} {share}, ms", engine, values)
                continue
            steps = [1e3 * statistics.median(t["steps_s"]) for t in times if t["steps_s"]]
            add(f"{workload} decode step, ms", engine, steps)
            add(f"{workload} prefill, s", engine, [t["prefill_s"] for t in times])
            add(f"{workload} total, s", engine, [t["total_s"] for t in times])
            if WORKLOADS[workload].whole:
                valid = [100 * statistics.mean(t["valid"]) for t in times]
                add(f"{workload} valid, %", engine, valid)
            if WORKLOADS[workload].text:
                further = WORKLOADS[workload].new_tokens[0] - 1
                rest = [1e3 * (t["total_s"] - t["prefill_s"]) / further for t in times]
                add(f"{workload} further token, ms", engine, rest)
                add(
                    f"{workload} tokens per step",
                    engine,
                    [further / len(t["steps_s"]) for t in times],
                )
    return figures


def table(figures: Figures, engines: list[str]) -> str:
    """Return medians with ranges and numbers of turns, and the peers' ratios to ours."""
    body = []
    for figure, by_engine in figures.items():
        cells = [figure]
        ours = statistics.median(by_engine["ours"]) if "ours" in by_engine else 0.0
        for engine in engines:
            values = by_engine.get(engine)
            if values is None:
                cells.append("-")
                continue
            middle = statistics.median(values)
            ratio = f", {middle / ours:.2f} x" if engine != "ours" and ours else ""
            spread = f"[{min(values):.3g} to {max(values):.3g}, {len(values)}]"
            cells.append(f"{middle:.3g} {spread}{ratio}")
        body.append(cells)
    return markdown(["", *engines], body)


def plot(figures: Figures, engines: list[str], file: Path) -> None:
    """Draw bars of each figure relative to ours."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [figure for figure, by_engine in figures.items() if "ours" in by_engine]
    picture, axes = pyplot.subplots(
        figsize=(9, 0.55 * len(shown) * max(len(engines) - 1, 1) ** 0.5 + 1)
    )
    height = 0.8 / len(engines)
    for place, engine in enumerate(engines):
        spots, widths = [], []
        for row, figure in enumerate(shown):
            if engine in figures[figure]:
                ours = statistics.median(figures[figure]["ours"])
                spots.append(row + place * height)
                widths.append(statistics.median(figures[figure][engine]) / ours)
        axes.barh(spots, widths, height, label=engine)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(shown))], shown)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("time relative to nano-inference (longer bars are slower)")
    axes.legend(loc="lower right")
    picture.tight_layout()
    picture.savefig(file, dpi=120)


def read_options() -> argparse.Namespace:
    """Return the command line; `workloads` and `engines` are lists of known names."""
    parser = options(
        __doc__,
        workloads=["W1", "W2", "W3", "W5"],
        peers=["transformers", "generate_batch", "llamacpp", "openvino", "vllm"],
        repeat=5,
        threads=os.cpu_count() or 1,
        folder=Path("build/benchmarks"),
        plot=Path,
        shape=("S", SHAPES),
    )
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH")
    arguments = parser.parse_args()
    arguments.engines = ["ours", *arguments.peers]
    refuse_unknown(parser, arguments.workloads, WORKLOADS)
    refuse_unknown(parser, map(_engine_of, arguments.engines), PROGRAMS)
    return arguments


def start(arguments: argparse.Namespace) -> tuple[list[Peer], dict[str, str]]:
    """Start the engines; return them, and the reason for each missing one."""
    folder = model_folder(arguments.folder, arguments.shape)
    pythons = dict(choice.split("=", 1) for choice in arguments.python)
    peers, missing = [], {}
    for name in arguments.engines:
        try:
            python = pythons.get(_engine_of(name), sys.executable)
            peers.append(Peer(name, python, folder, arguments.shape, arguments.threads))
        except EOFError as error:
            missing[name] = str(error)
    return peers, missing


def show_memory(peer: Peer, runs: Runs) -> None:
    """Print the engine's version and working memory; add the latter to `about`."""
    print(f"\n{peer.name}: {peer.about['version']}", end="")
    peaks = [run["peak_bytes"] for by_engine in runs.values() for run in by_engine[peer.name]]
    if not peaks or not peer.about["held_bytes"]:
        return
    working = max(peaks) - peer.about["before_bytes"] - peer.about["held_bytes"]
    print(
        f"; {working / 1e6:.0f} MB at the peak besides weights, KV cache and "
        f"{peer.about['before_bytes'] / 1e6:.0f} MB of imported code",
        end="",
    )
    peer.about["working_bytes"] = working


def show_machine(states: list[dict[str, float]]) -> None:
    """Print the machine's states."""
    for key, scale, unit in (
        ("bytes_per_s", 1e-9, "GB/s"),
        ("round_trip_ns", 1, "ns"),
        ("cores", 1, ""),
    ):
        if values := sorted(state[key] * scale for state in states if state[key]):
            print(
                f"{key}: median {statistics.median(values):.3g} {unit} "
                f"[{values[0]:.3g} to {values[-1]:.3g}]"
            )


def main() -> None:
    arguments = read_options()
    end_on_sigterm()
    peers, missing = start(arguments)
    started = time.time()
    with ExitStack() as stack:
        for peer in peers:
            stack.enter_context(peer)
        runs, states = measure(peers, arguments.workloads, arguments.repeat, arguments.threads)
    engines = [peer.name for peer in peers]
    by_state = figures_by_state(runs)
    print(
        f"\nShape {arguments.shape}, {arguments.threads} threads, medians [range, turns] and the "
        "ratio to ours"
    )
    for state, figures in by_state.items():
        print(f"\nCores: {state}\n\n{table(figures, engines)}")
    for peer in peers:
        show_memory(peer, runs)
    print()
    for name, reason in missing.items():
        print(f"left out: {name} ({reason})")
    show_machine(states)
    arguments.engines = {peer.name: peer.about for peer in peers}
    results = {"missing": missing, "figures": by_state, "turns": runs, "states": states}
    record(arguments, started=started, **results)
    if arguments.plot:
        plot(next(iter(by_state.values())), engines, arguments.plot)


if __name__ == "__main__":
    main()
