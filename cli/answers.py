"""How `submit` prints: answers on standard output, all else on standard error."""

from __future__ import annotations

import sys

from ..bus.codec import encode_output
from ..bus.public import Completion, CompletionChunk
from .terminal import complain, harmless, stderr
from .waterfall import waterfall


class AnswerPrinter:
    """Prints answers as text or as JSON lines."""

    def __init__(self, *, as_json: bool, trace: bool, labelled: bool) -> None:
        """`labelled`: answers of several requests, each behind its label."""
        self._as_json = as_json
        self._trace = trace
        self.labelled = labelled
        self._streamed = False
        self._on_terminal = sys.stdout.isatty()

    def line(self, text: str) -> None:
        """One line, at once."""
        self._write(f"{text}\n")

    def chunk(self, chunk: CompletionChunk) -> None:
        """A piece of the only answer, as it comes. Other answers are printed whole."""
        if self._as_json or self.labelled:
            return
        self._streamed = True
        self._write(chunk.text)

    def completion(self, label: str, completion: Completion) -> None:
        """The end of an answer: what of it is not printed yet, its error, its waterfall."""
        if self._as_json:
            self.line(encode_output(completion).decode())
        elif self._streamed:
            self.line("")
        elif completion.status == "done" or completion.samples:
            self._samples(label, completion)
        if completion.error is not None:
            where = f"[{label}] " if self.labelled else ""
            error = completion.error
            complain(f"{where}{completion.status}: {error.message} ({error.code})")
        if self._trace:
            stderr().print(waterfall(completion))

    def _samples(self, label: str, completion: Completion) -> None:
        several = len(completion.samples) > 1
        for sample in completion.samples:
            names = [label] if self.labelled else []
            if several:
                names.append(str(sample.sample_index))
            name = f"[{'.'.join(names)}] " if names else ""
            self.line(f"{name}{sample.text.strip() if name else sample.text}")

    def _write(self, text: str) -> None:
        sys.stdout.write(harmless(text) if self._on_terminal else text)
        sys.stdout.flush()


class ProgressLine:
    """One line on standard error, where that is a terminal, that counts answers as they come."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._live = shown and sys.stderr.isatty()
        self._sent = self._answered = self._failed = self._tokens = 0

    def sent(self) -> None:
        """One more request is on its way."""
        self._sent += 1
        self._draw()

    def answered(self, tokens: int, *, failed: bool) -> None:
        """One more has ended."""
        self._answered += 1
        self._failed += failed
        self._tokens += tokens
        self._draw()

    def clear(self) -> None:
        """Makes room for another line."""
        if self._live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def summary(self, seconds: float) -> None:
        """The last word."""
        if not self._shown:
            return
        self.clear()
        rate = self._tokens / max(seconds, 1e-9)
        sys.stderr.write(
            f"{self._answered} answered, {self._failed} of them not well; "
            f"{self._tokens} tokens in {seconds:.2f} s ({rate:,.0f} tokens/s)\n"
            if self._failed
            else f"{self._answered} answered; "
            f"{self._tokens} tokens in {seconds:.2f} s ({rate:,.0f} tokens/s)\n"
        )

    def _draw(self) -> None:
        if self._live:
            failed = f", {self._failed} failed" if self._failed else ""
            text = f"{self._answered} of {self._sent} answered{failed}"
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
