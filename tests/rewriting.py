"""The tests' assertions, rewritten once in a new checkout, and not once in each worker."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def rewrite_share(config: pytest.Config, folder: Path) -> None:
    """Rewrites this worker's share of a folder's test files, where nobody has done it before.

    All workers collect all files in one order. Where pytest has not yet written its `.pyc` files
    each would rewrite each file, which takes more time than all that is imported. This way each
    finds those of the others, or, where it comes too early, does as pytest does by itself.
    """
    worker: dict[str, object] | None = getattr(config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode:
        return
    place = int(str(worker["workerid"]).removeprefix("gw"))
    state = config.stash[rewrite.assertstate_key]
    for path in sorted(folder.rglob("test_*.py"))[place :: int(str(worker["workercount"]))]:
        cache = rewrite.get_cache_dir(path)
        written = cache / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, written) is None and rewrite.try_makedirs(cache):
            source, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, source, written)
