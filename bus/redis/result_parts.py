"""Encoded outputs for one result stream, and the error that replaces outputs too large to write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...config import shown
from ..codec import encode_output
from ..public import Completion, ErrorInfo, Output, Timings, Usage

TOO_LARGE = "result_too_large"
REFUSED = "result_refused"


class StreamPart(NamedTuple):
    """Encoded outputs of one result stream that are still to be written.

    Attributes:
        payloads: The outputs, encoded, in order.
        ends: Whether the last one is the terminal message.
        output: One of the outputs, for its request's ids. None only without payloads.
        instead: Whether they replace outputs that the server refused.
    """

    payloads: list[bytes]
    ends: bool
    output: Output | None
    instead: bool = False

    @property
    def largest_bytes(self) -> int:
        """Size of the largest payload."""
        return max(map(len, self.payloads), default=0)

    def rest(self, start: int) -> StreamPart:
        """Return the part without its first payloads."""
        return self._replace(payloads=self.payloads[start:])


def part_of(outputs: Sequence[Output], max_bytes: int) -> StreamPart:
    """Encode outputs up to the terminal message.

    An output larger than `max_bytes` ends the request with an error.
    """
    payloads: list[bytes] = []
    for output in outputs:
        raw = encode_output(output)
        part = StreamPart(payloads, isinstance(output, Completion), output)
        if len(raw) > max_bytes:
            reason = f"it has {len(raw)} bytes, and bus.max_result_bytes is {max_bytes}"
            end = ending(part, TOO_LARGE, reason)
            return end._replace(payloads=[*payloads, *end.payloads])
        payloads.append(raw)
        if part.ends:
            return part
    return StreamPart(payloads, False, outputs[-1] if outputs else None)


def ending(part: StreamPart, code: str, reason: str) -> StreamPart:
    """Return a terminal error that replaces an unwritable output."""
    output = part.output
    assert output is not None, "what was written has no owner"
    whole = output if isinstance(output, Completion) else None
    completion = Completion(
        request_id=output.request_id,
        entry_id=output.entry_id,
        model=whole.model if whole else "",
        status="error",
        error=ErrorInfo(
            code=code,
            message=f"a part of the result can't be written: {reason}. Ask for less in one "
            "request: lower n, max_tokens, logprobs or prompt_logprobs"
            if code == TOO_LARGE
            else f"the result can't be written: {shown(reason)}",
        ),
        usage=whole.usage if whole else Usage(),
        timings=whole.timings if whole else Timings(),
        trace_id=whole.trace_id if whole else "",
    )
    return StreamPart([encode_output(completion)], True, completion, instead=True)
