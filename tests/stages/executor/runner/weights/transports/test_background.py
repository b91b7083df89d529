"""Functions run in order on one thread, which holds up nobody."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from nano_inference.stages.executor.runner.weights.transports import Background

from ......programs import run

HANGING = """
import threading
from nano_inference.stages.executor.runner.weights.transports import Background
begun = threading.Event()
Background("x").submit(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
print("end")
"""


def test_results_and_errors_in_order_on_one_thread() -> None:
    seen: list[object] = []
    background = Background("weights-test", lambda: seen.append(threading.get_ident()))
    thread = background.submit(threading.get_ident)
    failed = background.submit(int, "x")
    last = background.submit(seen.append, "last")
    background.close()
    last.result(30)
    assert seen == [thread.result(), "last"]
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result()


def test_what_was_cancelled_before_its_turn_does_not_run() -> None:
    gate = threading.Event()
    background = Background("weights-test")
    background.submit(gate.wait)
    cancelled = background.submit(gate.clear)
    assert cancelled.cancel()
    gate.set()
    background.submit(int).result(30)
    background.close()
    assert gate.is_set()


def test_the_end_of_a_program_does_not_wait_for_it(tmp_path: Path) -> None:
    assert run(HANGING, tmp_path, whole_end=True) == (0, "end\n", "")
