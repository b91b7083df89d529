"""GGUF files: each is represented by a folder in Transformers' format, made from its header.

Transformers' loader converts the header to a configuration and a tokenizer. That takes many seconds
with a large vocabulary, and needs torch, which most stages don't import. So the first process that
needs a file converts it, into the user's cache folder; all stages then read an ordinary folder. The
weights stay in the file, which the folder links to.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from ..config import ModelError
from ..config.temporary import cache_folder, lock_file, sweep, temporary_folder
from .gguf_config import complete
from .gguf_facts import FACTS, FLOATS, LINK, GgufFacts
from .gguf_header import GgufHeader, read_header

_PACKAGES = ("gguf", "accelerate")
_MOST_S = 900.0
"""Time limit of a conversion, in seconds."""

_FORMAT = 2
"""Version of the folders; others are made again."""

_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""GGUF's `general.sampling` keys, by their names in generation_config.json."""

_CHECKED = "Hello, world! <s> 12 + 345 = 357;\n\n  naïve ﬁ\t日本語 🙂"


def require_packages() -> None:
    """Raise ModelError if the packages that Transformers needs for GGUF files are missing."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"GGUF files need the package{'s' * (len(missing) > 1)} {' and '.join(missing)}; "
            "pip install 'nano-inference[gguf]'"
        )


def made_of(file: Path) -> Path:
    """Return the folder of a GGUF file, which is converted if no process has done so.

    Raises:
        ModelError: The file can't be read or served, or packages are missing.
    """
    require_packages()
    status = file.stat()
    made_by = (_FORMAT, metadata.version("transformers"))
    identity = (str(file), status.st_ino, status.st_size, status.st_mtime_ns, made_by)
    name = f"{file.stem}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}"
    place = _cache_folder()
    if place is None:
        return _made_for_this_process(file, name)
    if not (place / name).is_dir():
        with _alone(place / f".{name}.lock"):
            # Another process may have made it meanwhile.
            if not (place / name).is_dir():
                _have_made(file, place / name)
    return place / name


@cache
def _made_for_this_process(file: Path, name: str) -> Path:
    """Convert into a temporary folder, removed when the process ends, or swept later."""
    sweep()
    folder = _until_exit().enter_context(temporary_folder("gguf")) / name
    _have_made(file, folder)
    return folder


@cache
def _until_exit() -> ExitStack:
    import atexit

    stack = ExitStack()
    atexit.register(stack.close)
    return stack


def _cache_folder() -> Path | None:
    """Return the cache folder; None if no folder is writable by this user alone."""
    # Another user's tokenizer would change the text.
    place = cache_folder("gguf")
    return place if place is not None and os.access(place, os.W_OK) else None


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Lock out other threads and processes for the same folder."""
    with lock_file(lock) as file:
        # On a file system without locks, several may convert it; the last one wins.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _have_made(file: Path, folder: Path) -> None:
    """Convert a file here, or in a child process where torch, which Transformers needs, isn't
    loaded."""
    if sys.modules.get("torch", sys) is not None:
        _make(file, folder)
        return
    read_header(file)  # no process is started for a broken file
    command = (sys.executable, "-P", "-m", __name__, str(file), str(folder))
    path = os.pathsep.join(filter(None, sys.path))
    try:
        child = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_MOST_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelError(f"can't read {file}: {error}; copy or download it again") from error
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"status {child.returncode}"])[-1]
        why = child.stdout.strip()
        raise ModelError(why or f"can't read {file} ({last}); copy or download it again")


def _make(file: Path, folder: Path) -> None:
    """Convert a file atomically."""
    header = read_header(file)
    making = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
    try:
        # Transformers sees the file alone: files beside it may belong to another model.
        (making / LINK).symlink_to(file)
        _save_config(making, header)
        if "tokenizer.ggml.tokens" in header.metadata:
            _save_tokenizer(making)
        _write(making / "generation_config.json", _generation_config(header))
        size, unread = file.stat().st_size, header.unread_positions
        facts = GgufFacts(str(file), size, header.types, header.num_parameters, unread)
        (making / FACTS).write_bytes(msgspec.json.encode(facts))
        try:
            os.rename(making, folder)
        except OSError:
            # Without locks, another process may have been faster.
            if not folder.is_dir():
                raise
    except ModelError:
        raise
    # A malformed header makes Transformers raise errors of any type.
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        raise ModelError(
            f"Transformers can't read {file}: {type(error).__name__}: {line:.300}; take the model "
            "in Transformers' format, or as a GGUF file of another architecture or version"
        ) from error
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _save_config(folder: Path, header: GgufHeader) -> None:
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(folder, gguf_file=LINK, local_files_only=True)
    complete(hf_config, header)
    hf_config.save_pretrained(folder)
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    _write(path, content | {"dtype": dtype_of(header.types)})


def dtype_of(types: dict[str, int]) -> str:
    """Return the dtype that `engine.dtype: auto` means for tensors of these types.

    Float tensors keep theirs, with norms in float32. Quantized tensors become bfloat16, which takes
    half the memory of float32 and is fast wherever there are kernels.
    """
    if any(name not in FLOATS for name in types):
        return "bfloat16"
    halves = [name for name in ("BF16", "F16") if name in types]
    return FLOATS[halves[0]] if halves else "float32"


def _save_tokenizer(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=LINK, local_files_only=True)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    # Some models' classes build a tokenizer of their own from a vocabulary; this one is used as it
    # is in tokenizer.json.
    _write(path, content | {"tokenizer_class": "PreTrainedTokenizerFast"})
    _check_same(tokenizer, AutoTokenizer.from_pretrained(folder, local_files_only=True))


def _check_same(made: Any, read: Any) -> None:
    ids = made(_CHECKED).input_ids
    if read(_CHECKED).input_ids != ids or read.decode(ids) != made.decode(ids):
        raise ModelError(
            "the tokenizer that Transformers makes of the GGUF file is another one when it is "
            "saved and read again; take the model in Transformers' format"
        )


def _generation_config(header: GgufHeader) -> dict[str, Any]:
    """Return the end-of-generation ids, as llama.cpp chooses them, and the recommended sampling."""
    found = (header.token_id(name) for name in ("eos", "eot", "eom"))
    content: dict[str, Any] = {}
    if stops := list(dict.fromkeys(token for token in found if token is not None)):
        content["eos_token_id"] = stops
    for theirs, ours in _SAMPLING.items():
        if (value := header.metadata.get(f"general.sampling.{theirs}")) is not None:
            content[ours] = value
    return content


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    """Run as a program: `gguf.py FILE FOLDER` converts, or prints the error."""
    try:
        _make(Path(sys.argv[1]), Path(sys.argv[2]))
    except ModelError as error:
        sys.stdout.write(error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
