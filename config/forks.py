"""Detection of forks of a process that has computed, in which torch and OpenMP would hang.

A fork has one thread, and a copy of the state of pools whose threads are missing: the first
parallel operation waits for them for ever.
"""

from __future__ import annotations

import os

from .errors import ModelError

_computes = False
_parent_computed = False


def begin_computing() -> None:
    """Note that this process has an engine, so that its forks can't have one.

    Raises:
        ModelError: `forked`: see `check_not_forked`.
    """
    global _computes
    check_not_forked()
    _computes = True


def check_not_forked() -> None:
    """Raise ModelError, `forked`, in a fork of a process that has or had an engine."""
    if _parent_computed:
        raise ModelError(
            "this process is a fork of one with an engine, and lacks the threads that compute; "
            "start it by 'spawn' (multiprocessing.get_context, or DataLoader's "
            "multiprocessing_context), or fork before there is an engine",
            code="forked",
        )


def is_forked() -> bool:
    """Return whether `check_not_forked` raises."""
    return _parent_computed


def _after_fork() -> None:
    global _parent_computed
    _parent_computed = _parent_computed or _computes


os.register_at_fork(after_in_child=_after_fork)
