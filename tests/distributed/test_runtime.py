"""Settings that are made before JAX opens a device."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import commands
import jax
import jax.numpy as jnp
import pytest

from jaxopt_llm.compiler import topology
from jaxopt_llm.compiler.topology import gpu_topology
from jaxopt_llm.config import MeshConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.distributed import runtime
from jaxopt_llm.distributed.launchers import Job
from jaxopt_llm.distributed.runtime import CPU_THREADS


@pytest.fixture
def no_cache_chosen() -> Iterator[None]:
    """Unset the folder of compiled programs, as for a user who names none."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", folder)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(runtime, "simulate_cpu_devices", lambda count, processes: None)
    return environment


@pytest.mark.core
@pytest.mark.slow
def test_only_the_user_can_read_the_cached_programs_of_a_run(tmp_path: Path) -> None:
    small = {"training.steps": 1, "evaluation.every": 1}
    arguments = [*commands.tiny(tmp_path / "run"), *(f"--{name}={value}" for name, value in small.items())]
    cache = {"XDG_CACHE_HOME": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": ""}
    process = commands.start("train", *arguments, **cache, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
    assert process.communicate(timeout=300) and process.returncode == 0
    (programs,) = (tmp_path / "jaxopt_llm" / "programs").iterdir()
    assert programs.stat().st_mode & 0o777 == 0o700
    assert any(programs.iterdir())


@pytest.mark.usefixtures("environment", "no_cache_chosen")
def test_a_cache_that_others_can_write_is_refused() -> None:
    runtime.cache_directory().mkdir(parents=True)
    runtime.cache_directory().chmod(0o777)
    with pytest.raises(InputError, match="is writable by others; run chmod 700"):
        runtime.configure_jax(1, cache=True)


@pytest.mark.parametrize("users", [{}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}])
def test_the_memory_fraction_is_raised_unless_the_user_set_one(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, users: dict[str, str]
) -> None:
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    environment.update(users)
    runtime.configure_jax(1, cache=False)
    # JAX refuses to start with both variables.
    fractions = {name: value for name, value in environment.items() if "FRACTION" in name}
    assert fractions == (users or {"XLA_CLIENT_MEM_FRACTION": runtime.MEMORY_FRACTION})


@pytest.mark.core
@pytest.mark.skipif(any(map(os.path.exists, runtime.NVIDIA_DEVICES)), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_says_nothing_about_cuda(tmp_path: Path) -> None:
    """The extra `plan`, which the tests have, installs JAX's CUDA plugin without NVIDIA's libraries."""

    def run(*arguments: object) -> None:
        process = commands.start(*map(str, arguments), JAX_PLATFORMS="", JAX_SKIP_CUDA_CONSTRAINTS_CHECK="")
        assert process.communicate(timeout=300)[1] == "" and process.returncode == 0

    run("train", *commands.tiny(tmp_path / "run"), "--training.steps", 1)
    run("evaluate", "--checkpoint", tmp_path / "run", "--batches", 1)


@pytest.mark.parametrize("platforms, device, hidden", [("", None, True), ("", "nvidia0", False), ("cuda", None, False)])
def test_jax_reports_what_cuda_lacks_on_a_machine_with_a_gpu(
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    platforms: str,
    device: str | None,
    hidden: bool,
) -> None:
    monkeypatch.setattr(runtime, "NVIDIA_DEVICES", (tmp_path / "nvidia0", tmp_path / "nvidiactl"))
    configured = SimpleNamespace(values={"jax_platforms": platforms, "jax_num_cpu_devices": -1})
    monkeypatch.setattr(runtime, "jax", SimpleNamespace(config=configured))
    if device:
        (tmp_path / device).touch()
    runtime.prepare_devices()
    assert ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK" in environment) == hidden


@pytest.mark.core
@pytest.mark.usefixtures("compiled_anew")
def test_xla_takes_the_options_of_a_repeatable_run(tmp_path: Path) -> None:
    device = jax.sharding.SingleDeviceSharding(gpu_topology("h200")[0])
    # Not a matmul: without a device there is no autotuning, and jax 0.11.2 then has no repeatable algorithm for it.
    lowered = jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((256,), jnp.float32, sharding=device))
    first = runtime.repeatable_options(lowered, tmp_path)
    assert first["xla_gpu_exclude_nondeterministic_ops"]
    choices = Path(str(first["xla_gpu_dump_autotune_results_to"]))
    topology.run_xla(lowered, first)
    choices.write_text("version: 3\n")
    second = runtime.repeatable_options(lowered, tmp_path)
    assert second["xla_gpu_exclude_nondeterministic_ops"]
    assert second["xla_gpu_load_autotune_results_from"] == str(choices) and choices.parent == tmp_path
    assert "xla_gpu_dump_autotune_results_to" not in second
    topology.run_xla(lowered, second)
    other = jax.jit(jnp.cos).lower(jax.ShapeDtypeStruct((256,), jnp.float32, sharding=device))
    assert runtime.repeatable_options(other, tmp_path)["xla_gpu_dump_autotune_results_to"] != str(choices)
    assert "xla_gpu_dump_autotune_results_to" not in runtime.repeatable_options(other, tmp_path, writes=False)


@pytest.mark.usefixtures("no_cache_chosen")
def test_an_unwritable_home_disables_only_the_cache(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    environment["XDG_CACHE_HOME"] = "/proc"
    runtime.configure_jax(1, cache=True)
    assert "compiled programs are not cached" in capsys.readouterr().err


def test_each_processor_has_its_own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    here = runtime.cache_directory()
    monkeypatch.setattr(runtime, "_processor", lambda: "another")
    assert runtime.cache_directory().parent == here.parent
    assert runtime.cache_directory() != here


@pytest.mark.core
@pytest.mark.skipif(sys.platform != "linux", reason="counts this process's threads")
def test_simulated_devices_have_threads_to_wait_in() -> None:
    """Check the number: with too few threads, programs with two collectives at once sometimes end the process."""
    jnp.zeros(1).block_until_ready()
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    assert sum("XLAEigen" in name for name in names) >= CPU_THREADS * len(jax.devices("cpu"))


def test_devices_divide_over_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int | None, int]] = []
    monkeypatch.setattr(runtime, "configure_jax", lambda count, processes, cache: asked.append((count, processes)))
    monkeypatch.setattr(runtime, "find_simulated", lambda: 0)
    four = Job("", 4, 0)
    runtime.configure_mesh(MeshConfig(fsdp=8), four, cache=True)
    with pytest.raises(InputError, match=r"6 device\(s\) do not divide over 4 processes"):
        runtime.configure_mesh(MeshConfig(fsdp=6), four, cache=True)
    runtime.configure_mesh(MeshConfig(), four, cache=True)  # simulated on CPUs: one in each process
    runtime.configure_mesh(MeshConfig(tensor=6), four, cache=True)
    assert asked == [(8, 4), (4, 4), (12, 4)]


def test_auto_takes_the_devices_that_the_environment_simulates(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    monkeypatch.setattr(runtime, "configure_jax", lambda count, processes, cache: asked.append(count))
    one = Job("", 1, 0)
    runtime.configure_mesh(MeshConfig(tensor=2), one, cache=True)  # the tests simulate eight
    assert asked == [None], "JAX finds them"
    runtime.configure_mesh(MeshConfig(), Job("", 2, 0), cache=True)
    runtime.configure_mesh(MeshConfig(fsdp=1), one, cache=True)
    assert asked[1:] == [16, 1]
    monkeypatch.setattr(runtime, "find_simulated", lambda: 0)
    runtime.configure_mesh(MeshConfig(), one, cache=True)  # a model of the user's own may have opened a device
    runtime.configure_mesh(MeshConfig(tensor=2), one, cache=True)
    assert asked[3:] == [None, 2]


def test_both_ways_to_simulate_devices_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime.find_simulated() == 8
    values = {**jax.config.values, "jax_num_cpu_devices": -1}
    monkeypatch.setattr(runtime, "jax", SimpleNamespace(config=SimpleNamespace(values=values)))
    for flags, count in (("", 0), ("--xla_force_host_platform_device_count=4 --xla_other=8", 4)):
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert runtime.find_simulated() == count
