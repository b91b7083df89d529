"""The child process of `GrammarTrial`, which runs this file as a program.

It imports llguidance alone, so it starts within a tenth of a second and takes little memory. Each
grammar is compiled in a fork, which SIGPROF ends when its CPU time is used up; its memory is freed
with it. Messages in both directions are JSON; the first configures.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

_SPARE_BYTES = 256 << 20
"""Address space that a fork may add."""


class ByteTokens:
    """A vocabulary of single bytes, in llguidance's form; a grammar names others by their ids.

    The time to build a lexer doesn't depend on the other tokens.
    """

    def __init__(self, vocab_size: int, stop_ids: list[int]) -> None:
        self.eos_token_id = stop_ids[0]
        self.bos_token_id = None
        self.special_token_ids = stop_ids
        free = [token_id for token_id in range(vocab_size) if token_id not in stop_ids][:256]
        self._ids = dict(enumerate(free))
        self.tokens = [b""] * vocab_size
        for token_id in stop_ids:
            self.tokens[token_id] = f"<{token_id}>".encode()
        for byte, token_id in self._ids.items():
            self.tokens[token_id] = bytes([byte])

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[byte] for byte in text if byte in self._ids]


def compile_one(
    tokenizer: LLTokenizer, grammar: str, limits: Any, cpu_s: float
) -> dict[str, str] | None:
    """Compile a grammar in a fork.

    Returns:
        The library's error, "" for success; None if the fork was killed.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            fuel = LLParserLimits(verbose_errors=False, **limits)
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=fuel)
            os.write(writer, json.dumps({"error": matcher.get_error()[:4096]}).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        answer = answers.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else None


def send(connection: Connection, content: object) -> None:
    """Send JSON."""
    connection.send_bytes(json.dumps(content).encode())


def main() -> None:
    """Serve until the connection is closed."""
    connection = Connection(int(sys.argv[1]))
    told = json.loads(connection.recv_bytes())
    tokens = ByteTokens(told["vocab_size"], told["stop_ids"])
    tokenizer = LLTokenizer(TokenizerWrapper(tokens))
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(EOFError, OSError):
        while True:
            asked = json.loads(connection.recv_bytes())
            found = compile_one(tokenizer, asked["grammar"], told["limits"], asked["cpu_s"])
            send(connection, found or {})


if __name__ == "__main__":
    main()
