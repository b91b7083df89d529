"""Checks of sampling parameters that few requests have."""

from __future__ import annotations

from collections.abc import Mapping

from .errors import ParameterError
from .quoting import is_unicode, shown

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_LOGIT_BIAS = 100
MAX_BIASED_TOKENS = 1024


def check_logit_bias(logit_bias: Mapping[int, float]) -> None:
    """Raises ParameterError: invalid_logit_bias."""
    wrong = ""
    if len(logit_bias) > MAX_BIASED_TOKENS:
        wrong = f"it holds {len(logit_bias)} tokens; at most {MAX_BIASED_TOKENS} are taken"
    for token_id, bias in () if wrong else logit_bias.items():
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            wrong = (
                f"the bias of token {shown(token_id)} is {shown(bias)}; it must be from "
                f"{-MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}"
            )
            break
    if wrong:
        raise _unusable("logit_bias", wrong, "invalid_logit_bias")


def check_stop(stop: tuple[str, ...]) -> None:
    """Raises ParameterError: invalid_stop."""
    wrong = ""
    if len(stop) > MAX_STOP_STRINGS:
        wrong = f"it holds {len(stop)} strings; at most {MAX_STOP_STRINGS} are taken"
    elif not all(stop):
        wrong = "it holds an empty string, which would stop at once; leave that out"
    elif not all(map(is_unicode, stop)):
        wrong = "it holds a lone surrogate, which no text of the model's can match"
    elif any(len(string.encode()) > MAX_STOP_BYTES for string in stop):
        wrong = f"a string in it is longer than {MAX_STOP_BYTES} bytes"
    if wrong:
        raise _unusable("stop", wrong, "invalid_stop")


def _unusable(name: str, why: str, code: str) -> ParameterError:
    return ParameterError(f"{name} can't be used: {why}", param=name, code=code)
