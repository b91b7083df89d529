"""Turns of sessions: requests as token trees keep them, and their records in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from ..config import RequestError, shown
from ..config.logger import get_logger
from ..store.records import readable
from ..store.trees import KeptTurn, TreeStore
from .entries import entry_key
from .public import Completion, CompletionSample, OutputPart

MAX_SESSION_ID_LENGTH = 128


class Turn(OutputPart, frozen=True, kw_only=True, omit_defaults=True):
    """A request of a session, as far as it was computed.

    Attributes:
        key: The identity of its entry.
        request_id: The request's id.
        model: The model, or the adapter, that sampled.
        note: As in the request's `session`.
        prompt: `[prompt]`, the tokens that were rendered, or given.
        samples: With all columns but top logprobs.
        images: Ids of the prompt's images.
    """

    key: str
    request_id: str
    model: str = ""
    note: str = ""
    prompt: tuple[int, ...] = ()
    samples: tuple[CompletionSample, ...] = ()
    images: tuple[str, ...] = ()


_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(Turn).decode


def check_session_id(id: str) -> str:
    """Return a session's id. Raises RequestError: invalid_session."""
    if not (0 < len(id) <= MAX_SESSION_ID_LENGTH and id.isprintable()):
        raise RequestError(
            f"the session's id is {shown(id)}; it must be 1 to {MAX_SESSION_ID_LENGTH} printable "
            "characters",
            code="invalid_session",
        )
    return id


def turn_of(completion: Completion) -> Turn:
    """Return a completion as a turn of its session."""
    session = completion.session
    return Turn(
        key=entry_key(completion.entry_id, completion.request_id),
        request_id=completion.request_id,
        model=completion.model,
        note="" if session is None else session.note,
        prompt=completion.prompt_token_ids,
        samples=tuple(replace(each, top_logprobs=None) for each in completion.samples),
        images=() if session is None else session.images,
    )


async def keep(trees: TreeStore, completions: Iterable[Completion], epoch: int) -> None:
    """Keep completions in the token trees of their sessions. Those without tokens are no turns.

    Raises:
        ChannelClosed: The bus was closed.
    """
    await asyncio.gather(*(_keep(trees, each, epoch) for each in completions))


async def _keep(trees: TreeStore, completion: Completion, epoch: int) -> None:
    session, made = completion.session, any(each.token_ids for each in completion.samples)
    if session is None or not made:
        return
    turn = turn_of(completion)
    kept = KeptTurn(turn.key, turn.prompt, _encode(replace(turn, key="", prompt=())))
    if not await trees.add(session.tenant, session.id, kept, epoch):
        get_logger().warning(
            "token_tree_full",
            request_id=completion.request_id,
            meaning="the turn is lost; export and delete sessions, or raise bus.trees_max_bytes",
        )


async def forget(trees: TreeStore, completions: Iterable[Completion], epoch: int) -> None:
    """Delete completions that were kept and not delivered. Raises as `keep`."""
    for each in completions:
        if (session := each.session) is not None:
            await trees.forget(session.tenant, session.id, turn_of(each).key, epoch)


class SessionTurns(msgspec.Struct, frozen=True):
    """The turns of a session.

    Attributes:
        turns: In no particular order.
        lost: Identities of the entries of further turns, for which there was no room.
    """

    turns: tuple[Turn, ...] = ()
    lost: tuple[str, ...] = ()


async def read(trees: TreeStore, tenant: str, session: str) -> SessionTurns | None:
    """Return the turns of a session; None if it is unknown, expired or deleted.

    Raises:
        BusError: The transport can't be reached.
    """
    kept = await trees.read(tenant, session)
    if kept is None:
        return None
    turns, lost = list[Turn](), list(kept.lost)
    for each in kept.turns:
        turn = readable(_decode, each.record, f"session {session!r}")
        if turn is None:
            lost.append(each.key)
        else:
            turns.append(replace(turn, key=each.key, prompt=each.prompt))
    return SessionTurns(tuple(turns), tuple(lost))
