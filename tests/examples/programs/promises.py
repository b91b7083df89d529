"""Promises of a server to one client: a program defines them, and `keep` runs all of them.

The programs run in environments that have their client, and nothing of ours.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import urlopen

URL = os.environ["NANO_INFERENCE_URL"]
METRICS_URL = os.environ["NANO_INFERENCE_METRICS_URL"]
LIMIT_S = 60.0

_promises: list[Callable[[], Any]] = []


def promise(function: Callable[[], Any]) -> Callable[[], Any]:
    """Add a function, which may be asynchronous, to what `keep` runs."""
    _promises.append(function)
    return function


def keep() -> None:
    """Run all promises, print the name of each that holds, and exit with 1 if one is broken."""
    broken = 0
    # One event loop for all: some clients keep connections beyond a call.
    with asyncio.Runner() as runner:
        for each in _promises:
            try:
                if (kept := each()) is not None:
                    runner.run(kept)
            except Exception:  # noqa: BLE001 (told with its traceback)
                broken += 1
                print(f"broken: {each.__name__}\n{traceback.format_exc()}")
            else:
                print("kept:", each.__name__)
    sys.exit(1 if broken else 0)


@contextmanager
def raises(kind: type[BaseException], *words: str) -> Iterator[None]:
    """The block raises an exception of this class, or of a subclass.

    Args:
        words: They stand in its text, or in the body of the answer that it keeps.
    """
    try:
        yield
    except kind as error:
        text = f"{error} {getattr(error, 'body', '')}"
        missing = [each for each in words if each not in text]
        assert not missing, f"{missing} not in {text}"
    except Exception as error:
        raise AssertionError(f"{type(error).__mro__} in place of {kind}") from error
    else:
        raise AssertionError(f"no {kind.__name__}")


@contextmanager
def cancels(requests: int = 1) -> Iterator[None]:
    """The server counts so many more requests as cancelled soon after the block."""
    before = _cancelled()
    yield
    end = time.monotonic() + LIMIT_S
    while (seen := _cancelled() - before) != requests or _in_flight():
        assert time.monotonic() < end, f"{seen} requests cancelled in place of {requests}"
        time.sleep(0.05)


def _cancelled() -> int:
    with urlopen(METRICS_URL, timeout=LIMIT_S) as answer:
        text = answer.read().decode()
    counts = re.findall(
        r'^nano_requests_total\{.*nano_request_status="cancelled".*\} (\S+)$', text, re.M
    )
    return round(sum(map(float, counts)))


def _in_flight(what: str = "num_total_reqs") -> int:
    with urlopen(f"{URL}/v1/loads", timeout=LIMIT_S) as answer:
        return int(json.load(answer)["loads"][0][what])
