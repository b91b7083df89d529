"""Connections to Redis, their errors, and retries."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from redis import exceptions
from redis._parsers import AsyncCommandsParser
from redis.asyncio import BlockingConnectionPool, Connection, Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig

from ...config import NOT_PERMITTED, BusError, redact
from ...config.errors import bus_closed
from ...config.logger import get_logger
from .address import CREDENTIALS, parse_address
from .multiplexed import MultiplexedRedis, options_of

T = TypeVar("T")

MIN_VERSION = (7, 0)
"""The oldest supported Redis. Valkey reports the Redis version that it is compatible with."""

CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 10.0
"""Time limit of a reply, beyond the time that a command blocks on purpose."""

SENTINEL_TIMEOUT_S = 1.0
"""Time limit of one sentinel before the next is tried."""

CLUSTER_CONNECTIONS = 1024
"""Connections to one node of a cluster; the client opens as many as commands run concurrently."""

TRANSACTIONS = 8
"""Transactions with WATCH at once, of one client; each has a connection meanwhile."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.02, 2.0

MOST_FIELDS = 64
"""Fields kept per entry. The package's own entries have fewer; more suffice to refuse an entry."""


_CONNECTION_ERRORS = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)

# Errors of a node that another may have replaced.
_NODE_ERRORS = (
    *_CONNECTION_ERRORS,
    exceptions.ClusterDownError,
    exceptions.ReadOnlyError,
    exceptions.RedisClusterException,
)

# Errors of the server's state, not of the command: the same command may succeed later. The client
# turns some into classes, and strips their first word.
_TRANSIENT_CLASSES = (
    exceptions.ExecAbortError,
    exceptions.OutOfMemoryError,
    exceptions.ReadOnlyError,
    exceptions.TryAgainError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    exceptions.ClusterError,
)
_TRANSIENT = ("LOADING", "BUSY ", "OOM", "MISCONF", "READONLY", "NOREPLICAS", "UNBLOCKED")

_UNREACHABLE = "the bus can't be reached; try again later"

# Prefix that the client adds to an error within a pipeline.
_IN_PIPELINE = "of pipeline caused error: ("


class Backoff:
    """Exponential backoff with jitter."""

    def __init__(self, first_s: float = FIRST_WAIT_S, longest_s: float = LONGEST_WAIT_S) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    async def wait(self) -> None:
        delay_s, self._next_s = self._next_s, min(self._longest_s, 2 * self._next_s)
        await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))

    def reset(self) -> None:
        self._next_s = self._first_s


class _MasterPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to the current master as the sentinels name it.

    redis-py's sentinel pool, which waits for a free connection as `BlockingConnectionPool` does.
    """


class _KnownCommands(AsyncCommandsParser):
    """Positions of the keys in each command, as one of the servers reports; all clients share it.

    By itself each client of a cluster asks whenever it connects, in the middle of a failover too:
    an answer of 100 kB, which takes 10 ms to read.
    """

    def __init__(self, known: dict[str, Any]) -> None:
        """Share `known`, the table of commands, with other clients; empty at first."""
        super().__init__()
        self.commands = known

    async def initialize(self, node: ClusterNode | None = None) -> None:
        """Read the commands from a server, unless another client has; always without a `node`."""
        if node is not None:
            self.node = node
            if self.commands:
                return
        known = self.commands
        await super().initialize(node)
        known.update(self.commands)
        self.commands = known


_NO_HELLO = re.compile("unknown command.*hello", re.IGNORECASE)
"""Redis 5 on the first command of each connection."""


class Server:
    """One Redis server, Sentinel group or cluster: makes clients, and explains errors.

    Raises:
        BusError: The URL can't be used.
    """

    def __init__(self, url: str, client_name: str = "") -> None:
        """Args: the URL, and this process's name in CLIENT LIST."""
        self.name = redact(url)
        self.reconnects = 0
        self._failures = 0
        self._client_name = client_name
        self._known_commands: dict[str, Any] = {}
        try:
            self._address = parse_address(url)
            # Does not connect yet, but finds options that don't exist.
            self._address.connection_class(**self._connection_options(0.0))
            self._sentinel = Sentinel(  # type: ignore[no-untyped-call]
                self._address.nodes if self._address.kind == "sentinel" else (),
                sentinel_kwargs={
                    **self._address.sentinel_options,
                    "ssl": self._address.tls,
                    "socket_timeout": SENTINEL_TIMEOUT_S,
                    "socket_connect_timeout": SENTINEL_TIMEOUT_S,
                    "retry": Retry(NoBackoff(), 0),
                },
            )
        except (ValueError, TypeError):
            # The original message may quote a part of the password.
            raise BusError(
                f"bus.url {self.name} is not a valid Redis URL; write redis://host:port/db, "
                "redis+sentinel://host:port,host:port/service or redis+cluster://host:port, and "
                "percent-encode special characters in the password"
            ) from None

    @property
    def is_cluster(self) -> bool:
        """Whether keys are spread over several nodes by slot."""
        return self._address.kind == "cluster"

    def client(
        self,
        block_s: float = 0.0,
        connected: Callable[[], object] | None = None,
    ) -> Redis:
        """Return a client whose commands may block for `block_s`.

        `connected`: called with each new connection, except in a cluster. An idle connection that
        has broken is replaced without an error.

        It never retries: after a lost reply the caller decides on running commands again. Use
        it with `execute`, `execute_all` and `on_each` only: for a cluster it is a RedisCluster.
        """
        address, options = self._address, self._connection_options(block_s)
        if connected is not None and address.kind != "cluster":
            options["redis_connect_func"] = partial(_connect, connected)
        off = MaintNotificationsConfig(enabled=False)
        if address.kind == "cluster":
            cluster = RedisCluster(
                startup_nodes=[ClusterNode(host, port) for host, port in address.nodes],
                require_full_coverage=False,
                max_connections=CLUSTER_CONNECTIONS,
                ssl=address.tls,
                maint_notifications_config=off,
                **options,
            )
            cluster.commands_parser = _KnownCommands(self._known_commands)
            limit_fields(cast(Redis, cluster))
            return cast(Redis, cluster)
        kind: dict[str, Any] = {"connection_class": address.connection_class}
        if address.kind == "sentinel":
            kind = {
                "service_name": address.service,
                "sentinel_manager": self._sentinel,
                "connection_class": SentinelManagedSSLConnection
                if address.tls
                else SentinelManagedConnection,
            }
        pool = (_MasterPool if address.kind == "sentinel" else BlockingConnectionPool)(
            max_connections=TRANSACTIONS,
            timeout=None,
            maint_notifications_config=off,
            **kind,
            **options,
        )
        redis = MultiplexedRedis.from_pool(pool)
        limit_fields(redis)
        return redis

    async def aclose(self) -> None:
        """Close the connections to sentinels. Clients are closed before."""
        await self._sentinel.aclose()

    def _connection_options(self, block_s: float) -> dict[str, Any]:
        """Return the URL's options, overridden by those that this package relies on."""
        options = self._address.options | {
            "protocol": 3,
            "legacy_responses": False,
            "decode_responses": False,
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": block_s + REPLY_TIMEOUT_S,
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "client_name": self._client_name or None,
        }
        if "path" not in options:  # a Unix socket has no keepalive
            options["socket_keepalive"] = True
        return options

    def lost(self, error: Exception, what: str) -> None:
        """Note a command that the server did not answer; the first of an outage is logged."""
        self._failures += 1
        if self._failures == 1:
            get_logger().warning("bus.retrying", what=what, error=str(self.explain(error)))

    def answered_again(self) -> None:
        """Note a command that was answered after failures; the first after an outage is logged."""
        self.reconnects += 1
        if self._failures:
            get_logger().info("bus.recovered", failures=self._failures)
        self._failures = 0

    def explain(self, error: Exception) -> BusError:
        """Convert an error to a sentence that says what to change, without the password; the
        message is without address and user, too."""
        if isinstance(error, exceptions.AuthenticationError):
            if CREDENTIALS.isdisjoint(self._address.options):
                return BusError(
                    f"Redis at {self.name} requires a password; add it to bus.url. Only the user "
                    "of `nano-inference up` finds that of its embedded server"
                )
            return BusError(
                "the bus refused the credentials of this process; its log says more",
                detail=f"Redis at {self.name} refused user or password; correct them in bus.url",
            )
        if isinstance(error, exceptions.BusyLoadingError):
            return BusError(
                "the bus is still loading its data; try again later",
                detail=f"Redis at {self.name} is still loading its data; try again later",
            )
        if isinstance(error, MasterNotFoundError):
            # The original names each sentinel in the client's own format.
            return BusError(
                _UNREACHABLE,
                detail=f"no sentinel that answers at {self.name} knows a live master "
                f"{self._address.service!r}; wait for the failover, or correct bus.url",
            )
        if isinstance(error, _CONNECTION_ERRORS):
            return BusError(
                _UNREACHABLE,
                detail=f"can't reach Redis at {self.name}: {_reason(error)}; "
                "start it, or pass --bus with the right URL",
            )
        if "DB index is out of range" in str(error):
            return BusError(
                "the bus has no database of the number in bus.url; its log says more",
                detail=f"Redis at {self.name} has no database of that number; write 0, or raise "
                "`databases` in its configuration",
            )
        if _NO_HELLO.search(str(error)):
            return _too_old(self.name, "before 6")
        if isinstance(error, exceptions.NoPermissionError):
            return BusError(
                "this process may not do this on the bus; its log says more",
                code=NOT_PERMITTED,
                detail=f"the user of bus.url may not do this on Redis at {self.name} (NOPERM "
                f"{error}); docs/redis-acl.md says which rights it takes",
            )
        return BusError(
            "the bus refused a command; the log of this process says more",
            detail=f"Redis at {self.name} refused a command: {error}",
        )


class Commands:
    """Commands of one RedisBus, on a shared connection.

    Each runs in a task of its own: it goes on when its caller is cancelled.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        # For commands in tasks that only `aclose` cancels.
        self.redis = server.client()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def shielded(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, which continues when the caller is cancelled, until `aclose`.

        Raises:
            ChannelClosed: The bus was closed.
        """
        if self._closed:
            work.close()
            raise bus_closed()
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._closed and task.cancelled():
                raise bus_closed() from None
            raise

    async def once(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Await one attempt.

        Raises:
            BusError: It failed, and may have taken effect.
            ChannelClosed: The bus was closed.
        """

        async def work() -> T:
            try:
                return await attempt()
            except (exceptions.RedisError, OSError) as error:
                raise self.server.explain(error) from None

        return await self.shielded(work())

    async def idempotent(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Run `persist`, shielded. `attempt` may take effect several times.

        Raises:
            BusError: The server refuses the command itself.
            ChannelClosed: The bus was closed.
        """
        return await self.shielded(persist(self.server, what, attempt))

    async def run(self, *command: Any) -> Any:
        """Send one command, once. Raises as `once`."""
        return await self.once(lambda: execute(self.redis, *command))

    async def run_all(
        self, commands: Sequence[Sequence[Any]], raise_on_error: bool = True
    ) -> list[Any]:
        """Send commands in one round trip, once. Raises as `once`."""
        return await self.once(lambda: execute_all(self.redis, commands, raise_on_error))

    async def retry(self, what: str, *command: Any) -> Any:
        """Send one command until it succeeds. Raises as `idempotent`."""
        return await self.idempotent(what, lambda: execute(self.redis, *command))

    async def retry_all(
        self, what: str, commands: Sequence[Sequence[Any]], raise_on_error: bool = True
    ) -> list[Any]:
        """Send commands in one round trip until they succeed. Raises as `idempotent`."""
        attempt = lambda: execute_all(self.redis, commands, raise_on_error)  # noqa: E731
        return await self.idempotent(what, attempt)

    async def time_ms(self, key: bytes) -> int:
        """Return the clock that makes the entry ids of the stream `key`. Raises as `once`."""
        return await self.once(lambda: time_ms(self.redis, key))

    async def aclose(self, patience_s: float) -> None:
        """Wait up to `patience_s` for running commands, then cancel them and disconnect."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=patience_s)
        await end_tasks(self._tasks)
        await self.redis.aclose()


async def execute(redis: Redis, *command: Any, key: bytes | None = None) -> Any:
    """Send one command.

    Args:
        key: One of its keys, if they aren't the first arguments, so that a cluster's client need
            not read the command's key positions from a server.
    """
    with _connection_errors:
        if not isinstance(redis, RedisCluster):
            return await redis.execute_command(*command)  # type: ignore[no-untyped-call]
        try:
            if key is None:
                return await redis.execute_command(*command)
            await redis.initialize()
            return await redis.execute_command(*command, target_nodes=redis.get_node_from_key(key))
        except _NODE_ERRORS:
            await redis.aclose()  # the client does so itself once the command has a node
            raise


async def execute_all(
    redis: Redis, commands: Iterable[Sequence[Any]], raise_on_error: bool = True
) -> list[Any]:
    """Send many commands in one round trip (per node), without a transaction.

    Connection errors are always raised; some of the commands may then have run.
    """
    if isinstance(redis, MultiplexedRedis):
        replies = await redis.execute_all(list(commands))
        if raise_on_error and (error := _first_error(replies)) is not None:
            raise error
        return replies
    pipeline = redis.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command, **options_of(command))
    with _connection_errors:
        try:
            replies = list(await pipeline.execute(raise_on_error=False))
        except _NODE_ERRORS:  # before any command was sent, by a node that is no more
            await redis.aclose()
            raise
    errors = [reply for reply in replies if isinstance(reply, Exception)]
    broken = [error for error in errors if isinstance(error, _NODE_ERRORS)]
    if broken:
        # Reload the slot map before the next command. (After a single command the client does so
        # itself.)
        await redis.aclose()
        raise broken[0]
    if errors and raise_on_error:
        raise errors[0]
    return replies


async def transact(redis: Redis, key: bytes, commands: Iterable[Sequence[Any]]) -> list[Any]:
    """Send a MULTI/EXEC transaction in one round trip.

    Args:
        key: One of its keys; all are in one slot.

    Returns:
        Raw replies: those of INFO and TIME are not parsed.
    """
    whole = (("MULTI",), *commands, ("EXEC",))
    if isinstance(redis, RedisCluster):
        pipeline = redis.pipeline(transaction=False)
        with _connection_errors:
            await redis.initialize()
            options = {"target_nodes": redis.get_node_from_key(key)}
            for command in whole:
                pipeline.execute_command(*command, **options)
            try:
                replies = (await pipeline.execute())[-1]
            except _NODE_ERRORS:
                await redis.aclose()  # as in `execute_all`
                raise
    else:
        replies = (await execute_all(redis, whole))[-1]
    if (error := _first_error(replies)) is not None:
        raise error
    return list(replies)


def _first_error(replies: Iterable[Any]) -> Exception | None:
    return next((reply for reply in replies if isinstance(reply, Exception)), None)


async def on_each(redis: Redis, *command: Any) -> list[Any]:
    """Return the replies of every master that holds part of the data."""
    if not isinstance(redis, RedisCluster):
        return [await execute(redis, *command)]
    with _connection_errors:
        await redis.initialize()
        return await asyncio.gather(
            *(redis.execute_command(*command, target_nodes=n) for n in redis.get_primaries())
        )


async def time_ms(redis: Redis, key: bytes) -> int:
    """Return the clock that makes the entry ids of the stream `key`, in milliseconds."""
    seconds, microseconds = await execute(redis, "TIME", key=key)
    return int(seconds) * 1000 + int(microseconds) // 1000


async def _connect(connected: Callable[[], object], connection: Connection) -> None:
    await connection.on_connect()
    connected()


class _ConnectionErrors:
    """Converts a cluster client's own errors for unreachable nodes, and its AttributeError when a
    connection is lost while opening, to ConnectionError. It has no state, so one is enough.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, exceptions.RedisClusterException):
            raise exceptions.ConnectionError(str(error)) from error
        if isinstance(error, AttributeError) and error.name == "writelines":
            raise exceptions.ConnectionError(f"the connection was lost: {error}") from error


_connection_errors = _ConnectionErrors()


async def persist(server: Server, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
    """Retry `attempt` with backoff while the server is unreachable.

    Raises:
        BusError: The server refuses the command itself.
    """
    backoff = Backoff()
    failed = False
    while True:
        try:
            result = await attempt()
        except (exceptions.RedisError, OSError) as error:
            if not is_transient(error):
                raise server.explain(error) from None
            server.lost(error, what)
            failed = True
            await backoff.wait()
        else:
            if failed:
                server.answered_again()
            return result


def is_transient(error: Exception) -> bool:
    """Return whether the same command may succeed later."""
    if isinstance(error, (*_CONNECTION_ERRORS, *_TRANSIENT_CLASSES)):
        return True
    return str(error).rpartition(_IN_PIPELINE)[2].lstrip("'\"").startswith(_TRANSIENT)


def watched(
    work: Coroutine[Any, Any, None], name: str, on_failure: Callable[[], object]
) -> asyncio.Task[None]:
    """Run `work` in the background. An unexpected error is logged, and `on_failure` then ends the
    waits that depend on the task.
    """

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            get_logger().error("bus.task_failed", task=name, error=repr(error), exc_info=error)
            on_failure()

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(ended)
    return task


async def end_tasks(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their end. Their errors are logged elsewhere.

    Up to Python 3.11, `asyncio.wait_for` (used by redis-py) swallows a cancellation that arrives
    just as it completes; so a task that continues is cancelled again.
    """
    running = {task for task in tasks if not task.done()}
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=0.2)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # marks it as seen


def check_version(info: dict[str, Any], server_name: str) -> None:
    """Check the reply to INFO server.

    Raises:
        BusError: The server is older than `MIN_VERSION`.
    """
    version = str(info.get("redis_version", ""))
    numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    if numbers < MIN_VERSION:
        raise _too_old(server_name, version or "unknown")


def _too_old(server_name: str, version: str) -> BusError:
    wanted = ".".join(map(str, MIN_VERSION))
    return BusError(
        "the bus is too old; the log of this process says more",
        detail=f"Redis at {server_name} has version {version}; {wanted} or newer "
        "is needed (any Valkey will do)",
    )


def _reason(error: BaseException) -> str:
    """Return the operating system's reason in a few words; the client's text repeats the host."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return "connection refused"
        if isinstance(cause, TimeoutError | exceptions.TimeoutError):
            return "no answer in time"
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror.rstrip(".")
        cause = cause.__cause__ or cause.__context__
    text = str(error)
    if "Connect call failed" in text or "Connection refused" in text:
        return "connection refused"
    return text.rstrip(".") or type(error).__name__


def limit_fields(redis: Redis) -> None:
    """Make a client keep at most `MOST_FIELDS` + 1 fields of each entry it reads.

    Any client may write an entry. Building a dictionary of a million fields takes longer than
    reading them, and blocks the event loop.
    """
    callbacks: Any = redis.response_callbacks
    for command in ("XREAD", "XREADGROUP", "XRANGE", "XREVRANGE"):
        redis.set_response_callback(command, _limited(command, callbacks[command]))


def _limited(command: str, parse: Callable[..., Any]) -> Callable[..., Any]:
    def parse_few(response: Any, **options: Any) -> Any:
        if response:
            for entries in response.values() if command.startswith("XREAD") else (response,):
                for entry in entries:
                    if entry is not None and entry[1] is not None:
                        del entry[1][2 * (MOST_FIELDS + 1) :]
        return parse(response, **options)

    return parse_few
