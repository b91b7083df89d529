"""Which class runs which stage. Each is imported only in a process that runs it."""

from __future__ import annotations

from ..stages.actor import Actor


def actor_class(stage: str) -> type[Actor]:
    """The shell of a stage; only the executor's brings torch's kernels to work."""
    match stage:
        case "admission":
            from ..stages.admission.stage import AdmissionStage

            return AdmissionStage
        case "fairness":
            from ..stages.fairness.stage import FairnessStage

            return FairnessStage
        case "batching":
            from ..stages.batching.stage import BatchingStage

            return BatchingStage
        case "executor":
            from ..stages.executor.stage import ExecutorStage

            return ExecutorStage
        case "streaming":
            from ..stages.streaming.stage import StreamingStage

            return StreamingStage
    raise ValueError(f"there is no stage {stage!r}")
