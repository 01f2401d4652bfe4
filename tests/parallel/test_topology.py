"""Devices to compile for, on a machine that has none."""

import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxopt_llm.errors import InputError
from jaxopt_llm.parallel import hlo, topology
from jaxopt_llm.parallel.topology import CHIPS, chip_of, gpu_topology


@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip_compiles_a_program_for_itself(chip: str) -> None:
    mesh = Mesh(np.array(gpu_topology(chip)).reshape(2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("x", "y")))
    compiled = topology.compile(jax.jit(lambda x: x @ x.T).lower(x))
    assert mesh.devices.flat[0].device_kind == CHIPS[chip].name
    assert hlo.memory(compiled).arguments == 256 * 512 * 2 // 8
    assert "__triton" in str(compiled.as_text())


def test_the_compiler_is_told_the_chip() -> None:
    """A100 has no tensor cores for 8-bit floats, H200 has."""

    def calls_float8(chip: str) -> bool:
        mesh = Mesh(np.array(gpu_topology(chip, gpus_per_host=1)), ("x",), axis_types=(AxisType.Auto,))
        sharding = NamedSharding(mesh, PartitionSpec())
        x, w = (jax.ShapeDtypeStruct(s, jnp.float8_e4m3fn, sharding=sharding) for s in ((256, 512), (512, 128)))
        multiply = jax.jit(lambda x, w: x.astype(jnp.bfloat16) * 2 @ (w.astype(jnp.bfloat16) * 2))
        compiled = topology.compile(multiply.lower(x, w), {"xla_gpu_enable_triton_gemm": False})
        return "__cublas$lt$matmul$f8" in str(compiled.as_text())

    assert not calls_float8("a100")
    assert calls_float8("h200")


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="NVIDIA's ptxas is not installed")
def test_without_machine_code_the_program_is_the_same() -> None:
    mesh = Mesh(np.array(gpu_topology()), ("x",), axis_types=(AxisType.Auto,))

    def array(*spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    loss = jax.grad(lambda w, x: jnp.sum(jax.nn.gelu(jnp.tanh(x @ w) @ w)).astype(jnp.float32))
    lowered = jax.jit(loss).lower(array("x", None), array(None, "x"))
    without = topology.compile(lowered)
    with topology.without_cache():
        whole = lowered.compile()
    assert hlo.memory(without) == hlo.memory(whole)
    texts = [str(each.as_text()) for each in (without, whole)]
    for read in (lambda text: hlo.collectives(text, mesh), hlo.dot_flops, lambda text: list(hlo.array_shapes(text))):
        assert read(texts[0]) == read(texts[1])


@pytest.mark.usefixtures("compiled_anew")
def test_what_makes_machine_code_is_not_nvidias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "_ASSEMBLER", f"{topology._ASSEMBLER}echo asked >> {tmp_path}/log\n")
    topology._toolkit.cache_clear()
    sharding = jax.sharding.SingleDeviceSharding(gpu_topology()[0])
    topology.compile(jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((384,), jnp.float32, sharding=sharding)))
    topology._toolkit.cache_clear()
    assert (tmp_path / "log").read_text().startswith("asked")


def test_hosts_and_gpus() -> None:
    devices = gpu_topology("h100", hosts=3, gpus_per_host=4)
    assert [device.id for device in devices] == list(range(12))
    assert [device.process_index for device in devices] == [0] * 4 + [1] * 4 + [2] * 4
    assert {device.platform for device in devices} == {"gpu"}


def test_many_hosts() -> None:
    assert len(gpu_topology(hosts=64)) == 512


def test_peaks() -> None:
    for name, chip in CHIPS.items():
        peak = chip.peak_flops
        assert peak["bfloat16"] == peak["float16"] == 2 * peak["float32"]
        # GeForce GPUs sum 16-bit products in float32 at half the rate.
        assert peak["int8"] == pytest.approx((4 if name == "4090" else 2) * peak["bfloat16"], rel=1e-3)
        assert ("float8" in peak) == (name != "a100")
        assert chip.memory_bytes_per_second > chip.nvlink_bytes_per_second > chip.network_bytes_per_second
    assert CHIPS["h200"].memory_bytes > CHIPS["h100"].memory_bytes


@pytest.mark.parametrize(
    "kind, chip",
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        *((each, None) for each in ("NVIDIA GH200 480GB", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL")),
        *((each, None) for each in ("NVIDIA A100-SXM4-40GB", "NVIDIA H200 MIG 1g.18gb", "NVIDIA GB200", "cpu")),
    ],
)
def test_what_a_gpu_is_known_by(kind: str, chip: str | None) -> None:
    assert chip_of(kind) == (CHIPS[chip] if chip else None)


def test_unknown_chip_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'h300' is unknown.*a100, h100, h200, b200"):
        gpu_topology("h300")


@pytest.mark.parametrize("counts", [{"hosts": 0}, {"gpus_per_host": 0}, {"hosts": -1, "gpus_per_host": -1}])
def test_impossible_counts(counts: dict[str, int]) -> None:
    with pytest.raises(InputError, match="at least 1"):
        gpu_topology("h200", **counts)


def test_without_the_plugin_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pkgutil, "iter_modules", lambda path: iter(()))
    with pytest.raises(InputError, match=r"pip install 'jaxopt_llm\[plan\]'"):
        gpu_topology()


# A driver that is missing, also where there is one.
NO_DRIVER = """
import jax, jax_plugins.xla_cuda13 as plugin
def no_driver(**_): raise RuntimeError("no driver")
plugin._check_cuda_versions = no_driver
from jaxopt_llm.errors import InputError
from jaxopt_llm.parallel.topology import gpu_topology
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


def test_too_late_says_so() -> None:
    script = """
jax.devices("cpu")
try:
    gpu_topology()
except InputError as error:
    print(error)
"""
    assert "set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before the program starts" in run_without_driver(script)
