"""`nano-inference submit`: send requests to a server or a pipeline and print the answers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bus.codec import encode_output
from ..bus.public import AfterTurn, Completion, CompletionChunk
from ..config import ConfigError, NanoInferenceError, redact
from .clients import submitter_at
from .connection import ServerAddress, Target, target_begun
from .images import read_image
from .options import Options, argument, option, takes, takes_status_options
from .requests import (
    LineReader,
    Submission,
    Template,
    field,
    given,
    read_file,
    read_stdin,
    template,
)
from .running import found
from .terminal import complain, harmless, stderr
from .trace import Waterfall

PATIENCE_S = 10.0
"""Time without an answer after which a hint is printed."""

_CONCURRENT = 64

_output = partial(option, rich_help_panel="Output")


@takes_status_options
@takes(template)
def submit(
    options: Options,
    template: Template,
    texts: Annotated[list[str] | None, argument("TEXT...", "Prompts; -: lines of input.")] = None,
    file: Annotated[Path | None, option("--file -f FILE", "Requests, one per line.")] = None,
    chat: Annotated[bool, field("--chat", "Apply the model's chat template to texts.")] = False,
    image: Annotated[
        list[Path] | None,
        field("--image FILE", "An image before each text; implies --chat. Repeatable."),
    ] = None,
    n: Annotated[int | None, field("--n -n", "Samples per prompt; default: 1.")] = None,
    session: Annotated[
        str | None, field("--kv-session ID", "The conversation that the request continues.")
    ] = None,
    session_ttl_s: Annotated[
        float | None, field("--kv-session-ttl SECONDS", "How long its KV is kept; default: 300.")
    ] = None,
    session_after: Annotated[
        AfterTurn | None, field("--kv-session-after", "What becomes of its KV; default: pin.")
    ] = None,
    fork: Annotated[
        str | None, field("--fork ID", "Go on after a token of another request; no TEXT.")
    ] = None,
    at: Annotated[int | None, field("--at K", "Number of its tokens to go on after.")] = None,
    sample: Annotated[
        int | None, field("--fork-sample INDEX", "Which of its samples; default: 0.")
    ] = None,
    as_json: Annotated[bool, _output("--json", "Print each Completion as a line of JSON.")] = False,
    no_wait: Annotated[bool, _output("--no-wait", "Print entry ids, and don't wait.")] = False,
    trace: Annotated[bool, _output("--trace", "Draw the times, on standard error.")] = False,
) -> None:
    """Send requests to a running server or pipeline and print the answers.

    One text is answered as it is generated:

        nano-inference submit "98 + 25 ="

        nano-inference submit --chat "What is 12 + 30?" --trace

        nano-inference submit "Story about Emma, a dog and" -n 4 -t 1 --seed 7

        nano-inference submit "98 + 25 =" --json --sampling logprobs=3 --sampling min_tokens=2

        nano-inference submit "What is this?" --image photo.jpg

    Many requests run concurrently. Each answer is printed when it is complete, after its request's
    id, or the number of its text or line. A line of a file is a request as JSON, or a prompt as a
    JSON string. On standard input, a line that does not begin with `{` is a prompt as it stands:

        nano-inference submit "98 + 25 =" "12 + 30 ="

        nano-inference submit --file requests.jsonl --json > answers.jsonl

        seq 1 9 | sed 's/$/ + 5 =/' | nano-inference submit -

    With --fork the prompt is that of another request and the first tokens of its sample:

        nano-inference submit --fork my-request --at 12 -n 8 -t 1

    Options fill in the fields that a request lacks.

    Answers go to standard output, messages to standard error. Ctrl-C cancels the requests in
    flight. The exit status is 1 when any request failed.
    """
    texts = texts or []
    one_text = fork is not None or (len(texts) == 1 and texts != ["-"] and file is None)
    streams = one_text and not as_json and n in (None, 1)
    template |= given({"n": n, "stream": streams, "model": options.served})
    template |= _session(session, session_ttl_s, session_after) | _fork(fork, at, sample)
    printer = _Printer(as_json=as_json, trace=trace, labelled=not one_text)
    most = options.config().bus.max_request_bytes
    images = [read_image(path) for path in image or ()]
    if images and (file is not None or texts == ["-"]):
        raise ConfigError("--image takes a text; requests in a file have images of their own")
    source = _source_of(texts, file, template, most, chat=chat, images=images)
    target = asyncio.run(target_begun(options))
    asyncio.run((_publish if no_wait else _answer)(target, source, printer))
    if printer.failed:
        raise typer.Exit(1)


def _session(id: str | None, ttl_s: float | None, after: AfterTurn | None) -> dict[str, Any]:
    """Return the request's field of a session, if there is one."""
    more = given({"ttl_s": ttl_s, "after": after})
    if id is None and more:
        raise ConfigError("--kv-session-ttl and --kv-session-after need --kv-session")
    return {} if id is None else {"kv_session": {"id": id, **more}}


def _fork(id: str | None, at: int | None, sample: int | None) -> dict[str, Any]:
    """Return the request's field of a fork, if it is one."""
    if (id is None) != (at is None) or (id is None and sample is not None):
        raise ConfigError("--fork ID and --at K go together, and --fork-sample needs both")
    more = given({"sample_index": sample})
    return {} if id is None else {"fork": {"request_id": id, "at": at, **more}}


def _source_of(
    texts: Sequence[str],
    file: Path | None,
    template: Template,
    max_bytes: int,
    *,
    chat: bool,
    images: Sequence[bytes],
) -> AsyncIterator[Submission]:
    """Return the requests to send.

    Raises:
        ConfigError: There are none, or the file can't be read.
        RequestError: A line of the file is not a request.
    """
    if "fork" in template:
        if texts or file is not None or chat or images:
            raise ConfigError("--fork takes no text, file or image: those are the other request's")
        return _listed([Submission("1", template.of_fork())])
    if bool(texts) == (file is not None) or (len(texts) > 1 and "-" in texts):
        raise ConfigError("give prompts, or --file FILE, or - for standard input, and only one")
    if list(texts) == ["-"] or str(file) == "-":
        name = "standard input"
        return read_stdin(LineReader(name, template, max_bytes, chat=chat, plain_prompts=True))
    if file is not None:
        return _listed(read_file(file, LineReader(str(file), template, max_bytes, chat=chat)))
    requests = (template.of_text(text, chat=chat, images=images) for text in texts)
    return _listed([Submission(str(number), each) for number, each in enumerate(requests, 1)])


async def _listed(submissions: list[Submission]) -> AsyncIterator[Submission]:
    for submission in submissions:
        yield submission


async def _publish(target: Target, source: AsyncIterator[Submission], printer: _Printer) -> None:
    """Send all requests and print their entry ids, in order."""
    async with submitter_at(target) as client:
        async for submission in source:
            printer.line(await client.publish(submission.request))


async def _answer(target: Target, source: AsyncIterator[Submission], printer: _Printer) -> None:
    """Send all requests, some at a time, and print the answers.

    asyncio's task groups cancel a task once, so that it can still cancel its request.
    """
    slots = asyncio.Semaphore(_CONCURRENT)
    unreadable: NanoInferenceError | None = None
    started = time.monotonic()

    def hint() -> None:
        printer.clear()
        likely = ""
        if not isinstance(target, ServerAddress):
            prefix = target.bus.prefix
            likely = f" is `nano-inference up` running, and is {prefix!r} its bus.prefix?"
            for each in found():
                if (each.bus, each.prefix) == (redact(target.bus.url), prefix):
                    age_s = time.time() - each.started_at
                    likely = f" `{each.command}` (process {each.pid}) started {age_s:.0f} s ago;"
        complain(f"waiting: no answer for {PATIENCE_S:.0f} s;{likely} see `nano-inference status`")

    async def answer(submission: Submission) -> None:
        async with aclosing(client.submit(submission.request)) as outputs:
            async for output in outputs:
                patience.cancel()
                if isinstance(output, CompletionChunk):
                    printer.chunk(output)
                else:
                    printer.completion(submission.label, output)

    async with submitter_at(target) as client:
        patience = asyncio.get_running_loop().call_later(PATIENCE_S, hint)
        try:
            async with asyncio.TaskGroup() as group:
                try:
                    async for submission in source:
                        await slots.acquire()
                        printer.sent()
                        task = group.create_task(answer(submission))
                        task.add_done_callback(lambda _: slots.release())
                except NanoInferenceError as error:
                    # Requests before the malformed line are still answered.
                    unreadable = error
        finally:
            patience.cancel()
            printer.clear()
    if unreadable is not None:
        raise unreadable
    printer.summary(time.monotonic() - started)


@dataclass
class _Printer:
    """Prints answers as text or as JSON lines, and for several requests a progress line.

    Attributes:
        labelled: Whether there are several requests.
        failed: The number of requests that failed.
    """

    as_json: bool
    trace: bool
    labelled: bool

    def __post_init__(self) -> None:
        self._streamed = False
        self._harmless = harmless if sys.stdout.isatty() else str
        self._live = self.labelled and sys.stderr.isatty()
        self._sent = self._answered = self._tokens = self.failed = 0

    def line(self, text: str) -> None:
        """Print one line, unbuffered."""
        self._write(f"{text}\n")

    def chunk(self, chunk: CompletionChunk) -> None:
        """Print a piece of the only answer. Several answers are printed whole."""
        if not (self.as_json or self.labelled):
            self._streamed = True
            self._write(chunk.text)

    def completion(self, label: str, completion: Completion) -> None:
        """Print the rest of an answer, its error, and its waterfall."""
        self.clear()
        if self.as_json:
            self.line(encode_output(completion).decode())
        elif self._streamed:
            self.line("")
        elif completion.status == "done" or completion.samples:
            several = len(completion.samples) > 1
            for sample in completion.samples:
                names = [label] * self.labelled + [str(sample.sample_index)] * several
                self.line(f"[{'.'.join(names)}] {sample.text.strip()}" if names else sample.text)
        if (error := completion.error) is not None:
            where = f"[{label}] " if self.labelled else ""
            complain(f"{where}{completion.status}: {error.message} ({error.code})")
        if self.trace:
            stderr().print(Waterfall(completion))
        self._answered += 1
        self._tokens += completion.usage.completion_tokens
        self.failed += completion.status != "done"
        self._progress()

    def sent(self) -> None:
        """Count a request that is sent."""
        self._sent += 1
        self._progress()

    def clear(self, text: str = "") -> None:
        """Replace the progress line, if there is one."""
        if self._live:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    def summary(self, seconds: float) -> None:
        """Print the totals of several requests."""
        if self.labelled:
            failed = f", {self.failed} of them failed" if self.failed else ""
            rate = self._tokens / max(seconds, 1e-9)
            sys.stderr.write(
                f"{self._answered} answered{failed}; "
                f"{self._tokens} tokens in {seconds:.2f} s ({rate:,.0f} tokens/s)\n"
            )

    def _progress(self) -> None:
        failed = f", {self.failed} failed" if self.failed else ""
        self.clear(f"{self._answered} of {self._sent} answered{failed}")

    def _write(self, text: str) -> None:
        sys.stdout.write(self._harmless(text))
        sys.stdout.flush()
