"""Checks of the arguments of control messages, before any work begins.

Tensors and files are checked where they are read.
"""

from __future__ import annotations

import os

from ....bus import control
from ....bus.weights import (
    ArcWeights,
    DeltaWeights,
    FolderWeights,
    GroupWeights,
    PastWeights,
    SharedMemoryWeights,
    StagedWeights,
    WeightsSource,
    check_in_flight,
)
from ....config import WeightsError, shown
from ..runner.weights.checks import LARGEST_VERSION, WeightLimits

Operation = (
    control.UpdateWeights
    | control.FinishUpdate
    | control.JoinWeightsGroup
    | control.LeaveWeightsGroup
    | control.TellWeightVersion
    | control.ChecksumWeights
    | control.ReleaseMemory
    | control.ResumeMemory
    | control.MoveExperts
    | control.LoadAdapter
    | control.UnloadAdapter
)

LONGEST_WAIT_S = 86_400.0
"""One day: within the range of clocks and sockets."""

_NAMES = ("part_of", "prepare_as", "prepared", "group", "key", "update", "run")
_LONGEST_NAME = 256
_LONGEST_PATH_BYTES = 4096  # Linux's
_LONGEST_HOST = 253  # DNS's
_LARGEST_WORLD = 1 << 16


def check_arguments(operation: Operation, limits: WeightLimits) -> None:
    """Check the arguments of an operation, in constant time.

    Raises:
        WeightsError: An argument is invalid; the error names it.
    """
    for part in (operation, getattr(operation, "source", None)):
        for argument in _NAMES:
            if (length := len(getattr(part, argument, ""))) > _LONGEST_NAME:
                raise WeightsError(
                    f"{argument} has {length} characters; a name may have {_LONGEST_NAME}"
                )
    match operation:
        case control.UpdateWeights():
            _check_wait(operation.timeout_s)
            _check_version(operation.version)
            check_in_flight(operation.in_flight)
            _check_source(operation.source, limits)
        case control.FinishUpdate():
            _check_version(operation.version)
        case control.JoinWeightsGroup():
            _check_join(operation)
        case control.LoadAdapter(folder=folder):
            check_in_flight(operation.in_flight)
            check_path(folder)
        case control.UnloadAdapter():
            check_in_flight(operation.in_flight)


def _check_version(version: int | None) -> None:
    """Raises WeightsError for a version that is too large."""
    if version is not None and version > LARGEST_VERSION:
        raise WeightsError(
            f"version is {shown(version)}; give a number up to {LARGEST_VERSION}, or none"
        )


def check_path(path: str) -> None:
    """Raises WeightsError for a text that can't name a file."""
    if not path:
        raise WeightsError("the path of the weights is empty; name a folder or a file")
    if "\0" in path:
        raise WeightsError(f"the path {shown(path)} has a NUL byte; give one without")
    try:
        size = len(os.fsencode(path))
    except UnicodeEncodeError:
        raise WeightsError(f"the path {shown(path)} is not Unicode; give one in UTF-8") from None
    if size > _LONGEST_PATH_BYTES:
        raise WeightsError(
            f"the path {shown(path)} has {size} bytes; it may have {_LONGEST_PATH_BYTES} bytes"
        )


def _check_source(source: WeightsSource | StagedWeights, limits: WeightLimits) -> None:
    match source:
        case FolderWeights(path=path) | ArcWeights(path=path):
            check_path(path)
        case SharedMemoryWeights(segments, tensors):
            limits.check_tensors(len(tensors))
            if len(segments) > len(tensors):
                raise WeightsError(
                    f"{len(tensors)} tensors are in {len(segments)} segments; name only "
                    "segments with a tensor"
                )
        case GroupWeights(tensors=tensors) | DeltaWeights(tensors=tensors):
            limits.check_tensors(len(tensors))
        case PastWeights(version=version):
            _check_version(version)


def _check_join(wish: control.JoinWeightsGroup) -> None:
    from ..runner.weights.transports.group import BACKENDS, host_and_port

    if not wish.group:
        raise WeightsError("group is empty; give the group a name")
    _check_wait(wish.timeout_s)
    if wish.backend not in BACKENDS:
        known = " or ".join(repr(backend) for backend in BACKENDS)
        raise WeightsError(f"backend {shown(wish.backend)} is unknown; use {known}")
    if wish.world_size > _LARGEST_WORLD:
        raise WeightsError(
            f"world_size is {shown(wish.world_size)}; it may be up to {_LARGEST_WORLD}"
        )
    if not 0 < wish.rank < wish.world_size:
        raise WeightsError(
            f"an executor's rank is from 1 to below the world's size: it is {shown(wish.rank)} of "
            f"{shown(wish.world_size)}; give one of these"
        )
    host, port = host_and_port(wish.address)
    if not port:
        raise WeightsError(
            "a group's address is host:port, and the port is not 0", remedy="give one of this form"
        )
    try:
        host.encode("idna")
    except UnicodeError:
        host = ""
    if not host or "\0" in host or len(host) > _LONGEST_HOST:
        raise WeightsError(
            f"{shown(wish.address)} has no valid host; give an address, or a name whose "
            "labels have up to 63 characters"
        )


def _check_wait(timeout_s: float) -> None:
    if not 0 < timeout_s <= LONGEST_WAIT_S:  # written so that NaN fails
        raise WeightsError(
            f"timeout_s is {shown(timeout_s)}; give seconds above 0, up to {LONGEST_WAIT_S:.0f}"
        )
