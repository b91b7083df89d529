"""Trial compilation of grammars in a process that can be killed.

llguidance limits nearly all of its work by fuel, but not a lexer's first transitions: `Lexer::from`
(1.9.1) computes 256 of them, each of which may visit as many states as an intersection or
complement of regular expressions has. 100 bytes can take hours and all memory with any fuel,
and a thread can't be stopped.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from pathlib import Path

from ..config import RequestError, cut
from .grammar_trial_process import read_frame, write_frame

_PROGRAM = Path(__file__).with_name("grammar_trial_process.py")

_LEAST_CPU_S = 0.03
_CPU_S_PER_BYTE = 0.1 / 16_384
"""CPU time limit per byte of grammar. Honest ones of up to 2 KB take up to 3 ms on a busy EPYC,
schemas of 16 KiB up to 9 ms, one of 111 KB 84 ms.
"""


def cpu_limit_s(grammar: str) -> float:
    """Return the CPU time limit for compiling a grammar."""
    return _LEAST_CPU_S + len(grammar) * _CPU_S_PER_BYTE


class GrammarTrial:
    """Compiles grammars in a child process, one at a time. Thread-safe.

    The child starts with the first grammar, and again if it has ended.
    """

    def __init__(
        self,
        vocab_size: int,
        stop_ids: list[int],
        special: dict[str, int],
        limits: dict[str, int],
    ) -> None:
        """Args:
        vocab_size: Columns of the model's logits.
        stop_ids: End-of-text tokens, at least one.
        special: Ids of special tokens by name.
        limits: As for `LLParserLimits`.
        """
        self._told = {
            "vocab_size": vocab_size,
            "stop_ids": stop_ids,
            "special": {name: id for name, id in special.items() if id < vocab_size},
            "limits": limits,
        }
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

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
                except (OSError, ValueError) as error:
                    self._stop()
                    reason = error
        raise RequestError(
            f"the process that tries grammars can't be used: {cut(str(reason), 200)}; try again",
            code="internal_error",
        )

    def _ask(self, grammar: str) -> str | None:
        """Send a grammar and read the result. Raises OSError or ValueError if the child is gone."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        write_frame(process.stdin, {"grammar": grammar, "cpu_s": cpu_limit_s(grammar)})
        answer = read_frame(process.stdout)
        if answer is None:
            raise OSError("it has ended")
        found: str | None = answer.get("error")
        return found

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: the program's folder must not shadow modules. A session of its own: an interrupt at
        # the terminal is for the service, which then closes the child's standard input.
        process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        assert process.stdin is not None
        write_frame(process.stdin, self._told)
        return process

    def _stop(self) -> None:
        if self._process is not None:
            self._finalizer()
            self._process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
