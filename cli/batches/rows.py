"""Rows of input files: lines of JSON, CSV and Parquet, read as a stream."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...config import ConfigError

MOST_LINE_BYTES = 256 << 20
"""Longest line that is read into memory."""

JSON_LINES = (".jsonl", ".ndjson")
FORMATS = (*JSON_LINES, ".csv", ".parquet")

_READ_ROWS = 1024


class Row(NamedTuple):
    """A row of a file.

    Attributes:
        number: Its line in a file of lines of JSON, else its number from 1.
        value: An object, of a table by column; any other JSON of a line. None for a fault.
        fault: Why it can't be read; "" if it can.
    """

    number: int
    value: Any
    fault: str = ""


def format_of(path: Path, option: str) -> str:
    """Return the format of a file, by the end of its name. Raises ConfigError: it is none."""
    kind = path.suffix.lower()
    if kind not in FORMATS:
        raise ConfigError(f"{option} is {path}; its name must end with {', '.join(FORMATS)}")
    return kind


def rows_of(path: Path) -> Iterator[Row]:
    """Yield the rows of a file, without blank lines.

    Raises:
        ConfigError: It can't be read, or is no such file.
    """
    kind = format_of(path, "IN")
    try:
        if kind in JSON_LINES:
            yield from _json_lines(path)
        elif kind == ".csv":
            yield from _csv(path)
        else:
            yield from _parquet(path)
    except OSError as error:
        why = f"can't read {path}: {error.strerror or error}"
        raise ConfigError(why, remedy="give a readable file") from None


def columns_of(path: Path) -> list[str]:
    """Return the columns of a table; of lines of JSON the fields of the first object."""
    if format_of(path, "IN") == ".parquet":
        return list(_opened(path).schema_arrow.names)
    first = next((row.value for row in rows_of(path) if isinstance(row.value, dict)), {})
    return list(first)


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MOST_LINE_BYTES + 1):
            number += 1
            if len(line) > MOST_LINE_BYTES:
                raise ConfigError(
                    f"{path}, line {number} has more than {MOST_LINE_BYTES >> 20} MiB",
                    remedy="write one JSON object in each line",
                )
            line = line.removeprefix(b"\xef\xbb\xbf").strip()
            if not line:
                continue
            try:
                yield Row(number, msgspec.json.decode(line))
            except (ValueError, RecursionError) as error:
                why = f"line {number} is no valid JSON ({error}); write one object in each line"
                yield Row(number, None, why)


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(MOST_LINE_BYTES)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            names = reader.fieldnames or []
            if twice := {name for name in names if names.count(name) > 1}:
                raise ConfigError(
                    f"{path} has two columns {min(twice)!r}", remedy="give each a name of its own"
                )
            for number, row in enumerate(reader, 1):
                if None in row or None in row.values():
                    width = sum(value is not None for value in row.values())
                    width += len(row.get(None, ())) - (None in row)
                    why = f"it has {width} values, and the header has {len(names)}"
                    yield Row(number, None, why)
                else:
                    yield Row(number, row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path}, line {reader.line_num + 1}: {error}",
                remedy="it must be CSV in UTF-8, with a header and quotes closed",
            ) from None


def _parquet(path: Path) -> Iterator[Row]:
    number = 0
    for batch in _opened(path).iter_batches(batch_size=_READ_ROWS):
        for row in batch.to_pylist():
            number += 1
            yield Row(number, row)


def _opened(path: Path) -> Any:
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(
            f"{path} is no Parquet: {error}", remedy="give a file of its format"
        ) from None
