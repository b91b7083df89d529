"""The settings of a pipeline on a Ray cluster."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from .base import PositiveInt, Range, Seconds, Section

_Share = Annotated[float, Range("from 0 to 1000000", 0, 1e6)]


class RayConfig(Section, frozen=True, forbid_unknown_fields=True):
    """The resources that `up --ray` reserves on a Ray cluster (docs/ray.md).

    Attributes:
        stage_cpus: CPUs that Ray reserves for each stage but the executor, and for each gateway.
        rank_cpus: CPUs for each rank of an executor.
        rank_gpus: GPUs for each rank: a whole number, or less than one GPU for an executor.
        rank_resources: Other resources for each rank, by the names that nodes were started with, as
            {"h100": 1}. Executors then run on these nodes only.
        strategy: How the front stages, replicas and gateways are placed: "SPREAD" on different
            nodes where there are enough, "STRICT_SPREAD" always, "PACK" on as few as possible.
        gateways: Gateways, if `gateway.port` or `gateway.grpc_port` is set. Each has the port of
            the one before plus one, or another one if that is taken.
        place_timeout_s: Time limit for the cluster to have room for the pipeline.
    """

    SECTION: ClassVar[str] = "ray"

    stage_cpus: _Share = 0.5
    rank_cpus: _Share = 1.0
    rank_gpus: _Share = 0.0
    rank_resources: dict[str, float] = msgspec.field(default_factory=dict)
    strategy: Literal["SPREAD", "STRICT_SPREAD", "PACK"] = "SPREAD"
    gateways: PositiveInt = 1
    place_timeout_s: Seconds = 60.0

    def check(self) -> None:
        gpus = self.rank_gpus
        self.require("rank_gpus", gpus <= 1 or gpus == int(gpus), "a whole number above 1")
        good = all(0 < number <= 1e6 for number in self.rank_resources.values())
        self.require("rank_resources", good, "numbers above 0 by name")
