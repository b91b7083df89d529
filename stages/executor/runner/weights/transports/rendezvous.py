"""How the members of a torch.distributed group meet and connect, within a given time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ......config import WeightsError, shown

BACKENDS = ("gloo", "nccl")

CPU = torch.device("cpu")
"""Where Gloo's buffers are."""

_LOOK_S = 5.0
"""How long one attempt to connect may take; between two it is seen whether somebody still waits."""


def open_group(
    store: Any,
    name: str,
    rank: int,
    world_size: int,
    backend: str,
    device: torch.device,
    deadline: float,
) -> Any:
    """Meets the others and connects to them. `store` is where they meet."""
    makers: dict[str, Callable[..., Any]] = {"gloo": _gloo, "nccl": _nccl}
    if backend not in makers:
        raise WeightsError(f"backend {shown(backend)} is unknown; use 'gloo' or 'nccl'")
    # The prefix that trainers give their store, and those that torch's own function puts on it.
    kind = "cpu/" if backend == "gloo" else "cuda/"
    for prefix in (name, f"{name}/", kind):
        store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    try:
        store.set_timeout(time_left(deadline))
        return makers[backend](store, rank, world_size, device, time_left(deadline))
    except (RuntimeError, ValueError) as error:
        raise broken(error, deadline) from None


def _gloo(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _nccl(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    if device.type != "cuda" or not dist.is_nccl_available():
        raise WeightsError("NCCL needs a GPU and a build of PyTorch that has it; use 'gloo'")
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def open_store(address: str, world_size: int, is_master: bool, deadline: float) -> Any:
    host, port = host_and_port(address)
    try:
        # A master that waits for workers counts those that say the same. Ours does not wait.
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, world_size, is_master, time_left(deadline), wait_for_workers=not is_master
        )
    except (RuntimeError, ValueError) as error:
        raise broken(error, deadline) from None


def host_and_port(address: str) -> tuple[str, int]:
    """Raises WeightsError for what is no address."""
    host, _, port = address.rpartition(":")
    digits = port.isascii() and port.isdigit() and len(port) <= 5
    if not host or not digits or int(port) > 65535:
        raise WeightsError(f"a group's address is host:port, not {shown(address)}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def await_port(address: str, deadline: float, stop: threading.Event) -> None:
    """Waits until somebody listens. torch's own waiting takes longer than it may, and is loud.

    Raises:
        WeightsError: Nobody did in time, or `stop` was set.
    """
    place = host_and_port(address)
    while not stop.is_set():
        try:
            socket.create_connection(
                place, min(time_left(deadline).total_seconds(), _LOOK_S)
            ).close()
            return
        except OSError as error:
            if time.monotonic() + 0.05 > deadline:
                raise WeightsError(
                    f"nobody keeps a group at {shown(address)}: {error.strerror or error}",
                    code="weights_timeout",
                ) from None
        stop.wait(0.05)
    raise was_left()


def was_left() -> WeightsError:
    """For whoever waits for a group that is left meanwhile."""
    return WeightsError("the group was left", code="weights_interrupted")


def time_left(deadline: float) -> timedelta:
    """The time that is left.

    Raises:
        WeightsError: None is.
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise WeightsError("the others were silent for too long", code="weights_timeout")
    # To the millisecond: torch takes no less, and 0 as none.
    return timedelta(milliseconds=max(round(1000 * seconds), 1))


def broken(error: Exception, deadline: float) -> WeightsError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "imed out" in reason or "timeout" in reason.lower() or time.monotonic() > deadline:
        return WeightsError(f"the group did not answer in time: {reason}", code="weights_timeout")
    return WeightsError(f"the group is broken: {reason}", code="weights_interrupted")
