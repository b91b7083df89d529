"""`nano-inference complete` and `cancel`: continue one text; end a request."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from typing import Annotated

from msgspec.structs import replace

from ..config import ConfigError
from .clients import client_at
from .connection import place_of
from .options import AskedModel, Options, argument, takes, takes_server_options
from .requests import Wanted, wanted
from .terminal import AnswerWriter, failures_exit


@takes_server_options
@takes(wanted)
def complete(
    options: Options,
    wanted: Wanted,
    text: Annotated[
        str | None, argument("TEXT", "The prompt; - or nothing reads standard input.")
    ] = None,
    model: AskedModel = None,
) -> None:
    """Continue a text, and print the continuation as it is generated.

    At a server, or with --bus at a pipeline:

        nano-inference complete "98 + 25 ="

        nano-inference complete "98 + 25 =" --url http://127.0.0.1:8000/v1 --max-tokens 8

        nano-inference complete < prompt.txt

    Standard input is one prompt, without a final line break. Ctrl-C also cancels the request. The
    exit status is 1 when the request was refused or failed.
    """
    place = place_of(options)
    prompt = _read_stdin() if text in (None, "-") else text
    request = replace(wanted, stream=True, model=model).of_text(prompt or "")

    async def run(writer: AnswerWriter) -> None:
        async with client_at(place) as client:
            if name := await client.check():
                request.setdefault("model", name)
            async with aclosing(client.ask(request)) as parts:
                async for part in parts:
                    writer.write(part.text)

    with failures_exit(), AnswerWriter() as writer:
        asyncio.run(run(writer))


def _read_stdin() -> str:
    """Raises ConfigError: standard input is empty, or no text."""
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("give a prompt, as an argument or on standard input")
    try:
        text = sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise ConfigError("standard input is not UTF-8 text") from None
    if not text:
        raise ConfigError("there is nothing on standard input; give a prompt")
    return text


@takes_server_options
def cancel(
    options: Options,
    request_id: Annotated[str, argument("ID", "The request's id, or that of its answer.")],
) -> None:
    """Cancel a request that is in flight. Its client gets the answer so far.

        nano-inference cancel chatcmpl-6c57ddeed9564f79a77b142870c43455

        nano-inference cancel 1795185430038-0 --bus redis://127.0.0.1:6390

    An unknown id, or one whose request has ended, is ignored: the exit status is 0 when the server
    or the pipeline has received the cancellation.
    """
    if not request_id:
        raise ConfigError("give the id of a request")
    place = place_of(options)

    async def run() -> None:
        async with client_at(place) as client:
            await client.cancel(request_id)

    with failures_exit():
        asyncio.run(run())
