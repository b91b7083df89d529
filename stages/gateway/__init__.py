"""The gateway: HTTP in front of the bus, as an ASGI application.

It takes the extra `gateway`. Each interface that it speaks is a package of routes: `sglang`.
"""

from .app import make_app
from .engine import EngineClient

__all__ = ["EngineClient", "make_app"]
