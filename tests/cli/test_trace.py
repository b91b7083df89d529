"""trace on the terminal, as a page, and for Jaeger; the waterfall of a Completion."""

from __future__ import annotations

import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from nano_inference.bus.public import Completion, ErrorInfo, StageTime, Timings, Usage
from nano_inference.cli.trace import Waterfall
from nano_inference.config import TelemetryConfig
from nano_inference.telemetry import TraceContext, names, setup_tracing

from .conftest import Run, assert_refused

BEGIN = 1_763_645_212_345_000_000


def at(milliseconds: float) -> int:
    return BEGIN + round(milliseconds * 1e6)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two processes, two requests; the first one was replayed and ended with an error."""
    path = tmp_path / "traces.jsonl"
    config = TelemetryConfig(trace_file=str(path))
    first, second = (setup_tracing(config, f"here-{number}") for number in (1, 2))

    def of(stage: str, request_id: str = "r-1") -> dict[str, str]:
        return {names.STAGE: stage, names.REQUEST_ID: request_id}

    for _ in range(2):  # its successor made it again
        attributes = of("admission") | {names.MESSAGE_ID: "17-0"}
        root = first.begin("17-0")
        first.span("admission", TraceContext(), at(0), at(1), attributes, own=root)
    first.span("replay", root, at(4), at(6), of("admission"), events=[(names.REPLAYED, at(6))])
    second.span("fairness", root, at(1), at(3), of("fairness"))
    executor = second.begin_below(root)
    second.span("executor", root, at(6), at(9), of("executor"), own=executor)
    second.span("prefill", executor, at(6), at(7), of("executor"))
    second.span(
        *("streaming", root, at(7), at(10), of("streaming") | {"text": "<script>"}), error="expired"
    )
    second.span(
        "step", TraceContext(), at(6), at(7), {names.BATCH_SIZE: 3}, links=[root.traceparent]
    )
    second.span("admission", TraceContext(), at(0), at(1), of("admission", "r-2"))
    first.shutdown()
    second.shutdown()
    return path


WATERFALL = """\
request r-1   10.00 ms
trace   {trace}   6 spans, 2 processes
                                                               start ms  took ms
admission     ████▊                                                0.00     1.00
  fairness        ▕█████████▏                                      1.00     2.00
  replay                        ▕█████████▎                        4.00     2.00
    replayed                              ▲                        6.00
  executor                                ██████████████▎          6.00     3.00
    prefill                               ████▉                    6.00     1.00
  streaming                                   ▕██████████████      7.00     3.00
    error     expired
recorded steps: 1, of 3 to 3 sequences
"""


def trace_id_of(path: Path) -> str:
    content = json.loads(path.read_text().splitlines()[0])
    trace_id: str = content["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["traceId"]
    return trace_id


def test_a_waterfall_on_the_terminal(run: Run, file: Path) -> None:
    done = run("trace", "r-1", "--file", str(file))
    assert done.status == 0, done.stderr
    shown = [line.rstrip() for line in done.stdout.splitlines()]
    assert shown == WATERFALL.format(trace=trace_id_of(file)).splitlines()


@pytest.mark.parametrize("wanted", ["17-0", "the trace"])
def test_a_request_is_found_by_entry_and_trace_id(run: Run, file: Path, wanted: str) -> None:
    wanted = trace_id_of(file) if wanted == "the trace" else wanted
    done = run("trace", wanted, "--set", f"telemetry.trace_file={file}")
    assert done.stdout.startswith("request r-1 ")


class Page(HTMLParser):
    """A trace page as a browser would show it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.words += [data.strip()] if data.strip() else []


def test_the_page_is_self_contained(run: Run, file: Path, tmp_path: Path) -> None:
    target = tmp_path / "trace.html"
    done = run("trace", "r-1", "--file", str(file), "--html", str(target))
    assert (done.status, done.stdout) == (0, "")
    text = target.read_text()
    page = Page(text)
    assert page.links == []
    assert "script" not in page.tags, "what a span says is text"
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    for word in ("r-1", "replay", "prefill", "streaming", "expired", "<script>", "here-2", "step"):
        assert word in page.words
    assert page.tags.count("details") == 7, "six spans and a step"


def test_jaeger_file(run: Run, file: Path, tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    assert run("trace", "r-1", "--file", str(file), "--jaeger", str(target)).status == 0
    (trace,) = json.loads(target.read_text())["data"]
    spans = {span["operationName"]: span for span in trace["spans"]}
    assert len(trace["spans"]) == 6
    assert trace["traceID"] == trace_id_of(file)
    assert spans["admission"]["references"] == []
    (parent,) = spans["prefill"]["references"]
    assert (parent["refType"], parent["traceID"]) == ("CHILD_OF", trace["traceID"])
    assert parent["spanID"] == spans["executor"]["spanID"]
    assert (spans["executor"]["startTime"], spans["executor"]["duration"]) == (at(6) // 1000, 3000)
    assert {"key": "error", "type": "bool", "value": True} in spans["streaming"]["tags"]
    (log,) = spans["replay"]["logs"]
    assert log["fields"] == [{"key": "event", "type": "string", "value": names.REPLAYED}]
    processes = [trace["processes"][span["processID"]]["serviceName"] for span in trace["spans"]]
    assert (set(processes), len(trace["processes"])) == ({"nano-inference"}, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("r-1", "--html", "x.html"), "write the spans of a trace file"),
        (("r-1", "--file", "nowhere.jsonl"), "can't be read"),
        (("r-9", "--file", "FILE"), "no span of 'r-9'"),
        (("r-1", "--file", "FILE", "--html", "/nowhere/x.html"), "can't be written"),
    ],
)
def test_an_error_is_one_sentence(
    run: Run, file: Path, arguments: tuple[str, ...], words: str
) -> None:
    done = run("trace", *(str(file) if each == "FILE" else each for each in arguments))
    assert_refused(done, words)


# --- waterfall of a Completion --------------------------------------------------------------------


def completion(*stages: tuple[str, float, float], first: float, end: float) -> Completion:
    times = [StageTime(stage=name, start_ns=at(a), end_ns=at(b)) for name, a, b in stages]
    timings = {"received_ns": BEGIN, "first_token_ns": at(first), "finished_ns": at(end)}
    return Completion(
        request_id="1763645212345-0",
        entry_id="1763645212345-0",
        status="done",
        timings=Timings(**timings, stages=tuple(times)),
        trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
    )


ORDINARY = completion(
    ("admission", 0, 0.42),
    ("fairness", 0.42, 0.47),
    ("batching", 0.47, 0.93),
    ("executor", 0.93, 11.8),
    ("streaming", 2.2, 12.34),
    first=4.1,
    end=12.34,
)


def drawn(shown: Completion, width: int = 80, encoding: str = "utf-8") -> list[str]:
    out = io.TextIOWrapper(io.BytesIO(), encoding)
    Console(file=out, width=width, color_system=None).print(Waterfall(shown))
    out.seek(0)
    return [line.rstrip() for line in out]


def test_at_80_columns() -> None:
    assert drawn(ORDINARY) == [
        "request 1763645212345-0 done   total 12.34 ms   first token 4.10 ms",
        "trace   4bf92f3577b34da6a3ce929d0e0e4736",
        "                                                               start ms  took ms",
        "admission    █▋                                                    0.00     0.42",
        "fairness      ▐                                                    0.42     0.05",
        "batching      ▕█▋                                                  0.47     0.46",
        "executor        ▐█████████████████████████████████████████▉        0.93    10.87",
        "streaming            ▐███████████████████████████████████████      2.20    10.14",
        "first token                 ▲                                      4.10",
    ]


def test_narrow() -> None:
    lines = drawn(ORDINARY, width=50)
    assert lines[:2] == ["request 1763645212345-0 done", "total 12.34 ms   first token 4.10 ms"]
    assert max(map(len, lines)) <= 50


def test_ascii() -> None:
    lines = drawn(ORDINARY, encoding="ascii")
    assert all(line.isascii() for line in lines)
    assert lines[3].split() == ["admission", "##", "0.00", "0.42"]
    assert lines[-1].split() == ["first", "token", "^", "4.10"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_stage_shows_however_short(width: int) -> None:
    shown = completion(
        ("admission", 0, 0),
        ("fairness", 5_000, 5_000.001),
        ("batching", 99_999.999, 100_000),
        ("executor", 100_000, 100_000),
        first=100_000,
        end=100_000,
    )
    rows = drawn(shown, width=width)[3:]
    assert [len(row.split()) for row in rows[:4]] == [4, 4, 4, 4]
    assert max(map(len, rows)) <= width


@pytest.mark.parametrize(("encoding", "mark"), [("utf-8", "▏"), ("ascii", "|")])
def test_times_that_are_all_the_same(encoding: str, mark: str) -> None:
    rows = drawn(completion(("admission", 0, 0), first=0, end=0), encoding=encoding)[3:]
    assert rows[0].split() == ["admission", mark, "0.00", "0.00"]


def test_clocks_that_disagree_stay_within_the_line() -> None:
    rows = drawn(completion(("admission", -5, 1), ("executor", 3, 2), first=1, end=2))[3:]
    assert max(map(len, rows)) <= 80
    assert rows[1].split()[-2:] == ["8.00", "-1.00"]


def test_refused_request_has_no_stages() -> None:
    error = ErrorInfo(code="invalid_n", message="n is 0")
    ended = {"status": "error", "error": error, "timings": Timings(finished_ns=BEGIN)}
    refused = Completion(request_id="a", entry_id="1-0", **ended)
    assert drawn(refused) == ["request a error", "no stage has recorded a time"]


def test_causes_of_time_add_up_to_the_total() -> None:
    time = {"queue": 1_000_000, "own_prefill": 2_000_000, "own_decode": 7_000_000}
    completion = Completion(
        request_id="r",
        entry_id="e",
        status="done",
        usage=Usage(time=time),
        timings=Timings(
            published_ns=BEGIN,
            received_ns=BEGIN + 1_000_000,
            first_token_ns=BEGIN + 3_000_000,
            finished_ns=BEGIN + 10_000_000,
            stages=(
                StageTime(stage="admission", start_ns=BEGIN + 1_000_000, end_ns=BEGIN + 10**7),
            ),
        ),
    )
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(Waterfall(completion))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert lines[0][3:6] == ["total", "10.00", "ms"]
    assert lines[0][-2:] == ["3.00", "ms"]
    assert lines[2][0] == "admission"
    assert lines[2][-2:] == ["1.00", "9.00"]
    assert ["own", "decode"] in [line[:2] for line in lines if "70.0%" in line]
    assert lines[-1] == ["sum", "10.00"]
