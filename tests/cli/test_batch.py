"""batch: files of calls, answered by any OpenAI-compatible server, here, or as a server's batch."""

from __future__ import annotations

import csv
import json
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nano_inference.cli.batches import calls, server
from nano_inference.cli.batches.journal import Journal

from ..programs import Ran
from .conftest import Run, assert_refused, listening

CHAT = "/v1/chat/completions"


class Upper(BaseHTTPRequestHandler):
    """A server of others, which answers a prompt in capitals.

    Attributes:
        prompts: What was sent, in order.
        refusals: Statuses of the next calls.
        slow: Called before each answer.
    """

    protocol_version = "HTTP/1.1"
    prompts: list[str]
    refusals: list[int]
    slow: Callable[[], Any]

    def do_GET(self) -> None:
        self.respond(200, {"data": [{"id": "upper"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refusals:
            self.respond(self.refusals.pop(), {"error": {"message": "not now", "code": "busy"}})
            return
        prompt = body["messages"][0]["content"]
        self.prompts.append(prompt)
        type(self).slow()
        if prompt == "bad":
            self.respond(400, {"error": {"message": "that is bad", "code": "bad"}})
            return
        message = {"role": "assistant", "content": prompt.upper()}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 2}
        self.respond(200, {"model": body["model"], "choices": [choice], "usage": usage})

    def respond(self, status: int, body: Any) -> None:
        # Of several lines, as some servers answer.
        content = json.dumps(body, indent=1).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None: ...


class Server(ThreadingHTTPServer):
    request_queue_size = 512


@pytest.fixture(scope="module")
def upper_url() -> Iterator[str]:
    with listening(Server(("127.0.0.1", 0), Upper)) as url:
        yield url


@pytest.fixture
def batch(run: Run, upper_url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    Upper.prompts, Upper.refusals, Upper.slow = [], [], lambda: None
    monkeypatch.setattr(calls, "_FIRST_WAIT_S", 0.001)
    return lambda *arguments: run("batch", "run", *map(str, arguments), "--url", upper_url)


def call(id: str, text: str) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}]}
    return {"custom_id": id, "method": "POST", "url": CHAT, "body": body}


def written(path: Path, *values: Any) -> Path:
    lines = (each if isinstance(each, str) else json.dumps(each) for each in values)
    path.write_text("\n".join(lines))
    return path


def answers(path: Path) -> dict[str, Any]:
    found = [json.loads(each) for each in path.read_text().splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found), "once each"
    return {each["custom_id"]: each for each in found}


def text(answer: Any) -> str:
    assert answer["error"] is None
    return str(answer["response"]["body"]["choices"][0]["message"]["content"])


def test_each_line_is_answered_in_order(batch: Callable[..., Ran], tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", *(call(f"c{n}", f"text {n}") for n in range(40)))
    out = tmp_path / "out.jsonl"
    ran = batch(source, out)
    assert (ran.status, ran.stdout) == (0, "")
    assert ran.stderr.startswith("nano-inference: 40 of 40 lines are answered; ")
    found = answers(out)
    assert [(id, text(each)) for id, each in found.items()] == [
        (f"c{n}", f"TEXT {n}") for n in range(40)
    ]
    assert found["c0"]["response"]["body"]["model"] == "upper", "the server's only one"
    assert batch(source, out).status == 0
    assert len(Upper.prompts) == 40, "nothing is sent again"


@pytest.mark.parametrize("cut", [0, 17, 500, -1])
def test_a_cut_off_file_is_repaired(batch: Callable[..., Ran], tmp_path: Path, cut: int) -> None:
    source = written(tmp_path / "in.jsonl", *(call(f"c{n}", f"text {n}") for n in range(6)))
    out = tmp_path / "out.jsonl"
    assert batch(source, out).status == 0
    whole = {id: text(each) for id, each in answers(out).items()}
    content = out.read_bytes()[:cut]
    out.write_bytes(content)
    Upper.prompts = []
    assert batch(source, out).status == 0
    assert {id: text(each) for id, each in answers(out).items()} == whole
    assert len(Upper.prompts) == 6 - content.count(b"\n"), "whole lines are not sent again"


def test_a_line_that_can_not_be_sent_is_an_error_line(
    batch: Callable[..., Ran], tmp_path: Path
) -> None:
    lines: list[Any] = ["no json", call("a", "good"), {"custom_id": "b"}, "", call("c", "bad")]
    lines += ['{"custom_id": "d", "messages": [NaN]}', '"a prompt"', call("e", "x")]
    lines[-1]["body"]["stream"] = True
    out = tmp_path / "out.jsonl"
    ran = batch(written(tmp_path / "in.jsonl", *lines), out)
    assert ran.status == 1
    assert "7 of 7 lines are answered, 5 of them errors (--again" in ran.stderr
    found = answers(out)
    assert [id for id, each in found.items() if each["error"]] == ["1", "b", "6", "e"]
    assert found["c"]["response"]["status_code"] == 400
    assert (text(found["a"]), text(found["7"])) == ("GOOD", "A PROMPT")
    Upper.prompts = []
    batch(tmp_path / "in.jsonl", out, "--again")
    assert Upper.prompts == ["bad"], "errors alone are sent anew"


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_in_and_out(batch: Callable[..., Ran], tmp_path: Path, kind: str) -> None:
    rows = [{"body": f"wörd, {n}\n", "n": n} for n in range(20)]
    source, out = tmp_path / f"in.{kind}", tmp_path / f"out.{kind}"
    if kind == "csv":
        with source.open("w", newline="") as file:
            csv.writer(file).writerows([["body", "n"], *(each.values() for each in rows)])
    else:
        pq.write_table(pa.Table.from_pylist(rows), source)
    assert batch(source, out, "--template", "{n}: {{{body}}}").status == 0
    found: list[dict[str, Any]]
    if kind == "csv":
        with out.open(newline="") as file:
            found = list(csv.DictReader(file))
    else:
        found = pq.read_table(out).to_pylist()
    assert [(each["body"], int(each["n"])) for each in found] == [
        (each["body"], each["n"]) for each in rows
    ]
    assert [each["answer"] for each in found] == [f"{n}: {{WÖRD, {n}\n}}" for n in range(20)]
    assert int(found[0]["answer_completion_tokens"]) == 2
    assert_refused(batch(source, tmp_path / "o.csv", "--template", "{bodi}"), "bodi", "body")
    assert batch(source, out, "--template", "{n}: {{{body}}}").status == 0
    assert len(Upper.prompts) == 20


def test_values_without_a_text_are_error_lines(batch: Callable[..., Ran], tmp_path: Path) -> None:
    source, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    rows = [{"id": "a", "x": 0.5}, {"id": "b", "x": float("nan")}, {"id": "c", "x": None}]
    pq.write_table(pa.Table.from_pylist(rows), source)
    template = '{"messages": [{"role": "user", "content": "x"}], "temperature": "{x}"}'
    assert batch(source, out, "--template", template, "--id", "id").status == 1
    found = pq.read_table(out).to_pylist()
    assert [bool(each["answer_error"]) for each in found] == [False, True, True]
    assert list(answers(tmp_path / "out.parquet.jsonl")) == ["a", "b", "c"]


def test_a_changed_call_is_refused(batch: Callable[..., Ran], tmp_path: Path) -> None:
    source, out = written(tmp_path / "in.jsonl", {"a": "x"}, {"a": "y"}), tmp_path / "out.jsonl"
    assert batch(source, out, "--template", "{a}").status == 0
    assert_refused(batch(source, out, "--template", "{a}!"), "has changed")
    assert_refused(batch(source, out, "--template", "{a}", "--seed", "1"), "has changed")
    assert_refused(batch(written(source, {"a": "x"}), out, "--template", "{a}"), "lacks")
    written(source, {"a": "x"}, {"a": "y"}, {"a": "z"})
    assert batch(source, out, "--template", "{a}").status == 0
    assert [text(each) for each in answers(out).values()] == ["X", "Y", "Z"]


def test_wrong_files_are_refused(batch: Callable[..., Ran], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    good = written(tmp_path / "in.jsonl", call("a", "x"))
    empty = written(tmp_path / "empty.jsonl", " ", "")
    twice = written(tmp_path / "twice.jsonl", call("a", "x"), call("b", "x"), call("a", "y"))
    table = written(tmp_path / "table.csv", "x,y", "1,2")
    wrong = written(tmp_path / "wrong.parquet", "x")
    mine = written(tmp_path / "mine.jsonl", "my own text")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"a,b\n\xff\xfe,1\n")
    for arguments, hint in {
        (tmp_path / "none.jsonl", out): "No such file",
        (good, good): "the same",
        (good, tmp_path / "out.txt"): ".parquet",
        (good, tmp_path / "no folder" / "out.jsonl"): "can't write",
        (good, mine): "line 1 is no answer",
        (empty, out): "no line",
        (twice, out): "lines 1 and 3",
        (table, out): "no column prompt",
        (table, out, "--template", "{x} {"): "--template",
        (table, out, "--template", '{"messages": ['): "no valid JSON",
        (table, tmp_path / "o.csv", "--template", "{x}", "--answer", "y"): "--answer",
        (wrong, out): "Parquet",
        (binary, out, "--template", "{a}"): "UTF-8",
    }.items():
        assert_refused(batch(*arguments), hint)
        assert not out.exists(), "nothing is left"
    with Journal(out):
        assert_refused(batch(good, out), "another command")
    assert mine.read_text() == "my own text"
    assert Upper.prompts == []


def test_a_full_disk_loses_no_answer(batch: Callable[..., Ran], tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", *(call(f"c{n}", f"text {n}") for n in range(20)))
    out = tmp_path / "out.jsonl"
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
    try:
        ran = batch(source, out, "--concurrency", "2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert ran.status == 2
    assert "the same command goes on" in ran.stderr
    kept = answers(out)
    assert 0 < len(kept) < 20
    Upper.prompts = []
    assert batch(source, out).status == 0
    # A set: what the first run had asked for last may come late, and is asked for again.
    assert (len(answers(out)), len({*Upper.prompts})) == (20, 20 - len(kept))


def test_a_refusal_for_load_is_tried_again(batch: Callable[..., Ran], tmp_path: Path) -> None:
    source, out = written(tmp_path / "in.jsonl", call("a", "x")), tmp_path / "out.jsonl"
    Upper.refusals = [429, 503]
    assert batch(source, out).status == 0
    assert text(answers(out)["a"]) == "X"
    other = tmp_path / "other.jsonl"
    Upper.refusals = [401]
    ran = batch(source, other)
    assert ran.status == 2
    assert "not now" in ran.stderr
    assert not other.exists(), "no line's answer is that of a wrong key"


@pytest.mark.slow
def test_a_killed_command_loses_and_doubles_nothing(
    batch: Callable[..., Ran], program: list[str], upper_url: str, tmp_path: Path
) -> None:
    source = written(tmp_path / "in.jsonl", *(call(f"c{n}", f"text {n}") for n in range(300)))
    out = tmp_path / "out.jsonl"
    Upper.slow = lambda: time.sleep(0.02)
    command = [*program, "batch", "run", source, out, "--url", upper_url, "--concurrency", "4"]
    for killed in (3, 60, 150):
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            while not out.exists() or out.read_bytes().count(b"\n") < killed:
                assert process.poll() is None
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGKILL)
    assert len(answers(out)) < 300
    assert batch(source, out).status == 0
    assert [text(each) for each in answers(out).values()] == [f"TEXT {n}" for n in range(300)]
    assert len(Upper.prompts) <= 300 + 3 * 4, "calls in flight alone are sent again"


@pytest.mark.slow
def test_an_engine_in_the_process_answers_as_a_server(run: Run, url: str, tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", *({"n": n} for n in range(20)))
    local, served = tmp_path / "local.jsonl", tmp_path / "served.jsonl"
    same = ["--template", "What is {n} + 30?", "--model", "tiny"]
    more = ["--set", "engine.dtype=float32"]
    assert run("batch", "run", str(source), str(local), *same, *more, "--local").status == 0
    assert run("batch", "run", str(source), str(served), *same, "--url", url).status == 0
    found = [{id: text(each) for id, each in answers(out).items()} for out in (local, served)]
    assert found[0] == found[1]
    assert found[0]["13"] == "42"


def test_a_batch_of_the_server(
    run: Run, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "LOOK_S", 0.02)
    rows = [{"custom_id": f"c{n}", "n": n} for n in range(10)]
    source, out = written(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl"
    at = ["--url", url]
    made = run("batch", "submit", str(source), "--template", "What is {n} + 30?", *at)
    assert made.status == 0, made.stderr
    id = made.stdout.strip()
    ran = run("batch", "results", id, str(out), *at)
    assert (ran.status, ran.stdout) == (0, ""), ran.stderr
    assert text(answers(out)["c9"]) == "39"
    assert "10 completed" in run("batch", "status", id, *at).stdout
    assert f"{id}  completed     10/10  " in run("batch", "list", *at).stdout
    assert_refused(run("batch", "cancel", id, *at), "no line is left")
    assert_refused(run("batch", "status", "batch_none", *at), "batch_none")


def test_files_of_the_server(run: Run, url: str, tmp_path: Path) -> None:
    source, out, at = tmp_path / "in.jsonl", tmp_path / "out.jsonl", ["--url", url]
    source.write_bytes('{"ü": 1}\n'.encode())
    made = run("files", "upload", str(source), *at)
    assert made.status == 0, made.stderr
    id = made.stdout.strip()
    listed = run("files", "list", "--purpose", "batch", *at).stdout
    assert re.search(rf"{id} +10 bytes +[-0-9]+ [0-9:]+ +in.jsonl", listed)
    record = json.loads(run("files", "get", id, "--json", *at).stdout)
    assert record in map(json.loads, run("files", "list", "--json", *at).stdout.splitlines())
    assert run("files", "get", id, *at).stdout == source.read_text()
    assert run("files", "get", id, str(out), *at).status == 0
    assert out.read_bytes() == source.read_bytes()
    assert run("files", "delete", id, *at).stderr == f"nano-inference: {id} is deleted\n"
    for command in ("get", "delete"):
        assert_refused(run("files", command, id, *at), id)
    assert_refused(run("files", "upload", str(tmp_path / "none"), *at), "can't read")
