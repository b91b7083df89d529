"""The gRPC messages of `inference.proto`.

They have a descriptor pool of their own: protobuf refuses a second library with the same names, as
Triton's client has, in one pool.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

SERVICE = "inference.GRPCInferenceService"
"""The full name of the service; a method's path is "/SERVICE/METHOD"."""


class Method(NamedTuple):
    """A method of the service.

    Attributes:
        name: As in `inference.proto`.
        request: The class of its requests.
        response: The class of its responses.
        streams: Requests and responses are streams.
    """

    name: str
    request: type[Message]
    response: type[Message]
    streams: bool

    @property
    def path(self) -> str:
        return f"/{SERVICE}/{self.name}"


_POOL = descriptor_pool.DescriptorPool()
for _file in descriptor_pb2.FileDescriptorSet.FromString(
    (files(__package__) / "inference.binpb").read_bytes()
).file:
    _POOL.Add(_file)


def message(name: str) -> Any:
    """Return the class of a message of `inference.proto`, such as "ModelInferRequest".

    Its type is made here, so type checkers don't know it. Raises KeyError for an unknown name.
    """
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"inference.{name}"))


METHODS: dict[str, Method] = {
    each.name: Method(
        each.name,
        message(each.input_type.name),
        message(each.output_type.name),
        each.server_streaming,
    )
    for each in _POOL.FindServiceByName(SERVICE).methods
}
"""All methods of the service by name."""

ModelInferRequest = message("ModelInferRequest")
ModelInferResponse = message("ModelInferResponse")
