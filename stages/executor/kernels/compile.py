"""Makes a library of `cpu.c`, once for each machine, and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("cpu.c")

_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-fopenmp", "-Wall", "-Wextra", "-Werror")

_COMPILER_TIMEOUT_S = 120.0


class KernelsUnavailable(Exception):
    """There are no kernels here, and the message says why."""


def load_library() -> ctypes.CDLL:
    """The library, compiled now if it is not in the user's cache folder yet.

    Raises:
        KernelsUnavailable: The machine, its compiler or torch's build don't allow it.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise KernelsUnavailable(f"there are none for {platform.system()} on {platform.machine()}")
    processor = _processor_flags()
    if "avx512_bf16" not in processor:
        raise KernelsUnavailable("the processor has no AVX512-BF16")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise KernelsUnavailable("there is no C compiler; install gcc, or set CC to one")
    openmp = _openmp_of_torch()
    name = _name(compiler, processor, openmp)
    folder = _cache_folder()
    library = folder / name
    if not library.is_file():
        _compile(compiler, openmp, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelsUnavailable(f"can't load {library}: {error}") from None


def _processor_flags() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return line
    return ""


def _openmp_of_torch() -> str:
    """The OpenMP library in this process.

    With another one beside it there would be two sets of threads, each waiting for work by spinning
    on the processors that the other one needs.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if os.path.basename(path).startswith(("libgomp", "libiomp")):
            return path
    raise KernelsUnavailable("torch was built without OpenMP")


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "nano-inference"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="nano-inference-"))


def _name(compiler: str, *parts: str) -> str:
    """A name that changes with whatever the library depends on."""
    version = _run([compiler, "--version"])
    digest = hashlib.sha256(SOURCE.read_bytes())
    for part in (version, *_FLAGS, *parts):
        digest.update(part.encode() + b"\0")
    return f"cpu-{digest.hexdigest()[:24]}.so"


def _compile(compiler: str, openmp: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, linked = f"{folder}/cpu.o", f"{folder}/cpu.so"
        _run([compiler, *_FLAGS, "-c", str(SOURCE), "-o", compiled])
        # Linked by its path: the compiler would take its own OpenMP library.
        _run([compiler, "-shared", compiled, openmp, "-lm", "-o", linked])
        # Another process may do the same; whole files replace one another.
        os.replace(linked, library)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_COMPILER_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no message"])[0]
        raise KernelsUnavailable(f"{command[0]} failed: {reason}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"can't run {command[0]}: {error}") from None
    return done.stdout
