"""Rate limits of callers: calls and tokens per minute, and calls in flight.

Tokens are reserved before a call: those of its prompts, and the most that it may generate. After
the call, the tokens that it used are committed in their place.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from ...bus.public import GenerateRequest
from ...config import BusError, Config, RequestError
from ...config.logger import get_logger
from ...store.limits import Charge, Limit, LimitStore, Reservation
from ..call import Account, Call
from ..caller import AppliedLimits, Caller
from ..server.http import DEFAULT_RETRY_S, EngineError
from ..server.measures import Measures, Reason
from ..serving.chain import Requests
from .backend import PolicyUnavailable

MINUTE_S = 60

BYTES_OF_A_TOKEN = 3
"""Bytes of a prompt's text per token, for estimates; most tokenizers make fewer tokens."""

TOKENS_OF_AN_IMAGE = 256
"""Tokens of an image, for estimates: few models make fewer of a photo."""

_REQUESTS, _TOKENS, _IN_FLIGHT = "requests", "tokens", "in_flight"
_WORDS: dict[str, tuple[Reason, str]] = {
    _REQUESTS: ("requests_per_minute", "calls a minute"),
    _TOKENS: ("tokens_per_minute", "tokens a minute"),
    _IN_FLIGHT: ("max_in_flight", "calls at the same time"),
}


class ReserveLimits:
    """Reserves what a call may use from all limits of its caller, or refuses the call."""

    def __init__(self, limits: LimitStore, config: Config, measures: Measures) -> None:
        self._limits = limits
        self._max_model_len = config.engine.max_model_len
        self._is_open = config.policy.limits_when_bus_fails == "open"
        self._measures = measures
        self._is_away = False

    @asynccontextmanager
    async def admit(self, call: Call, requests: Requests) -> AsyncIterator[None]:
        charges = charges_of(call.caller.limits, sum(map(self._most_tokens, requests)))
        # A request published before, which is not in `requests`, was reserved then.
        reservation = await self._reserve(charges) if charges and requests else None
        if reservation is None:
            yield
            return
        account = call.account
        account.headers.update(headers_of(reservation))
        if not reservation.granted:
            raise self._refused(reservation, call.caller)
        before = account.tokens
        try:
            yield
        finally:
            used = account.tokens - before + self._left_tokens(account, requests)
            self._limits.commit(
                reservation, [used if _what(each) == _TOKENS else each.amount for each in charges]
            )

    async def _reserve(self, charges: Sequence[Charge]) -> Reservation | None:
        """Return None if the store is away and the settings let the call pass."""
        try:
            reservation = await self._limits.reserve(charges)
        except BusError as error:
            if not self._is_away:
                get_logger().warning("limits_not_counted", error=str(error), passes=self._is_open)
            self._is_away = True
            if self._is_open:
                return None
            self._measures.refused("limits_unavailable")
            raise PolicyUnavailable(
                "this key has limits, and what it has used can't be counted; try again later"
            ) from None
        self._is_away = False
        return reservation

    def _refused(self, reservation: Reservation, caller: Caller) -> RequestError:
        assert reservation.refused_by is not None
        charge = reservation.charges[reservation.refused_by]
        reason, unit = _WORDS[_what(charge)]
        self._measures.refused(reason)
        most = charge.limit.most
        whose = "this key's" if charge.limit.name.startswith("key:") else "this tenant's"
        if charge.amount > most:
            return RequestError(
                f"the call may come to {charge.amount} tokens, and {whose} limit is {most} {unit}; "
                "lower max_tokens or n, or shorten the prompt",
                code="tokens_above_limit",
            )
        wait_s = math.ceil(
            DEFAULT_RETRY_S if reservation.retry_after_s is None else reservation.retry_after_s
        )
        return EngineError(
            f"{whose} limit of {most} {unit} is used up; try again in {wait_s} s",
            code="rate_limit_exceeded",
            retry_after_s=wait_s,
        )

    def _most_tokens(self, request: GenerateRequest) -> int:
        """Return the most tokens of a request; an estimate for a text."""
        prompt = prompt_tokens(request)
        if request.embed is not None:
            return prompt
        room = max(0, self._max_model_len - prompt)
        return prompt + max(1, request.n) * min(max(1, request.sampling.max_tokens), room)

    def _left_tokens(self, account: Account, requests: Iterable[GenerateRequest]) -> int:
        """Return the tokens of requests whose end the gateway hasn't seen."""
        tokens = 0
        for request in requests:
            if request.request_id in account.left:
                seen = account.left[request.request_id]
                most = self._most_tokens(request)
                tokens += most if seen is None else prompt_tokens(request) + seen
        return tokens


def charges_of(applied: Iterable[AppliedLimits], tokens: int) -> list[Charge]:
    """Return the charges of a call with at most so many tokens."""
    return [
        Charge(Limit(f"{each.name}:{what}", most, window_s), amount)
        for each in applied
        for what, most, window_s, amount in (
            (_REQUESTS, each.limits.requests_per_minute, MINUTE_S, 1),
            (_TOKENS, each.limits.tokens_per_minute, MINUTE_S, tokens),
            (_IN_FLIGHT, each.limits.max_in_flight, 0, 1),
        )
        if most is not None
    ]


def headers_of(reservation: Reservation) -> dict[str, str]:
    """Return OpenAI's headers for the request and token limits with the least room left.

    Times are seconds until all of a limit is free again.
    """
    headers = {}
    for what in (_REQUESTS, _TOKENS):
        stands = [
            (room.left, room.reset_s, charge.limit.most)
            for charge, room in zip(reservation.charges, reservation.rooms, strict=True)
            if _what(charge) == what
        ]
        if stands:
            left, reset_s, most = min(stands)
            headers[f"x-ratelimit-limit-{what}"] = str(most)
            headers[f"x-ratelimit-remaining-{what}"] = str(left)
            headers[f"x-ratelimit-reset-{what}"] = f"{reset_s:.3f}s"
    return headers


def prompt_tokens(request: GenerateRequest) -> int:
    """Return the tokens of a prompt; an estimate for a text and for images."""
    images = TOKENS_OF_AN_IMAGE * len(request.images)
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids) + images
    texts = [request.prompt or "", *(each.text for each in request.messages or ())]
    size = sum(len(text.encode(errors="surrogatepass")) for text in texts)
    return math.ceil(size / BYTES_OF_A_TOKEN) + images


def _what(charge: Charge) -> str:
    return charge.limit.name.rpartition(":")[2]
