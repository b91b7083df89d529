"""All interfaces to one model, and what they share."""

from __future__ import annotations

from ..config import Config
from ..pipeline.client import BusClient
from .api import anthropic
from .api.kserve.http import kserve_routes
from .api.kserve.regions import TenantRegions
from .api.kserve.repository import open_service
from .api.kserve.service import KServe
from .api.openai import InfoCalls, ResponseCalls, openai_routes
from .api.openai.adapters import adapter_routes
from .api.sglang import sglang_routes
from .policy.policy import Policy
from .policy.routes import PolicyRoute
from .serving.chat_templates import AT_ONCE, ChatTemplates
from .serving.durable_calls import KeptCalls
from .serving.measures import Measures
from .serving.message_formats import LazyFormat, check_format
from .serving.model_length import ModelLength
from .serving.orphaned_calls import AbandonedCalls
from .serving.readiness import Readiness
from .serving.served import ServedModels
from .serving.submissions import Submissions
from .serving.turns import Turns
from .serving.words import LazyWords


class Interfaces:
    """Those to the model of one client, and what they share.

    Attributes:
        config: The settings of that model.
        chain: Through which its calls go.
        readiness: Whether it takes requests.
        submissions: Its requests that wait, or are in the pipeline.
        kept: Its calls that are kept on the bus.
        abandoned: What becomes of those that nobody attends, where it is the only model.
        kserve: What is behind its interface of KServe.
        info: OpenAI's calls about it.
        responses: OpenAI's responses that it has made.
        routes: Of all interfaces but what is about the gateway as a whole.
    """

    def __init__(
        self,
        engine: BusClient,
        config: Config,
        policy: Policy,
        measures: Measures,
        readiness: Readiness,
        regions: TenantRegions,
    ) -> None:
        """Raises ConfigError when `gateway.message_format` or `gateway.models` can't be obeyed."""
        check_format(config)
        words = LazyWords(config.engine.model_folder)
        served = ServedModels(engine, config)
        several = bool(config.bus.model)
        self.config = config
        self.chain = policy.chain_of(engine, config, words, served, one_of_several=several)
        self.readiness = readiness
        self.submissions = Submissions(engine, config, measures, readiness, self.chain)
        length = self.submissions.length
        templates = _templates(config, words, length, measures)
        self.kept = KeptCalls(engine, config)
        self.abandoned = AbandonedCalls.of(self.kept, engine.bus.store.calls, config)
        models = open_service(
            *(self.submissions, config, words, readiness, measures), packages=not several
        )
        self.kserve = KServe(models, regions)
        self.info = InfoCalls(config, words, templates, length, served)
        self.responses = ResponseCalls(
            self.submissions, self.kept, config, words, templates, length, served
        )
        self.routes: list[PolicyRoute] = [
            *anthropic.model_routes(self.info.cards, self.info.card_of),
            *sglang_routes(
                *(engine, config, words, self.submissions, measures, readiness, length, served)
            ),
            *openai_routes(
                *(config, words, self.submissions, self.kept, templates, length, served),
                self.info,
                self.responses,
            ),
            *anthropic.anthropic_routes(config, words, self.submissions, templates, served),
            *adapter_routes(engine, served),
            *kserve_routes(self.kserve, readiness, config.gateway),
        ]


def _templates(
    config: Config, words: LazyWords, length: ModelLength, measures: Measures
) -> ChatTemplates:
    timeout_s = config.gateway.template_timeout_s
    turns = Turns(AT_ONCE, config.gateway.max_waiting, measures)
    form, most = LazyFormat(config, words), config.admission.max_constraint_bytes
    return ChatTemplates(words, length.get, timeout_s, turns, form, most)
