"""Arrays in answers of JSON."""

from __future__ import annotations

import io
from base64 import b64encode
from typing import Any

import numpy as np
import numpy.typing as npt


def npy_text(array: npt.NDArray[Any]) -> str:
    """Return an array as vLLM writes it: a file of numpy's format, in base64."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return b64encode(file.getbuffer()).decode()
