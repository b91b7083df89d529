"""`nano-inference samples`: training samples of a session's token tree."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from ..bus.public import DEFAULT_TENANT
from ..config import Config
from ..pipeline.session_files import SampleFormat, write_samples
from ..pipeline.token_tree import SessionSample, check_complete
from .clients import ServerClient
from .connection import ServerAddress, connected, target_of
from .options import Options, argument, option, takes_status_options
from .terminal import complain


@takes_status_options
def samples(
    options: Options,
    session: Annotated[str, argument("SESSION", "Its id in requests.")],
    format: Annotated[
        SampleFormat, option("--format", "Lines of JSON, or Parquet (extra batch).")
    ] = "jsonl",
    out: Annotated[
        Path | None, option("--out FILE", "Write to a file instead of standard output.")
    ] = None,
    tenant: Annotated[str | None, option("--tenant NAME", "The tenant of its requests.")] = None,
    partial: Annotated[
        bool, option("--partial", "Leave out turns for which there was no room.")
    ] = False,
    delete: Annotated[bool, option("--delete", "Delete the session afterwards.")] = False,
) -> None:
    """Write one training sample for each path through a session's token tree.

        nano-inference samples agent-7 > samples.jsonl

        nano-inference samples agent-7 --format parquet --out samples.parquet --delete

    Each has token ids, the loss mask (1 where the engine sampled), logprobs and versions of the
    weights, exactly as the model had them; docs/token-tree.md lists the fields.
    """
    target = target_of(options)
    asked = (session, tenant, partial)
    found = asyncio.run(_read(target, options.served, *asked))
    if out is None:
        write_samples(found, sys.stdout.buffer, format)
        sys.stdout.buffer.flush()
    else:
        with out.open("wb") as file:
            write_samples(found, file, format)
        complain(f"{len(found)} samples, {sum(len(each.token_ids) for each in found)} tokens")
    if delete:
        asyncio.run(_delete(target, options.served, session, tenant))


async def _read(
    target: Config | ServerAddress,
    model: str | None,
    session: str,
    tenant: str | None,
    partial: bool,
) -> Sequence[SessionSample]:
    if isinstance(target, ServerAddress):
        async with ServerClient(target, model) as client:
            return await client.samples(session, tenant, partial=partial)
    async with connected(target, model) as client:
        tree = await client.token_tree(session, tenant=tenant or DEFAULT_TENANT)
    if not partial:
        check_complete(tree)
    return tree.samples()


async def _delete(
    target: Config | ServerAddress, model: str | None, session: str, tenant: str | None
) -> None:
    if isinstance(target, ServerAddress):
        async with ServerClient(target, model) as client:
            await client.delete_session(session, tenant)
        return
    async with connected(target, model) as client:
        await client.delete_session(session, tenant=tenant or DEFAULT_TENANT)
