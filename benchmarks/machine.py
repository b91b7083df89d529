"""The machine's state: its bandwidth, and the distance between its cores (machine.c).

Shared machines change within seconds, so the state is measured in the run that it explains.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

NEAR_NS, FAR_NS = 200, 250
"""Round trips of near cores are below the first (AMD cores that share a cache: 50 to 150 ns, Intel
Xeons with AMX: 120 to 190 ns), those of far cores above the second."""

SHARED, WHOLE = 1.4, 1.7
"""Two virtual cores are threads of one core if together they multiply less than the first times as
much as one, and separate cores if more than the second."""


@dataclass(frozen=True)
class State:
    """One measurement.

    Attributes:
        round_trip_ns: From one core to another and back.
        cores: Multiplications of two threads, relative to one thread.
        bytes_per_s: Read by all threads together; 0 if not measured.
    """

    round_trip_ns: float
    cores: float
    bytes_per_s: float = 0.0

    @property
    def name(self) -> str:
        """The cores' distance: "near", "far", "shared" (both on one core), or "" if not clear."""
        if self.cores < SHARED:
            return "shared"
        if self.cores < WHOLE:
            return ""
        if self.round_trip_ns < NEAR_NS:
            return "near"
        return "far" if self.round_trip_ns > FAR_NS else ""


def state_around(before: State | None, after: State | None) -> str:
    """Return the state between two measurements: "changing" if they differ or are not clear,
    "unknown" without measurements."""
    if before is None or after is None:
        return "unknown"
    return before.name if before.name == after.name and before.name else "changing"


def measure(threads: int = 0) -> State | None:
    """Measure the state, with the bandwidth of so many threads if not 0; None without a C compiler.

    It takes about 20 ms, with the bandwidth 300 ms.
    """
    library = _library()
    if library is None:
        return None
    bytes_per_s = library.bandwidth(threads) if threads else 0.0
    return State(library.round_trip() * 1e9, library.cores(), bytes_per_s)


def operations_per_s(threads: int) -> float:
    """Return the additions and multiplications of bfloat16 per second, by vectors, in 100 ms; 0 if
    they can't be measured."""
    library = _library()
    return 0.0 if library is None else float(library.arithmetic(threads))


def note(states: list[dict[str, float]], threads: int = 0) -> State | None:
    """Measure the state, and append it to a list for the result file."""
    if (state := measure(threads)) is not None:
        states.append(asdict(state))
    return state


@cache
def _library() -> ctypes.CDLL | None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix="nano-inference-"))
    source, target = Path(__file__).with_suffix(".c"), folder / "machine.so"
    flags = ("-O3", "-march=native", "-shared", "-fPIC", "-pthread")
    subprocess.run([compiler, *flags, str(source), "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))
    for name in ("bandwidth", "round_trip", "cores", "arithmetic"):
        getattr(library, name).restype = ctypes.c_double
    return library
