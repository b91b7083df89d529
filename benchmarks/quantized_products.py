"""Products of the CPU kernels with quantised weights, against those with bfloat16, in alternation.

    python benchmarks/quantized_products.py [--rows 1,4,16,64,512] [--threads 1] [--repeat 7]
        [--products qkv,output,gated,down,vocabulary] [--forms ...] [--json FILE]

Random weights in the shapes of S: queries, keys and values together (896 to 1152), the attention's
output (896 to 896), gate and up (896 to 2 x 4864), down (4864 to 896), the output layer (896 to
151,936). For few rows each call takes another copy of the weights, so that these come from memory.

Times are the least of all turns, of one thread in processor time, of several on the clock. `x` is
relative to bfloat16. GB/s are of weights with their scales, GMAC/s products with weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from harness import options, print_table, progress, record, refuse_unknown, rotated

from nano_inference.stages.executor.runner.kernels.codes import PANEL, Codes
from nano_inference.stages.executor.runner.kernels.cpu import Linear, LinearKind
from nano_inference.stages.executor.runner.kernels.packed import Packed

PRODUCTS: dict[str, tuple[int, tuple[int, ...], LinearKind]] = {
    "qkv": (896, (896, 128, 128), LinearKind.PLAIN),
    "output": (896, (896,), LinearKind.PLAIN),
    "gated": (896, (4864, 4864), LinearKind.GATED_SILU),
    "down": (4864, (896,), LinearKind.PLAIN),
    "vocabulary": (896, (151_936,), LinearKind.WIDE),
}
FORMS: dict[str, tuple[int, int, int] | None] = {
    "bfloat16": None,
    "int8": (8, 0, 16),
    "int8/128": (8, 128, 16),
    "int8/32": (8, 32, 16),
    "int4/128": (4, 128, 16),
    "int4/32": (4, 32, 16),
    "int8 and 8-bit activations": (8, 0, 8),
    "int4/128 and 8-bit activations": (4, 128, 8),
}
"""Bits, group (0: one scale per output) and bits of activations."""
FEW_ROWS, COLD_BYTES = 16, 96 << 20


def layer_of(inputs: int, outputs: int, form: tuple[int, int, int] | None) -> tuple[Packed, int]:
    """Return a layer of random weights, and its bytes."""
    if form is None:
        weight = torch.randn(outputs, inputs, dtype=torch.bfloat16)
        return Packed({"weight": weight, "bias": None}, inputs, outputs), weight.nbytes  # type: ignore[dict-item]
    bits, group, activation_bits = form
    codes = Codes(outputs, inputs, bits, group or inputs, zero=2 ** (bits - 1))  # type: ignore[arg-type]
    shape = codes.panels, codes.padded_inputs * bits // 32, PANEL, 4
    tensors: dict[str, Any] = {
        "codes": torch.randint(0, 256, shape, dtype=torch.uint8),
        "scales": torch.rand(codes.panels, codes.groups, PANEL, dtype=torch.bfloat16),
    }
    size = sum(each.nbytes for each in tensors.values())
    parameters = {**tensors, "bias": None}
    return Packed(parameters, inputs, outputs, codes, torch.bfloat16, activation_bits), size  # type: ignore[arg-type]


class Product:
    """One product with so many copies of its weights."""

    def __init__(self, name: str, form: str, few: bool) -> None:
        self.inputs, outputs, kind = PRODUCTS[name]
        self.macs = self.inputs * sum(outputs)
        self.copies: list[Linear] = []
        taken = 0
        while not self.copies or (few and taken < COLD_BYTES):
            layers = [layer_of(self.inputs, each, FORMS[form]) for each in outputs]
            self.bytes = sum(size for _, size in layers)
            taken += self.bytes
            self.copies.append(Linear([packed for packed, _ in layers], kind))

    def time(self, rows: torch.Tensor, clock: Callable[[], float]) -> float:
        """Return the time of a call."""
        started = clock()
        for each in self.copies:
            each(rows)
        return (clock() - started) / len(self.copies)


def main() -> None:
    """Run the program."""
    parser = options(
        __doc__,
        rows=[1, 4, 16, 64, 512],
        threads=1,
        repeat=7,
        products=[*PRODUCTS],
        forms=[*FORMS][:6],
    )
    arguments = parser.parse_args()
    refuse_unknown(parser, arguments.products, PRODUCTS)
    refuse_unknown(parser, arguments.forms, FORMS)
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    results: dict[str, dict[str, float]] = {}
    cases = [(few, name) for few in (True, False) for name in arguments.products]
    with torch.inference_mode():
        for number, (few, name) in enumerate(cases):
            progress(number, len(cases), "product")
            counts = [each for each in arguments.rows if (each <= FEW_ROWS) == few]
            products = {form: Product(name, form, few) for form in arguments.forms if counts}
            for count in counts:
                rows = torch.randn(count, PRODUCTS[name][0], dtype=torch.bfloat16)
                least = dict.fromkeys(products, float("inf"))
                for turn in range(arguments.repeat + 1):
                    for form in rotated(products, turn):
                        spent = products[form].time(rows, clock)
                        if turn:
                            least[form] = min(least[form], spent)
                base = least.get("bfloat16", float("nan"))
                for form, spent in least.items():
                    product = products[form]
                    results[f"{name}, {count} rows, {form}"] = {
                        "us": spent * 1e6,
                        "x": base / spent,
                        "gb_per_s": product.bytes / spent / 1e9,
                        "gmac_per_s": product.macs * count / spent / 1e9,
                    }
    columns = {
        "us": "{us:.0f}",
        "x": "{x:.2f}",
        "GB/s": "{gb_per_s:.1f}",
        "GMAC/s": "{gmac_per_s:.1f}",
    }
    print_table(columns, results)
    record(arguments, results=results)


if __name__ == "__main__":
    main()
