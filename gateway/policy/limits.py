"""How much callers may use: calls and tokens in a minute, and calls at the same time.

Tokens are taken before it is known how many it will be: those of the prompts, and as many as the
call may have made at most. When it has ended, what it did use stands in their place.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from ...bus.public import GenerateRequest
from ...config import BusError, Config, RequestError
from ...config.logger import get_logger
from ...store.limits import Charge, Limit, LimitStore, Reservation
from ..server.http import DEFAULT_RETRY_S, EngineError
from ..serving.account import Account
from ..serving.measures import Measures, Reason
from ..serving.origin import Origin
from .backend import PolicyUnavailable
from .caller import AppliedLimits, Caller

MINUTE_S = 60

BYTES_OF_A_TOKEN = 3
"""Of a prompt's text, by which its tokens are estimated; most tokenizers make fewer of it."""

_REQUESTS, _TOKENS, _IN_FLIGHT = "requests", "tokens", "in_flight"
_WORDS: dict[str, tuple[Reason, str]] = {
    _REQUESTS: ("requests_per_minute", "calls a minute"),
    _TOKENS: ("tokens_per_minute", "tokens a minute"),
    _IN_FLIGHT: ("max_in_flight", "calls at the same time"),
}


class ReserveLimits:
    """Takes what a call may come to from all limits that its caller has, or refuses it."""

    def __init__(self, limits: LimitStore, config: Config, measures: Measures) -> None:
        self._limits = limits
        self._max_model_len = config.engine.max_model_len
        self._is_open = config.policy.limits_when_bus_fails == "open"
        self._measures = measures
        self._is_away = False

    @asynccontextmanager
    async def admit(
        self, origin: Origin, requests: Sequence[GenerateRequest]
    ) -> AsyncIterator[None]:
        reserved = sum(map(self._most_tokens, requests))
        charges = charges_of(origin.caller.limits, reserved)
        # What was published before was taken then.
        reservation = await self._reserve(origin, charges) if charges and requests else None
        if reservation is None:
            yield
            return
        account = origin.account
        account.headers.update(headers_of(reservation))
        if not reservation.granted:
            raise self._refused(reservation, origin.caller)
        before = account.tokens
        try:
            yield
        finally:
            used = account.tokens - before + self._left_tokens(account, requests)
            finals = (used if _what(each) == _TOKENS else each.amount for each in charges)
            self._limits.commit(reservation, list(finals))

    async def _reserve(self, origin: Origin, charges: Sequence[Charge]) -> Reservation | None:
        """None when nobody can count, and that is no reason to refuse."""
        try:
            reservation = await self._limits.reserve(charges)
        except BusError as error:
            if not self._is_away:
                log = get_logger()
                log.warning("limits_not_counted", error=error.message, passes=self._is_open)
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
        wait_s = DEFAULT_RETRY_S if reservation.retry_after_s is None else reservation.retry_after_s
        return EngineError(
            f"{whose} limit of {most} {unit} is used up; try again in {math.ceil(wait_s)} s",
            code="rate_limit_exceeded",
            retry_after_s=math.ceil(wait_s),
        )

    def _most_tokens(self, request: GenerateRequest) -> int:
        """Tokens that a request may come to; of a text it is an estimate."""
        prompt = prompt_tokens(request)
        if request.embed is not None:
            return prompt
        room = max(0, self._max_model_len - prompt)
        return prompt + max(1, request.n) * min(max(1, request.sampling.max_tokens), room)

    def _left_tokens(self, account: Account, requests: Iterable[GenerateRequest]) -> int:
        """What requests may have come to that were left before their end."""
        tokens = 0
        for request in requests:
            if request.request_id in account.left:
                seen = account.left[request.request_id]
                most = self._most_tokens(request)
                tokens += most if seen is None else prompt_tokens(request) + seen
        return tokens


def charges_of(applied: Iterable[AppliedLimits], tokens: int) -> list[Charge]:
    """What a call that may come to so many tokens takes."""
    charges = []
    for each in applied:
        limits = each.limits
        if (most := limits.requests_per_minute) is not None:
            charges.append(Charge(Limit(f"{each.name}:{_REQUESTS}", most, MINUTE_S)))
        if (most := limits.tokens_per_minute) is not None:
            charges.append(Charge(Limit(f"{each.name}:{_TOKENS}", most, MINUTE_S), tokens))
        if (most := limits.max_in_flight) is not None:
            charges.append(Charge(Limit(f"{each.name}:{_IN_FLIGHT}", most)))
    return charges


def headers_of(reservation: Reservation) -> dict[str, str]:
    """How the limits of requests and tokens stand, each by the one that has least left.

    They are those of OpenAI; the times are seconds until everything is back.
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
    """Tokens of a prompt, estimated where it is a text."""
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    texts = [request.prompt or "", *(each.content for each in request.messages or ())]
    size = sum(len(text.encode(errors="surrogatepass")) for text in texts)
    return math.ceil(size / BYTES_OF_A_TOKEN)


def _what(charge: Charge) -> str:
    return charge.limit.name.rpartition(":")[2]
