"""Checks of sampling parameters that few requests have, and of those that Python callers make."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from .base import Range
from .errors import ParameterError
from .quoting import is_unicode, shown
from .wrong_values import told_of

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_LOGIT_BIAS = 100
MAX_BIASED_TOKENS = 1024


def take(params: Any, name: str, kind: Any, allowed: Range | None) -> None:
    """Check the type of a parameter of a Python caller, who may have it from numpy or torch.

    Args:
        params: The SamplingParams.
        name: The parameter's name.
        kind: Its type.
        allowed: Its range.

    Raises:
        ParameterError: As `check_type`.
    """
    given = getattr(params, name)
    plain = without_arrays(given)
    if name == "top_k" and plain == -1:  # off, as in vLLM
        plain = 0
    if plain is not given:
        msgspec.structs.force_setattr(params, name, plain)
        params.__post_init__()  # which freezes lists
    check_type(name, getattr(params, name), kind, allowed)


def check_type(name: str, value: Any, kind: Any, allowed: Range | None) -> None:
    """Check the type of a parameter.

    Raises:
        ParameterError: invalid_request, or the code of the parameter's range.
    """
    try:
        # Without builtin_types bytes would become base64 text.
        plain = msgspec.to_builtins(value, builtin_types=(bytes, bytearray, memoryview))
        msgspec.convert(plain, kind)
    except (msgspec.ValidationError, TypeError) as error:
        code = f"invalid_{name}" if allowed else "invalid_request"
        if allowed and isinstance(value, int | float) and not allowed.holds(value):
            limit = f"it must be {allowed.wanted}"
            raise ParameterError(
                f"{name} is {shown(value)}", limit, param=name, code=code
            ) from None
        raise ParameterError(told_of(error, name, value), param=name, code=code) from None


def without_arrays(value: Any) -> Any:
    """Return a value with Python's numbers in place of numpy's and torch's; itself without any."""
    if hasattr(value, "item"):
        return value.tolist()
    if isinstance(value, list | tuple | set | frozenset):
        plain = [without_arrays(each) for each in value]
        if any(map(operator.is_not, plain, value)):
            return type(value)(plain)
    elif isinstance(value, dict):
        of_all = {without_arrays(key): without_arrays(each) for key, each in value.items()}
        if any(map(operator.is_not, (*of_all, *of_all.values()), (*value, *value.values()))):
            return of_all
    return value


def kinds_of(constraint: Any) -> list[str]:
    """Return the fields of a Constraint that are set."""
    names = constraint.__struct_fields__
    return [name for name in names if getattr(constraint, name) not in (None, False)]


def check_constraint(constraint: Any) -> None:
    """Check the types of a Constraint's fields, and `kind_of`.

    Raises:
        ParameterError: invalid_request, invalid_constraint.
    """
    types = get_type_hints(type(constraint))
    for name in kinds_of(constraint):
        value = getattr(constraint, name)
        # A schema may be of any size, or refer to itself.
        if name != "json_schema" or not isinstance(value, dict):
            check_type(f"constraint.{name}", value, types[name], None)
    kind_of(constraint)


def kind_of(constraint: Any) -> str:
    """Return the only kind of a Constraint.

    Raises:
        ParameterError: invalid_constraint: there is not exactly one kind, or no text to choose.
    """
    kinds, wrong = kinds_of(constraint), ""
    if len(kinds) != 1:
        wanted = ", ".join(constraint.__struct_fields__)
        wrong = f"constraint has {' and '.join(kinds) or 'no kind'}; give exactly one of {wanted}"
    elif constraint.choice is not None and not (constraint.choice and all(constraint.choice)):
        wrong = "constraint.choice must be texts that are not empty, one at least"
    if wrong:
        raise ParameterError(wrong, param="constraint", code="invalid_constraint")
    return kinds[0]


def check_rare(params: Any, outside: Sequence[ParameterError]) -> None:
    """Check what few SamplingParams have.

    Args:
        params: The parameters.
        outside: The errors of their numbers.

    Raises:
        ParameterError: As `check_ranges`; of several numbers with the code of the first.
    """
    if outside:
        message = "; ".join(error.message for error in outside)
        raise ParameterError(message, param=outside[0].param, code=outside[0].code)
    if not 0 <= params.min_tokens <= params.max_tokens:
        limit = f"it must be from 0 to max_tokens ({shown(params.max_tokens)})"
        what = f"min_tokens is {shown(params.min_tokens)}"
        raise ParameterError(what, limit, param="min_tokens", code="invalid_min_tokens")
    _check_stop(params.stop)
    _check_logit_bias(params.logit_bias)
    if params.constraint is not None and (params.ignore_eos or params.min_tokens):
        raise ParameterError(
            "a constraint ends with the model's end-of-sequence token, which ignore_eos and "
            "min_tokens forbid; leave these out",
            param="constraint",
            code="invalid_constraint",
        )


def _check_logit_bias(logit_bias: Mapping[int, float]) -> None:
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


def _check_stop(stop: tuple[str, ...]) -> None:
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
