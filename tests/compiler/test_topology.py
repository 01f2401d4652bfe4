"""Devices to compile for, on a machine without a GPU."""

import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxopt_llm.compiler import hlo, topology
from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.compiler.topology import gpu_topology
from jaxopt_llm.core.errors import InputError


@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip_compiles_a_program_for_itself(chip: str) -> None:
    mesh = Mesh(np.array(gpu_topology(chip)).reshape(2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("x", "y")))
    compiled = topology.compile_without_gpu(jax.jit(lambda x: x @ x.T).lower(x))
    assert mesh.devices.flat[0].device_kind == CHIPS[chip].name
    assert hlo.read_memory(compiled).arguments == 256 * 512 * 2 // 8
    assert "__triton" in str(compiled.as_text())


def test_the_compiler_gets_the_chip() -> None:
    """Check that only the H200 multiplies in fp8: the A100 has no fp8 tensor cores."""

    def calls_float8(chip: str) -> bool:
        mesh = Mesh(np.array(gpu_topology(chip, gpus_per_host=1)), ("x",), axis_types=(AxisType.Auto,))
        sharding = NamedSharding(mesh, PartitionSpec())
        x, w = (jax.ShapeDtypeStruct(s, jnp.float8_e4m3fn, sharding=sharding) for s in ((256, 512), (512, 128)))
        multiply = jax.jit(lambda x, w: x.astype(jnp.bfloat16) * 2 @ (w.astype(jnp.bfloat16) * 2))
        compiled = topology.compile_without_gpu(multiply.lower(x, w), {"xla_gpu_enable_triton_gemm": False})
        return "__cublas$lt$matmul$f8" in str(compiled.as_text())

    assert not calls_float8("a100")
    assert calls_float8("h200")


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="NVIDIA's ptxas is not installed")
def test_a_program_without_machine_code_is_the_same() -> None:
    mesh = Mesh(np.array(gpu_topology()), ("x",), axis_types=(AxisType.Auto,))

    def array(*spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    loss = jax.grad(lambda w, x: jnp.sum(jax.nn.gelu(jnp.tanh(x @ w) @ w)).astype(jnp.float32))
    lowered = jax.jit(loss).lower(array("x", None), array(None, "x"))
    without_code = topology.compile_without_gpu(lowered)
    with topology.without_cache():
        with_code = lowered.compile()
    assert hlo.read_memory(without_code) == hlo.read_memory(with_code)
    found, expected = str(without_code.as_text()), str(with_code.as_text())
    assert hlo.list_collectives(found, mesh) == hlo.list_collectives(expected, mesh)
    assert hlo.count_dot_flops(found) == hlo.count_dot_flops(expected)
    assert list(programs.list_array_shapes(found)) == list(programs.list_array_shapes(expected))


@pytest.mark.usefixtures("compiled_anew")
def test_nvidias_assembler_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "_ASSEMBLER", f"{topology._ASSEMBLER}echo asked >> {tmp_path}/log\n")
    topology._toolkit.cache_clear()
    sharding = jax.sharding.SingleDeviceSharding(gpu_topology()[0])
    topology.compile_without_gpu(jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((384,), jnp.float32, sharding=sharding)))
    topology._toolkit.cache_clear()
    assert (tmp_path / "log").read_text().startswith("asked")


def test_a_machine_without_a_cuda_toolkit_has_what_xla_reads_of_it() -> None:
    """XLA finds both files in the folder that it is given, before it looks for an installed toolkit."""
    folder = Path(topology._toolkit().name)
    assert os.access(folder / "bin" / "ptxas", os.X_OK)
    assert (folder / "nvvm" / "libdevice" / "libdevice.10.bc").exists()


def test_hosts_and_gpus() -> None:
    devices = gpu_topology("h100", hosts=3, gpus_per_host=4)
    assert [device.id for device in devices] == list(range(12))
    assert [device.process_index for device in devices] == [0] * 4 + [1] * 4 + [2] * 4
    assert {device.platform for device in devices} == {"gpu"}


def test_many_hosts() -> None:
    assert len(gpu_topology(hosts=64)) == 512


def test_unknown_chip_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'h300' is unknown.*3090, .*a100, .*h200, .*b200"):
        gpu_topology("h300")


@pytest.mark.parametrize("counts", [{"hosts": 0}, {"gpus_per_host": 0}, {"hosts": -1, "gpus_per_host": -1}])
def test_impossible_counts(counts: dict[str, int]) -> None:
    with pytest.raises(InputError, match="at least 1"):
        gpu_topology("h200", **counts)


def test_a_missing_plugin_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pkgutil, "iter_modules", lambda path: iter(()))
    with pytest.raises(InputError, match=r"pip install -e '.*\[plan\]'"):
        gpu_topology()


# Simulate a missing driver, even on a machine that has one.
NO_DRIVER = """
import jax, jax_plugins.xla_cuda13 as plugin
def no_driver(**_): raise RuntimeError("no driver")
plugin._check_cuda_versions = no_driver
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.compiler.topology import gpu_topology
"""


def run_without_driver(script: str) -> str:
    unset = ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "JAX_PLATFORMS")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", NO_DRIVER + script]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def test_a_fresh_process_needs_no_preparation() -> None:
    assert run_without_driver("print(len(gpu_topology()))") == "8\n"


def test_the_default_backend_stays() -> None:
    gpu_topology()
    assert jax.default_backend() == jax.devices()[0].platform == "cpu"
    assert jax.jit(lambda x: x + 1)(jnp.zeros(())).devices() <= set(jax.devices("cpu"))


def test_a_plugin_that_was_loaded_too_early_is_an_error() -> None:
    script = """
jax.devices("cpu")
try:
    gpu_topology()
except InputError as error:
    print(error)
"""
    assert "set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before the program starts" in run_without_driver(script)


@pytest.mark.parametrize("message", [*topology.NO_KERNEL, "out of memory"])
def test_a_library_multiplies_where_xla_finds_no_kernel(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uses_triton: list[Any] = []

    def run(lowered: Any, options: dict[str, Any]) -> str:
        uses_triton.append(options.get("xla_gpu_enable_triton_gemm", True))
        if uses_triton[-1]:
            raise jax.errors.JaxRuntimeError(f"INTERNAL: {message} for %dot.1")
        return "compiled"

    monkeypatch.setattr(topology, "run_xla", run)
    if message in topology.NO_KERNEL:
        assert topology.compile_without_gpu(Any) == "compiled" and uses_triton == [True, False]
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            topology.compile_without_gpu(Any)
