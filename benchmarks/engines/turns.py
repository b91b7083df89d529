"""The common part of the programs of kv_conversations.py.

A program first writes a line of JSON with the engine's version, and then answers each line
`{prompt, tokens}` with `{first_s, total_s, tokens}`: a greedy completion of so many tokens.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class Turn(NamedTuple):
    """A completion: seconds to its first token and to its last one, and its tokens."""

    first_s: float
    total_s: float
    tokens: list[int]


def serve(start: Callable[[dict[str, Any]], tuple[str, Callable[[list[int], int], Turn]]]) -> None:
    """Answer until the input ends; `start` gets the options of the command line, as JSON, and
    returns the version and a function that completes a prompt."""
    # Answers have a separate channel, since libraries print to standard output.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    version, complete = start(json.loads(sys.argv[1]))
    print(json.dumps({"version": version}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        turn = complete(asked["prompt"], asked["tokens"])
        print(json.dumps(turn._asdict()), file=answers)
