"""Streams of interfaces whose answers one request makes, part by part."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from ...bus.public import Completion, CompletionChunk
from ...config import NanoInferenceError
from ...text.messages import Reading
from ..call import Call
from ..server.http import EventStream, SendEvent
from .begun_calls import BodyCall
from .prepared import about_tools
from .samples import SampleChunks, stream_unsent
from .services import Services

Answer = dict[str, Any]
Produce = Callable[[SendEvent], Awaitable[None]]
Stream = TypeVar("Stream", bound=EventStream)


class PartsWriter(Protocol):
    """Writes the parts of an answer."""

    def add(self, chunks: Sequence[CompletionChunk]) -> list[Answer]: ...

    def end(self, completion: Completion) -> list[Answer]: ...


def streamed(
    services: Services,
    call: Call,
    begun: BodyCall,
    writer: PartsWriter,
    reading: Reading | None,
    *,
    stream_of: Callable[[Produce], Stream],
    send_part: Callable[[SendEvent, Answer], Awaitable[None]],
    failure: Callable[[NanoInferenceError], Answer],
) -> Stream:
    """Return the stream of a call: attach to its request, send what comes, then the end.

    Args:
        stream_of: Makes the stream of what produces it.
        send_part: Sends a part.
        failure: Returns the last part of a stream that has begun and fails.
    """
    (asked,) = begun.requests

    async def produce(send: SendEvent) -> None:
        async def tell(parts: Sequence[Answer]) -> None:
            for part in parts:
                await send_part(send, part)

        async def take(chunks: Sequence[CompletionChunk]) -> None:
            await tell(writer.add(chunks))

        try:
            async with begun.attach() as attachment:
                with about_tools(reading):
                    completion = await stream_unsent(
                        services.submissions, call, asked, SampleChunks(take), attachment
                    )
        except NanoInferenceError as error:
            if not stream.committed:
                raise
            await tell([failure(error)])
            return
        await tell(writer.end(completion))

    stream = stream_of(produce)
    return stream
