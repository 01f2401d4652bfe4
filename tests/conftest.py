"""Set-up of the tests: eight simulated CPU devices, GPU programs compiled without a GPU, the GPU of `gpu` tests."""

import gc
import os
import resource
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

# JAX reads this when it loads its CUDA plugin; without it the plugin requires a driver.
os.environ["HF_HUB_OFFLINE"] = "1"  # a misspelt folder looks like the id of a model; no test asks the real hub
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# Compiling takes most of the time of a CPU test. The environment variable also reaches commands that tests start.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# XLA's older code generator for CPUs takes half the time. Its flag has another name in 0.11, which aborts on the old
# one. Two tests run at a time on two cores: XLA's own threads add work and save no time.
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        # XLA would time many variants of each matmul, for minutes: the blocks of attention all have different shapes.
        "--xla_gpu_autotune_level=0" if os.path.exists("/dev/nvidia0") else "",
        "--xla_cpu_use_fusion_emitters=false"
        if version("jaxlib") < "0.11"
        else "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_gpu_force_compilation_parallelism=1",
    )
)
# Compiled programs are kept from one test run to the next (remembered.py). Their keys include the names of operations,
# which tests read, and exclude source lines, which every edit moves.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"  # small programs are a fifth of a second run
os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
os.environ["JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY"] = "1"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# Parallel tests share the GPU. By default JAX would give three quarters of it to the first process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import pytest
import remembered
import selection
from jax._src import compilation_cache
from jax._src.lru_cache import LRUCache

from jaxopt_llm.compiler import topology
from jaxopt_llm.distributed import runtime
from jaxopt_llm.distributed.runtime import simulate_cpu_devices
from jaxopt_llm.kernels import attention_auto
from jaxopt_llm.parallel import mesh

runtime.make_private(remembered.FOLDER)
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(remembered.PROGRAMS)  # for the commands that tests start
jax.config.update("jax_compilation_cache_dir", str(remembered.PROGRAMS))
simulate_cpu_devices(8)
gc.set_threshold(50_000, 20, 20)  # tracing creates many objects and few cycles
STARTED = time.monotonic()
COLLECTED = pytest.StashKey[set[str]]()  # node ids before deselection
LEFT_OUT, LEFT_OUT_OF_WORKER = pytest.StashKey[list[str]](), "slow_tests_left_out"
MEASURED: dict[str, float] = {}  # CPU seconds of each test, with --measure
# A test run that nohup or a shell started in the background ignores these signals, and so would all programs that tests
# start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
# The default device is a CPU even on a machine with a GPU. A test that runs on the GPU uses the fixture `gpu`.
jax.config.update("jax_default_device", jax.devices("cpu")[0])


@pytest.fixture(autouse=True, scope="session")
def nothing_measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make `training.attention auto` choose from an empty table, independent of the table in the package."""
    table = tmp_path_factory.mktemp("measured") / "table.json"
    table.write_text("[]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_auto, "TABLE", table)
        yield


@pytest.fixture(autouse=True, scope="module")
def kept_out_of_garbage_collection() -> Iterator[None]:
    """Exclude traced programs from garbage collection.

    They are kept until the process ends: a gigabyte of small objects that the collector would scan again and again.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def compiled_once() -> Iterator[None]:
    """Reuse the programs that earlier test runs have compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "run_xla", remembered.run_xla)
        patch.setattr(compilation_cache, "put_executable_and_time", remembered.keep_restorable)
        patch.setattr(LRUCache, "put", remembered.put_whole)
        patch.setattr(mesh, "disable_compilation_cache", lambda: None)
        yield


@pytest.fixture
def compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile every program, for tests of compiling itself."""
    monkeypatch.setattr(topology, "run_xla", remembered.compile_anew)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-tests-on-cpu", action="store_true", help="try the tests marked gpu on the CPU, which proves no GPU right"
    )
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, and no others")
    parser.addoption("--slow-share", metavar="K/N", help="run part K of N of these, too (0/8 to 7/8)")
    parser.addoption("--measure", action="store_true", help="measure all unmarked tests, and write tests/expensive.txt")
    parser.addoption("--quick", action="store_true", help="run the tests nearest to the change for at most two minutes")


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        remembered.forget_unused()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = {item.nodeid for item in items}
    expensive = set() if config.option.measure else selection.read_expensive()
    for item in items:
        if item.nodeid in expensive:
            item.add_marker(pytest.mark.slow)
    slow = [item for item in items if item.get_closest_marker("slow")]
    if all("::" in argument for argument in config.args):
        chosen = items  # each test is named on the command line
    elif config.option.slow:
        chosen = slow
    elif config.option.slow_share:
        part, parts = map(int, config.option.slow_share.split("/"))
        share, left = selection.share_of(slow, part, parts, selection.changed_files())
        chosen = [item for item in items if item not in slow or item in share]
        note_touched_files(config, left)
    else:
        chosen = [item for item in items if item not in slow]
    if config.option.quick:
        distance = selection.distances({item.path for item in chosen}, selection.changed_files())
        chosen = [item for item in chosen if distance[item.path] < selection.FAR]
        chosen.sort(key=lambda item: distance[item.path])
    config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
    items[:] = chosen
    for item in items:
        if item.get_closest_marker("gpu") and not (config.option.gpu_tests_on_cpu or gpus()):
            item.add_marker(pytest.mark.skip(reason="no GPU is visible to JAX"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note the CPU time of a test, with the commands that it starts and waits for."""
    before = _cpu_seconds()
    result = yield
    if item.config.option.measure:
        MEASURED[item.nodeid] = _cpu_seconds() - before
    return result


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def note_touched_files(config: pytest.Config, left: list[pytest.Item]) -> None:
    """Keep for the summary the files whose slow tests the change touches but this run leaves out."""
    files = sorted({str(item.path.relative_to(selection.ROOT)) for item in left})
    config.stash[LEFT_OUT] = files
    if hasattr(config, "workeroutput"):
        config.workeroutput[LEFT_OUT_OF_WORKER] = files


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    output = getattr(node, "workeroutput", {})  # a worker that crashed has none
    if LEFT_OUT_OF_WORKER in output:
        node.config.stash[LEFT_OUT] = output[LEFT_OUT_OF_WORKER]
    MEASURED.update(output.get("measured", {}))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.option.quick and time.monotonic() - STARTED > selection.QUICK_SECONDS:
        pytest.skip("--quick has run for its time: scripts/test runs all")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """End --quick with 0 if no test is near the change, for example a change of a document."""
    if session.config.option.quick and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["measured"] = MEASURED
    elif session.config.option.measure:
        selection.write_expensive(MEASURED)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the skipped tests by reason, and print the command that runs each failed test again."""
    write, stats = terminalreporter.write_line, terminalreporter.stats
    venv = shlex.quote(os.path.relpath(sys.prefix, selection.ROOT))
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in stats.get("skipped", []))
    if reasons:
        terminalreporter.section("skipped")
        for reason, count in reasons.most_common():
            write(f"{count:5}  {reason}")
    if left := terminalreporter.config.stash.get(LEFT_OUT, []):
        terminalreporter.section("slow tests of the change that did not run, because it touches so many")
        write(f"VENV={venv} scripts/test --slow {shlex.join(left)}")
    failed = dict.fromkeys(report.nodeid for kind in ("failed", "error") for report in stats.get(kind, []))
    if failed:
        terminalreporter.section("to run a failed test again by itself")
        for test in failed:
            write(f"VENV={venv} scripts/test --numprocesses 0 {shlex.quote(test)}")


def gpus() -> list[jax.Device]:
    try:
        return jax.devices("gpu")
    except RuntimeError:
        return []


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[jax.Device]:
    """Make the first GPU the default device. Programs for it are optimised: XLA has no other GPU code.

    With --gpu-tests-on-cpu it is a simulated device that is not the default device of other tests.
    """
    device = jax.devices("cpu")[-1] if request.config.option.gpu_tests_on_cpu else gpus()[0]
    jax.config.update("jax_disable_most_optimizations", False)
    with jax.default_device(device):
        yield device
    jax.config.update("jax_disable_most_optimizations", True)
