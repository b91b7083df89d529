"""A strict reader of GGUF headers, run before any library reads the file.

Libraries trust the counts in a header: a truncated or forged one makes them read past the end,
allocate without limit, or loop for hours. Here every count is checked against the file's size.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..config import ModelError, shown

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Types of numbers, and their codes in `struct`."""

_MOST_DIMENSIONS = 4

_MOST_ELEMENTS = 1 << 21
"""Limit on elements of all arrays together. The gguf package keeps about 700 bytes per element, so
9 MB of bytes would take 6 GB. The largest known vocabulary (262,144 tokens) needs 1.3 million.
"""

_MOST_OF_OTHERS = 1 << 16
"""Limit for an array outside the tokenizer; most have one number per layer."""

_MOST_LAYERS = 1024
"""Limit on layers: their modules are built before weights are read. Known models have up to 200."""
_SIZES = (
    *("embedding_length", "feed_forward_length", "vocab_size", "expert_count"),
    *("attention.head_count", "attention.head_count_kv"),
    *("attention.key_length", "attention.value_length"),
)
"""Dimensions of the model that can't exceed the largest tensor dimension."""


class GgufTensor(NamedTuple):
    """A tensor of a GGUF file.

    Attributes:
        kind: Its type, by GGUF's name ("Q4_0", "F32").
        shape: Its dimensions, slowest first, as torch has them.
        start: First byte in the file.
        num_bytes: Bytes in the file.
    """

    kind: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file.

    Attributes:
        metadata: Numbers, booleans and strings by name; for arrays, their length.
        tensors: Tensors by name.
        unread_positions: Position-encoding keys that Transformers ignores.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    unread_positions: tuple[str, ...] = ()

    @property
    def types(self) -> dict[str, int]:
        """Number of tensors of each type, the most frequent first."""
        return dict(Counter(tensor.kind for tensor in self.tensors.values()).most_common())

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    @property
    def context_length(self) -> int | None:
        """The longest context in tokens; None if absent."""
        found = self.metadata.get(f"{self.architecture}.context_length")
        return found if type(found) is int else None

    def token_id(self, name: str) -> int | None:
        """Return the id of a special token in the metadata ("eos", "eot")."""
        found = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return found if type(found) is int else None


def read_header(path: Path) -> GgufHeader:
    """Return a file's header. Weights are only checked for being there.

    Raises:
        ModelError: The file can't be read, is not GGUF, is truncated, or contradicts itself.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except ValueError:
        raise ModelError(f"{path} is empty; copy or download it again") from None
    except OSError as error:
        raise ModelError(f"can't read {path}: {error}; copy or download it again") from error


def _unread_positions(metadata: dict[str, Any], tensors: Iterable[str]) -> tuple[str, ...]:
    """Return rotary-scaling keys, which Transformers' loader reads for GPT-OSS only."""
    architecture = metadata["general.architecture"]
    if architecture == "gpt-oss":
        return ()
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    scaled = [f"{architecture}.rope.scaling ({shown(kind)})"] if kind != "none" else []
    return (*scaled, *(name for name in tensors if name.startswith("rope_f")))


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0
        self._elements = 0

    def header(self) -> GgufHeader:
        if self._data[:4] != _MAGIC:
            raise ModelError(
                f"{self._path} is no GGUF file: it does not begin with GGUF",
                remedy="copy or download it again, or name another file",
            )
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            big = "written for big-endian machines" if version & 0xFFFF == 0 else f"GGUF {version}"
            raise ModelError(f"{self._path} is {big}; convert it to GGUF 3, little-endian")
        num_tensors, num_entries = self._number("Q"), self._number("Q")
        # The shortest entries: an empty key and a byte; an empty name and one dimension.
        self._check_room(num_entries, 13)
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            if key in metadata:
                raise self._broken(f"has {shown(key)} twice")
            metadata[key] = self._value(key, self._number("I"))
        self._check_room(num_tensors, 32)
        tensors: dict[str, tuple[list[int], int, int]] = {}
        for _ in range(num_tensors):
            name = self._string()
            if name in tensors:
                raise self._broken(f"has the tensor {shown(name)} twice")
            tensors[name] = self._tensor()
        self._check_metadata(metadata, tensors)
        alignment = metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        places = {name: self._place(name, start, *each) for name, each in tensors.items()}
        self._check_places(places, start)
        return GgufHeader(metadata, places, _unread_positions(metadata, tensors))

    def _tensor(self) -> tuple[list[int], int, int]:
        """Return a tensor's dimensions (fastest first), type number and offset."""
        count = self._number("I")
        if not 1 <= count <= _MOST_DIMENSIONS:
            raise self._broken(f"has a tensor of {count} dimensions")
        dimensions = [self._number("Q") for _ in range(count)]
        return dimensions, self._number("I"), self._number("Q")

    def _check_metadata(self, metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise self._broken("does not say its general.architecture")
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment.bit_count() != 1:
            raise self._broken(f"has the general.alignment {alignment!r}")
        parts = metadata.get("split.count", 1)
        if parts != 1:
            raise ModelError(
                f"{self._path} is one of {parts} parts of a model, which Transformers does not "
                "read; make one file of them with `llama-gguf-split --merge`"
            )
        if not tensors:
            raise self._broken("holds no tensors, and so no weights")
        blocks = metadata.get(f"{architecture}.block_count", 0)
        if type(blocks) is not int or blocks > min(len(tensors), _MOST_LAYERS):
            raise self._broken(
                f"has {len(tensors)} tensors for {blocks!r} layers, of which there may be "
                f"{_MOST_LAYERS}"
            )
        largest = max(max(dimensions) for dimensions, _, _ in tensors.values())
        for name in _SIZES:
            size = metadata.get(f"{architecture}.{name}", 0)
            if isinstance(size, int) and size > largest:
                raise self._broken(f"has the {name} {size}, and no tensor is as large")

    def _place(
        self, name: str, start: int, dimensions: list[int], number: int, offset: int
    ) -> GgufTensor:
        """Return a tensor, in data that begin at a byte of the file."""
        # An optional package; the caller has checked that it is installed.
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(number)
            block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise self._broken(f"has {shown(name)} of the unknown type {number}") from None
        if dimensions[0] % block_elements:
            raise self._broken(f"has {shown(name)} of {dimensions[0]} columns in {kind.name}")
        size = math.prod(dimensions) // block_elements * block_bytes
        return GgufTensor(kind.name, tuple(reversed(dimensions)), start + offset, size)

    def _check_places(self, places: dict[str, GgufTensor], start: int) -> None:
        """Check that every tensor lies within the file and none overlap.

        Args:
            places: Tensors by name.
            start: Start of the data.
        """
        last, before = start, ""
        for name, tensor in sorted(places.items(), key=lambda place: place[1][2:]):
            begin, end = tensor.start, tensor.start + tensor.num_bytes
            if end > len(self._data):
                raise ModelError(
                    f"{self._path} is cut off: it has {len(self._data)} bytes, and {shown(name)} "
                    f"ends at {end}; copy or download it again"
                )
            if begin < last:
                raise self._broken(
                    f"has {shown(name)} at byte {begin - start} of its data, where {shown(before)} "
                    f"still is, up to byte {last - start}"
                )
            last, before = end, name

    def _value(self, key: str, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._broken(f"has a value of the unknown type {kind}")
        kind, count = self._number("I"), self._number("Q")
        if kind != _STRING and kind not in _SCALARS:
            raise self._broken(f"has an array of the unsupported type {kind}")
        size = 8 if kind == _STRING else struct.calcsize(_SCALARS[kind])
        self._check_room(count, size)
        self._check_elements(key, count)
        if kind in _SCALARS:
            self._skip(count * size)
        else:
            for _ in range(count):
                self._skip(self._number("Q"))
        return count

    def _check_elements(self, key: str, count: int) -> None:
        self._elements += count
        most = _MOST_ELEMENTS if key.startswith("tokenizer.") else _MOST_OF_OTHERS
        if count > most or self._elements > _MOST_ELEMENTS:
            raise self._broken(
                f"has {count} elements in {shown(key)}, and {self._elements} in its arrays so far; "
                f"it may have {most} there, and {_MOST_ELEMENTS} in all"
            )

    def _number(self, code: str) -> Any:
        (number,) = struct.unpack_from(f"<{code}", self._data, self._skip(struct.calcsize(code)))
        return number

    def _string(self) -> str:
        size = self._number("Q")
        begin = self._skip(size)
        try:
            return self._data[begin : begin + size].decode()
        except UnicodeDecodeError:
            raise self._broken("has a text that is not UTF-8") from None

    def _skip(self, size: int) -> int:
        """Advance, and return the old position."""
        begin = self._at
        self._check_room(size, 1)
        self._at += size
        return begin

    def _check_room(self, count: int, size: int) -> None:
        left = len(self._data) - self._at
        if count * size > left:
            raise ModelError(
                f"{self._path} is cut off or broken: at byte {self._at} its header says that at "
                f"least {count * size} bytes follow, and {left} do; copy or download it again"
            )

    def _broken(self, what: str) -> ModelError:
        return ModelError(f"{self._path} can't be served: it {what}; copy or convert it again")
