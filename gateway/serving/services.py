"""The services that the interfaces to one model share."""

from __future__ import annotations

from ...config import Config
from ...pipeline.client import BusClient
from ...text.messages import find_format
from ..policy.policy import Policy
from .chat_templates import AT_ONCE, ChatTemplates
from .durable_calls import DurableCalls
from .lane_state import Readiness, ServedModels
from .measures import Measures
from .submissions import Submissions
from .turns import Turns
from .words import LazyWords


class Services:
    """The services of one model.

    Attributes:
        engine: The model's client.
        config: The settings of the model.
        measures: Spans and metrics.
        readiness: Whether the model takes requests.
        words: The tokenizer, and the format of messages.
        served: The names that requests may give in `model`.
        chain: The policy chain of the model's calls.
        submissions: Requests that wait or are in the pipeline.
        length: Tokens that prompt and completion may have together.
        templates: Conversations as prompts.
        durable: Calls stored on the bus.
    """

    def __init__(
        self,
        engine: BusClient,
        config: Config,
        policy: Policy,
        measures: Measures,
        readiness: Readiness,
    ) -> None:
        """Raises ConfigError when `gateway.message_format` is unknown for any model."""
        find_format(config.gateway.message_format, None, "", "")
        self.engine, self.config = engine, config
        self.measures, self.readiness = measures, readiness
        gateway = config.gateway
        self.words = LazyWords(config.engine.model_folder, gateway.message_format)
        self.served = ServedModels(engine, config)
        self.chain = policy.chain_of(
            engine, config, self.words, self.served, one_of_several=bool(config.bus.model)
        )
        self.submissions = Submissions(engine, config, measures, readiness, self.chain)
        self.length = self.submissions.length
        turns = Turns(AT_ONCE, gateway.max_waiting, measures)
        self.templates = ChatTemplates(
            self.words, self.length.get, gateway.template_timeout_s, turns
        )
        self.durable = DurableCalls(engine, config)
