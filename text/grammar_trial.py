"""Trial compilation of grammars in a process that can be killed.

llguidance limits nearly all of its work by fuel, but not a lexer's first transitions: `Lexer::from`
(1.9.1) computes 256 of them, each of which may visit as many states as an intersection or
complement of regular expressions has. 100 bytes can take hours and all memory with any fuel, and
a thread can't be stopped.
"""

from __future__ import annotations

import json
import threading
import weakref
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from ..config import RequestError, cut
from .children import end_child, start_child
from .grammar_trial_process import send

_PROGRAM = Path(__file__).with_name("grammar_trial_process.py")

_LEAST_CPU_S = 0.03
_CPU_S_PER_BYTE = 0.1 / 16_384
"""CPU time limit per byte of grammar. Honest ones of up to 2 KB take up to 3 ms on a busy EPYC,
schemas of 16 KiB up to 9 ms, one of 111 KB 84 ms.
"""

_MOST_CPU_S = 0.25
"""The most for any grammar, since others wait for the child."""


def cpu_limit_s(grammar: str) -> float:
    """Return the CPU time limit for compiling a grammar."""
    return min(_MOST_CPU_S, _LEAST_CPU_S + len(grammar) * _CPU_S_PER_BYTE)


class GrammarTrial:
    """Compiles grammars in a child process, one at a time. Thread-safe.

    The child starts with the first grammar, and again if it has ended.
    """

    def __init__(self, vocab_size: int, stop_ids: list[int], limits: dict[str, int]) -> None:
        """Args:
        vocab_size: Columns of the model's logits.
        stop_ids: End-of-text tokens, at least one.
        limits: As for `LLParserLimits`.
        """
        self._told = {"vocab_size": vocab_size, "stop_ids": stop_ids, "limits": limits}
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def run(self, grammar: str) -> str | None:
        """Compile a grammar.

        Returns:
            The library's error, "" for success; None if it exceeds its time or memory.

        Raises:
            RequestError: internal_error: the child can't start, or ends by itself.
        """
        with self._lock:
            for _ in range(2):
                try:
                    return self._ask(grammar)
                except (OSError, EOFError) as error:
                    self._stop()
                    reason = str(error) or "it has ended"
        raise RequestError(
            f"the process that tries grammars can't be used: {cut(reason, 200)}; try again",
            code="internal_error",
        )

    def _ask(self, grammar: str) -> str | None:
        """Send a grammar and read the result. Raises OSError or EOFError if the child is gone."""
        connection = self._connection or self._start()
        send(connection, {"grammar": grammar, "cpu_s": cpu_limit_s(grammar)})
        found: str | None = json.loads(connection.recv_bytes()).get("error")
        return found

    def _start(self) -> Connection:
        connection, theirs = Pipe()
        self._process = start_child(_PROGRAM, [theirs])
        self._finalizer = weakref.finalize(self, end_child, self._process, [connection])
        self._connection = connection
        send(connection, self._told)
        return connection

    def _stop(self) -> None:
        if self._connection is not None:
            self._finalizer()
            self._connection = None
