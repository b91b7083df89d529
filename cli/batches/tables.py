"""Answers as columns: the rows of the input, with what was answered to each."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from ...config import ConfigError
from .journal import Answer, Journal, replaced
from .lines import Line
from .rows import JSON_LINES, Row, columns_of

_ROWS = 8192


class AnswerTable:
    """A table of the input's columns and the answers.

    The columns of an answer are its text, its finish reason, its error and its numbers of tokens.
    """

    def __init__(self, source: Path, path: Path, column: str) -> None:
        """`column`: that of the text; the others begin with it. Raises ConfigError: the input has
        a column of such a name."""
        self._source, self._path = source, path
        self._columns = columns_of(source)
        if source.suffix.lower() in JSON_LINES and {"url", "body"} <= {*self._columns}:
            self._columns = ["custom_id"]
        self._added = {
            column: str,
            f"{column}_finish_reason": str,
            f"{column}_error": str,
            f"{column}_prompt_tokens": int,
            f"{column}_completion_tokens": int,
        }
        for name in self._added:
            if name in self._columns:
                raise ConfigError(
                    f"{source} has a column {name!r} already",
                    remedy="name the column of answers with --answer NAME",
                )

    def write(self, lines: Iterable[Line], journal: Journal) -> None:
        """Write the table, in the order of the input. Raises ConfigError: it can't be written."""
        rows = (self._row(line.row, journal.read(line.id)) for line in lines)
        with replaced(self._path) as file:
            if self._path.suffix.lower() == ".csv":
                with io.TextIOWrapper(file, "utf-8", newline="") as text:
                    writer = csv.writer(text)
                    writer.writerow([*self._columns, *self._added])
                    writer.writerows([_cell(each) for each in row] for row in rows)
            else:
                self._write_parquet(rows, file)

    def _row(self, row: Row, answer: Answer) -> list[Any]:
        value = row.value if isinstance(row.value, dict) else {}
        return [*(value.get(name) for name in self._columns), *cells_of(answer)]

    def _write_parquet(self, rows: Iterator[list[Any]], file: Any) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        types = {str: pa.string(), int: pa.int64()}
        added = [pa.field(name, types[kind]) for name, kind in self._added.items()]
        if self._source.suffix.lower() == ".parquet":
            own = list(pq.read_schema(self._source))
        else:
            own = [pa.field(name, pa.string()) for name in self._columns]
        schema = pa.schema([*own, *added])
        is_text = [pa.types.is_string(field.type) for field in schema]
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            while some := list(islice(rows, _ROWS)):
                arrays = [
                    pa.array(
                        [None if each is None else _cell(each) for each in column]
                        if text
                        else column,
                        field.type,
                    )
                    for column, field, text in zip(
                        zip(*some, strict=True), schema, is_text, strict=True
                    )
                ]
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def cells_of(answer: Answer) -> tuple[str | None, str | None, str | None, int | None, int | None]:
    """Return the text, the finish reason, the error and the tokens of an answer."""
    if answer.error is not None:
        return None, None, f"{answer.error.message} ({answer.error.code})", None, None
    assert answer.response is not None
    body = msgspec.json.decode(answer.response.body)
    if answer.failed or not isinstance(body, dict):
        error = body.get("error") if isinstance(body, dict) else body
        message = error.get("message") if isinstance(error, dict) else None
        return (
            None,
            None,
            str(message or f"status {answer.response.status_code}: {body}"),
            None,
            None,
        )
    usage = body.get("usage") or {}
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    completion = usage.get("completion_tokens", usage.get("output_tokens"))
    texts, reasons = _texts(body)
    text = texts[0] if len(texts) == 1 and isinstance(texts[0], str) else _json(texts or body)
    return text, ",".join(reasons) or None, None, prompt, completion


def _texts(body: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """Return what was answered, one for each sample, and why each ended."""
    texts: list[Any] = []
    reasons = []
    for choice in body.get("choices") or ():
        message = choice.get("message") or {}
        texts.append(choice.get("text", message.get("content")) or message.get("tool_calls") or "")
        reasons.append(str(choice.get("finish_reason") or ""))
    for item in body.get("output") or ():
        texts += [part["text"] for part in item.get("content") or () if "text" in part]
    if body.get("type") == "message":
        texts += [part["text"] for part in body.get("content") or () if "text" in part]
        reasons.append(str(body.get("stop_reason") or ""))
    if body.get("object") == "list":
        texts += [each.get("embedding") for each in body.get("data") or ()]
        texts = texts[:1] if len(texts) == 1 else texts
    return texts, reasons


def _json(value: Any) -> str:
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    return msgspec.json.encode(value).decode()


def _cell(value: Any) -> Any:
    """Return a value as a text."""
    if value is None or isinstance(value, str):
        return value
    return (
        msgspec.json.encode(value, enc_hook=str).decode()
        if isinstance(value, (list, dict, bool))
        else str(value)
    )
