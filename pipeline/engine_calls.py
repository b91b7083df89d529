"""The calls of an engine, by several threads and in forks of its process."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..config.forks import check_not_forked

_Class = TypeVar("_Class", bound=type)
_Call = TypeVar("_Call", bound=Callable[..., Any])


def one_at_a_time(owner: _Class) -> _Class:
    """Have the public methods of a class exclude one another, by the object's `_lock`.

    The cores are not made for several threads. In a fork they raise, before they wait for a lock
    that a thread of the parent may hold.
    """
    for name, method in list(vars(owner).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(owner, name, _alone(method))
    return owner


def says_other_names(method: _Call) -> _Call:
    """Have a call with an argument that it does not have name its own (`config.other_names`)."""

    @functools.wraps(method)
    def call(*args: Any, **more: Any) -> Any:
        try:
            return method(*args, **more)
        except TypeError:
            from ..config import EngineConfig, SamplingParams
            from ..config.other_names import unknown_argument

            what = method.__qualname__.removesuffix(".__init__")
            known = inspect.signature(method).parameters
            fields = EngineConfig.__struct_fields__, SamplingParams.__struct_fields__
            if unknown := unknown_argument(what, more, known, *fields):
                raise unknown from None
            raise

    return cast(_Call, call)


class OtherNames:
    """Has an attribute that an engine lacks name its own (`config.other_names`)."""

    if not TYPE_CHECKING:  # A type checker refuses such attributes by itself.

        def __getattr__(self, name: str) -> Any:
            from ..config.other_names import unknown_attribute

            raise unknown_attribute(self, name)


def _alone(method: Callable[..., Any]) -> Callable[..., Any]:
    @says_other_names
    @functools.wraps(method)
    def call(self: Any, *args: Any, **more: Any) -> Any:
        check_not_forked()
        lock: RLock = self._lock
        with lock:
            return method(self, *args, **more)

    return call
