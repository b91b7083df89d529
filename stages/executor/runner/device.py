"""Devices by torch's names, and their differences."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ....config import ModelError, shown

PREFERRED = ("cuda", "xpu", "mps", "cpu")
"""The order in which `auto` looks for a device. ROCm devices are "cuda" in torch."""

_WITHOUT_INDEX = ("cpu", "mps")
"""The kinds with one device, which shares the machine's memory."""

_TESTED = frozenset({"cpu", "cuda"})
"""The kinds on which this project's tests have run. On ROCm they have not."""


def devices_here() -> dict[str, int]:
    """Return the number of visible devices by kind, without kinds that are missing."""
    counts = {kind: _count(kind) for kind in PREFERRED}
    return {kind: count for kind, count in counts.items() if count}


def _count(kind: str) -> int:
    if kind == "cpu":
        return 1
    module: Any = torch.get_device_module(kind)
    return int(module.device_count()) if module.is_available() else 0


def resolve_device(name: str) -> torch.device:
    """Return the device of a name such as "auto", "cpu", "cuda", "cuda:1", "xpu:0", "mps".

    Raises:
        ModelError: The device is missing, or the name is unknown to torch.
    """
    names = [
        kind if kind in _WITHOUT_INDEX else f"{kind}:{index}"
        for kind, count in devices_here().items()
        for index in range(count)
    ]
    if name == "auto":
        name = names[0]
    advice = f"here {'are' if len(names) > 1 else 'is'} {', '.join(names)}; use one, or 'auto'"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"torch has no device {shown(name)}; {advice}") from None
    found = f"{device.type}:{device.index or 0}"
    if device.type in _WITHOUT_INDEX:
        found = found.removesuffix(":0")
    if found not in names:
        raise ModelError(f"device {shown(name)} is missing; {advice}")
    return torch.device(found)


def device_of_replica(name: str, replica: int) -> str:
    """Return the device of one of several replicas: they take turns over all devices, unless the
    name has a number."""
    if name != "auto" and name not in PREFERRED:
        return name
    device = resolve_device(name)
    count = devices_here()[device.type]
    return name if count == 1 else f"{device.type}:{replica % count}"


def describe_device(device: torch.device) -> str:
    """Return a readable name: "cpu", "cuda:0 NVIDIA H200", "mps (unverified)"."""
    name = str(device)
    if device.type in ("cuda", "xpu"):
        module: Any = torch.get_device_module(device.type)
        name = f"{name} {module.get_device_name(device)}"
    if device.type == "cuda" and torch.version.hip:
        name = f"{name}, ROCm {torch.version.hip}"
    return f"{name} (unverified)" if is_unverified(device) else name


def is_unverified(device: torch.device) -> bool:
    """Return whether no test of this project has run on this kind of device."""
    return device.type not in _TESTED or (device.type == "cuda" and bool(torch.version.hip))


def chooses_tokens(device: torch.device) -> bool:
    """Return whether tokens are chosen on the device; otherwise on the CPU.

    The choice needs float64, which Apple's devices and some of Intel's lack.
    """
    return device.type in ("cpu", "cuda")


def free_memory(device: torch.device) -> tuple[int, int] | None:
    """Return free and total bytes of a device with its own memory; None if it shares the machine's,
    or if torch can't tell."""
    if device.type in _WITHOUT_INDEX:
        return None
    module: Any = torch.get_device_module(device.type)
    try:
        free, total = module.mem_get_info(device)
    except (AttributeError, RuntimeError):
        return None
    return int(free), int(total)


def trim(device: torch.device) -> None:
    """Return the allocators' unused memory to the device or the system."""
    if device.type != "cpu":
        module: Any = torch.get_device_module(device.type)
        module.empty_cache()
    elif give_back := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        give_back(0)
