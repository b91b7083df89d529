"""Checks of a model's files before anything is loaded."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Literal

import msgspec

from ..config import Config, ConfigError, EngineConfig, ModelError, missing_model
from ..text.tokenizer_files import check_vocabulary, has_tokenizer

MODELS = Path("~/.cache/nano-inference/models")
"""Default folder of `pull`."""

CODE_BYTES = 1_500_000_000
"""Address space of a process with torch and its threads, beside the model; measured."""

State = Literal["ok", "warn", "fail"]

_NO_TOKENIZER = "has no tokenizer, so it takes and returns token ids only"


class Finding(msgspec.Struct, frozen=True):
    """A check: its subject, state and finding, and what to do about it."""

    name: str
    state: State
    found: str
    advice: str = ""


def check_model_path(config: Config, typed: str | None) -> None:
    """Check that something exists at the model's path.

    Args:
        config: Its settings name the model.
        typed: The value of --model; None if another source of settings names the model.

    Raises:
        ModelError: Nothing exists there.
    """
    model = config.engine.model_path
    if not config.engine.model_folder.exists():
        pulled = (MODELS / model.replace("/", "--")).expanduser()
        there = f"it was pulled to {pulled}; give that"
        advice = there if pulled.is_dir() else missing_model(model)
        raise ModelError(f"{_named(model, typed)}: there is no such folder or file; {advice}")


def check_model_files(config: Config, typed: str | None) -> None:
    """Check that the files of the model exist, without reading them.

    Args:
        config: As `check_model_path`; several models are checked by their manager.
        typed: As `check_model_path`.

    Raises:
        ModelError: Nothing exists at the path, or no model.
        ConfigError: `ulimit -v` is too small for it.
    """
    if config.models:
        return
    check_model_path(config, typed)
    if problem := _problem_of(config.engine.model_folder):
        named = _named(config.engine.model_path, typed)
        raise ModelError(f"{named} {problem}; {missing_model('')}")
    check_vocabulary(config.engine.model_folder)
    check_address_space(config.engine)


def check_address_space(config: EngineConfig) -> None:
    """Raises ConfigError: `ulimit -v` is too small for code, weights and KV cache."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    folder = config.model_folder
    files = [folder] if folder.is_file() else folder.glob("*.safetensors")
    weights = sum(file.stat().st_size for file in files)
    needed = CODE_BYTES + weights + config.kv_cache_bytes
    if 0 <= limit < needed:  # RLIM_INFINITY is -1
        raise ConfigError(
            f"`ulimit -v` allows {limit / 1e9:.1f} GB of addresses, and this needs "
            f"{needed / 1e9:.1f} GB: {CODE_BYTES / 1e9:.1f} for code, {weights / 1e9:.1f} for "
            f"weights, {config.kv_cache_bytes / 1e9:.1f} for engine.kv_cache_bytes; raise the "
            f"limit by `ulimit -v {needed // 1024 + 1}`, or lower the setting"
        )


def _named(model: str, typed: str | None) -> str:
    # --set engine.model_path takes precedence over --model.
    return f"--model {typed}" if typed == model else f"engine.model_path {model}"


def _problem_of(path: Path) -> str:
    """Return why a path can't be a model; "" if it may be one."""
    if path.is_file():
        with path.open("rb") as file:
            return "" if file.read(4) == b"GGUF" else "is no GGUF file"
    if any(path.glob("*.gguf")):
        return ""
    if not (path / "config.json").is_file():
        return "is a folder without config.json and without a GGUF file"
    if not any(found for pattern in ("*.safetensors", "*.bin") for found in path.glob(pattern)):
        return "is a folder without weights (*.safetensors)"
    return ""


def check_folder(path: str) -> Finding:
    """Check the content of a model folder or a GGUF file, without loading weights."""
    # These imports take time.
    from ..text.gguf_facts import facts_of
    from ..text.model_folder import folder_of

    named = EngineConfig(model_path=path).model_folder
    try:
        folder = folder_of(named)
    except ModelError as error:
        sentence, _, advice = error.message.rpartition("; ")
        return Finding("folder", "fail", sentence, advice)
    facts = facts_of(folder)
    if facts is None and not folder.is_dir():
        return Finding("folder", "fail", f"there is no folder {folder}", missing_model(path))
    files = {"config.json": "config.json", "weights (*.safetensors)": "*.safetensors"}
    missing = [what for what, pattern in files.items() if not any(folder.glob(pattern))]
    if facts is None and missing:
        found = f"{folder} has no {', no '.join(missing)}"
        return Finding("folder", "fail", found, "save model and tokenizer there: save_pretrained()")
    if facts is not None:
        size, types = facts.size_bytes, f" in {', '.join(facts.types)}"
    else:
        size, types = sum(file.stat().st_size for file in folder.glob("*.safetensors")), ""
    try:
        types = types or _format_of(folder)
    except ModelError as error:
        sentence, _, advice = error.message.rpartition("; ")
        return Finding("folder", "fail", sentence, advice)
    found = f"{named} ({_type_of(folder)}, {size / 1e6:,.0f} MB of weights{types})"
    if not has_tokenizer(folder):
        advice = "use a file that has one" if facts else "save it: tokenizer.save_pretrained()"
        return Finding("folder", "warn", f"{found} {_NO_TOKENIZER}", advice)
    try:
        check_vocabulary(folder)
    except ModelError as error:
        sentence, _, advice = error.message.partition("; ")
        return Finding("folder", "fail", sentence, advice)
    if facts is not None and facts.unread:
        found += f"; Transformers does not read its {', '.join(facts.unread)}"
        return Finding("folder", "warn", found, "use the model in Transformers' format")
    return Finding("folder", "ok", found)


def _format_of(folder: Path) -> str:
    """Return the format of quantised weights, as config.json has it; "" for plain ones.

    Raises:
        ModelError: Such weights aren't read.
    """
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        found = content.get("quantization_config") if isinstance(content, dict) else None
    except (OSError, ValueError):
        return ""
    if not isinstance(found, dict):
        return ""
    # With torch, whose import takes time.
    from ..stages.executor.runner.linear.formats.choose import format_of

    return f" in {format_of(found).label}"


def _type_of(folder: Path) -> str:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return str(content.get("model_type", "of unknown type"))
    except (OSError, ValueError, AttributeError):
        return "config.json can't be read"
