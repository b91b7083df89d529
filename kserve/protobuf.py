"""The messages of gRPC, made from `inference.proto`.

They live in a pool of descriptors of their own: another library in the process that has the same
names, as Triton's client does, would otherwise make protobuf refuse one of the two.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

SERVICE = "inference.GRPCInferenceService"
"""The service's full name; the path of a method is "/SERVICE/METHOD"."""

_PACKAGE = "inference"


class Method(NamedTuple):
    """A method of the service.

    Attributes:
        name: As in `inference.proto`.
        request: The class of what a client sends.
        response: The class of what it gets.
        streams: Whether many of both may go over one call.
    """

    name: str
    request: type[Message]
    response: type[Message]
    streams: bool

    @property
    def path(self) -> str:
        return f"/{SERVICE}/{self.name}"


def _load() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    described = (files(__package__) / "inference.binpb").read_bytes()
    for each in descriptor_pb2.FileDescriptorSet.FromString(described).file:
        pool.Add(each)
    return pool


_POOL = _load()


def message(name: str) -> Any:
    """The class of a message of `inference.proto`, such as "ModelInferRequest".

    Its type is not known to type checkers, since it is made here. Raises KeyError for a name that
    is not there.
    """
    found = _POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}")
    return message_factory.GetMessageClass(found)


METHODS: dict[str, Method] = {
    each.name: Method(
        each.name,
        message(each.input_type.name),
        message(each.output_type.name),
        each.server_streaming,
    )
    for each in _POOL.FindServiceByName(SERVICE).methods
}
"""All methods of the service by their names."""

ModelInferRequest = message("ModelInferRequest")
ModelInferResponse = message("ModelInferResponse")
ModelStreamInferResponse = message("ModelStreamInferResponse")
ModelMetadataResponse = message("ModelMetadataResponse")
ModelConfigResponse = message("ModelConfigResponse")
RepositoryIndexResponse = message("RepositoryIndexResponse")
