"""Parameters of requests, responses and tensors: their names and their meaning.

A budget (`timeout_ns`) is the time left when the request is sent, so that clocks need not agree:
each hop turns it into a deadline on its own clock, and sends on the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from ..config import MAX_INT64, RequestError, shown
from .tensors import MAX_NAME_LENGTH, Parameters, SharedMemory, TensorError

CODE_KEY = "nano-inference-code"
"""An error's stable code: in trailing metadata, or in the parameters of a stream's response."""

RETRY_KEY = "retry-after"
"""In trailing metadata: seconds after which a retry is worthwhile."""

STATUS_KEY = "grpc-status"
"""In the parameters of a stream's response: the gRPC status number of the request's error."""

FINAL_PARAM = "triton_final_response"
"""Of a stream's response: whether it is the last one of its request."""

WANTS_FINAL_PARAM = "triton_enable_empty_final_response"
"""Of a request to a decoupled model: whether an empty response marks the end."""

TIMEOUT_NS_PARAM = "timeout_ns"
"""A request's remaining budget in nanoseconds; zero or less has expired."""

TRITON_TIMEOUT_PARAM = "timeout"
"""Triton's timeout in microseconds; 0 is no limit."""

KEY_PARAM = "idempotency_key"
"""A request's idempotency key, where one header can't be that of several requests."""

BILLED_PARAM = "billed_ns"
"""Of the response with a request's end: its share of the device's busy time in nanoseconds."""

REGION_PARAM = "shared_memory_region"
BYTE_SIZE_PARAM = "shared_memory_byte_size"
OFFSET_PARAM = "shared_memory_offset"
MEMORY_PARAMS = frozenset({REGION_PARAM, BYTE_SIZE_PARAM, OFFSET_PARAM})

CLASSIFICATION_PARAM = "classification"

# Client libraries use it to describe how the tensor was made.
_IGNORED = frozenset({"content_type"})


def time_param(cause: str) -> str:
    """Return the parameter with a request's time of a cause, in nanoseconds, beside `billed_ns`."""
    return f"time_{cause}_ns"


class Budget(NamedTuple):
    """A request's time limit, and the parameter that set it."""

    ns: int
    param: str


def deadline_params(budget_ns: int) -> dict[str, int]:
    """Return the parameters of a budget; none for zero or less, which is no deadline."""
    return {TIMEOUT_NS_PARAM: min(budget_ns, MAX_INT64)} if budget_ns > 0 else {}


def budget_of(parameters: Parameters) -> Budget | None:
    """Return the shorter of a request's time limits; None without one.

    Raises:
        RequestError: invalid_budget.
    """
    budgets: list[Budget] = []
    for param, unit_ns, unit, minimum in (
        (TIMEOUT_NS_PARAM, 1, "nanoseconds", -MAX_INT64),
        (TRITON_TIMEOUT_PARAM, 1000, "microseconds, from 0,", 0),
    ):
        if (given := parameters.get(param)) is None:
            continue
        # JSON may write a whole number with a point, and a boolean is an integer in Python.
        if isinstance(given, float) and given.is_integer():
            given = int(given)
        if type(given) is not int or not minimum <= given <= MAX_INT64:
            raise RequestError(
                f"the parameter {param} is {shown(given)}; it must be a whole number of {unit} "
                "that fits 64 bits. Leave it out for no deadline",
                code="invalid_budget",
            )
        if given or param == TIMEOUT_NS_PARAM:
            budgets.append(Budget(min(given * unit_ns, MAX_INT64), param))
    return min(budgets, default=None)


def memory_of(name: str, parameters: Mapping[str, object]) -> SharedMemory | None:
    """Return a tensor's place in shared memory by its parameters; None if it is inline.

    Raises:
        TensorError: The parameters are incomplete or invalid.
    """
    region = parameters.get(REGION_PARAM)
    if region is None:
        if parameters.get(BYTE_SIZE_PARAM) is None and OFFSET_PARAM not in parameters:
            return None
        raise TensorError(f"{shown(name)} is in shared memory; add {REGION_PARAM}")
    if not isinstance(region, str) or not 0 < len(region) <= MAX_NAME_LENGTH:
        raise TensorError(
            f"the {REGION_PARAM} of {shown(name)} is {shown(region)}; it must be the name of a "
            f"region, of at most {MAX_NAME_LENGTH} characters"
        )
    return SharedMemory(
        region,
        byte_count(name, BYTE_SIZE_PARAM, parameters.get(BYTE_SIZE_PARAM)),
        byte_count(name, OFFSET_PARAM, parameters.get(OFFSET_PARAM, 0)),
    )


def memory_params(place: SharedMemory) -> dict[str, str | int]:
    """Return the parameters of a place in shared memory; an offset of 0 is left out."""
    found: dict[str, str | int] = {REGION_PARAM: place.region, BYTE_SIZE_PARAM: place.byte_size}
    return found | {OFFSET_PARAM: place.offset} if place.offset else found


def byte_count(name: str, parameter: str, given: object) -> int:
    """Validate a number of bytes. Raises TensorError."""
    if type(given) is not int or not 0 <= given <= MAX_INT64:
        raise TensorError(
            f"the {parameter} of {shown(name)} is {shown(given)}; it must be a number of bytes, 0 "
            "or more"
        )
    return given


def check_tensor_parameters(
    name: str, parameters: Mapping[str, object], known: Collection[str] = MEMORY_PARAMS
) -> None:
    """Refuse a tensor's unknown parameters that are set.

    Raises:
        RequestError: unsupported.
    """
    if parameters.get(CLASSIFICATION_PARAM):
        raise RequestError(
            f"{shown(name)} is requested as classes, which no model here has; leave out "
            f"{CLASSIFICATION_PARAM} and sort the output yourself",
            code="unsupported",
        )
    for parameter, value in parameters.items():
        if parameter not in known and parameter not in _IGNORED and value:
            raise RequestError(
                f"the parameter {shown(parameter)} of {shown(name)} is not known here; known: "
                f"{', '.join(sorted(known))}. Leave it out",
                code="unsupported",
            )
