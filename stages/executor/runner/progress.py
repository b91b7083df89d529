"""The progress of loading a model's weights, from Transformers' own progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as transformers_logging

_log: Any = transformers_logging
# Of the process, as the bars are; all of its models are loaded by one thread.
_share: list[float] = []


def loaded_share() -> float | None:
    """Return which share of the weights is loaded; None if none are being loaded."""
    return _share[-1] if _share else None


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable Transformers' progress bars."""
    shown = _log.is_progress_bar_enabled()
    _log.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            _log.enable_progress_bar()


@contextmanager
def counted_progress() -> Iterator[None]:
    """Have Transformers' bars set `loaded_share` rather than write to the terminal."""

    def count(
        factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Counted:
        return _Counted(*args, **kwargs)

    before = _log.set_tqdm_hook(count)
    _share.append(0.0)
    try:
        with no_progress_bars():
            yield
    finally:
        _share.pop()
        _log.set_tqdm_hook(before)


class _Counted(_log.EmptyTqdm):  # type: ignore[misc]
    """A bar that is not shown."""

    def __iter__(self) -> Iterator[Any]:
        parts = self._iterator
        total = len(parts) if isinstance(parts, Sized) else 0
        for number, part in enumerate(parts):
            if _share and total:
                _share[-1] = number / total
            yield part
