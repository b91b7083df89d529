"""The package's errors: a small hierarchy, each with a stable `code`.

A released code never changes: programs match on it; `error_codes.toml` has all of them. The message
is one sentence for people: what is wrong, the limit, and what to change.
"""

from __future__ import annotations

from .quoting import cut


class NanoInferenceError(Exception):
    """Base of every error that this package raises deliberately.

    A message quotes outside input, and goes to logs, clients and other processes; so it is cut
    here, to `config.quoting.MOST_TEXT` characters.

    Attributes:
        message: A text that any client may read, also one of a gateway.
        param: The path of the field that is wrong, such as `messages[0].role`; None if none is.
        retry_after_s: Seconds after which a retry may succeed; None if none will.
    """

    code = "internal_error"

    def __init__(
        self,
        what: str,
        limit: str = "",
        remedy: str = "",
        *,
        code: str = "",
        param: str | None = None,
        retry_after_s: float | None = None,
        detail: str = "",
    ) -> None:
        """Join what a person has to read: "top_p is 7; it must be from 0 to 1; leave it out".

        Args:
            what: What is wrong, with the value that was given.
            limit: The values that are possible, such as "it must be from 0 to 1".
            remedy: What to do, as an imperative. Limit and remedy may be parts of `what`;
                tests/test_errors.py finds a refusal that lacks both.
            code: A code of `error_codes.toml`, unless that of the class.
            detail: The text of the exception, for commands and logs: the message with addresses or
                paths that no client of a gateway may read; "" for the message itself.
        """
        self.message = cut("; ".join(filter(None, (what, limit, remedy))))
        super().__init__(cut(detail) if detail else self.message)
        self.code = code or self.code
        self.param = param
        self.retry_after_s = retry_after_s


class ConfigError(NanoInferenceError):
    """A setting is unknown, of the wrong type, or out of range."""

    code = "invalid_config"


class ModelError(NanoInferenceError):
    """A model folder is missing or can't be served."""

    code = "model_unavailable"


class RequestError(NanoInferenceError):
    """A request is refused: it ends with a terminal error of this code, and nothing else is
    affected."""

    code = "invalid_request"


class FieldError(RequestError):
    """A field of a request is invalid; `param` is its path."""


class ParameterError(FieldError, ValueError):
    """A sampling parameter is of the wrong type, or outside its range. `param`: its name."""


def field_error(
    param: str, why: str, limit: str = "", remedy: str = "", *, code: str = ""
) -> FieldError:
    """Return an error whose message begins with the field, by its path in the request.

    Args:
        why: The rest of the sentence, such as "is empty"; after a colon, a sentence of its own.
    """
    what = f"{param}{'' if why.startswith(':') else ' '}{why}"
    return FieldError(what, limit, remedy, param=param, code=code)


def prompt_too_long(max_model_len: int, given: str, advice: str) -> RequestError:
    """Return the refusal of a prompt that is too long.

    Clients such as LiteLLM recognise it by its first words, which are OpenAI's.

    Args:
        max_model_len: Limit of prompt and completion together, in tokens.
        given: The excess, as "the prompt has 3000".
        advice: The remedy, as "shorten it".
    """
    return RequestError(
        f"This model's maximum context length is {max_model_len} tokens; {given}, so {advice}",
        code="prompt_too_long",
    )


class WeightsError(ModelError):
    """New weights were refused; the weights in place and their version are unchanged."""

    code = "weights_refused"


class AdapterError(WeightsError):
    """An adapter was refused or is unknown; loaded adapters are unchanged."""

    code = "adapter_refused"


NOT_PERMITTED = "not_permitted"
"""Code of a BusError for a command that the bus's access control forbids."""


class BusError(NanoInferenceError):
    """The bus can't be reached, or a message can't be carried."""

    code = "bus_unavailable"


class ChannelClosed(BusError):
    """The channel was closed: nothing more can be sent, and everything sent has been received."""

    code = "channel_closed"


class LaneReplaced(BusError):
    """Another process has started the same stage of the lane, so this one stops."""

    code = "lane_replaced"


def leaves_of(error: BaseException) -> list[BaseException]:
    """Return the errors of an exception group and of the groups within it, in their order."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for each in error.exceptions for leaf in leaves_of(each)]


def bus_closed() -> ChannelClosed:
    """Return the error of every end of a bus after `aclose`."""
    return ChannelClosed("the bus was closed")


def stage_replaced(stage: str, lane: str) -> LaneReplaced:
    """Return the error of a process of whose stage another one is the newest."""
    return LaneReplaced(
        f"another process has started the {stage} stage of lane {lane!r}, so this one stops; give "
        "each pipeline a bus.lane of its own"
    )
