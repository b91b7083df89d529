"""A model of 7 billion weights from a GGUF file: time and memory of loading, and speed, by engine.

    python benchmarks/large.py [--kind Q4_0] [--engines ours,llamacpp] [--repeat 2]
        [--python llamacpp=PATH] [--folder DIR] [--json FILE]

The file has random weights in shape L (Qwen2.5-7B's) and no tokenizer; it is written tensor by
tensor, if it isn't there, and takes 4.4 GB in Q4_0. As in files of llama.cpp, its output layer is
in Q6_K. Engines take turns, each turn in a fresh process that loads the file, which the system then
has in its page cache, and runs twice

    prefill     128 tokens of one prompt
    step        of one sequence after it
    step, 4     of four such sequences

of which the second counts. Memory is the largest found in `/proc` every 10 ms: `peak` of
everything, which includes pages of the file while they are mapped, and `own` of memory that belongs
to the process alone. Both include Python, the code and, of ours, a KV cache of 134 MB. `loads`
is from the start of the process.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import machine
import numpy as np
from harness import Worker, options, print_table, progress, record, refuse_unknown, rotated
from workloads import SHAPES

from nano_inference.tests.gguf_files import random_rows

ENGINES = {"ours": "ours.py", "llamacpp": "llamacpp.py"}
RUNS = {"prefill": "W1-short", "step": "W1-short", "step, 4": "W1-short-4"}
SHAPE = "L"
OUTPUT_KIND = "Q6_K"
FILE_TYPES = {
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "Q4_K": gguf.LlamaFileType.MOSTLY_Q4_K_M,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}

Matrix = tuple[int, int, str]
"""Outputs, inputs and type."""


def tensors_of(
    shape: dict[str, Any], kind: str
) -> Iterator[tuple[str, Matrix | tuple[int, float]]]:
    """Iterate over tensors by name: matrices, and the length and value of vectors."""
    hidden, inner, vocabulary = (
        shape[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    narrow = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    yield "token_embd.weight", (vocabulary, hidden, kind)
    for layer in range(shape["num_hidden_layers"]):
        blk = f"blk.{layer}"
        yield f"{blk}.attn_norm.weight", (hidden, 1.0)
        for name, size in (("attn_q", hidden), ("attn_k", narrow), ("attn_v", narrow)):
            yield f"{blk}.{name}.weight", (size, hidden, kind)
            yield f"{blk}.{name}.bias", (size, 0.0)
        yield f"{blk}.attn_output.weight", (hidden, hidden, kind)
        yield f"{blk}.ffn_norm.weight", (hidden, 1.0)
        yield f"{blk}.ffn_gate.weight", (inner, hidden, kind)
        yield f"{blk}.ffn_up.weight", (inner, hidden, kind)
        yield f"{blk}.ffn_down.weight", (hidden, inner, kind)
    yield "output_norm.weight", (hidden, 1.0)
    yield "output.weight", (vocabulary, hidden, OUTPUT_KIND)


def write_file(path: Path, kind: str) -> None:
    """Write the model, with one tensor at a time in memory."""
    shape = SHAPES[SHAPE]
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_context_length(32_768)
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    tensors = dict(tensors_of(shape, kind))
    for name, each in tensors.items():
        if len(each) == 2:
            writer.add_tensor_info(name, each[:1], np.dtype(np.float32), 4 * each[0])
            continue
        rows, columns, own = each
        stored = gguf.GGMLQuantizationType[own]
        block, block_bytes = gguf.GGML_QUANT_SIZES[stored]
        place = (rows, columns // block * block_bytes)
        writer.add_tensor_info(name, place, np.dtype(np.uint8), place[0] * place[1], stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, each in enumerate(tensors.values()):
        if len(each) == 2:
            writer.write_tensor_data(np.full(*each, np.float32))
        else:
            writer.write_tensor_data(random_rows(each[2], *each[:2], seed=number))
    writer.close()


class Memory(threading.Thread):
    """Records the largest memory of a process.

    Attributes:
        peak_bytes: Of all its pages.
        own_bytes: Of pages that are no file's.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = self.own_bytes = 0
        self._status = Path(f"/proc/{pid}/status")
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.01):
            with suppress(OSError, KeyError):  # it ends meanwhile
                lines = (line.split(":", 1) for line in self._status.read_text().splitlines())
                sizes = {name: text.split() for name, text in lines}
                self.peak_bytes = max(self.peak_bytes, int(sizes["VmHWM"][0]) << 10)
                own = int(sizes["RssAnon"][0]) + int(sizes["RssShmem"][0]) << 10
                self.own_bytes = max(self.own_bytes, own)

    def end(self) -> None:
        self._ended.set()
        self.join()


def measure(engine: str, python: str, target: Path, kind: str, threads: int) -> dict[str, Any]:
    """Load the file in a fresh process, and run the workloads."""
    program = Path(__file__).parent / "engines" / ENGINES[engine]
    start = time.perf_counter()
    with Worker(python, program, target, SHAPE, threads, f"{engine}:{kind}") as worker:
        memory = Memory(worker.process.pid)
        memory.start()
        about = worker.answer()
        loads_s = time.perf_counter() - start
        memory.end()
        found: dict[str, Any] = {
            "version": about["version"],
            "loads_s": loads_s,
            "peak_bytes": memory.peak_bytes,
            "own_bytes": memory.own_bytes,
            "before_bytes": about["before_bytes"],
        }
        before = machine.measure(threads)
        times = {name: [worker.ask([name, seed]) for seed in (1, 2)][-1] for name in RUNS.values()}
        found["state"] = machine.state_around(before, machine.measure(threads))
        found["bandwidth"] = before.bytes_per_s if before is not None else None
    for name, workload in RUNS.items():
        own = times[workload]
        seconds = own["prefill_s"] if name == "prefill" else statistics.median(own["steps_s"])
        found[name] = 1e3 * seconds
    return found


def main() -> None:
    parser = options(
        __doc__,
        kind=("Q4_0", [*FILE_TYPES]),
        engines=[*ENGINES],
        repeat=2,
        threads=2,
        folder=Path("build/benchmarks"),
    )
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH")
    arguments = parser.parse_args()
    refuse_unknown(parser, arguments.engines, ENGINES)
    pythons = dict(choice.split("=", 1) for choice in arguments.python)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    target = arguments.folder.absolute() / SHAPE
    file = target.with_name(f"{SHAPE}-{arguments.kind}.gguf")
    if not file.exists():
        part = file.with_suffix(".part")
        write_file(part, arguments.kind)
        part.rename(file)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.engines}
    for turn in range(arguments.repeat):
        for name in rotated(arguments.engines, turn):
            python = pythons.get(name, sys.executable)
            own = measure(name, python, target, arguments.kind, arguments.threads)
            turns[name].append(own)
        progress(turn + 1, arguments.repeat)
    size = file.stat().st_size
    rows = {}
    for name, each in turns.items():
        numbers = ("loads_s", "peak_bytes", "own_bytes", *RUNS)
        fields = {key: statistics.median(turn[key] for turn in each) for key in numbers}
        fields |= {f"{key}, of file": fields[key] / size for key in ("peak_bytes", "own_bytes")}
        rows[name] = {key.replace(", ", "_"): value for key, value in fields.items()}
    print_table(
        {
            "loads": "{loads_s:.1f} s",
            "peak / file": "{peak_bytes_of file:.2f}",
            "own / file": "{own_bytes_of file:.2f}",
            "prefill": "{prefill:.0f} ms",
            "step": "{step:.1f} ms",
            "step, 4": "{step_4:.1f} ms",
        },
        rows,
        f"{size / 1e9:.2f} GB in {arguments.kind}",
    )
    record(arguments, file_bytes=size, turns=turns, medians=rows)


if __name__ == "__main__":
    main()
