"""The services that the interfaces to one model share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import InitVar, dataclass

from ...config import Config, ConfigError, RequestError
from ...pipeline.client import BusClient
from ...text.chat_template import TemplateWorkers
from ...text.messages import find_format
from ..server.measures import Measures
from .begun_calls import BodyCalls
from .capacity import Capacity
from .chain import PolicyChain
from .chat_templates import AT_ONCE, ChatTemplates
from .durable_calls import DurableCalls
from .images import FETCHES, Images
from .lane_state import Readiness, ServedModels
from .request_log import RequestLog
from .sessions import SessionPrompts
from .submissions import Submissions
from .tokenizer import LazyTokenizer
from .weight_sync import VersionLabels, WeightSync

ChainOf = Callable[[BusClient, Config, LazyTokenizer, ServedModels], PolicyChain]
"""Returns the policy chain of a model's calls."""


@dataclass(eq=False)
class Services:
    """The services of one model.

    Raises:
        ConfigError: `gateway.message_format` is unknown for any model; `mcp.servers` has none.

    Attributes:
        client: The model's client.
        config: The settings of the model.
        measures: Spans and metrics.
        readiness: Whether the model takes requests.
        request_log: The last requests, for the console; None without it.
        tokenizer: The tokenizer, and the format of messages.
        served: The names that requests may give in `model`.
        chain: The policy chain of the model's calls.
        submissions: Requests that wait or are in the pipeline.
        length: Tokens that prompt and completion may have together.
        templates: Conversations as prompts.
        session_prompts: Prompts of calls that name a session.
        images: Images of conversations.
        durable: Calls stored on the bus.
        keyed: Calls with idempotency keys, of interfaces that store nothing else.
        labels: Trainers' names of weight versions.
        weight_sync: Trainers' weight updates, through any interface.
    """

    client: BusClient
    config: Config
    chain_of: InitVar[ChainOf]
    measures: Measures
    readiness: Readiness
    request_log: RequestLog | None

    def __post_init__(self, chain_of: ChainOf) -> None:
        client, config, measures = self.client, self.config, self.measures
        gateway = config.gateway
        find_format(gateway.message_format, None, "", "")
        if config.mcp.enabled:
            from .mcp_servers import configured  # a missing package or file ends the start

            configured(config.mcp)
        workers = TemplateWorkers(AT_ONCE, gateway.template_timeout_s)
        self.tokenizer = LazyTokenizer(
            config.engine.model_folder, gateway.message_format, workers.run
        )
        self.served = ServedModels(client, config)
        self.chain = chain_of(client, config, self.tokenizer, self.served)
        self.submissions = Submissions(
            client, config, measures, self.readiness, self.chain, self.request_log
        )
        self.length = self.submissions.length
        fetches = Capacity(FETCHES, gateway.max_waiting, measures)
        self.images = Images(config.images, config.engine.model_name, fetches)
        rendering = Capacity(AT_ONCE, gateway.max_waiting, measures)
        self.templates = ChatTemplates(
            self.tokenizer,
            self.length.get,
            workers,
            rendering,
            drops_billing=gateway.billing_lines == "drop",
        )
        self.session_prompts = SessionPrompts(
            client.bus.store.trees,
            self.tokenizer,
            self.templates,
            continues=gateway.continue_by_tokens,
        )
        self.durable = DurableCalls(client, config)
        self.keyed = BodyCalls(self.durable, config.engine.model_name)
        self.labels = VersionLabels(client.bus.store.weight_update)
        self.weight_sync = WeightSync(client, self.labels, gateway.sync_timeout_s)

    async def warm_up(self) -> None:
        """Load the tokenizer, start the processes that render its chat template, if any, and find
        the format of its messages."""
        # A model without a tokenizer serves tokens. Any other error is that of the calls too.
        with suppress(RequestError, ConfigError):
            tokenizer = await self.tokenizer.required()
            if tokenizer.transformers.chat_template:
                await self.templates.start()
                await self.tokenizer.message_format()
