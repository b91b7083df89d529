"""The tables of docs/models.md, written from the tests' measurements and compared with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from nano_inference.stages.executor import wrap_model

from .models import ARCHITECTURES, REFUSED, make_model

DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"

MAX_DIFFERENCE = 1e-4
"""Largest difference of a logprob in float32 from Transformers'."""

MAX_RATIO = 1.5
"""Largest ratio of our mean distance from float32, in bfloat16, to the larger one of Transformers'
own.
"""

COLUMNS = {
    "block 16": "blocks of 16",
    "block 1": "blocks of 1",
    "radix": "radix",
    "paged": "paged",
    "chunks": "chunks of 7",
    "preempted": "preempted",
    "warm": "warm cache",
    "bf16": "bfloat16: ours from float32, mean",
    "bf16 eager": "eager from float32, mean",
    "bf16 worst": "ours from eager, largest",
    "bf16 sdpa": "sdpa from eager, largest",
}
"""The measured quantities of each architecture, and their column headings."""


class Results:
    """The largest values that a test session measured, by cell."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, str], float] = defaultdict(float)

    def add(self, architecture: str, column: str, value: float) -> None:
        """Takes a figure. The column is a key of COLUMNS."""
        assert column in COLUMNS, column
        cell = architecture, column
        self._cells[cell] = max(self._cells[cell], value)

    def write(self) -> None:
        """Rewrites the tables in the document.

        Raises:
            RuntimeError: Not everything was measured.
        """
        wanted = {(name, column) for name in ARCHITECTURES for column in COLUMNS}
        if missing := wanted - self._cells.keys():
            raise RuntimeError(f"{DOCUMENT.name} was not written; not measured: {sorted(missing)}")
        measured = [
            [name, *(shown(self._cells[name, column]) for column in COLUMNS)]
            for name in ARCHITECTURES
        ]
        text = DOCUMENT.read_text()
        text = put_table(text, "measured", ["", *COLUMNS.values()], measured)
        text = put_table(text, "features", FEATURE_HEADINGS, map(features, ARCHITECTURES))
        text = put_table(text, "refused", REFUSED_HEADINGS, refused_rows())
        DOCUMENT.write_text(text)


def shown(value: float) -> str:
    """A figure with two digits; empty for 0."""
    if not value:
        return ""
    return f"{value:.1e}".replace("e-0", "e-") if value < 1e-3 else f"{value:.2g}"


FEATURE_HEADINGS = [
    *("", "heads : KV heads", "window", "chunks", "KV of another layer"),
    *("soft cap", "sinks", "experts", "tied"),
]


@cache
def features(name: str) -> tuple[str, ...]:
    """A row of the table of features, read from the model."""
    model = make_model(name)
    config = model.config
    layers = wrap_model(model, 64).layers
    heads = f"{config.num_attention_heads} : {layers[0].num_kv_heads}"

    def in_some(sizes: list[int | None]) -> str:
        found = [size for size in sizes if size is not None]
        return f"{found[0]} in {len(found)} of {len(layers)} layers" if found else ""

    shared = sum(layer.source is not None for layer in layers)
    soft_cap = getattr(config, "attn_logit_softcapping", None)
    sinks = any(key.endswith("sinks") for key, _ in model.named_parameters())
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    return (
        name,
        heads,
        in_some([layer.window for layer in layers]),
        in_some([layer.chunk for layer in layers]),
        f"{shared} of {len(layers)} layers" if shared else "",
        f"{soft_cap:g}" if soft_cap else "",
        "yes" if sinks else "",
        f"{config.num_experts_per_tok} of {experts}" if experts else "",
        "yes" if config.tie_word_embeddings else "",
    )


REFUSED_HEADINGS = ["`model_type`", "what the refusal says"]


def refused_rows() -> list[tuple[str, str]]:
    """The kinds of refused models, by the error's sentence."""
    by_reason: dict[str, list[str]] = {}
    for kind, reason in REFUSED.items():
        by_reason.setdefault(reason, []).append(f"`{kind}`")
    return [(", ".join(kinds), reason) for reason, kinds in by_reason.items()]


def put_table(text: str, name: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The document with another table between the markers of that name."""
    before, begin, rest = text.partition(f"<!-- begin {name} -->\n")
    _, end, after = rest.partition(f"<!-- end {name} -->\n")
    if not begin or not end:
        raise ValueError(f"{DOCUMENT} has no markers for the table {name!r}")
    table = [headings, ["---"] * len(headings), *rows]
    lines = "".join(f"| {' | '.join(row)} |\n" for row in table)
    return before + begin + lines + end + after


def read_table(name: str) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table in the document."""
    text = DOCUMENT.read_text()
    body = text.partition(f"<!-- begin {name} -->\n")[2].partition(f"<!-- end {name} -->\n")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in body.splitlines()]
    return lines[0], lines[2:]
