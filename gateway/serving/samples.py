"""A request of one sample on its way through the engine: whole, or as a stream of chunks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio
import anyio.lowlevel

from ...bus.public import Completion, CompletionChunk, GenerateRequest, Output
from ...config import NanoInferenceError
from .origin import Origin
from .submissions import Submissions

MOST_UNSENT = 4096
"""Tokens of a stream buffered here for a slow client. The rest waits on the bus."""

Take = Callable[[Sequence[CompletionChunk]], Awaitable[None]]


class Unsent:
    """Outputs that wait for a client, which may read slowly.

    Subclasses define `is_due` and `send_next`.

    Attributes:
        unsent: Tokens that wait.
    """

    def __init__(self) -> None:
        self.unsent = 0
        self._read = anyio.Event()
        self._changed = anyio.Event()
        self._closed = False

    @property
    def is_due(self) -> bool:
        """Whether there is anything to send."""
        raise NotImplementedError

    async def send_next(self) -> None:
        """Send what is due, or a part of it."""
        raise NotImplementedError

    async def send_all(self) -> None:
        """Send until it is closed and nothing is left."""
        while self.is_due or not self._closed:
            if not self.is_due:
                self._changed = anyio.Event()
                await self._changed.wait()
                continue
            await self.send_next()
            # The server takes what fits its buffers without a pause.
            await anyio.lowlevel.checkpoint()

    async def room(self) -> None:
        """Wait while too much waits for the client."""
        while self.unsent > MOST_UNSENT and self.is_due:
            if self._read.is_set():
                self._read = anyio.Event()
            await self._read.wait()

    def close(self) -> None:
        """Declare that no more outputs come."""
        self._closed = True
        self._changed.set()

    def _came(self, tokens: int) -> None:
        self.unsent += tokens
        self._changed.set()

    def _taken(self) -> None:
        self.unsent = 0
        self._read.set()


class UnsentOutputs(Unsent):
    """The outputs of one request."""

    def put(self, output: Output) -> None:
        """Add an output."""
        raise NotImplementedError


class SampleChunks(UnsentOutputs):
    """The chunks of one sample. The end of the sample has what did not come in chunks."""

    def __init__(self, take: Take) -> None:
        super().__init__()
        self._take = take
        self._waiting: list[CompletionChunk] = []

    def put(self, output: Output) -> None:
        if isinstance(output, CompletionChunk):
            self._waiting.append(output)
            self._came(len(output.token_ids))

    @property
    def is_due(self) -> bool:
        return bool(self._waiting)

    async def send_next(self) -> None:
        chunks, self._waiting = self._waiting, []
        self._taken()
        await self._take(chunks)


async def stream_sample(
    submissions: Submissions, origin: Origin, request: GenerateRequest, take: Take
) -> Completion:
    """Run a request of one sample, and pass its chunks to `take` as fast as they are taken.

    Raises:
        NanoInferenceError: The engine has failed. All earlier chunks were passed on.
    """
    return await stream_unsent(submissions, origin, request, SampleChunks(take))


async def stream_unsent(
    submissions: Submissions, origin: Origin, request: GenerateRequest, unsent: UnsentOutputs
) -> Completion:
    """Run a request, and send its outputs as fast as they are read.

    Raises:
        NanoInferenceError: The engine did not do it, or its outputs could not be sent.
    """
    failure: NanoInferenceError | None = None

    async def put(output: Output) -> None:
        unsent.put(output)
        await unsent.room()

    async def send() -> None:
        nonlocal failure
        try:
            await unsent.send_all()
        except NanoInferenceError as error:
            # Outside the group, which would wrap it.
            failure = error
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(send)
        try:
            completion = await complete_sample(submissions, origin, request, put)
        except NanoInferenceError as error:
            failure = failure or error
        unsent.close()
    if failure is not None:
        raise failure
    return completion


async def complete_sample(
    submissions: Submissions,
    origin: Origin,
    request: GenerateRequest,
    put: Callable[[Output], Awaitable[None]] | None = None,
    before: str = "",
) -> Completion:
    """Run a request, and return its completion.

    Args:
        put: Called with each output, and awaited.
        before: The part of the prompt that the answer shows before each sample.

    Raises:
        NanoInferenceError: The engine has failed.
    """
    ended: list[Completion] = []

    async def take(index: int, output: Output) -> None:
        if put is not None:
            await put(output)
        if isinstance(output, Completion):
            ended.append(output)

    await submissions.run(origin, [request], take, before=lambda index: before)
    return ended[0]
