"""vLLM's control plane: its calls in a trainer's order, and out of it."""

from __future__ import annotations

from typing import Any

import pytest
from httpx import Response

from nano_inference.bus.weights import FolderWeights, GroupWeights, SharedMemoryWeights, TensorMeta
from nano_inference.config import BusError, WeightsError, role_of

from ...fake import Client, app_of, http_of, report

PART = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}
INIT = {"master_address": "10.0.0.1", "master_port": 5000, "rank_offset": 1, "world_size": 3}


async def sent(http: Client, path: str, body: Any = None) -> Any:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def code(answer: Response) -> str:
    """The stable code of an error in vLLM's shape."""
    error = answer.json()["error"]
    assert (error["code"], answer.status_code) == (answer.status_code, answer.status_code)
    assert error["message"]
    assert {"message", "type", "param", "code"} == error.keys()
    return str(answer.headers["X-Error-Code"])


async def got(http: Client, path: str) -> Any:
    answer = await http.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_trainer_sends_parts_that_change_together(http: Client) -> None:
    """The calls and answers of vLLM's own client, `HTTPVLLMWeightSyncClient`."""
    answer = await sent(
        http, "/init_weight_transfer_engine", {"init_info": INIT | {"packed": True}}
    )
    assert answer == {"message": "Weight transfer initialized"}
    joined = http.engine.last("join_weights_group")
    assert (joined["group"], joined["address"]) == ("weight_transfer", "10.0.0.1:5000")
    assert (joined["backend"], joined["world_size"]) == ("gloo", 3)
    assert await sent(http, "/start_weight_update") == {"message": "Weight update started"}
    for _ in range(2):
        answer = await sent(http, "/update_weights", {"update_info": PART})
        assert answer == {"message": "Weights updated"}
    assert http.engine.version == 0
    info = await got(http, "/weight_info")
    assert info["weight_version"] == "0"
    assert info["update"] == {
        "open": True,
        "parts": 2,
        "failure": None,
        "decided_version": None,
    }
    answer = await sent(http, "/finish_weight_update", {"weight_version": "step-7"})
    assert answer == {"message": "Weight update finished", "version": 1}
    assert (await got(http, "/weight_info"))["weight_version"] == "step-7"
    source = http.engine.last("stage_weights")["weights"]
    assert source == GroupWeights(
        "weight_transfer", (TensorMeta("a", "bfloat16", (2, 3)),), 1 << 30, packed=True
    )


async def test_a_repeated_finish_returns_what_the_first_did(http: Client) -> None:
    await sent(http, "/start_weight_update")
    await sent(http, "/update_weights", {"update_info": {"path": "w"}})
    first = await sent(http, "/finish_weight_update", {"weight_version": "9"})
    assert await sent(http, "/finish_weight_update", {"weight_version": "9"}) == first
    assert await sent(http, "/finish_weight_update") == first
    other = await http.post("/finish_weight_update", json={"weight_version": "10"})
    assert code(other) == "no_weight_update"
    assert http.engine.version == 9


async def test_a_restarted_gateway_continues_the_update(http: Client) -> None:
    await sent(http, "/init_weight_transfer_engine", {"init_info": INIT | {"packed": True}})
    await sent(http, "/start_weight_update")
    await sent(http, "/update_weights", {"update_info": PART})
    async with http_of(app_of(http.engine), http.engine) as other:
        assert (await got(other, "/weight_info"))["update"]["parts"] == 1
        await sent(other, "/update_weights", {"update_info": PART})
        assert http.engine.last("stage_weights")["weights"].packed
        await sent(other, "/finish_weight_update", {"weight_version": "two"})
    assert http.engine.version == 1
    assert (await got(http, "/weight_info"))["weight_version"] == "two"
    assert (await got(http, "/get_weight_version"))["weight_version"] == "two"


@pytest.mark.parametrize("call", ["/finish_weight_update", "/start_weight_update"])
async def test_an_update_that_a_killed_gateway_decided_is_completed(
    http: Client, call: str
) -> None:
    await sent(http, "/start_weight_update")
    await sent(http, "/update_weights", {"update_info": PART})
    http.engine.failures["finish_update"] = BusError("the gateway is killed here")
    assert code(await http.post("/finish_weight_update")) == "bus_unavailable"
    assert (await got(http, "/weight_info"))["update"]["decided_version"] == 1
    http.engine.failures.clear()
    async with http_of(app_of(http.engine), http.engine) as other:
        await sent(other, call)
        assert http.engine.version == 1
        assert (await got(other, "/weight_info"))["update"]["decided_version"] is None


async def test_a_decided_update_with_a_lost_executor_is_reported_once(http: Client) -> None:
    await sent(http, "/start_weight_update")
    await sent(http, "/update_weights", {"update_info": PART})
    http.engine.failures["finish_update"] = WeightsError("lost", code="weights_differ")
    assert code(await http.post("/finish_weight_update")) == "weights_differ"
    assert code(await http.post("/finish_weight_update")) == "weights_differ"
    assert code(await http.post("/finish_weight_update")) == "no_weight_update"
    await sent(http, "/start_weight_update")


async def test_a_failed_part_leaves_the_old_weights(http: Client) -> None:
    await sent(http, "/start_weight_update")
    http.engine.failures["stage_weights"] = WeightsError("torn")
    assert code(await http.post("/update_weights", json={"update_info": PART})) == "weights_refused"
    http.engine.failures.clear()
    again = await http.post("/update_weights", json={"update_info": PART})
    assert code(again) == "weights_incomplete"
    for _ in range(2):
        assert code(await http.post("/finish_weight_update")) in (
            "weights_incomplete",
            "no_weight_update",
        )
    assert http.engine.version == 0


async def test_calls_out_of_order_are_refused(http: Client) -> None:
    body = {"update_info": PART}
    assert code(await http.post("/update_weights", json=body)) == "no_weight_update"
    assert code(await http.post("/finish_weight_update")) == "no_weight_update"
    await sent(http, "/start_weight_update")
    # Another trainer.
    assert code(await http.post("/start_weight_update")) == "weights_busy"
    await sent(http, "/update_weights", body)
    await sent(http, "/start_weight_update", {"replace": True})
    assert await sent(http, "/finish_weight_update") == {"message": "Weight update finished"}
    assert http.engine.version == 0


async def test_a_new_trainer_drops_the_update_of_a_dead_one(http: Client) -> None:
    await sent(http, "/start_weight_update")
    await sent(http, "/update_weights", {"update_info": PART})
    await sent(http, "/init_weight_transfer_engine", {"init_info": {"backend": "disk"}})
    assert code(await http.post("/finish_weight_update")) == "no_weight_update"
    await sent(http, "/start_weight_update")
    await sent(http, "/shutdown_weight_transfer_engine")
    assert http.engine.last("leave_weights_group") == {"group": "weight_transfer"}
    assert code(await http.post("/update_weights", json={"update_info": PART})) == (
        "no_weight_update"
    )


async def test_a_folder_of_prime_rl_is_a_whole_update(http: Client) -> None:
    assert await sent(http, "/update_weights", {"weight_dir": "/w/step_3", "step": 3}) == {
        "status": "ok"
    }
    assert http.engine.last("update_weights")["weights"] == FolderWeights("/w/step_3")
    assert http.engine.last("update_weights")["partial"] is False
    assert http.engine.version == 3
    loaded = await http.post("/load_lora_adapter", json={"lora_name": "r", "lora_path": "/a"})
    assert loaded.json().get("error", {}).get("code") != "not_found"


async def test_skyrl_updates_by_methods_of_its_workers(http: Client) -> None:
    start, update = "skyrl_start_weight_update", "update_weights_nccl"
    calls = [
        {"method": start, "kwargs": {"is_checkpoint_format": True}},
        {"method": update, "kwargs": {"update_info": PART | {"packed": True}}},
        {"method": "skyrl_finish_weight_update"},
    ]
    for each in calls:
        assert await sent(http, "/collective_rpc", each) == {"results": [None]}
    assert http.engine.version == 1
    assert code(await http.post("/collective_rpc", json={"method": "reset"})) == "unsupported"
    handles = {"update_info": {"names": ["a"], "ipc_handles_pickled": "x"}}
    refused = {"method": "update_weights_ipc", "kwargs": handles}
    assert code(await http.post("/collective_rpc", json=refused)) == "unsupported"
    assert await sent(http, "/reset_prefix_cache", {"reset_running_requests": False})
    await sent(http, "/sleep?level=2&tags=kv_cache")
    assert http.engine.last("release_memory") == {"tags": ("kv_cache",)}


async def test_shared_memory_is_named_by_its_segments(http: Client) -> None:
    await sent(http, "/start_weight_update")
    memory = {"segments": ["psm_1"], "places": [[0, 64]]}
    await sent(http, "/update_weights", {"update_info": PART | {"shared_memory": memory}})
    source = http.engine.last("stage_weights")["weights"]
    meta = TensorMeta("a", "bfloat16", (2, 3))
    assert source == SharedMemoryWeights(("psm_1",), (meta,), ((0, 64),))


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/update_weights", {}, "invalid_request"),
        ("/update_weights", {"update_info": {}}, "invalid_request"),
        ("/update_weights", {"update_info": []}, "invalid_request"),
        ("/update_weights", {"update_info": PART, "weight_dir": "w"}, "invalid_request"),
        ("/update_weights", {"update_info": PART | {"shapes": []}}, "invalid_request"),
        ("/update_weights", {"update_info": PART | {"path": "w"}}, "invalid_request"),
        ("/update_weights", {"update_info": PART | {"names": "a"}}, "invalid_request"),
        ("/update_weights", {"update_info": {"ipc_handles_pickled": "x"}}, "unsupported"),
        ("/update_weights", {"update_info": PART | {"colour": 1}}, "unsupported"),
        ("/update_weights", [], "malformed"),
        ("/init_weight_transfer_engine", {}, "invalid_request"),
        ("/init_weight_transfer_engine", {"init_info": {"backend": "ipc"}}, "invalid_request"),
        ("/init_weight_transfer_engine", {"init_info": {"backend": "gloo"}}, "invalid_request"),
        (
            "/init_weight_transfer_engine",
            {"init_info": INIT | {"world_size": 1}},
            "invalid_request",
        ),
        ("/init_weight_transfer_engine", {"init_info": {"nccl_unique_id_b64": "x"}}, "unsupported"),
        ("/init_broadcaster", {"host": "h", "port": 1}, "unsupported"),
        ("/start_weight_update", {"replace": "no"}, "invalid_request"),
        ("/start_draft_weight_update", {}, "unsupported"),
        ("/finish_weight_update", {"weight_version": 7}, "invalid_request"),
        ("/finish_weight_update", {"weight_version": "x" * 1001}, "no_weight_update"),
        ("/pause?mode=retract", {}, "invalid_request"),
        ("/pause", {"mode": "keep"}, "unsupported"),
        ("/sleep?level=3", {}, "invalid_request"),
        ("/wake_up?tags=gpu", {}, "invalid_request"),
        ("/abort_requests", {"request_ids": "a"}, "invalid_request"),
        ("/weight_checker", {}, "invalid_request"),
        ("/weight_checker", {"action": "compare"}, "invalid_request"),
        ("/weight_checker", {"action": "reset"}, "unsupported"),
        ("/reset_prefix_cache?reset_running_requests=true", {}, "unsupported"),
    ],
)
async def test_bad_input_is_refused_and_changes_nothing(
    http: Client, path: str, body: Any, expected: str
) -> None:
    assert code(await http.post(path, json=body)) == expected
    state = (await got(http, "/weight_info"))["update"]
    assert not state["open"]
    assert http.engine.names == []


async def test_pause_and_resume(http: Client) -> None:
    assert await got(http, "/is_paused") == {"is_paused": False}
    for mode in ("abort", "wait", "keep"):
        assert await sent(http, f"/pause?mode={mode}&clear_cache=false") == {"status": "paused"}
        assert http.engine.last("pause") == {"in_flight": mode}
    assert await sent(http, "/pause") == {"status": "paused"}
    assert http.engine.last("pause") == {"in_flight": "abort"}
    assert await got(http, "/is_paused") == {"is_paused": True}
    assert await sent(http, "/resume") == {"status": "resumed"}
    assert await got(http, "/is_paused") == {"is_paused": False}


async def test_sleep_releases_memory_by_its_level(http: Client) -> None:
    assert await sent(http, "/sleep") == {"status": "sleeping", "level": 1}
    assert http.engine.last("release_memory") == {"tags": ("kv_cache",)}
    assert await got(http, "/is_sleeping") == {"is_sleeping": True}
    assert await sent(http, "/wake_up") == {"status": "awake", "tags": None}
    assert http.engine.names[-1] == "resume"
    assert await sent(http, "/sleep?level=2&mode=keep") == {"status": "sleeping", "level": 2}
    woken = await sent(http, "/wake_up?tags=weights")
    assert woken == {"status": "sleeping", "tags": ["weights"]}
    # As TRL's colocated trainer does between the two.
    await sent(http, "/start_weight_update")
    await sent(http, "/update_weights", {"update_info": {"path": "w"}})
    await sent(http, "/finish_weight_update")
    assert (await sent(http, "/wake_up?tags=kv_cache&tags=weights"))["status"] == "awake"
    assert await got(http, "/is_sleeping") == {"is_sleeping": False}
    assert await sent(http, "/sleep?level=0") == {"status": "sleeping", "level": 0}
    assert (await sent(http, "/wake_up"))["status"] == "awake"


async def test_what_trainers_read_of_the_server(http: Client) -> None:
    load = {"ranks": 2, "device": "cpu", "dtype": "bfloat16"}
    http.engine.stage_reports = [
        report(stage=stage, load=load) for stage in ("executor", role_of("executor", 1), "batching")
    ]
    assert await got(http, "/get_world_size") == {"world_size": 4}
    assert await got(http, "/get_world_size?include_dp=false") == {"world_size": 2}
    config = (await got(http, "/server_info?config_format=json"))["vllm_config"]
    assert config["weight_transfer_config"] == {"backend": "gloo"}
    assert config["model_config"]["dtype"] == "torch.bfloat16"
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert config["parallel_config"]["data_parallel_size"] == 2
    assert config["lora_config"]["max_loras"] == 32
    assert isinstance((await got(http, "/server_info?config_format=text"))["vllm_config"], str)
    # Without the field it is SGLang's call.
    assert "max_running_requests" in await got(http, "/server_info")
    assert await got(http, "/load") == {"server_load": 0}
    assert (await http.get("/liveness")).json()["status"] == "idle"


async def test_aborts_and_caches(http: Client) -> None:
    assert await sent(http, "/abort_requests", {}) == {"status": "aborted", "aborted": 0}
    assert http.engine.names == ["cancel_all"]
    aborted = await sent(http, "/abort_requests", {"request_ids": ["a", "b"]})
    assert aborted == {"status": "aborted", "aborted": 2}
    assert await sent(http, "/reset_prefix_cache") == {"success": True}
    assert (await http.post("/reset_encoder_cache")).status_code == 200
    assert http.engine.names.count("flush_cache") == 2


async def test_checksums_are_compared_with_a_baseline(http: Client) -> None:
    checksums = (await sent(http, "/weight_checker", {"action": "checksum"}))["checksums"]
    body = {"action": "compare", "baseline": checksums}
    assert await sent(http, "/weight_checker", body) == {"match": True, "mismatches": []}
    body["baseline"] = checksums | {"more": "x"}
    compared = await sent(http, "/weight_checker", body)
    assert compared == {"match": False, "mismatches": ["more"]}
