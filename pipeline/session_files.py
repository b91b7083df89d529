"""Files of training samples: JSON lines and Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO, Literal

import msgspec

from .token_tree import SessionSample

SampleFormat = Literal["jsonl", "parquet"]


def write_samples(
    samples: Sequence[SessionSample], file: BinaryIO, format: SampleFormat = "jsonl"
) -> None:
    """Write samples, one to a line or a row, with the fields of `SessionSample`.

    In Parquet `token_ids` and `weight_versions` are lists of int32, `loss_mask` of int8, and
    logprobs of float32.

    Raises:
        ModuleNotFoundError: Parquet, without the extra `batch`.
    """
    if format == "jsonl":
        encoder = msgspec.json.Encoder()
        file.writelines(encoder.encode(each) + b"\n" for each in samples)
        return
    import pyarrow
    from pyarrow import parquet

    types = {
        "token_ids": pyarrow.list_(pyarrow.int32()),
        "loss_mask": pyarrow.list_(pyarrow.int8()),
        "weight_versions": pyarrow.list_(pyarrow.int32()),
        **dict.fromkeys(
            ("logprobs", "support_logprobs", "ref_logprobs"), pyarrow.list_(pyarrow.float32())
        ),
    }
    span = {"start": 0, "stop": 0, "request_id": "", "sample_index": 0, "num_tokens": 0}
    more = {"finish_reason": "", "model": "", "adapter_version": 0}
    types["spans"] = pyarrow.list_(
        pyarrow.struct(
            (name, pyarrow.string() if value == "" else pyarrow.int32())
            for name, value in (span | more).items()
        )
    )
    types["images"] = pyarrow.list_(pyarrow.string())
    plain = {"session": pyarrow.string(), "finish_reason": pyarrow.string()}
    fields = {
        name: types.get(name) or plain.get(name) or pyarrow.int32()
        for name in SessionSample.__struct_fields__
    }
    rows = [{name: getattr(each, name) for name in fields} for each in samples]
    for row in rows:
        row["spans"] = [msgspec.structs.asdict(each) for each in row["spans"]]
    table = pyarrow.Table.from_pylist(rows, pyarrow.schema(list(fields.items())))
    parquet.write_table(table, file)
