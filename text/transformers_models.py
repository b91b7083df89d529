"""Import of Transformers' models."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path


def import_models() -> None:
    """Import `transformers.models` with the list of classes that `transformers` has made.

    By itself it reads its 1,600 files for that list again, which takes 0.24 s.
    """
    if "transformers.models" in sys.modules:
        return
    from transformers.utils import import_utils

    made = import_utils.create_import_structure_from_path
    folder = Path(import_utils.__file__).parents[1] / "models"

    def again(path: str) -> object:
        return made(folder if Path(path) == folder / "__init__.py" else path)

    import_utils.create_import_structure_from_path = again
    try:
        import_module("transformers.models")
    finally:
        import_utils.create_import_structure_from_path = made
