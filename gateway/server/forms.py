"""Forms with a file (multipart/form-data, RFC 7578), whose file is passed on while it arrives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from ...config import RequestError
from ..call import Call
from .http import field_error

_MOST_FIELDS = 64
_MOST_FIELD_BYTES = 1 << 16


@dataclass(eq=False)
class FileForm:
    """The form of a call.

    Attributes:
        file_field: The field of its file.
        filename: The file's name; None until the file begins.
        fields: Its other fields, all of them once `content` has ended. A field comes before or
            after the file.
    """

    call: Call
    file_field: str
    filename: str | None = None
    fields: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kind, options = parse_options_header(self.call.header("content-type"))
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise RequestError(
                "the body is no form with a file",
                remedy=f"send multipart/form-data with the file in the field {self.file_field!r}",
                code="unsupported_media_type",
            )
        self._arrived: list[bytes] = []
        self._header, self._value = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._name, self._is_file, self._text = "", False, bytearray()
        self._ended = False
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_data,
                "on_part_data": self._take_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    async def content(self) -> AsyncIterator[bytes]:
        """Yield the file.

        Raises:
            RequestError: malformed: it is no form, or is cut off; invalid_request: it has no file,
                or several.
        """
        async for part in self.call.chunks():
            try:
                self._parser.write(part)
            except MultipartParseError as error:
                raise _malformed(f"can't be read: {error}") from None
            arrived, self._arrived = self._arrived, []
            for each in arrived:
                yield each
        if not self._ended:
            raise _malformed("is cut off")
        if self.filename is None:
            raise field_error(self.file_field, "is missing", remedy="send the file in this field")

    def _begin_part(self) -> None:
        self._headers, self._text = {}, bytearray()

    def _end_header(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header, self._value = bytearray(), bytearray()

    def _begin_data(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == self.file_field
        if not self._is_file:
            if len(self.fields) >= _MOST_FIELDS:
                raise _malformed(f"has more than {_MOST_FIELDS} fields")
            return
        if self.filename is not None:
            raise field_error(self.file_field, "comes twice", remedy="send one file in each call")
        self.filename = options.get(b"filename", b"").decode("utf-8", "replace")

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._arrived.append(data[start:end])
        elif len(self._text) + end - start > _MOST_FIELD_BYTES:
            why = f"has more than {_MOST_FIELD_BYTES} bytes"
            raise field_error(self._name, why, remedy="send the file alone in a form")
        else:
            self._text += data[start:end]

    def _end_part(self) -> None:
        if not self._is_file:
            self.fields[self._name] = bytes(self._text).decode("utf-8", "replace")

    def _end(self) -> None:
        self._ended = True


def _malformed(why: str) -> RequestError:
    return RequestError(
        f"the form {why}", remedy="send it whole, as RFC 7578 has it", code="malformed"
    )
