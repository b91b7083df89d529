"""Builds libraries of the C files here, once per machine, and loads them."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from weakref import WeakKeyDictionary

import msgspec

from .....config.temporary import cache_folder, only_we_write, sweep, temporary_folder

SOURCES = Path(__file__).parent

# Without contraction, the compiler can't choose how often a product and a sum are rounded.
_FLAGS = "-std=gnu11 -O3 -ffp-contract=off -fPIC -Wall -Wextra -Werror"
_KERNEL_FLAGS = f"{_FLAGS} -march=native -fopenmp"

_COMPILER_TIMEOUT_S = 120.0

_DIGEST_BYTES = 32

_LOADS = count()
_digests: WeakKeyDictionary[ctypes.CDLL, bytes] = WeakKeyDictionary()


class Library(msgspec.Struct, frozen=True):
    """A library.

    Attributes:
        source: The C file.
        processor: The required processor flags, in Linux's spelling. Empty: any processor, and no
            OpenMP.
        instructions: Instruction sets that they allow, for readers.
        define: The macros to define.
    """

    source: str
    processor: str
    instructions: str
    define: str

    @property
    def needed(self) -> str:
        """The required instructions for readers."""
        return f"{self.instructions} with FMA" if "fma" in self.processor else self.instructions


TILES = Library("cpu.c", "amx_bf16 amx_int8", "AMX-BF16", "TILES")
BFLOAT16 = Library("cpu.c", "avx512_bf16", "AVX512-BF16", "BFLOAT16")
BFLOAT16_AVX2 = Library("cpu.c", "avx2 fma", "AVX2", "BFLOAT16 AVX2")
FLOAT32 = Library("cpu.c", "avx512f", "AVX-512", "FLOAT32")
FLOAT32_AVX2 = Library("cpu.c", "avx2 fma", "AVX2", "FLOAT32 AVX2")
SAMPLING = Library("sampling.c", "avx512f", "AVX-512", "SAMPLING")
SAMPLING_AVX2 = Library("sampling.c", "avx2 fma", "AVX2", "SAMPLING AVX2")
LAYOUT_AVX2 = Library("layout.c", "avx2 fma", "AVX2", "LAYOUT AVX2")
LAYOUT = Library("layout.c", "", "", "LAYOUT")
RANKS = Library("ranks.c", "", "", "RANKS")


class KernelsUnavailable(Exception):
    """There are no kernels here; the message has the reason."""


def load_library(library: Library) -> ctypes.CDLL:
    """Load a library, and compile it unless the user's cache folder has it, intact and safe.

    Raises:
        KernelsUnavailable: The machine, its compiler or torch's build don't allow it.
    """
    processor = openmp = ""
    if platform.system() != "Linux" or (library.processor and platform.machine() != "x86_64"):
        raise KernelsUnavailable(f"there are none for {platform.system()} on {platform.machine()}")
    if library.processor:
        processor = processor_flags()
        if not set(library.processor.split()) <= set(processor.split()):
            raise KernelsUnavailable(f"the processor has no {library.needed}")
        openmp = _openmp_of_torch()
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise KernelsUnavailable("there is no C compiler; install gcc, or set CC to one")
    name = _name(library, compiler, processor, openmp)
    cache = cache_folder()
    if cache is not None:
        with suppress(OSError):
            return _load(cache, name)
    sweep()
    try:
        with _alone(cache, name), temporary_folder("kernels") as folder:
            if cache is not None:
                with suppress(OSError):  # another process has compiled it meanwhile
                    return _load(cache, name)
            content = _compile(library, compiler, openmp, folder)
            if cache is not None:
                with suppress(OSError):
                    _keep(content, cache, name)
                    return _load(cache, name)
            _keep(content, folder, name)
            return _load(folder, name)
    except OSError as error:
        raise KernelsUnavailable(f"can't make and load {name}: {error}") from None


@contextmanager
def _alone(cache: Path | None, name: str) -> Iterator[None]:
    """Compile a library in one process of the user at a time: several that start together need the
    same ones."""
    with ExitStack() as stack:
        if cache is not None:
            path = cache / f"{name}.lock"
            with suppress(OSError):  # a folder that can't be written, or without locks
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                lock = os.open(path, flags, 0o600)
                stack.callback(os.close, lock)
                # Who waits for this file, or makes another one, finds the library.
                stack.callback(path.unlink, missing_ok=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def digest_of(library: ctypes.CDLL) -> bytes:
    """Return the SHA-256 of a library that `load_library` has returned."""
    return _digests[library]


def processor_flags() -> str:
    """Return the line of the processor's flags, in Linux's spelling; "" if there is none."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return line
    return ""


def _openmp_of_torch() -> str:
    """Return the OpenMP library of this process.

    A second one would bring a second set of threads, and idle threads spin on processors that the
    others need.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if os.path.basename(path).startswith(("libgomp", "libiomp")):
            return path
    raise KernelsUnavailable("torch was built without OpenMP")


def _keep(content: bytes, folder: Path, name: str) -> None:
    """Write the library, followed by its digest.

    Always to a new file, since another process may run the old one. A reader detects an incomplete
    file by its digest.

    Raises:
        OSError: It can't be written.
    """
    (folder / name).unlink(missing_ok=True)
    file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(file, "wb") as kept:
        kept.write(content + hashlib.sha256(content).digest())


def _load(folder: Path, name: str) -> ctypes.CDLL:
    """Load a file that `_keep` wrote. The checked file is the loaded file, even if it is replaced
    meanwhile.

    Raises:
        OSError: It is missing or damaged, other users may write to it, or it can't be loaded.
    """
    with ExitStack() as stack:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, place)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = stack.enter_context(open(os.open(name, flags, dir_fd=place), "rb"))
        status = os.fstat(file.fileno())
        if not (stat.S_ISREG(status.st_mode) and only_we_write(status)):
            raise OSError("others may write to it")
        if not only_we_write(os.fstat(place)):
            raise OSError(f"others may write to {folder}")
        whole = file.read()
        content, digest = whole[:-_DIGEST_BYTES], whole[-_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            raise OSError("it is damaged")
        # A new path each time: dlopen caches by path, and descriptors are reused.
        path = f"/proc/self/fd/{'./' * next(_LOADS)}{file.fileno()}"
        loaded = ctypes.CDLL(path)
        _digests[loaded] = digest
        return loaded


def _flags(library: Library) -> list[str]:
    return (_KERNEL_FLAGS if library.processor else _FLAGS).split()


def _name(library: Library, compiler: str, *parts: str) -> str:
    """Return a name that changes with everything the library depends on.

    It doesn't run the compiler, so that a library that is there needs none that works.
    """
    digest = hashlib.sha256()
    for source in (SOURCES / library.source, *sorted(SOURCES.glob("*.h"))):
        digest.update(source.read_bytes())
    for part in (_identity(compiler), *_flags(library), library.define, *parts):
        digest.update(part.encode() + b"\0")
    defines = library.define.lower().replace(" ", "-")
    return f"{defines}-{digest.hexdigest()[:24]}.so"


def _identity(compiler: str) -> str:
    """Return what changes when a compiler is replaced by another version."""
    file = os.path.realpath(shutil.which(compiler) or compiler)
    try:
        status = os.stat(file)
    except OSError as error:
        raise KernelsUnavailable(f"can't run {compiler}: {error.strerror}") from None
    return f"{file} {status.st_size} {status.st_mtime_ns}"


def _compile(library: Library, compiler: str, openmp: str, folder: Path) -> bytes:
    compiled, linked = f"{folder}/compiled.o", f"{folder}/linked.so"
    source = str(SOURCES / library.source)
    defines = [f"-D{define}" for define in library.define.split()]
    _run([compiler, *_flags(library), *defines, "-c", source, "-o", compiled], folder)
    # Linked by path: the compiler would take its own OpenMP library.
    libraries = [openmp] if openmp else []
    _run([compiler, "-shared", compiled, *libraries, "-lm", "-o", linked], folder)
    return Path(linked).read_bytes()


def _run(command: list[str], folder: Path) -> None:
    """`folder`: for the compiler's temporary files."""
    try:
        subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
            timeout=_COMPILER_TIMEOUT_S,
            env={**os.environ, "TMPDIR": str(folder)},
        )
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no message"])[0]
        raise KernelsUnavailable(f"{command[0]} failed: {reason}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"can't run {command[0]}: {error}") from None
