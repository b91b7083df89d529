"""Compares engines on the workloads of `workloads.py`, interleaved in one run.

    python benchmarks/run.py [--workloads W1,W2,W3,W5] [--shape S] [--peers transformers,...]
        [--repeat 5] [--python openvino=PATH] [--folder DIR] [--json FILE] [--plot FILE]

Each engine is a process of its own that loads the model once and then waits for its turns; they
take turns workload by workload, in rotating order, so that what the machine does meanwhile hits all
of them. Where its cores are is looked at around every turn: a shared machine has states in which it
is twice as fast, and only turns in one state are compared (`machine.py`). A peer that is not
installed is named, and left out. Models are of random weights, made here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import machine
from workloads import SHAPES, WORKLOADS

Figures = dict[str, dict[str, list[float]]]

ENGINES = Path(__file__).parent / "engines"

PROGRAMS = {
    "ours": "ours.py",
    "transformers": "hf_generate.py",
    "generate_batch": "hf_batch.py",
    "llamacpp": "llamacpp.py",
    "openvino": "ov_genai.py",
}


class Peer:
    """An engine's process."""

    def __init__(self, name: str, python: str, folder: Path, shape: str, threads: int) -> None:
        """Starts it; raises EOFError when it can't."""
        self.name = name
        command = [python, str(ENGINES / PROGRAMS[name]), str(folder), shape, str(threads)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
        self._log = Path(folder).with_name(f"{name}.log").open("w+")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self.about = self._answer()

    def run(self, workload: str, seed: int) -> dict[str, Any] | None:
        """The times of one run; None when the engine has no way to do it."""
        assert self._process.stdin is not None
        print(json.dumps([workload, seed]), file=self._process.stdin, flush=True)
        answer: dict[str, Any] | None = self._answer()
        return answer

    def why(self) -> str:
        """The last thing that it said."""
        self._log.seek(0)
        return (self._log.read().strip().splitlines() or ["no message"])[-1]

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"{self.name}: {self.why()}")
        return json.loads(line)


def measure(
    peers: list[Peer], workloads: list[str], repeat: int, threads: int
) -> tuple[dict[str, dict[str, list[dict[str, Any]]]], list[dict[str, float]]]:
    """All runs by workload and engine, without the first round, and the machine's states."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    states: list[dict[str, float]] = []
    for workload in workloads:
        runs[workload] = {peer.name: [] for peer in peers}
        for repetition in range(repeat + 1):
            turn = repetition % len(peers)
            if (around := machine.measure(threads)) is not None:
                states.append(asdict(around))
            for peer in peers[turn:] + peers[:turn]:
                before = machine.measure()
                times = peer.run(workload, seed=repetition)
                after = machine.measure()
                if times is None or repetition == 0:  # the first one warms up
                    continue
                times["state"] = machine.state_around(before, after)
                runs[workload][peer.name].append(times)
                states += [asdict(state) for state in (before, after) if state is not None]
            print(".", end="", file=sys.stderr, flush=True)
        print(f" {workload}", file=sys.stderr)
    return runs, states


def figures_by_state(runs: dict[str, dict[str, list[dict[str, Any]]]]) -> dict[str, Figures]:
    """The figures of the turns in each state of the machine, the state with the most turns first.

    Turns in which it changed are left out, unless there are no others.
    """
    count = Counter(
        turn["state"] for engines in runs.values() for turns in engines.values() for turn in turns
    )
    names = [name for name, _ in count.most_common() if name != "changing"] or list(count)
    return {
        name: figures_of(
            {
                workload: {
                    engine: [turn for turn in turns if turn["state"] == name]
                    for engine, turns in engines.items()
                }
                for workload, engines in runs.items()
            }
        )
        for name in names
    }


def figures_of(runs: dict[str, dict[str, list[dict[str, Any]]]]) -> Figures:
    """By figure and engine, one number per repetition."""
    figures: Figures = {}

    def add(figure: str, engine: str, values: list[float]) -> None:
        if values:
            figures.setdefault(figure, {})[engine] = values

    for workload, engines in runs.items():
        for engine, times in engines.items():
            if WORKLOADS[workload].rate:
                for part, label in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
                    for share, place in (("p50", 0.5), ("p99", 0.99)):
                        values = [sorted(t[part])[int(place * (len(t[part]) - 1))] for t in times]
                        add(f"{workload} {label} {share}, ms", engine, [v * 1e3 for v in values])
                continue
            steps = [1e3 * statistics.median(t["steps_s"]) for t in times if t["steps_s"]]
            add(f"{workload} decode step, ms", engine, steps)
            add(f"{workload} prefill, s", engine, [t["prefill_s"] for t in times])
            add(f"{workload} total, s", engine, [t["total_s"] for t in times])
    return figures


def table(figures: Figures, engines: list[str]) -> str:
    """Medians with their ranges and numbers of turns, and how many times longer than ours each peer
    takes."""
    lines = ["| | " + " | ".join(engines) + " |", "|---" * (len(engines) + 1) + "|"]
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
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(figures: Figures, engines: list[str], file: Path) -> None:
    """Bars of each figure relative to ours."""
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
    """The command line; `workloads` and `engines` are lists of known names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workloads", default="W1,W2,W3,W5")
    parser.add_argument("--shape", default="S", choices=sorted(SHAPES))
    parser.add_argument("--peers", default="transformers,generate_batch,llamacpp,openvino")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    options.workloads = options.workloads.split(",")
    options.engines = ["ours", *filter(None, options.peers.split(","))]
    for name in (
        *(set(options.workloads) - WORKLOADS.keys()),
        *(set(options.engines) - PROGRAMS.keys()),
    ):
        parser.error(
            f"{name} is unknown; workloads: {', '.join(WORKLOADS)}; peers: {', '.join(PROGRAMS)}"
        )
    return options


def start(options: argparse.Namespace) -> tuple[list[Peer], dict[str, str]]:
    """The engines, and why each of the others can't be started. Makes the model if need be."""
    folder = options.folder.absolute() / options.shape
    if not (folder / "config.json").is_file():
        # Only here: it imports torch.
        from random_models import write_model

        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder, options.shape)
    pythons = dict(choice.split("=", 1) for choice in options.python)
    peers, missing = [], {}
    for name in options.engines:
        try:
            python = pythons.get(name, sys.executable)
            peers.append(Peer(name, python, folder, options.shape, options.threads))
        except EOFError as error:
            missing[name] = str(error)
    return peers, missing


def show_memory(peer: Peer, runs: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """The engine's version, and the memory that it took for its work, which is noted."""
    print(f"\n{peer.name}: {peer.about['version']}", end="")
    if not peer.about["held_bytes"]:
        return
    peak = max(run["peak_bytes"] for by_engine in runs.values() for run in by_engine[peer.name])
    working = peak - peer.about["before_bytes"] - peer.about["held_bytes"]
    print(
        f"; {working / 1e6:.0f} MB at the peak besides weights, KV cache and "
        f"{peer.about['before_bytes'] / 1e6:.0f} MB of imported code",
        end="",
    )
    peer.about["working_bytes"] = working


def show_machine(states: list[dict[str, float]]) -> None:
    """What the machine did meanwhile."""
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
    options = read_options()
    peers, missing = start(options)
    started = time.time()
    try:
        runs, states = measure(peers, options.workloads, options.repeat, options.threads)
    finally:
        for peer in peers:
            peer.stop()
    engines = [peer.name for peer in peers]
    by_state = figures_by_state(runs)
    print(
        f"\nShape {options.shape}, {options.threads} threads, medians [range, turns] and the ratio "
        "to ours"
    )
    for state, figures in by_state.items():
        print(f"\nCores: {state}\n\n{table(figures, engines)}")
    for peer in peers:
        show_memory(peer, runs)
    print()
    for name, reason in missing.items():
        print(f"left out: {name} ({reason})")
    show_machine(states)
    if options.json:
        content = {
            "started": started,
            "shape": options.shape,
            "threads": options.threads,
            "engines": {peer.name: peer.about for peer in peers},
            "missing": missing,
            "figures": by_state,
            "turns": runs,
            "states": states,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.plot:
        plot(next(iter(by_state.values())), engines, options.plot)


if __name__ == "__main__":
    main()
