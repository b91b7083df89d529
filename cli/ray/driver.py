"""The driver: `up --ray` places a lane's actors on a Ray cluster, watches them, and stops them.

The actors outlive the driver. `down` stops those of a driver that was killed.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import ray
from ray import exceptions
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...bus import open_bus
from ...config import Config, ConfigError, redact, split_role
from ...config.roles import REPLICATED
from ...pipeline.health import lanes_of
from ...pipeline.supervisor import StageFailed
from ..processes import STOP_S, CanNotStart, Printer
from .host import ActorState, StageHost, check_node, versions
from .plan import LanePlan, lane_of, namespace_of, plan_of, settings_of, stop_order

_LOOK_S = 1.0
_REACH_S = 10.0
_CHECK_LIMIT_S = 120.0
"""For a node to start a worker, import the package and look."""


def connect(address: str, namespace: str) -> None:
    """Connect to a cluster.

    Raises:
        ConfigError: The address is of another kind.
        CanNotStart: There is no cluster, or it has other versions.
    """
    if "://" in address:
        raise ConfigError(
            "--ray takes HOST:PORT of the cluster's head, or 'auto' on one of its nodes, and no "
            "URL; from elsewhere run the command by `ray job submit`"
        )
    if address != "auto":
        _reach(address)  # Ray itself retries for some minutes
    # It warns that actors end with their placement group, which is removed after them.
    logging.getLogger("ray.actor").setLevel(logging.ERROR)
    try:
        ray.init(address=address, namespace=namespace, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError, exceptions.RaySystemError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CanNotStart(f"can't connect to the Ray cluster at {address}: {reason}") from None


def _reach(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--ray {address}: it must be HOST:PORT, such as 10.0.0.1:6379, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, OverflowError) as error:
        raise CanNotStart(f"can't connect to a Ray cluster at {address}: {error}") from None


class RayLane:
    """A lane on a cluster, seen from the driver.

    Attributes:
        actors: Handles, by name.
    """

    def __init__(self, config: Config, printer: Printer) -> None:
        self.actors: dict[str, Any] = {}
        self._namespace, self._lane = namespace_of(config), lane_of(config)
        # Longer than a process takes to stop, or its actor to kill it.
        self._limit_s = config.pipeline.drain_timeout_s + 2 * STOP_S
        self._printer = printer
        self._group: Any = None
        self._stopped = False

    def attach(self) -> None:
        """Find the lane's actors and its placement group."""
        for each in ray.util.list_named_actors(all_namespaces=True):
            name = each["name"]
            if each["namespace"] == self._namespace and name.rpartition("/")[0] == self._lane:
                with suppress(ValueError):  # it ends
                    self.actors[name] = ray.get_actor(name, namespace=self._namespace)
        with suppress(ValueError):  # there is none
            self._group = ray.util.get_placement_group(self._group_name)

    @property
    def _group_name(self) -> str:
        # Names of placement groups belong to the namespace too, but `ray status` doesn't show it.
        return f"{self._namespace}/{self._lane}"

    # --- start ------------------------------------------------------------------------------------

    async def start(self, plan: LanePlan, config: Config) -> None:
        """Place the actors, check their nodes, and start them.

        Raises:
            CanNotStart: There is no room, or a node can't run them.
        """
        try:
            await self._place(plan, config.ray.place_timeout_s)
            settings, wanted = settings_of(config), versions()
            await self._check(plan, settings, wanted)
            for each in plan.actors:
                options = each.options(self._namespace) | self._in_bundle(each.bundle)
                actor = ray.remote(StageHost).options(**options)
                self.actors[each.name] = actor.remote(each, settings, wanted)
        except BaseException:
            self.kill()
            raise

    async def _place(self, plan: LanePlan, limit_s: float) -> None:
        self._group = ray.util.placement_group(
            plan.bundles, strategy=plan.strategy, name=self._group_name, lifetime="detached"
        )
        with anyio.move_on_after(limit_s):
            await self._group.ready()
            return
        free = ray.available_resources()
        names = sorted({name for bundle in plan.bundles for name in bundle})
        there = ", ".join(f"{name} {free.get(name, 0):g}" for name in names)
        needed = ", ".join(
            " + ".join(f"{name} {amount:g}" for name, amount in bundle.items())
            for bundle in plan.bundles
        )
        raise CanNotStart(
            f"the Ray cluster had no room for {len(plan.bundles)} bundles ({needed}; "
            f"{plan.strategy}) within {limit_s:g} s; free are {there} on {len(ray.nodes())} nodes. "
            "Add nodes, or reserve less (settings ray.*)"
        )

    async def _check(
        self, plan: LanePlan, settings: Mapping[str, Any], wanted: Mapping[str, str]
    ) -> None:
        """Check the node of each bundle. Raises CanNotStart."""
        options = {"num_cpus": 0, "max_retries": 0}
        check = ray.remote(check_node)
        asked = [
            check.options(**options, **self._in_bundle(bundle)).remote(wanted, settings)
            for bundle in range(len(plan.bundles))
        ]
        problems: list[str] = []
        for each in asked:
            try:
                with anyio.fail_after(_CHECK_LIMIT_S):
                    problems.append(await each)
            except exceptions.RayError as error:
                # Also for a node on which the package can't be imported.
                problems.append(f"a node can't run this package: {_last_line(error)}")
            except TimeoutError:
                problems.append(f"a node did not answer within {_CHECK_LIMIT_S:g} s")
        if found := list(dict.fromkeys(filter(None, problems))):
            raise CanNotStart("; ".join(found))

    def _in_bundle(self, bundle: int) -> dict[str, Any]:
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, bundle)}

    # --- watch ------------------------------------------------------------------------------------

    async def states(self) -> dict[str, ActorState | None]:
        """Return the actors' states; None for an actor that Ray is starting again.

        Raises:
            StageFailed: An actor has ended for good, and no replica can replace it.
        """
        found: dict[str, ActorState | None] = {}
        ended: dict[str, str] = {}
        for name, actor in self.actors.items():
            found[name] = None
            try:
                with anyio.move_on_after(_LOOK_S):
                    found[name] = state = await actor.state.remote()
                    if state.failure:
                        ended[name] = state.failure
            except exceptions.ActorUnavailableError:
                continue  # its node does not answer, or Ray is starting it again
            except exceptions.RayActorError as error:
                ended[name] = _last_line(error)
        if not self._stopped:
            self._check_ended(ended)
        return found

    def _check_ended(self, ended: Mapping[str, str]) -> None:
        """Forget actors that have ended for good. Raises StageFailed unless a replica is left."""
        for name, reason in ended.items():
            if split_role(_role_of(name))[0] not in REPLICATED:
                raise StageFailed(f"{name} has ended: {reason}")
        left = {split_role(_role_of(name)) for name in self.actors.keys() - ended.keys()}
        whole = [
            replica for stage, replica in left if left >= {(each, replica) for each in REPLICATED}
        ]
        if ended and not whole:
            raise StageFailed(f"every replica has ended: {'; '.join(ended.values())}")
        for name, reason in ended.items():
            self._printer.say(f"{name} has ended: {reason}; the other replicas continue without it")
            del self.actors[name]

    async def watch(self, config: Config, *, until_ready: bool = False) -> None:
        """Print where gateways listen and whether the lane serves, until cancelled.

        Args:
            config: The lane's settings.
            until_ready: Return when it serves.

        Raises:
            StageFailed: As `states`.
        """
        shown: dict[str, dict[str, str]] = {}
        serves = False
        bus = open_bus(config.bus)
        try:
            while True:
                for name, state in (await self.states()).items():
                    if state is not None and shown.get(name, {}) != state.places:
                        shown[name] = state.places
                        places = ", ".join(f"{kind} {at}" for kind, at in state.places.items())
                        self._printer.say(f"{name}: {places}")
                with anyio.move_on_after(_LOOK_S):
                    lanes = lanes_of(await bus.store.board.read())
                    now = any(lane.ready for lane in lanes if lane.lane == config.bus.lane)
                    if now != serves and not self._stopped:
                        serves = now
                        self._printer.say("ready" if now else "not ready: a stage is missing")
                if serves and until_ready:
                    return
                await anyio.sleep(_LOOK_S)
        finally:
            with anyio.CancelScope(shield=True):
                await bus.aclose()

    # --- stop -------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Stop all processes in order, with requests in flight drained, and remove the actors."""
        if self._stopped:
            return
        self._stopped = True
        for names in stop_order(self.actors):
            async with anyio.create_task_group() as group:
                for name in names:
                    group.start_soon(self._stop, name)
        self.kill()

    async def _stop(self, name: str) -> None:
        actor = self.actors[name]
        try:
            with anyio.fail_after(self._limit_s):
                await actor.stop.remote(drain=True)
        except exceptions.RayError as error:
            self._printer.say(f"{name} had ended: {_last_line(error)}")
        except TimeoutError:
            self._printer.say(f"{name} does not stop; killing it")
        # At once: Ray would start the process again if the node were lost now.
        _kill(actor)

    def kill(self) -> None:
        """End all actors at once, and remove the placement group."""
        self._stopped = True
        for actor in self.actors.values():
            _kill(actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
            self._group = None


def _kill(actor: Any) -> None:
    with suppress(ValueError, exceptions.RayError):  # it has ended
        ray.kill(actor, no_restart=True)


def _role_of(name: str) -> str:
    return name.rpartition("/")[2]


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


RunUntilSignal = Callable[..., Awaitable[None]]


async def run_on_ray(
    config: Config, address: str, detach: bool, run_until_signal: RunUntilSignal
) -> None:
    """Run a lane on a cluster until a signal, or with `detach` until it serves requests.

    Raises:
        ConfigError: The settings can't run on a cluster, or the lane runs there.
        CanNotStart, StageFailed: As `RayLane`.
    """
    plan = plan_of(config)
    printer = Printer()
    connect(address, plan.namespace)
    lane = RayLane(config, printer)
    lane.attach()
    if lane.actors:
        raise ConfigError(
            f"lane {plan.lane} runs on this cluster; end it with "
            f"`nano-inference down --ray {address}`, or choose another bus.lane"
        )
    printer.say(f"starting {len(plan.actors)} actors over {redact(config.bus.url)}")
    await lane.start(plan, config)
    if detach:
        await lane.watch(config, until_ready=True)
        printer.say(f"`nano-inference down --ray {address}` ends it")
        return
    await run_until_signal([partial(lane.watch, config)], printer, lane.stop, lane.kill)


async def stop_on_ray(config: Config, address: str) -> None:
    """Stop a lane that a driver has left on a cluster.

    Raises:
        ConfigError: It doesn't run there.
    """
    namespace, name = namespace_of(config), lane_of(config)
    printer = Printer()
    connect(address, namespace)
    lane = RayLane(config, printer)
    lane.attach()
    if not lane.actors:
        lane.kill()  # a placement group may be left
        raise ConfigError(
            f"lane {name} of {namespace} does not run on the cluster at {address}",
            remedy="name one that `nano-inference status` shows",
        )
    printer.say(f"stopping {len(lane.actors)} actors: requests in flight may finish")
    await lane.stop()
