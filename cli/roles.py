"""`nano-inference roles`: read and change which replicas prefill and which decode."""

from __future__ import annotations

from typing import Annotated, cast, get_args

from ..config import ConfigError, ReplicaRole, nearest
from ..pipeline.client import BusClient
from .connection import of_lane, operate
from .options import AsJson, Lane, Options, argument, group, takes_model_options
from .terminal import harmless, print_json, print_table

app = group("""Read the roles of the replicas, and change them while they run.

        nano-inference roles show

        nano-inference roles set prefill decode decode

    See docs/roles.md. A change lasts until the process of the fairness stage restarts.
    """)

Roles = dict[str, tuple[str, ...]]
"""By lane, the role of each replica."""


@app.command()
@takes_model_options
def show(options: Options, as_json: AsJson = False, lane: Lane = None) -> None:
    """Print the roles in force.

    nano-inference roles show
    """
    _print(operate(options, lambda client: _in_force(client, lane)), as_json)


@app.command("set")
@takes_model_options
def set_(
    options: Options,
    roles: Annotated[list[str], argument("ROLE...", "One for each replica.")],
    lane: Lane = None,
) -> None:
    """Give each replica a role: prefill, decode or both. Sequences stay where they run.

    nano-inference roles set prefill decode
    """
    known = get_args(ReplicaRole)
    for role in roles:
        if role not in known:
            raise ConfigError(
                f"there is no role {role!r:.80}; roles are {', '.join(known)}{nearest(role, known)}"
            )
    wanted = cast(list[ReplicaRole], roles)
    operate(options, lambda client: client.update_roles(wanted, lane))


async def _in_force(client: BusClient, lane: str | None) -> Roles:
    return of_lane(await client.deployment.roles(), lane)


def _print(roles: Roles, as_json: bool) -> None:
    if as_json:
        print_json(roles)
        return
    rows = [
        (harmless(lane), str(replica), role)
        for lane, each in roles.items()
        for replica, role in enumerate(each)
    ]
    print_table(("lane", "replica", "role"), rows)
