"""The bus over Redis or Valkey: one server, a master that sentinels name, or a cluster."""

from .bus import RedisBus

__all__ = ["RedisBus"]
