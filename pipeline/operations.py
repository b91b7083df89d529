"""Operations on a running pipeline, one table for the command line and for gateways.

An operation is a function of a client and of its arguments, whose types are those of its
annotations. Over a bus it is called with the caller's client; a gateway has a route for each and
calls it with its own.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args, get_type_hints

import anyio
import msgspec
from msgspec.structs import replace

from ..bus.dead_letters import DeadLetter
from ..bus.kv_events import KVEventEntry
from ..bus.public import Completion
from ..bus.weights import FolderWeights, InFlight, PastWeights
from ..config import (
    BusError,
    ConfigError,
    FairnessConfig,
    ReplicaRole,
    RequestError,
    nearest,
    parse_value,
    shown,
)
from ..config.wrong_values import told_of
from .client import BusClient
from .digest import Digest, RunDigest, VersionDigests
from .models import served_names

T = TypeVar("T")

CONFIRM_S = 15.0
"""Time limit for a lane to report changed settings of fairness; it reports every second."""


_ANY_AGE_S = 1e9


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        run: Takes a client, then the arguments by name. An asynchronous function, or an
            asynchronous generator.
        scope: The permission that a gateway's caller needs.
        changes: Whether it changes something, for the audit log.
    """

    run: Callable[..., Any]
    scope: Literal["read", "generate", "weights", "admin"]
    changes: bool = False

    @property
    def streams(self) -> bool:
        """Whether it yields results without an end, first None once it misses none."""
        return inspect.isasyncgenfunction(self.run)

    @cached_property
    def arguments(self) -> type[msgspec.Struct]:
        """The arguments as a struct, for a decoder."""
        hints = get_type_hints(self.run)
        _, *parameters = inspect.signature(self.run).parameters.values()
        fields: list[Any] = [
            (each.name, hints[each.name])
            if each.default is each.empty
            else (each.name, hints[each.name], each.default)
            for each in parameters
        ]
        return msgspec.defstruct(
            self.run.__name__, fields, frozen=True, kw_only=True, forbid_unknown_fields=True
        )

    @cached_property
    def result(self) -> Any:
        """The type of its result, or of each of its results."""
        found = get_type_hints(self.run)["return"]
        return get_args(found)[0] if self.streams else found


async def update_weights(
    client: BusClient,
    folder: str = "",
    in_flight: InFlight = "keep",
    version: int | None = None,
    partial: bool = False,
    timeout_s: float = 300.0,
    lane: str | None = None,
    past: int | None = None,
) -> int:
    """Replace the weights by those of a folder that executors can read, or by a past version of the
    log of weights; return their version."""
    return await client.update_weights(
        FolderWeights(folder) if past is None else PastWeights(past),
        in_flight=in_flight,
        version=version,
        partial=partial,
        timeout_s=timeout_s,
        lane=lane,
    )


async def expert_owners(client: BusClient) -> dict[str, tuple[int, ...]]:
    """Return which rank owns each expert, by lane. Raises BusError: no executor reports it."""
    if owners := await client.expert_owners():
        return owners
    raise BusError("no executor reports owners of experts; see engine.expert_parallel")


# --- fairness -------------------------------------------------------------------------------------


async def roles(client: BusClient, lane: str | None = None) -> dict[str, tuple[str, ...]]:
    """Return the roles of the replicas by lane. Raises BusError: no lane reports them."""
    return _of_lane(await client.deployment.roles(), lane)


async def update_roles(client: BusClient, roles: list[str], lane: str | None = None) -> None:
    """Give each replica a role. Raises ConfigError: there is no such role."""
    known: tuple[ReplicaRole, ...] = get_args(ReplicaRole)
    for role in roles:
        if role not in known:
            raise ConfigError(f"there is no role {role!r:.80}; roles are {', '.join(known)}")
    await client.update_roles([each for role in roles for each in known if each == role], lane)


async def fairness(client: BusClient, lane: str | None = None) -> dict[str, FairnessConfig]:
    """Return the settings of fairness by lane. Raises BusError: no lane reports them."""
    return _of_lane(await client.deployment.fairness(), lane)


async def change_fairness(
    client: BusClient, changes: list[str], lane: str | None = None
) -> dict[str, FairnessConfig]:
    """Change settings of fairness by "name=value" texts; return all settings, once in force.

    Raises:
        ConfigError: A change is refused, and nothing has changed.
        BusError: No lane reports its settings, or a lane did not confirm the change.
    """
    # All are checked before any is sent.
    before = await fairness(client, lane)
    wanted = {name: changed(config, changes) for name, config in before.items()}
    for name, after in wanted.items():
        await client.update_fairness(after, name.rpartition(":")[2])
    late = list(wanted)
    with anyio.move_on_after(CONFIRM_S):
        while late:
            await anyio.sleep(0.2)
            settings = await client.deployment.fairness()
            late = [name for name, after in wanted.items() if settings.get(name) != after]
    if late:
        raise BusError(
            f"lane {', '.join(late)} did not confirm the change; see `nano-inference fairness show`"
        )
    return wanted


def changed(config: FairnessConfig, changes: Sequence[str]) -> FairnessConfig:
    """Return settings with "name=value" changes; `tenant_weights.<tenant>` changes one weight.

    Raises:
        ConfigError: A change has another form, names no setting, or is out of range.
    """
    known = FairnessConfig.__struct_fields__
    tree: dict[str, Any] = msgspec.structs.asdict(config)
    for text in changes:
        name, equals, value = text.partition("=")
        name, dot, key = name.strip().partition(".")
        if not equals:
            raise ConfigError(f"a change is name=value, not {text!r:.80}; give it so")
        if name not in known:
            raise ConfigError(f"fairness has no setting {name!r:.80}{nearest(name, known)}")
        if not dot:
            tree[name] = parse_value(value)
        elif name == "tenant_weights" and key:
            weights = tree[name] if isinstance(tree[name], Mapping) else {}
            tree[name] = {**weights, key: parse_value(value)}
        else:
            raise ConfigError(f"fairness.{name} has no parts; give {name}=value")
    try:
        return msgspec.convert(tree, FairnessConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(told_of(error, "fairness", tree)) from None


def _of_lane(by_lane: Mapping[str, T], lane: str | None) -> dict[str, T]:
    """Return the values of all lanes or of one, by `LANE`, or `MODEL:LANE`.

    Raises:
        BusError: There is none.
    """
    found = {name: by_lane[name] for name in by_lane if lane in (None, name.rpartition(":")[2])}
    if not found:
        which = "a pipeline" if lane is None else f"lane {lane}"
        raise BusError(f"no fairness stage of {which} reports; see `nano-inference status`")
    return found


# --- requests -------------------------------------------------------------------------------------


class Shards(msgspec.Struct, frozen=True):
    """The shards of the requests stream.

    Attributes:
        shards: Their number.
        before: The number before the last change; 0 if there was none.
        moving: Whether the last change is in progress.
        requests: Requests on each.
    """

    shards: int
    before: int
    moving: bool
    requests: list[int]


async def shards(client: BusClient) -> Shards:
    """Return the shards of the requests stream."""
    layout = await client.shards()
    lengths = list(await client.bus.requests.shard_lengths())
    return Shards(layout.shards, layout.before, layout.moving, lengths)


async def set_shards(client: BusClient, number: int) -> Shards:
    """Change the number of shards of the requests stream while requests run."""
    await client.set_shards(number)
    return await shards(client)


async def dead_letters(client: BusClient) -> list[DeadLetter]:
    """Return the dead letters of the client's model, or of all, oldest first."""
    letters = await client.bus.requests.dead_letters()
    return [each for each in letters if client.bus.model in ("", each.model)]


async def retry_dead_letters(client: BusClient, ids: list[str]) -> dict[str, str]:
    """Publish the requests of dead letters again, each to its model, and remove the letters.

    Returns:
        The ids of the new requests by letter: the old ids may still have their old answers.

    Raises:
        RequestError: `not_found`: one is unknown, and nothing is done.
        BusError: The bus can't be reached; the letter stays.
    """
    published: dict[str, str] = {}
    for letter in await _of(client, ids):
        async with AsyncExitStack() as stack:
            bus = client.bus
            if letter.model != bus.model:
                bus = (await stack.enter_async_context(client.of_model(letter.model))).bus
            published[letter.letter_id] = await bus.requests.publish(
                replace(letter.request, request_id=""),
                traceparent=letter.traceparent,
                tracestate=letter.tracestate,
            )
        # Last, so that the letter stays if publishing fails.
        await client.bus.requests.drop_dead_letter(letter.letter_id)
    return published


async def drop_dead_letters(client: BusClient, ids: list[str]) -> dict[str, bool]:
    """Remove dead letters; return by letter whether it was still there.

    Raises:
        RequestError: `not_found`: one is unknown, and nothing is done.
    """
    return {
        each.letter_id: await client.bus.requests.drop_dead_letter(each.letter_id)
        for each in await _of(client, ids)
    }


async def _of(client: BusClient, ids: list[str]) -> list[DeadLetter]:
    by_id = {each.letter_id: each for each in await client.bus.requests.dead_letters()}
    for unknown in [each for each in ids if each not in by_id]:
        raise RequestError(
            f"there is no dead letter {shown(unknown)}; list them by `nano-inference dlq list` or "
            "GET /admin/dead_letters",
            code="not_found",
        )
    return [by_id[each] for each in ids]


async def tail(client: BusClient) -> AsyncGenerator[Completion | None, None]:
    """Yield None, then every request that ends from then on, of the client's model or of all."""
    model = client.bus.model
    statuses = await client.models() if model else []
    names = {name for each in statuses if each.id == model for name in served_names(each)}
    async with aclosing(await client.bus.results.tail()) as ended:
        yield None
        async for completion in ended:
            if not model or completion.model in names:
                yield completion


async def kv_events(
    client: BusClient, kept: bool = False
) -> AsyncGenerator[KVEventEntry | None, None]:
    """Yield None, then the KV events of the client's model or of all from then on.

    `kept`: begin with the oldest entry that the stream keeps.
    """
    async with aclosing(await client.kv_events(kept=kept)) as entries:
        yield None
        async for entry in entries:
            yield entry


async def recorded(client: BusClient, id: str) -> list[Completion]:
    """Return what is recorded of a request, an entry, a trace, or a call over HTTP."""
    return await client.recorded(id)


async def digest(
    client: BusClient, ids: Sequence[str] = (), last_s: float | None = None
) -> RunDigest:
    """Return the digest of the recorded results.

    Args:
        client: The client.
        ids: Only of these requests; `PREFIX*` is all whose ids begin so. Empty: all.
        last_s: Only of the last seconds; None: all.
    """
    found = Digest()
    await _add_recorded(found, client, ids, last_s)
    return found.result()


async def digests(
    client: BusClient, ids: Sequence[str] = (), last_s: float | None = None
) -> dict[int, RunDigest]:
    """Return the digest of each version of the weights; arguments as for `digest`."""
    found = VersionDigests()
    await _add_recorded(found, client, ids, last_s)
    return found.result()


async def _add_recorded(
    found: Digest | VersionDigests, client: BusClient, ids: Sequence[str], last_s: float | None
) -> None:
    async for each in client.bus.results.newest(_ANY_AGE_S if last_s is None else last_s):
        if is_wanted(each, ids):
            found.add(each)


def is_wanted(completion: Completion, ids: Sequence[str]) -> bool:
    """Return whether a result is one of the ids, as of `digest`."""
    id = completion.request_id or completion.entry_id
    return not ids or any(
        id.startswith(each[:-1]) if each.endswith("*") else id == each for each in ids
    )


OPERATIONS = {
    "weight_version": Operation(BusClient.weight_version, "read"),
    "update_weights": Operation(update_weights, "weights", changes=True),
    "pause": Operation(BusClient.pause, "weights", changes=True),
    "resume": Operation(BusClient.resume, "weights", changes=True),
    "flush_cache": Operation(BusClient.flush_cache, "weights", changes=True),
    "release_memory": Operation(BusClient.release_memory, "weights", changes=True),
    "resume_memory": Operation(BusClient.resume_memory, "weights", changes=True),
    # They have folders of the server, of which /v1/models shows other callers the last part only.
    "adapters": Operation(BusClient.adapters, "admin"),
    "load_adapter": Operation(BusClient.load_adapter, "weights", changes=True),
    "unload_adapter": Operation(BusClient.unload_adapter, "weights", changes=True),
    "expert_owners": Operation(expert_owners, "read"),
    "move_experts": Operation(BusClient.move_experts, "weights", changes=True),
    "kv_session": Operation(BusClient.kv_session, "generate"),
    "roles": Operation(roles, "read"),
    "update_roles": Operation(update_roles, "admin", changes=True),
    # Settings and service name tenants.
    "fairness": Operation(fairness, "admin"),
    "change_fairness": Operation(change_fairness, "admin", changes=True),
    "tenant_service": Operation(BusClient.tenant_service, "admin"),
    "shards": Operation(shards, "admin"),
    "set_shards": Operation(set_shards, "admin", changes=True),
    "dead_letters": Operation(dead_letters, "admin"),
    "retry_dead_letters": Operation(retry_dead_letters, "admin", changes=True),
    "drop_dead_letters": Operation(drop_dead_letters, "admin", changes=True),
    # They have prompts or answers of all tenants, or hashes of them.
    "recorded": Operation(recorded, "admin"),
    "digest": Operation(digest, "admin"),
    "digests": Operation(digests, "admin"),
    "tail": Operation(tail, "admin"),
    "kv_events": Operation(kv_events, "admin"),
}
