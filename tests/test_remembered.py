"""A program is compiled again exactly when something that XLA is given has changed."""

import dataclasses
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import remembered
from jax._src import compilation_cache
from jax._src.lru_cache import LRUCache
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxopt_llm.compiler import hlo, topology
from jaxopt_llm.compiler.buffers import find_peak
from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.compiler.topology import gpu_topology

pytestmark = pytest.mark.core

OPTIONS = {"xla_gpu_enable_triton_gemm": False}


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "READINGS", tmp_path / "readings")


def lowered(
    scope: str = "product",
    hosts: int = 1,
    gpus: int = 8,
    number: int = 7,
    function: Callable[..., Any] = jnp.tanh,
    **options: Any,
) -> jax.stages.Lowered:
    """Return a small program for one GPU: that of this number among the GPUs of all hosts. options: of `jax.jit`."""
    device = gpu_topology("h200", hosts, gpus // hosts)[number]
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))

    def program(x: jax.Array) -> jax.Array:
        with jax.named_scope(scope):
            return function(x) @ x

    return jax.jit(program, compiler_options=options or None).lower(x)


def changed_program(_: pytest.MonkeyPatch) -> str:
    return remembered.key(lowered(function=jnp.sin), OPTIONS)


def changed_name_of_an_operation(_: pytest.MonkeyPatch) -> str:
    return remembered.key(lowered(scope="other"), OPTIONS)


def changed_options(_: pytest.MonkeyPatch) -> str:
    return remembered.key(lowered(), {"xla_gpu_enable_triton_gemm": True})


def changed_options_of_jit(_: pytest.MonkeyPatch) -> str:
    return remembered.key(lowered(xla_gpu_enable_latency_hiding_scheduler=True), OPTIONS)


def changed_flags(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    return remembered.key(lowered(), OPTIONS)


def changed_setting_of_jax(_: pytest.MonkeyPatch) -> str:
    with jax.disable_jit(False), jax.numpy_rank_promotion("warn"):
        return remembered.key(lowered(), OPTIONS)


def changed_hosts(_: pytest.MonkeyPatch) -> str:
    """The GPU of the same number, in another process."""
    return remembered.key(lowered(hosts=8, number=7), OPTIONS)


def changed_device(_: pytest.MonkeyPatch) -> str:
    return remembered.key(lowered(number=6), OPTIONS)


def changed_number_of_devices(_: pytest.MonkeyPatch) -> str:
    """The program still runs on one of them."""
    return remembered.key(lowered(gpus=16), OPTIONS)


def changed_chip(monkeypatch: pytest.MonkeyPatch) -> str:
    smaller = dataclasses.replace(CHIPS["h200"], memory_bytes=2**36)
    monkeypatch.setitem(CHIPS, "h200", smaller)
    return remembered.key(lowered(), OPTIONS)


def changed_version(monkeypatch: pytest.MonkeyPatch) -> str:
    read = metadata.Distribution.version.fget
    assert read is not None

    def version(found: metadata.Distribution) -> str:
        return read(found) + ".1" * (found.metadata["Name"] == "jax-cuda13-pjrt")

    monkeypatch.setattr(metadata.Distribution, "version", property(version))
    remembered.versions.cache_clear()
    try:
        return remembered.key(lowered(), OPTIONS)
    finally:
        remembered.versions.cache_clear()


def changed_toolkit(_: pytest.MonkeyPatch) -> str:
    return remembered.key(lowered(), OPTIONS | {"xla_gpu_cuda_data_dir": "elsewhere"})


def changed_assembler(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(shutil, "which", lambda name: __file__)
    return remembered.key(lowered(), OPTIONS)


def changed_dump(_: pytest.MonkeyPatch) -> str:
    return remembered.key(lowered(), {**OPTIONS, "xla_dump_to": "folder"})


@pytest.mark.parametrize(
    "change",
    [
        changed_program,
        changed_name_of_an_operation,
        changed_options,
        changed_options_of_jit,
        changed_flags,
        changed_setting_of_jax,
        changed_hosts,
        changed_device,
        changed_number_of_devices,
        changed_chip,
        changed_version,
        changed_toolkit,
        changed_assembler,
        changed_dump,
    ],
)
def test_whatever_xla_is_given_changes_the_key(
    change: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: sys.executable)  # as if there were an assembler
    before = remembered.key(lowered(), OPTIONS)
    assert change(monkeypatch) != before


def test_where_folders_are_changes_nothing() -> None:
    one, other = ({"xla_gpu_cuda_data_dir": folder, "xla_dump_to": folder} for folder in ("here", "there"))
    assert remembered.key(lowered(), one) == remembered.key(lowered(), other)


def test_versions_name_the_compilers() -> None:
    assert {"jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt"} <= {name for name, _ in remembered.versions()}


def test_a_kept_program_reads_as_the_compiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = remembered.compile_anew(lowered(), OPTIONS)
    remembered.run_xla(lowered(), OPTIONS)
    monkeypatch.setattr(remembered, "compile_anew", None)  # which nothing may call any more
    kept = remembered.run_xla(lowered(), OPTIONS)
    assert kept.as_text() == compiled.as_text() and "product" in kept.as_text()
    assert hlo.read_memory(kept) == hlo.read_memory(compiled)


def test_what_is_not_kept_is_compiled() -> None:
    for _ in range(2):
        (device,) = remembered.run_xla(lowered(), OPTIONS).output_shardings.device_set
        assert device.device_kind == "NVIDIA H200"


def test_buffers_are_listed_from_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "run_xla", remembered.run_xla)
    program = lowered(function=lambda x: jnp.tanh(x) @ x)  # whose first product is a temporary
    buffers = find_peak(program).temporaries
    assert buffers
    monkeypatch.setattr(remembered, "compile_anew", None)
    assert find_peak(program).temporaries == buffers


@pytest.mark.parametrize(("said", "kept"), [(f"{topology.NO_KERNEL[0]} for it", True), ("No space left", False)])
def test_a_failure_is_kept_if_it_comes_from_the_program(said: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        tried.append(said)
        raise jax.errors.JaxRuntimeError(said)

    tried: list[str] = []
    monkeypatch.setattr(remembered, "compile_anew", fail)
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=said):
            remembered.run_xla(lowered(), OPTIONS)
    assert len(tried) == 2 - kept


@pytest.mark.parametrize("size", [0, 200])
def test_a_torn_file_is_written_again(size: int) -> None:
    text = remembered.run_xla(lowered(), OPTIONS).as_text()
    (file,) = remembered.READINGS.iterdir()
    file.write_bytes(file.read_bytes()[:size])
    assert remembered.run_xla(lowered(), OPTIONS).as_text() == text
    assert remembered.kept_in(file)["text"] == text


def test_a_program_is_kept_whole(tmp_path: Path) -> None:
    """JAX finds it where it looks, and what is there already stays."""
    cache = LRUCache(str(tmp_path), max_size=-1)
    for value in (b"first", b"second"):
        remembered.put_whole(cache, "key", value)
    assert cache.get("key") == b"first" and len(list(tmp_path.iterdir())) == 1


def test_the_suite_keeps_what_it_compiles() -> None:
    assert topology.run_xla is remembered.run_xla
    assert compilation_cache.put_executable_and_time is remembered.keep_restorable
    assert LRUCache.put is remembered.put_whole


@pytest.mark.parametrize("loop", [False, True])
def test_programs_with_collectives_in_a_loop_are_not_kept(loop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restored, these would end the process."""

    def program(x: jax.Array) -> jax.Array:
        body = jax.shard_map(lambda x: jax.lax.psum(x, "data"), in_specs=P("data"), out_specs=P(), axis_names={"data"})
        return jax.lax.fori_loop(0, 3, lambda _, x: x + body(x), x) if loop else body(x)

    with jax.set_mesh(jax.make_mesh((8,), ("data",), (AxisType.Auto,), devices=jax.devices("cpu"))):
        compiled = jax.jit(program).lower(jnp.ones(8)).compile()
    executable = compiled._executable.xla_executable
    assert "all-reduce" in compiled.as_text()
    kept: list[tuple[Any, ...]] = []
    monkeypatch.setattr(remembered, "keep_any", lambda *given: kept.append(given))
    remembered.keep_restorable("key", "name", executable, None, 1)
    assert len(kept) == (not loop)
