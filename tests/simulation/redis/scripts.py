"""Lua scripts on a simulated server, run by Lua 5.1 as in Redis."""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from typing import Any

from lupa import lua51

from .commands import OK, Arguments, Engine
from .data import RedisError

_PRELUDE = b"""
local call, pcall_, sha1hex = ...
redis = {
  call = call,
  pcall = pcall_,
  sha1hex = sha1hex,
  error_reply = function(text) return {err = text} end,
  status_reply = function(text) return {ok = text} end,
}
"""


class _Runner:
    """One Lua state, shared by all servers: scripts keep nothing in it.

    Attributes:
        engine: Engine of the running script.
    """

    def __init__(self) -> None:
        self.lua = lua51.LuaRuntime(encoding=None, register_eval=False, register_builtins=False)
        self.engine: Engine | None = None
        self._scripts: dict[bytes, Any] = {}
        setup = self.lua.eval(b"function(...) " + _PRELUDE + b" end")
        setup(self._call, self._pcall, lambda text: sha1(text).hexdigest().encode())

    def run(self, engine: Engine, script: bytes, keys: Arguments, arguments: Arguments) -> Any:
        function = self._scripts.get(script)
        if function is None:
            function = self.lua.eval(b"function(KEYS, ARGV) " + script + b"\nend")
            self._scripts[script] = function
        self.engine = engine
        table = self.lua.table
        try:
            return self._reply(function(table(*keys), table(*arguments)))
        except lua51.LuaError as error:
            raise RedisError(f"ERR {error}") from None

    def _call(self, *command: Any) -> Any:
        assert self.engine is not None
        raw = [each if type(each) is bytes else _argument(each) for each in command]
        reply = self.engine.run(raw)
        return reply if type(reply) is bytes or type(reply) is int else self._value(reply)

    def _pcall(self, *command: Any) -> Any:
        try:
            return self._call(*command)
        except RedisError as error:
            return self.lua.table_from({b"err": str(error).encode()})

    def _value(self, reply: Any) -> Any:
        """Return a command's reply as Lua gets it: as in RESP2."""
        if reply is None:
            return False
        if isinstance(reply, bytes | int):
            return reply
        if reply is OK or isinstance(reply, str):
            return self.lua.table_from({b"ok": reply.encode()})
        if isinstance(reply, dict):
            reply = [each for pair in reply.items() for each in pair]
        return self.lua.table(*map(self._value, reply))

    def _reply(self, value: Any) -> Any:
        """Return a script's value as its reply."""
        if value is None or value is False:
            return None
        if isinstance(value, bytes):
            return value
        if isinstance(value, int | float):
            return int(value)
        if (error := value[b"err"]) is not None:
            raise RedisError(error.decode())
        if (status := value[b"ok"]) is not None:
            return status.decode()
        items = []
        index = 1
        while (item := value[index]) is not None:
            items.append(self._reply(item))
            index += 1
        return items


@cache
def _runner() -> _Runner:
    return _Runner()


def run_script(engine: Engine, script: bytes, keys: Arguments, arguments: Arguments) -> Any:
    """Run a script.

    Raises:
        RedisError: It failed, or returns an error.
    """
    return _runner().run(engine, script, keys, arguments)


def _argument(value: Any) -> bytes:
    return str(value).encode() if isinstance(value, int) else f"{value:.17g}".encode()
