"""What both codecs ask of a request beside its tensors' elements."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from ..config import RequestError, shown
from .tensors import MAX_NAME_LENGTH, TensorError

MAX_TENSORS = 1024
"""A request or an answer has at most so many inputs, and so many outputs."""

CLASSIFICATION_PARAM = "classification"

# How a client's library has made the tensor.
_HARMLESS = frozenset({"content_type"})

T = TypeVar("T")


def counted(tensors: Sequence[T]) -> Sequence[T]:
    """The same. Raises TensorError where there are too many."""
    if len(tensors) > MAX_TENSORS:
        raise TensorError(f"there are {len(tensors)} tensors; at most {MAX_TENSORS} are taken")
    return tensors


def checked_name(name: str) -> str:
    """A tensor's name that came from outside. Raises TensorError."""
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise TensorError(
            f"a tensor is named {shown(name)}; a name has 1 to {MAX_NAME_LENGTH} characters"
        )
    return name


def check_parameters(name: str, parameters: Mapping[str, object], known: Collection[str]) -> None:
    """Refuses parameters of a tensor that ask for something unknown.

    Raises:
        RequestError: unsupported.
    """
    for parameter, value in parameters.items():
        if parameter not in known and parameter not in _HARMLESS and value:
            raise RequestError(
                f"the parameter {shown(parameter)} of {shown(name)} is not known here; known: "
                f"{', '.join(sorted(known))}. Leave it out",
                code="unsupported",
            )


def check_not_classified(name: str, parameters: Mapping[str, object]) -> None:
    """Raises RequestError `unsupported` where an output is wanted as classes."""
    if parameters.get(CLASSIFICATION_PARAM):
        raise RequestError(
            f"{shown(name)} is wanted as classes, which no model here has; leave out "
            f"{CLASSIFICATION_PARAM} and sort the output yourself",
            code="unsupported",
        )
