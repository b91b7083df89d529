"""slime's rollout function: groups of samples with rewards, and the end of what isn't needed."""

from __future__ import annotations

import itertools
import json
import sys
from argparse import Namespace
from urllib.parse import urlsplit

from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.http_utils import init_http_client
from slime.utils.types import Sample

url, _, folder = sys.argv[1:]
SAMPLES, GROUPS = 2, 3


async def reward(args: Namespace, sample: Sample, **_: object) -> float:
    """Return a reward, named by `custom_rm_path`."""
    return float(len(sample.response))


class Source:
    """A data source without end."""

    def __init__(self) -> None:
        self.indices = itertools.count()
        self.returned: list[list[Sample]] = []

    def get_samples(self, number: int) -> list[list[Sample]]:
        return [
            [
                Sample(index=next(self.indices), prompt="98 + 25 =", label="123")
                for _ in range(SAMPLES)
            ]
            for _ in range(number)
        ]

    def add_samples(self, groups: list[list[Sample]]) -> None:
        self.returned += groups


def arguments(**changed: object) -> Namespace:
    at = urlsplit(url)
    off = dict.fromkeys(
        (
            *("ci_test", "group_rm", "partial_rollout", "mask_offpolicy_in_partial_rollout"),
            *(
                "use_rollout_routing_replay",
                "use_distributed_post",
                "custom_generate_function_path",
            ),
            *("dynamic_sampling_filter_path", "rollout_sample_filter_path", "rm_type"),
            *("rollout_all_samples_process_path", "rollout_stop", "rollout_stop_token_ids"),
            *("sglang_enable_deterministic_inference", "rollout_sample_hooks", "reward_key"),
        )
    )
    return Namespace(
        **off
        | {
            "hf_checkpoint": folder,
            "sglang_router_ip": at.hostname,
            "sglang_router_port": at.port,
            "sglang_server_concurrency": 8,
            "sglang_dp_size": 1,
            "rollout_num_engines": 1,
            "rollout_num_gpus": 1,
            "rollout_num_gpus_per_engine": 1,
            "rollout_temperature": 1.0,
            "rollout_top_p": 0.9,
            "rollout_top_k": -1,
            "rollout_max_response_len": 8,
            "rollout_skip_special_tokens": False,
            "rollout_seed": 1,
            "rollout_global_dataset": True,
            "rollout_batch_size": GROUPS,
            "over_sampling_batch_size": GROUPS + 1,
            "n_samples_per_prompt": SAMPLES,
            "custom_rm_path": f"{__name__}.reward",
            "partial_rollout": True,
        }
        | changed
    )


def main() -> None:
    args, source = arguments(), Source()
    init_http_client(args)
    output = generate_rollout(args, 0, source)
    assert len(output.samples) == GROUPS
    for group in output.samples:
        assert len(group) == SAMPLES
        for sample in group:
            assert sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
            assert len(sample.rollout_log_probs) == sample.response_length > 0
            assert sample.weight_versions
            assert sample.reward == len(sample.response)
    responses = [sample.response for group in output.samples for sample in group]
    print(json.dumps({"responses": responses}))


if __name__ == "__main__":
    main()
