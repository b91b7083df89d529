"""The errors of the whole package: a small hierarchy, each with a stable `code`.

A code never changes once released: programs match on it. The message is one sentence that says
what is wrong and what to change; people read it.
"""

from __future__ import annotations

from .quoting import cut


class NanoInferenceError(Exception):
    """Base of every error that this package raises on purpose.

    A message quotes what came from outside, and goes to logs, clients and other processes; so it is
    cut here, once for all, to `config.quoting.MOST_TEXT` characters.
    """

    code = "internal_error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        self.message = cut(message)
        super().__init__(self.message)
        if code is not None:
            self.code = code


class ConfigError(NanoInferenceError):
    """A setting is unknown, of the wrong type, or out of range."""

    code = "invalid_config"


class ModelError(NanoInferenceError):
    """A model folder is missing or can't be served."""

    code = "model_unavailable"


class RequestError(NanoInferenceError):
    """A request is refused. It ends with a terminal error of this code; nothing else is touched."""

    code = "invalid_request"


class WeightsError(ModelError):
    """New weights could not be taken; those in place and their version are as they were."""

    code = "weights_refused"


class AdapterError(WeightsError):
    """An adapter could not be taken, or there is none; those in place are as they were."""

    code = "adapter_refused"


NOT_PERMITTED = "not_permitted"
"""The code of a BusError for what this user of the bus may not do."""


class BusError(NanoInferenceError):
    """The bus can't be reached, or a message can't be carried."""

    code = "bus_unavailable"


class ChannelClosed(BusError):
    """The channel was closed; nothing more can be sent, and all that was sent has been received."""

    code = "channel_closed"


class LaneReplaced(BusError):
    """Another admission has started for the same lane; this one has nothing left to do."""

    code = "lane_replaced"


def bus_closed() -> ChannelClosed:
    """The error of every end of a bus after `aclose`."""
    return ChannelClosed("the bus was closed")
