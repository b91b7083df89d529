"""The services that the interfaces to one model share."""

from __future__ import annotations

from typing import NamedTuple

from ...config import Config
from ...pipeline.client import BusClient
from .chat_templates import ChatTemplates
from .durable_calls import DurableCalls
from .lane_state import ModelLength, Readiness, ServedModels
from .measures import Measures
from .submissions import Submissions
from .words import LazyWords


class Services(NamedTuple):
    """The services of one model.

    Attributes:
        length: Tokens that prompt and completion may have together.
        served: The names that requests may give in `model`.
    """

    engine: BusClient
    config: Config
    measures: Measures
    readiness: Readiness
    words: LazyWords
    templates: ChatTemplates
    submissions: Submissions
    durable: DurableCalls
    length: ModelLength
    served: ServedModels
