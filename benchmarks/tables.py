"""Generates the documents' tables from the result files.

    python benchmarks/tables.py

A table of one of `DOCUMENTS` stands between `<!-- table: NAME -->` and `<!-- end
-->`; `TABLES` has its function, which reads files in benchmarks/results/. Run this program after a
measurement with `--json`; a test compares the documents.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from harness import markdown, median_ratio

HERE = Path(__file__).parent
DOCUMENTS = tuple(
    HERE.parent / name
    for name in (
        "README.md",
        "benchmarks/README.md",
        "docs/comparison.md",
        "docs/kv-tiers.md",
        "docs/operations.md",
        "docs/quantization.md",
        "docs/ranks.md",
        "docs/roles.md",
        "docs/soak.md",
    )
)

TABLE = re.compile(r"(?<=<!-- table: )([a-z0-9-]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)

PEERS = {
    "openvino": "OpenVINO GenAI",
    "llamacpp": "llama.cpp",
    "transformers": "Transformers `generate`",
    "generate_batch": "`generate_batch`",
    "vllm": "vLLM, on the CPU",
}
BESIDE_OURS = {
    "ours": "nano-inference",
    **{peer: PEERS[peer] for peer in ("llamacpp", "openvino", "vllm")},
}

FIGURES = {
    "W1-short decode step, ms": "1 x 128 tokens, ms per token",
    "W1-short prefill, s": "1 x 128 tokens, prefill, s",
    "W2 decode step, ms": "16 x 128 tokens, ms per step",
    "W2 prefill, s": "16 x 128 tokens, prefill, s",
    "W3 total, s": "4 x 256 tokens, 8 samples of 32 tokens each, s",
    "W5 total, s": "32 x 1,024 common tokens and 64 of their own, 32 new, s",
    "W6 prefill, s": "1 x 4,096 tokens, prefill, s",
    "W6 decode step, ms": "1 x 4,096 tokens, ms per token",
    "W7 prefill, s": "4 x 2,048 tokens, prefill, s",
    "W7 decode step, ms": "4 x 2,048 tokens, ms per step",
    "W8 prefill, s": "64 x 64 tokens, prefill, s",
    "W8 decode step, ms": "64 x 64 tokens, ms per step",
}
KINDS = {"json": "JSON", "dates": "dates", "words": "words", "choice": "one of 50 texts"}
CONSTRAINED = {
    "any decode step, ms": "no constraint, ms per step",
    **{f"{kind} decode step, ms": f"{words}, ms per step" for kind, words in KINDS.items()},
    "any-first prefill, s": "no constraint, first token, s",
    **{
        f"{kind}-first{new} prefill, s": f"{words}, first token by a {grammar} grammar, s"
        for kind, words in KINDS.items()
        for new, grammar in (("", "known"), ("-new", "new"))
    },
    **{f"{kind}-whole valid, %": f"{words}, valid texts, %" for kind, words in KINDS.items()},
}
"""Figures under a constraint, of 4 prompts of 32 tokens; a first token is that of one prompt of
16."""


@cache
def result(name: str) -> Any:
    """Return the content of a result file."""
    return json.loads((HERE / "results" / f"{name}.json").read_text(encoding="utf-8"))


def named(beginning: str) -> list[str]:
    """Return the result files whose names begin so."""
    return sorted(path.stem for path in (HERE / "results").glob(f"{beginning}*.json"))


def short(value: float | None, digits: int = 3) -> str:
    """Return a number with so many significant digits."""
    if value is None:
        return ""
    if value >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


# --- run.py ---------------------------------------------------------------------------------------


def merged(names: Sequence[str], state: str) -> dict[str, dict[str, list[float]]]:
    """Return the figures of several results of `run.py` in a state of the machine."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in names:
        for figure, by_engine in result(name)["figures"].get(state, {}).items():
            for engine, values in by_engine.items():
                found.setdefault(figure, {}).setdefault(engine, []).extend(values)
    return found


def engines_of(
    names: Sequence[str],
    states: Sequence[str],
    peers: Sequence[str],
    figures: Mapping[str, str] = FIGURES,
) -> str:
    """Return medians of `run.py`, with each peer's time over ours, by state of the machine."""
    by_state = {state: merged(names, state) for state in states}
    body = []
    for figure, words in figures.items():
        for state, measured in by_state.items():
            by_engine = measured.get(figure, {})
            if "ours" not in by_engine or len(by_engine) == 1:
                continue
            ours = statistics.median(by_engine["ours"])
            cells = [against(by_engine.get(peer), ours) for peer in peers]
            name = f"{words}, {state}" if len(states) > 1 else words
            body.append([name, f"{short(ours)} ({len(by_engine['ours'])})", *cells])
    return markdown(["", "nano-inference", *(PEERS[peer] for peer in peers)], body)


def against(times: Sequence[float] | None, ours: float) -> str:
    """Return a median, its ratio to ours, and the number of turns; nothing without turns."""
    if not times:
        return ""
    median = statistics.median(times)
    return f"{short(median)} = {median / ours:.2f} x ({len(times)})"


AMX = ("run-S-2-amx-cores-W1-short", "run-S-2-amx-cores-W2-W3", "run-S-2-amx-cores-W5")
VECTORS = ("run-S-2-amx-cores-by-vectors-W1-short", "run-S-2-amx-cores-by-vectors-W2-W3")
PEERS_RUNS = tuple(
    f"run-S-2-cpu-cores-peers{part}" for part in ("", "-again", "-long", "-long-again")
)
ALL = tuple(BESIDE_OURS)[1:]
EPYC = ("run-S-2-cpu-cores-W1-short", "run-S-2-cpu-cores-W2-W3")


def turns_of(names: Sequence[str], workload: str, engine: str) -> list[Any]:
    """Return an engine's turns of `run.py` in any state of the machine."""
    found = [result(name)["turns"].get(workload, {}) for name in names]
    return [turn for by_engine in found for turn in by_engine.get(engine, ())]


def masks() -> str:
    """Return the CPU time of grammars and masks by library."""
    found = result("masks-xgrammar")["masks"]
    body = []
    for kind in found["llguidance"]:
        for library in ("llguidance", "xgrammar"):
            row = found[library][kind]
            times = (row["compile_ms"], statistics.median(row["masks_ms"]), max(row["masks_ms"]))
            body.append([f"{kind}, {library}", *(short(each, 2) for each in times)])
    return markdown(["ms of CPU time", "compile", "mask, median", "most"], body)


DRAFTED = named("drafts-K-")
TEXTS = {
    "edited": "one token in twenty differs from the prompt",
    "edited-4": "the same, 4 sequences",
    "new": "a text that the prompt has not",
}


def drafted() -> str:
    """Return the time per token after the first one, without and with drafts by n-grams."""
    body = []
    for workload, words in TEXTS.items():
        for engine, name in BESIDE_OURS.items():
            plain, drafts = (
                [
                    1e3 * (turn["total_s"] - turn["prefill_s"])
                    for turn in turns_of(DRAFTED, workload, f"{engine}{kind}")
                ]
                for kind in ("", ":ngram-16" if engine == "ours" else ":ngram-5")
            )
            if plain and drafts:
                before, after = (statistics.median(each) / 63 for each in (plain, drafts))
                cells = [short(before), short(after), f"{before / after:.2f}"]
                body.append([f"{words}: {name}", *cells])
    return markdown(["ms per token", "without", "with drafts", "times as fast"], body)


# --- pipeline.py, gateway.py, poisson.py, kserve.py -----------------------------------------------

PIPELINE = {
    "bare loop": "the bare loop (`InferenceEngine.generate`)",
    "Transformers, padded batch": "Transformers' `generate`, padded batch",
    "memory": "pipeline in memory",
    "memory, chunks": "pipeline in memory, every token streamed",
    "Redis, five processes": "five processes over Redis",
    "Redis, five processes, chunks": "five processes over Redis, every token streamed",
}


def pipeline_of(name: str) -> str:
    variants = result(name)["variants"]
    body = [
        [words, f"{variants[key]['tokens_per_s']:,.0f}", f"{variants[key]['x_bare']:.2f}"]
        for key, words in PIPELINE.items()
        if key in variants
    ]
    return markdown(["", "tokens/s", "time over the bare loop"], body)


def gateway() -> str:
    shapes = result("gateway-2-cpu-cores")["shapes"]
    body = [
        [way, *(f"{shape['ways'][way]['x_submit']:.2f}" for shape in shapes.values())]
        for way in ("HTTP", "HTTP, streaming")
    ]
    return markdown(["time over `Pipeline.submit`", *shapes], body)


def first_token() -> str:
    """Return the times of `first_token.py`, with what they have more than the bare loop."""
    clients = result("first-token-2-cpu-cores")["clients"]
    *_, most = clients.values()
    body = []
    for way, of_most in most.items():
        times = [rows[way] for rows in clients.values()]
        cells = [f"{each['p50_ms']:.1f} (+{each['more_ms']:.1f})" for each in times]
        body.append([way, *cells, f"{of_most['x_bare']:.2f}"])
    heads = [f"{number} client{'s' * (number != '1')}, ms" for number in clients]
    return markdown(["first token after", *heads, "x bare, with the most"], body)


SERVERS = ("nano-inference", "llama-server", "vLLM", "transformers serve")


def poisson(names: Sequence[str], figure: str, words: str) -> str:
    """Return the servers' times under load, by rate, server and client; `figure` is the second."""
    rows = [row for name in names for row in result(name)["rows"]]
    body = []
    for row in sorted(rows, key=lambda row: (row["rate"], SERVERS.index(row["server"]))):
        load = [f"{row['rate']:g}", row["server"], *([row["client"]] if "client" in row else [])]
        ttft = [short(row[f"ttft_ms_{share}"] / 1000, 2) for share in ("p50", "p99")]
        gap = [f"{row[f'{figure}_ms_{share}']:,.0f}" for share in ("p50", "p99")]
        cells = [", ".join(load), " / ".join(ttft), " / ".join(gap)]
        body.append([*cells, f"{row['good']:.0%}", f"{row['tokens_per_s']:.0f}"])
    head = ["requests/s", "TTFT p50 / p99, s", f"{words} p50 / p99, ms", "in time", "tokens/s"]
    return markdown(head, body)


def kserve() -> str:
    files = {"one tensor": "kserve-1-tensor", "four tensors": "kserve-4-tensors"}
    seconds = {words: result(f"{name}-2-cpu-cores")["seconds"] for words, name in files.items()}
    body = []
    for way in ("shared memory, gRPC", "shared memory, HTTP", "inline, gRPC", "inline, HTTP"):
        cells = [way]
        for times in seconds.values():
            speed = median_ratio(times["memcpy"], times[way])
            cells.append(f"{short(statistics.median(times[way]))}, {speed:.3f}")
        body.append(cells)
    return markdown(["seconds, speed over memcpy", *seconds], body)


# --- chaos.py, hostile.py -------------------------------------------------------------------------

STREAM_FAULTS = ("lost", "duplicated", "gaps", "mismatched", "mismatched_sampled", "not_recovered")
HTTP_FAULTS = ("lost", "doubled", "gaps", "different", "different_sampled", "returns")


def chaos_of(name: str, fields: Sequence[str]) -> str:
    found = result(name)
    kills = ", ".join(f"{count} {target}" for target, count in found["kills"].items())
    body = [
        ["requests", found["requests"]],
        ["faults", f"{sum(found['kills'].values())} ({kills})"],
        *([field, found[field]] for field in fields),
        ["wall time, s", found["wall_s"]],
    ]
    times = {"recovery": found["recovery_s"]} if "recovery_s" in found else {}
    for target, each in found.get("recovery_s_by_target", {}).items():
        times[f"recovery from {target}"] = each
    for words, each in times.items():
        body.append([f"{words} p50 / p99, s", f"{short(each['p50'])} / {short(each['p99'])}"])
    return markdown([f"{name}.json", ""], body)


def bad_days(name: str) -> str:
    """Return a row for each kind of fault; hosts are counted together."""
    body = []
    for deployment, found in result(name)["deployments"].items():
        for kind, row in found["kinds"].items():
            counts = [row.get(fault, "") for fault in ("lost", "doubled", "gaps", "different")]
            times = [row.get(what) for what in ("next_s", "all_s")]
            words = [f"{each['p50']:.1f} / {each['p99']:.1f}" if each else "" for each in times]
            body.append([kind, row["number"], *counts, *words])
        if deployment == "hosts":
            wrong = found["wrong"]
            body.append(["hosts: all", sum(each["number"] for each in found["kinds"].values())])
            body[-1] += [*(wrong[fault] for fault in ("lost", "doubled", "gaps", "different"))]
            body[-1] += ["", ""]
    head = ["fault", "number", "lost", "doubled", "gaps", "different"]
    return markdown([*head, "next answer p50 / p99, s", "all answers p50 / p99, s"], body)


def soak_trends(name: str) -> str:
    """Return memory by process, the server's numbers, all that is not flat; the others' count."""
    body, flat = [], 0
    for series, row in result(name)["trends"].items():
        if row["per_hour"] is None:
            continue  # too few samples of a process that came and went
        if row["verdict"] == "flat" and not series.startswith(("memory", "Redis")):
            flat += 1
            continue
        numbers = (f"{row[each]:,.1f}" for each in ("level", "per_hour", "low", "high"))
        body.append([series, *numbers, row["verdict"]])
    body.append(["the others", "", "", "", "", f"{flat} flat"])
    return markdown(["series", "level", "slope, an hour", "from", "to", "verdict"], body)


def hostile() -> str:
    found, ways = result("hostile")["rows"], ("http", "redis")
    waits = {row["attack"]: max(row[way]["worst_s"] for way in ways) for row in found}
    alone = waits.pop("(nothing)")
    worst = sorted(waits, key=lambda attack: -waits[attack])[:3]
    body = [
        ["attacks", len(waits)],
        ["worst wait without an attack, s", alone],
        *([f"worst wait under `{attack}`, s", waits[attack]] for attack in worst),
        ["bystander's requests lost", sum(row[way]["lost"] for row in found for way in ways)],
        ["attacks under which a process ended", sum(not row["same_processes"] for row in found)],
    ]
    return markdown(["hostile.json", ""], body)


# --- roles.py, kv_tiers.py ------------------------------------------------------------------------


def bandwidth(name: str) -> str:
    head = {
        "copy_large": "copy, large pages",
        "copy": "copy, 4 KiB pages",
        "memory": "shared memory",
        "memory_share": "of a copy",
        "loopback": "plain loopback",
        "tcp": "TCP",
        "tcp_share": "of plain",
    }
    body = []
    for size, row in result(name)["bandwidth"].items():
        cells = [f"{row[key]:.0%}" if "share" in key else f"{row[key]:.2f}" for key in head]
        body.append([f"blocks of {size}", *cells])
    return markdown(["GB/s", *head.values()], body)


def snapshots(name: str) -> str:
    rows = result(name)["snapshots"]
    body = [
        [way, f"{row['ms']:.1f}", f"{row['low']:.1f} to {row['high']:.1f}"]
        for way, row in rows.items()
    ]
    return markdown(["ms", "one snapshot", "quartiles"], body)


TIER_WAYS = {
    "store": "store, beside a copy in memory",
    "load": "load, beside a copy in memory",
    "store and write blocks": "store and write, beside writing a file",
    "read blocks": "read blocks, beside a file from the page cache",
    "read blocks from disk": "read blocks, beside a file from the disk",
}


def tier_bandwidth(name: str) -> str:
    """Return the rates of `kv_tiers.py`, and what they are of plain ways."""
    body = []
    for way, row in result(name)["bandwidth"].items():
        quartiles = f"{row['low']:.0%} to {row['high']:.0%}"
        shares = [f"{row['share']:.0%}", quartiles, f"{row['cpu_share']:.0%}"]
        body.append([TIER_WAYS[way], f"{row['rate']:.2f}", *shares])
    return markdown(["", "GB/s", "of plain", "quartiles", "by processor time"], body)


def takeover(names: Mapping[str, str]) -> str:
    """Return the times of `takeover.py`, by result file and the words for its shape."""
    body = []
    for name, words in names.items():
        for stage_and_way, row in result(name)["takeover"].items():
            stage, way = stage_and_way.split(", ")
            seconds = [f"{row['median_s']:.2f}", f"{row['most_s']:.2f}"]
            has_standby = "yes" if way == "standby" else ""
            body.append([f"{stage}{words}", has_standby, *seconds, row["pss"]])
    return markdown(["killed", "standby", "median, s", "most, s", "PSS, MB"], body)


def handover(name: str) -> str:
    """Return the times of `roles.py`."""
    figures = ("gap_ms", "decode_ms", "over_ms", "transfer_ms")
    body = [
        [length, *(f"{row[each]:.1f}" for each in figures)]
        for length, row in result(name)["handover"].items()
    ]
    head = ["ms", "first to second token", "decode step", "the rest", "all transfers"]
    return markdown(head, body)


def handover_parts(name: str) -> str:
    """Return what the handovers of `roles.py` consist of."""
    rows = result(name)["handover"]
    parts = [part for part in next(iter(rows.values())) if not part.endswith(("_ms", "transfers"))]
    body = [[words, *(f"{row[part]:.1f}" for part in parts)] for words, row in rows.items()]
    return markdown(["ms", *parts], body)


def interference(name: str) -> str:
    body = [
        [
            way,
            *(f"{row[part]:,.0f}" for part in ("calm_p50", "calm_p99", "p50", "p99", "most")),
            f"{row['first_s']:.1f}",
            f"{row['tokens_per_s']:.0f}",
        ]
        for way, row in result(name)["interference"].items()
    ]
    beside = [f"beside prompts: {share}" for share in ("p50", "p99", "most")]
    head = ["ms", "alone: p50", "p99", *beside, "prompts' TTFT, s", "streams' tokens/s"]
    return markdown(head, body)


def devices(name: str) -> str:
    figures = ("itl_p50", "itl_p99", "itl_most", "first_p50", "first_p99")
    body = [
        [way, *(f"{row[figure]:.1f}" for figure in figures)]
        for way, row in result(name)["devices"].items()
    ]
    between = [f"between tokens: {share}" for share in ("p50", "p99", "most")]
    return markdown(["virtual ms", *between, "prompts' TTFT: p50", "p99"], body)


def conversations(name: str) -> str:
    figures = ("first_p50", "first_p95", "begins_p50", "later_p50", "later_p95")
    body = [
        [engine, *(f"{row[figure]:.0f}" for figure in figures), f"{row['total_s']:.0f}"]
        for engine, row in result(name)["conversations"].items()
    ]
    later = [f"of later turns: {share}" for share in ("p50", "p95")]
    head = ["", "TTFT, ms: p50", "p95", "of first turns: p50", *later, "total, s"]
    return markdown(head, body)


# --- ranks.py -------------------------------------------------------------------------------------


def all_reduce(name: str) -> str:
    body = []
    for size, rows in result(name)["all_reduce_us"].items():
        for shape, times in rows.items():
            cells = [short(statistics.median(times["ours"]))]
            ratio = median_ratio(times["gloo"], times["ours"])
            cells.append(f"{short(statistics.median(times['gloo']))} = {short(ratio, 2)} x")
            body.append([f"{size} ranks, {shape}", *cells])
    return markdown(["us", "shared memory", "gloo"], body)


def rank_steps(name: str) -> str:
    body = []
    for engine, row in result(name)["step_s"].items():
        cells = []
        for kind, seconds in row.items():
            if kind.endswith("exchanged"):
                continue
            exchanged = statistics.median(row.get(f"{kind}, exchanged", [0.0]))
            of_it = f" ({exchanged * 1e3:,.1f})" if exchanged else ""
            cells.append(f"{statistics.median(seconds) * 1e3:,.1f}{of_it}")
        body.append([engine, *cells])
    kinds = ["decode, 1 sequence", "16 sequences", "prompt of 512 tokens"]
    return markdown(["ms per step (of it in exchanges)", *kinds], body)


def rank_memory(name: str) -> str:
    kinds = ("weights", "KV", "PSS", "RSS", "peak RSS")
    body = [
        [layout, *(", ".join(f"{rank[kind]:.2f}" for rank in ranks) for kind in kinds)]
        for layout, ranks in result(name)["memory_gb"].items()
    ]
    return markdown(["GB of each rank", *kinds], body)


# --- README.md, docs/comparison.md ----------------------------------------------------------------


def medians(figure: str) -> list[str]:
    """Return our median of a figure of `run.py` between near cores, and each peer's; "" without a
    turn."""
    by_engine = merged(PEERS_RUNS, "near")[figure]
    return [
        short(statistics.median(by_engine[engine])) if engine in by_engine else ""
        for engine in ("ours", *ALL)
    ]


FIVE = (0, 1, 2, 4, 6)
"""The rows of the README."""


def five() -> str:
    rows = measured_rows()
    return markdown(BESIDE, [rows[number] for number in FIVE])


def measured() -> str:
    return markdown(
        BESIDE, [[cell.replace("(docs/", "(") for cell in row] for row in measured_rows()]
    )


OVER_HTTP = ("llama-server", "vLLM", "`transformers serve`")
BESIDE = ("", "nano-inference", "beside it")


def measured_rows() -> list[list[str]]:
    """Return the figures beside those of others, with links from the root."""
    variants = result("pipeline-2-cpu-cores")["variants"]
    streamed = variants["Redis, five processes, chunks"]
    padded = variants["Transformers, padded batch"]
    one = medians("W1-short decode step, ms")
    sixteen = medians("W2 decode step, ms")
    steps = result("recurrent-Q-2-cpu-cores")["figures"]["W1-short decode step, ms"]
    hybrid = {engine: statistics.median(times) for engine, times in steps.items()}
    over_http = {
        row["server"]: short(row["ttft_ms_p50"] / 1000, 2)
        for row in result("poisson-S-2-cpu-cores")["rows"]
        if row["rate"] == 1
    }
    found = result("chaos")
    lost = sum(found[name] for name in ("lost", "duplicated", "gaps", "mismatched"))
    days = result("chaos-days")["deployments"].values()
    kinds = [kind for day in days for kind in day["kinds"].values()]
    return [
        [
            "bundled model, 128 requests, five processes over Redis, streamed",
            f"{streamed['tokens_per_s']:,.0f} tokens/s",
            f"Transformers' `generate`: {padded['tokens_per_s']:,.0f}",
        ],
        ["0.5 B, one sequence", f"{one[0]} ms per token", peers_of(one)],
        ["0.5 B, 16 sequences", f"{sixteen[0]} ms per step", peers_of(sixteen)],
        [
            "0.8 B with Gated DeltaNet (Qwen3.5), one sequence",
            f"{short(hybrid['ours'])} ms per token",
            f"llama.cpp: {short(hybrid['llamacpp'])}; "
            f"Transformers: {short(hybrid['transformers'])}",
        ],
        [
            "0.5 B, over HTTP, one request per second",
            f"first token after {over_http['nano-inference']} s",
            "; ".join(
                f"{words}: {over_http[server]}"
                for server, words in zip(SERVERS[1:], OVER_HTTP, strict=True)
                if server in over_http
            ),
        ],
        [
            f"{found['requests']:,} streams under {sum(found['kills'].values())} faults (`kill -9` "
            "of stages and Redis, cut connections)",
            f"{lost} lost, doubled, cut or different",
            f"next token after {short(found['recovery_s']['p50'], 2)} s "
            f"(99 %: {short(found['recovery_s']['p99'], 2)} s)",
        ],
        [
            f"{sum(day['requests'] for day in days):,} requests over HTTP, gRPC and Redis under "
            f"{sum(kind['number'] for kind in kinds)} faults of {len(kinds)} kinds",
            f"{sum(sum(day['wrong'].values()) for day in days)} lost, doubled, cut or different",
            "[each kind's recovery](docs/soak.md#bad-days)",
        ],
    ]


LARGE = {
    "step": "1 sequence, ms per token",
    "step, 4": "4 sequences, ms per step",
    "prefill": "prefill of 128 tokens, ms",
    "loads_s": "loading, s",
}


def large() -> str:
    found = result("large-L-Q4_0-2-cpu-cores")
    every = [found["turns"], *found["earlier_turns"]]
    body = [
        [
            words,
            *(
                short(statistics.median(turn[key] for turns in every for turn in turns[engine]))
                for engine in ("ours", "llamacpp")
            ),
        ]
        for key, words in LARGE.items()
    ]
    return markdown(["", "nano-inference", "llama.cpp"], body)


def peers_of(times: Sequence[str]) -> str:
    """Return the times of the engines beside ours."""
    names = ("llama.cpp", "OpenVINO GenAI", "vLLM")
    return "; ".join(f"{name}: {time}" for name, time in zip(names, times[1:], strict=True) if time)


OTHERS = ("openvino", "llamacpp")
# --- quantization.py, quantization_grpo.py --------------------------------------------------------


def formats() -> str:
    """Return accuracy and perplexity of the bundled model by format."""
    head = ("", "MB", "bits per weight", "perplexity", "accuracy", "of sums")
    body = [
        (
            name,
            f"{of['bytes'] / 1e6:.2f}",
            f"{of['bits']:.1f}",
            f"{of['perplexity']:.4f}",
            f"{of['accuracy']:.1%}",
            f"{of['sums']:.1%}",
            f"{of['same']:.1%}",
            f"{of['logprob_gap']:.4f}",
        )
        for name, of in result("quantization")["formats_measured"].items()
    ]
    return markdown((*head, "same answers", "logprobs differ by"), body)


def quantized_grpo() -> str:
    """Return rewards and divergence of GRPO by the rollouts' weights and the correction."""
    head = ("rollouts, correction", "first steps", "last steps", "held-out before", "after", "KL")
    body = [
        (
            name,
            f"{of['first']:.1%}",
            f"{of['last']:.1%}",
            f"{of['before']:.1%}",
            f"{of['after']:.1%} ({of['after_least']:.1%} to {of['after_most']:.1%})",
            f"{of['kl']:.1e}",
        )
        for name, of in result("quantization-grpo")["figures"].items()
    ]
    return markdown(head, body)


TABLES: dict[str, Callable[[], str]] = {
    "run-peers": partial(engines_of, PEERS_RUNS, ("far", "near"), ALL),
    "first-token": first_token,
    "run-amx": partial(engines_of, AMX, ("near",), OTHERS),
    "run-transformers": partial(
        engines_of,
        ["run-S-2-amx-cores-Transformers"],
        ("near",),
        ("transformers", "generate_batch"),
    ),
    "run-vectors": partial(engines_of, VECTORS, ("near",), OTHERS),
    "run-epyc": partial(engines_of, EPYC, ("near",), OTHERS),
    "run-epyc-busy": partial(
        engines_of, ["run-S-2-cpu-cores-W1-short-one-busy"], ("shared",), OTHERS
    ),
    "constraints-peers": partial(
        engines_of, named("constraints-peers-"), ("far", "near"), ALL, CONSTRAINED
    ),
    "masks": masks,
    "drafted": drafted,
    "pipeline": partial(pipeline_of, "pipeline-2-cpu-cores"),
    "pipeline-s": partial(pipeline_of, "pipeline-S-2-cpu-cores"),
    "gateway": gateway,
    "poisson": partial(poisson, ["poisson-S-2-cpu-cores"], "itl", "gap between tokens"),
    "poisson-clients": partial(
        poisson, named("poisson-clients-"), "mean_itl", "mean time per further token"
    ),
    "kserve": kserve,
    "chaos": partial(chaos_of, "chaos", STREAM_FAULTS),
    "chaos-http": partial(chaos_of, "chaos-http", HTTP_FAULTS),
    "bad-days": partial(bad_days, "chaos-days"),
    "soak": partial(soak_trends, "soak"),
    "hostile": hostile,
    "bandwidth": partial(bandwidth, "roles-M-2-cpu-cores"),
    "takeover": partial(
        takeover, {"takeover-2-cpu-cores": "", "takeover-S-2-cpu-cores": " (S, 5 kills)"}
    ),
    "tier-bandwidth": partial(tier_bandwidth, "kv-bandwidth-S-2-cpu-cores"),
    "snapshots": partial(snapshots, "kv-snapshots-2-cpu-cores"),
    "handover": partial(handover, "roles-T-2-cpu-cores"),
    "handover-parts": partial(handover_parts, "roles-T-2-cpu-cores"),
    "interference": partial(interference, "roles-M-2-cpu-cores"),
    "devices": partial(devices, "roles-M-2-cpu-cores"),
    "conversations": partial(conversations, "kv-conversations-2-cpu-cores"),
    "all-reduce": partial(all_reduce, "ranks-2-cpu-cores"),
    "rank-steps": partial(rank_steps, "ranks-2-cpu-cores"),
    "rank-memory": partial(rank_memory, "ranks-memory"),
    "five": five,
    "measured": measured,
    "beside-vllm": partial(engines_of, ["run-quantized-S-2-cpu-cores-vllm"], ("near",), ("vllm",)),
    "beside-llamacpp": large,
    "formats": formats,
    "quantized-grpo": quantized_grpo,
}


def written(text: str) -> str:
    """Return a document with its tables generated anew."""
    return TABLE.sub(lambda found: f"{found[1]}{found[2]}\n{TABLES[found[1]]()}\n", text)


def main() -> None:
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        path.write_text(written(text), encoding="utf-8")


if __name__ == "__main__":
    main()
