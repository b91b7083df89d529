"""What is checked of a request before its prompt is looked at. One code for each cause."""

from __future__ import annotations

from ...bus.messages import GenerateRequest
from ...config import RequestError, SamplingParams

MAX_REQUEST_ID_LENGTH = 256
MAX_TENANT_LENGTH = 128
MAX_PRIORITY = 1000
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MIN_TEMPERATURE = 1e-4
MAX_TEMPERATURE = 1e4
MAX_INT64 = 2**63 - 1


def is_usable_request_id(request_id: str) -> bool:
    """Whether it can name a result stream and be shown in logs: printable, not too long."""
    return 0 < len(request_id) <= MAX_REQUEST_ID_LENGTH and request_id.isprintable()


def check_request(request: GenerateRequest, *, model_name: str, max_samples: int) -> None:
    """All fields but the prompt and those of `sampling`.

    Raises:
        RequestError: unknown_model, invalid_tenant, invalid_priority, invalid_budget, invalid_n.
    """
    if request.model not in ("", model_name):
        raise RequestError(
            f"there is no model {shown(request.model)} here; leave model empty or ask for "
            f"{model_name!r}",
            code="unknown_model",
        )
    if not (0 < len(request.tenant) <= MAX_TENANT_LENGTH and request.tenant.isprintable()):
        raise RequestError(
            f"tenant is {shown(request.tenant)}; it must be 1 to {MAX_TENANT_LENGTH} printable "
            f"characters",
            code="invalid_tenant",
        )
    _require(
        "priority",
        request.priority,
        -MAX_PRIORITY <= request.priority <= MAX_PRIORITY,
        f"from {-MAX_PRIORITY} to {MAX_PRIORITY}",
    )
    if request.budget_ns is not None and request.budget_ns > MAX_INT64:
        raise RequestError(
            f"budget_ns is {shown(request.budget_ns)}; it must fit 64 bits. Leave it out for no "
            f"deadline",
            code="invalid_budget",
        )
    _require("n", request.n, 1 <= request.n <= max_samples, f"from 1 to {max_samples}")


def check_sampling(sampling: SamplingParams, *, vocab_size: int) -> None:
    """Every range of SamplingParams.

    A temperature is 0 (greedy) or from 1e-4 to 1e4: nearer to 0 or to infinity the scaled logits
    leave float32, and logprobs would be NaN.

    Raises:
        RequestError: invalid_max_tokens, invalid_temperature, invalid_top_k, invalid_top_p,
            invalid_min_p, invalid_seed, invalid_stop, invalid_stop_token_ids.
    """
    p = sampling
    _require("max_tokens", p.max_tokens, p.max_tokens >= 1, "at least 1")
    # Written so that NaN fails.
    _require(
        "temperature",
        p.temperature,
        p.temperature == 0 or MIN_TEMPERATURE <= p.temperature <= MAX_TEMPERATURE,
        f"0 (greedy) or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
    )
    _require("top_k", p.top_k, 0 <= p.top_k <= MAX_INT64, "0 (off) or a number of tokens")
    _require("top_p", p.top_p, 0 < p.top_p <= 1, "above 0 and at most 1 (off)")
    _require("min_p", p.min_p, 0 <= p.min_p <= 1, "from 0 (off) to 1")
    if p.seed is not None:
        fits = -MAX_INT64 - 1 <= p.seed <= MAX_INT64
        _require("seed", p.seed, fits, "a signed 64-bit integer, or absent")
    _check_stop(p.stop)
    bad = [i for i in p.stop_token_ids if not 0 <= i < vocab_size]
    if bad:
        raise RequestError(
            f"stop_token_ids holds {shown(bad[0])}; the model's token ids are 0 to "
            f"{vocab_size - 1}",
            code="invalid_stop_token_ids",
        )


def shown(value: object) -> str:
    """A client's value as it can stand in any message: short, and ASCII.

    Python refuses to print integers of thousands of digits, and text may hold lone surrogates,
    which no codec takes.
    """
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_encodable(text: str) -> bool:
    """False for text with lone surrogates, which JSON escapes can bring in."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_stop(stop: tuple[str, ...]) -> None:
    wrong = ""
    if len(stop) > MAX_STOP_STRINGS:
        wrong = f"it holds {len(stop)} strings; at most {MAX_STOP_STRINGS} are taken"
    elif not all(stop):
        wrong = "it holds an empty string, which would stop at once; leave that out"
    elif not all(map(is_encodable, stop)):
        wrong = "it holds a lone surrogate, which no text of the model's can match"
    elif any(len(string.encode()) > MAX_STOP_BYTES for string in stop):
        wrong = f"a string in it is longer than {MAX_STOP_BYTES} bytes"
    if wrong:
        raise RequestError(f"stop can't be used: {wrong}", code="invalid_stop")


def _require(name: str, value: float, holds: bool, wanted: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {shown(value)}; it must be {wanted}", code=f"invalid_{name}")
