"""`nano-inference quantize`: a model's folder with weights of 8 or 4 bits."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.filesize import decimal
from rich.progress import DownloadColumn, Progress

from ..config import ConfigError, EngineConfig, ModelError, missing_model
from ..text.model_folder import gguf_file_of
from .options import AsJson, argument, option
from .pull import partial_folder
from .terminal import complain, print_json, print_table, said_lines, stderr, stdout, waiting

if TYPE_CHECKING:
    from ..stages.executor.runner.quantize.folder import LayerReport, Plan, Wanted

_GROUPS = (32, 64, 128)
_SHOWN_LAYERS = 10


def quantize(
    source: Annotated[
        str,
        argument("SOURCE", "A folder in Transformers' format, or the name of a bundled model."),
    ],
    target: Annotated[Path, argument("TARGET", "The new folder; it must not exist.")],
    format: Annotated[
        Literal["int8", "int4"], option("--format", "Integers of 8 or of 4 bits.")
    ] = "int8",
    group: Annotated[
        int | None,
        option(
            "--group N",
            "Inputs that share a scale: 32, 64 or 128; default: 128 with int4, all with int8.",
        ),
    ] = None,
    zero_points: Annotated[
        bool, option("--zero-points", "A zero point for each scale; without, 0 is in the middle.")
    ] = False,
    ignore: Annotated[
        list[str] | None,
        option(
            "--ignore PATTERN",
            "Leave these layers as they are, as '*.down_proj'. Repeatable. The output layer and "
            "routers stay always.",
        ),
    ] = None,
    activation_bits: Annotated[
        int,
        option(
            "--activation-bits N",
            "8 has vLLM round activations too, to int8 by token, which its CPU kernels need for "
            "int8.",
        ),
    ] = 16,
    as_json: AsJson = False,
) -> None:
    """Write a model's folder with quantised weights, and print the error of each layer.

        nano-inference quantize models/mine models/mine-int4 --format int4

        nano-inference serve --model models/mine-int4

    The folder is in compressed-tensors' format, which this package, vLLM and Transformers read. It
    appears once it is complete. Weights are rounded to the nearest code; no data is used.
    """
    bits: Literal[4, 8] = 4 if format == "int4" else 8
    group = _checked_group(group, bits)
    _check_activations(activation_bits, bits, group, zero_points=zero_points)
    folder, target = _checked_source(source), target.expanduser().resolve()
    _check_target(folder, target)
    with waiting("loading code"):
        from ..stages.executor.runner.linear.rounding import Rounding
        from ..stages.executor.runner.quantize.folder import Wanted, plan_folder
    rounding = Rounding(bits, group, zero_points)
    wanted = Wanted(rounding, tuple(ignore or ()), 8 if activation_bits == 8 else 16)
    plan = plan_folder(folder, wanted)
    try:
        with partial_folder(target, "quantize") as partial:
            layers = _write(plan, target, partial)
    except OSError as error:
        raise ConfigError(f"{target} can't be written: {error}; give another TARGET") from None
    if as_json:
        print_json(_as_json(plan, target, layers))
    else:
        _print(plan, target, layers)
    for note in _notes(plan, wanted):
        complain(note)


# --- checks -------------------------------------------------------------------------------------


def _checked_group(group: int | None, bits: int) -> int:
    if group is None:
        return 128 if bits == 4 else 0
    if group not in _GROUPS:
        raise ConfigError(f"--group must be 32, 64 or 128; got {group}")
    return group


def _check_activations(activation_bits: int, bits: int, group: int, *, zero_points: bool) -> None:
    if activation_bits not in (8, 16):
        raise ConfigError(f"--activation-bits must be 8 or 16; got {activation_bits}")
    if activation_bits == 8 and (bits != 8 or group or zero_points):
        raise ConfigError(
            "--activation-bits 8 needs --format int8 with one scale per output; leave out --group "
            "and --zero-points"
        )


def _checked_source(source: str) -> Path:
    """Return the folder of a SOURCE argument.

    Raises:
        ModelError: There is none, or it is a GGUF file.
    """
    folder = EngineConfig(model_path=source).model_folder
    if not folder.exists():
        raise ModelError(f"{source}: there is no such folder; {missing_model(source)}")
    if (file := gguf_file_of(folder)) is not None:
        raise ModelError(
            f"{file} is a file, and only a folder in Transformers' format can be quantised; a GGUF "
            "file has quantised weights already, which are served as they are"
        )
    return folder.resolve()


def _check_target(folder: Path, target: Path) -> None:
    if target.suffix == ".gguf":
        raise ConfigError(f"{target} must be a folder; GGUF files are not written")
    if target.exists():
        raise ConfigError(f"{target} is there already; remove it, or give another TARGET")
    if target.is_relative_to(folder):
        raise ConfigError(f"{target} is within {folder}; give another TARGET")


# --- writing ------------------------------------------------------------------------------------


def _write(plan: Plan, target: Path, partial: Path) -> list[LayerReport]:
    from ..stages.executor.runner.quantize.folder import write_folder

    new = partial / "new"
    shutil.rmtree(new, ignore_errors=True)  # of a command that was killed
    if plan.bytes_after > (free := shutil.disk_usage(partial).free):
        raise ConfigError(
            f"{target} needs {decimal(plan.bytes_after)}, and {decimal(free)} are free in "
            f"{target.parent}"
        )
    new.mkdir()
    console = stderr()
    columns = (*Progress.get_default_columns(), DownloadColumn())
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    task = progress.add_task("quantising", total=plan.num_bytes)

    def state() -> str:
        done = decimal(int(progress.tasks[0].completed))
        return f"quantising: {done} of {decimal(plan.num_bytes)}"

    try:
        with progress, said_lines(state, console):
            layers = write_folder(plan, new, lambda size: progress.advance(task, size))
        os.rename(new, target)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return layers


# --- the report ---------------------------------------------------------------------------------


def _bits_per_weight(layers: list[LayerReport]) -> float:
    return 8 * sum(each.bytes_after for each in layers) / sum(each.weights for each in layers)


def _as_json(plan: Plan, target: Path, layers: list[LayerReport]) -> dict[str, object]:
    return {
        "folder": str(target),
        "bytes_before": plan.num_bytes,
        "bytes_after": plan.bytes_after,
        "bits_per_weight": _bits_per_weight(layers),
        "layers": layers,
        "kept": plan.kept,
    }


def _print(plan: Plan, target: Path, layers: list[LayerReport]) -> None:
    worst = sorted(layers, key=lambda each: each.error, reverse=True)[:_SHOWN_LAYERS]
    rows = [
        (each.name, f"{each.error:.2%}", decimal(each.bytes_before), decimal(each.bytes_after))
        for each in worst
    ]
    columns = ("layer", "error", "before", "after")
    print_table(columns, rows, right=columns[1:], fold=("layer",))
    mean = sum(each.error for each in layers) / len(layers)
    console = stdout()
    more = f", the {len(worst)} worst above" if len(worst) < len(layers) else ""
    console.print(
        f"{len(layers)} layers{more}: {mean:.2%} mean error (norm of differences over norm of "
        f"weights), {_bits_per_weight(layers):.2f} bits per weight",
        soft_wrap=True,
    )
    for why, names in _reasons(plan).items():
        shown = ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
        console.print(f"not quantised ({why}): {shown}", soft_wrap=True)
    sizes = f"{decimal(plan.num_bytes)} before, {decimal(plan.bytes_after)} after"
    console.print(f"{target}: {sizes}", soft_wrap=True)


def _reasons(plan: Plan) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for name, why in plan.kept.items():
        reasons.setdefault(why, []).append(name)
    return reasons


def _notes(plan: Plan, wanted: Wanted) -> list[str]:
    """Return what other programs can't do with this folder."""
    notes = []
    if wanted.rounding.bits == 8 and wanted.activation_bits == 16:
        notes.append("vLLM reads this folder on GPUs alone; on CPUs it needs --activation-bits 8")
    if wanted.rounding.zero_points:
        notes.append(
            "Transformers may need CompressedTensorsConfig(dequantize=True) to read zero points"
        )
    if plan.splits:
        notes.append(
            f"vLLM can't load it: it computes {plan.splits} together, of which only some are "
            "quantised"
        )
    return notes
