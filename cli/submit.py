"""`nano-inference submit`: sends requests to a running pipeline and prints the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path

import typer
from msgspec.structs import replace

from ..bus.public import Completion, CompletionChunk
from ..config import Config, ConfigError, NanoInferenceError
from ..pipeline.client import BusClient
from .answers import AnswerPrinter, ProgressLine
from .connection import connected
from .options import Options, takes_model_options
from .request_options import (
    AsJson,
    Chat,
    NoWait,
    Prompts,
    RequestFile,
    Samples,
    Trace,
    takes_wanted_options,
)
from .requests import LineReader, Submission, Wanted, read_file, read_stdin
from .terminal import complain

Source = Iterable[Submission] | AsyncIterator[Submission]

PATIENCE_S = 10.0
"""How long no answer at all is normal."""

_CONCURRENT = 64


@takes_model_options
@takes_wanted_options()
def submit(
    options: Options,
    wanted: Wanted,
    texts: Prompts = None,
    file: RequestFile = None,
    chat: Chat = False,
    n: Samples = None,
    as_json: AsJson = False,
    no_wait: NoWait = False,
    trace: Trace = False,
) -> None:
    """Send requests to a running pipeline and print the answers.

    One text is answered as it is generated:

        nano-inference submit "98 + 25 ="

        nano-inference submit --chat "What is 12 + 30?" --trace

        nano-inference submit "Story about Emma, a dog and" -n 4 -t 1 --seed 7

        nano-inference submit "98 + 25 =" --json --sampling logprobs=3 --sampling min_tokens=2

    Many requests run at the same time, and each answer is printed when it is complete, behind
    its request's id, or the number of its text or line. A line of a file is a request as JSON, or
    a prompt as a JSON string. On standard input, a line that does not begin with `{` is a prompt
    as it stands:

        nano-inference submit "98 + 25 =" "12 + 30 ="

        nano-inference submit --file requests.jsonl --json > answers.jsonl

        seq 1 9 | sed 's/$/ + 5 =/' | nano-inference submit -

    What a request leaves out is taken from the options that you give.

    Answers go to standard output, all else to standard error. Ctrl-C cancels what is in flight.
    The exit status is 1 when any request did not end well.
    """
    given = texts or []
    one_text = len(given) == 1 and given != ["-"] and file is None
    streams = one_text and not as_json and n in (None, 1)
    wanted = replace(wanted, chat=chat, n=n, stream=streams, model=options.served)
    printer = AnswerPrinter(as_json=as_json, trace=trace, labelled=not one_text)
    _Submitting(options.client_config(), printer).run(given, file, wanted, no_wait=no_wait)


def _source_of(texts: Sequence[str], file: Path | None, wanted: Wanted, max_bytes: int) -> Source:
    """What is to be sent.

    Raises:
        ConfigError: Nothing is, or the file can't be read.
        RequestError: A line of the file is not a request.
    """
    if bool(texts) == (file is not None) or (len(texts) > 1 and "-" in texts):
        raise ConfigError("give prompts, or --file FILE, or - for standard input, and only one")
    if list(texts) == ["-"] or str(file) == "-":
        return read_stdin(LineReader("standard input", wanted, max_bytes, plain_prompts=True))
    if file is not None:
        return read_file(file, LineReader(str(file), wanted, max_bytes, plain_prompts=False))
    return [
        Submission(str(number), wanted.of_text(text)) for number, text in enumerate(texts, start=1)
    ]


class _Submitting:
    """One run of the command.

    It keeps to asyncio's own task groups: they cancel a task once, after which it can still tell
    the pipeline that its request is not wanted any more.
    """

    def __init__(self, config: Config, printer: AnswerPrinter) -> None:
        self._config = config
        self._printer = printer
        # One answer is printed as it comes, which is progress enough.
        self._progress = ProgressLine(shown=printer.labelled)
        self._patience: asyncio.TimerHandle | None = None
        self.failed = 0

    def run(
        self, texts: Sequence[str], file: Path | None, wanted: Wanted, *, no_wait: bool
    ) -> None:
        """Sends what is wanted and, unless `no_wait`, prints the answers.

        Raises:
            ConfigError, RequestError: As `_source_of`.
            typer.Exit: A request did not end well.
        """
        source = _source_of(texts, file, wanted, self._config.bus.max_request_bytes)
        asyncio.run(self.publish(source) if no_wait else self.answer(source))
        if self.failed:
            raise typer.Exit(1)

    async def publish(self, source: Source) -> None:
        """Sends all requests and prints their entry ids, in order."""
        async with connected(self._config) as client:
            async for submission in _each(source):
                self._printer.line(await client.publish(submission.request))

    async def answer(self, source: Source) -> None:
        """Sends all requests, some at a time, and prints what comes."""
        slots = asyncio.Semaphore(_CONCURRENT)
        unreadable: NanoInferenceError | None = None
        started = time.monotonic()
        async with connected(self._config) as client:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(PATIENCE_S, self._grow_impatient)
            try:
                async with asyncio.TaskGroup() as group:
                    try:
                        async for submission in _each(source):
                            await slots.acquire()
                            self._progress.sent()
                            task = group.create_task(self._answer_one(client, submission))
                            task.add_done_callback(lambda _: slots.release())
                    except NanoInferenceError as error:
                        # What was sent before the unreadable line is still answered.
                        unreadable = error
            finally:
                self._patience.cancel()
                self._progress.clear()
        if unreadable is not None:
            raise unreadable
        self._progress.summary(time.monotonic() - started)

    async def _answer_one(self, client: BusClient, submission: Submission) -> None:
        async with aclosing(client.submit(submission.request)) as outputs:
            async for output in outputs:
                if self._patience is not None:
                    self._patience.cancel()
                if isinstance(output, CompletionChunk):
                    self._printer.chunk(output)
                else:
                    self._finish(submission, output)

    def _finish(self, submission: Submission, completion: Completion) -> None:
        self._progress.clear()
        self._printer.completion(submission.label, completion)
        failed = completion.status != "done"
        self.failed += failed
        self._progress.answered(completion.usage.completion_tokens, failed=failed)

    def _grow_impatient(self) -> None:
        self._progress.clear()
        complain(
            f"waiting: no answer for {PATIENCE_S:.0f} s; is `nano-inference up` running, and is "
            f"{self._config.bus.prefix!r} its bus.prefix? See `nano-inference status`"
        )


async def _each(
    source: Source,
) -> AsyncIterator[Submission]:
    if isinstance(source, AsyncIterator):
        async for submission in source:
            yield submission
    else:
        for submission in source:
            yield submission
