"""`nano-inference complete`: the continuation of one text, as it is generated."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from typing import Any

from msgspec.structs import replace

from ..config import ConfigError
from .answerer import Place, answerer_at, place_of
from .asking import AnswerWriter, AskedModel, CompletedText, failures_told
from .options import Options, takes_asking_options
from .request_options import takes_wanted_options
from .requests import Wanted


@takes_asking_options
@takes_wanted_options()
def complete(
    options: Options, wanted: Wanted, text: CompletedText = None, model: AskedModel = None
) -> None:
    """Continue a text, and print the continuation as it is generated.

    Of a server, or with --bus of a pipeline:

        nano-inference complete "98 + 25 ="

        nano-inference complete "98 + 25 =" --url http://127.0.0.1:8000/v1 --max-tokens 8

        nano-inference complete < prompt.txt

    All of standard input is one prompt; one line break at its end is not part of it. Ctrl-C ends
    the request too. The exit status is 1 when it was refused or did not end well.
    """
    place = place_of(options)
    wanted = replace(wanted, stream=True)
    request = wanted.of_text(_read_stdin() if text in (None, "-") else text)
    if model is not None:
        request["model"] = model
    with failures_told(), AnswerWriter() as writer:
        asyncio.run(_complete(place, request, writer))


async def _complete(place: Place, request: dict[str, Any], writer: AnswerWriter) -> None:
    async with answerer_at(place) as answerer:
        if name := await answerer.check():
            request.setdefault("model", name)
        async with aclosing(answerer.ask(request)) as pieces:
            async for piece in pieces:
                writer.write(piece.text)


def _read_stdin() -> str:
    """Raises ConfigError when there is nothing, or no text."""
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("give a prompt, as an argument or on standard input")
    try:
        text = sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise ConfigError("standard input is no text in UTF-8") from None
    if not text:
        raise ConfigError("there is nothing on standard input; give a prompt")
    return text
