"""`nano-inference experts`: read and change which rank owns which expert."""

from __future__ import annotations

from typing import Annotated

from ..config import BusError
from .connection import operate
from .options import AsJson, Lane, Options, argument, group, takes_model_options
from .terminal import harmless, print_json, print_table

app = group("""Read which rank owns which expert, and change it while requests run.

        nano-inference experts show

        nano-inference experts move 0 1 0 1

    For models with engine.expert_parallel; see docs/ranks.md. A change lasts until the executor
    restarts.
    """)


@app.command()
@takes_model_options
def show(options: Options, as_json: AsJson = False) -> None:
    """Print the owners in force.

    nano-inference experts show
    """
    owners = operate(options, lambda client: client.expert_owners())
    if not owners:
        raise BusError("no executor reports owners of experts; see engine.expert_parallel")
    if as_json:
        print_json(owners)
        return
    rows = [
        (harmless(lane), str(expert), str(rank))
        for lane, each in owners.items()
        for expert, rank in enumerate(each)
    ]
    print_table(("lane", "expert", "rank"), rows)


@app.command()
@takes_model_options
def move(
    options: Options,
    owners: Annotated[list[int], argument("RANK...", "The owner of each expert.")],
    lane: Lane = None,
) -> None:
    """Give each expert an owner; each rank owns equally many. No token changes.

    nano-inference experts move 0 1 0 1
    """
    operate(options, lambda client: client.move_experts(owners, lane=lane))
