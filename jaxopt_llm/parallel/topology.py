"""The GPUs we know, and devices to compile for on a machine that has none."""

import contextlib
import functools
import importlib.util
import os
import pkgutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.extend.mlir import ir

from jaxopt_llm.errors import InputError
from jaxopt_llm.kernels import grouped_matmul_pallas
from jaxopt_llm.kernels.attention import capability_of, unsupported
from jaxopt_llm.kernels.attention_auto import Choice, fastest
from jaxopt_llm.parallel.offload import HOST
from jaxopt_llm.parallel.precision import Matmul


@dataclass(frozen=True)
class Chip:
    """What one GPU can do. Bytes are bytes (not bits), rates are per second, peaks are without sparsity.

    `name` is the driver's, and so JAX's `device_kind`.
    `peak_flops` is keyed by the dtype of a matmul's operands. "float32" is the TF32 rate: that is how XLA multiplies
    float32 at its default precision. A dtype that the tensor cores do not have is absent.
    `network_bytes_per_second` is the usual fabric of a server with 8 such GPUs, one network card per GPU.
    The fields below it are what XLA's cost model and code generator want to know.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_second: float
    peak_flops: Mapping[str, float]
    nvlink_bytes_per_second: float  # one GPU, one direction; over PCIe where there is no NVLink
    network_bytes_per_second: float  # one GPU, one direction
    pcie_bytes_per_second: float  # to the host over 16 lanes, one direction
    compute_capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    float32_units_per_core: int
    clock_ghz: float
    threads_per_core: int
    shared_memory_bytes_per_core: int
    shared_memory_bytes_per_block: int  # the opt-in limit
    l2_cache_bytes: int


FLOAT8_CAPABILITY = (8, 9)
# The keys of Chip.peak_flops, by XLA's names of the operands' dtype.
PEAK_OF = {
    "f8e4m3fn": "float8",
    "f8e5m2": "float8",
    "s8": "int8",
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
}

_ADA = {"bfloat16": 165.2e12, "float16": 165.2e12, "float32": 82.6e12, "float8": 330.3e12, "int8": 660.6e12}
_HOPPER = {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 494.7e12, "float8": 1978.9e12, "int8": 1978.9e12}

# Peaks and NVLink: NVIDIA's datasheets of the A100 80GB, H100 and H200 (SXM) and of HGX B200 (an eighth of the board),
# and the whitepaper "NVIDIA H100 Tensor Core GPU Architecture". They quote peaks with sparsity, twice the dense ones,
# and NVLink in both directions together. Network: DGX A100 (200 Gb/s per GPU), DGX H100, H200 and B200 (400 Gb/s).
# PCIe: generation 4 for the A100, 5 for the others, without the protocol's own bytes.
# Memory (as the driver reports it), cores, clocks and caches: openxla/xla, xla/backends/gpu/target_config/specs.
# RTX 4090: NVIDIA's whitepaper "NVIDIA Ada GPU Architecture", peaks of products summed in float32; memory and cache as
# deviceQuery prints them under driver 13.0, threads and shared memory by the CUDA programming guide. It has neither
# NVLink nor, in NVIDIA's driver, a direct way to its neighbours: PCIe's rate is what its link has, not what NCCL gets
# by way of the host. Nor is there a usual network: one card of 100 Gb/s for 8 is assumed.
CHIPS: Mapping[str, Chip] = {
    "a100": Chip(
        name="NVIDIA A100-SXM4-80GB",
        memory_bytes=85_100_068_864,
        memory_bytes_per_second=2.039e12,
        peak_flops={"bfloat16": 312e12, "float16": 312e12, "float32": 156e12, "int8": 624e12},
        nvlink_bytes_per_second=300e9,
        network_bytes_per_second=25e9,
        pcie_bytes_per_second=32e9,
        compute_capability=(8, 0),
        cores=108,
        float32_units_per_core=64,
        clock_ghz=1.41,
        threads_per_core=2048,
        shared_memory_bytes_per_core=167_936,
        shared_memory_bytes_per_block=166_912,
        l2_cache_bytes=41_943_040,
    ),
    "h100": Chip(
        name="NVIDIA H100 80GB HBM3",
        memory_bytes=84_942_979_072,
        memory_bytes_per_second=3.35e12,
        peak_flops=_HOPPER,
        nvlink_bytes_per_second=450e9,
        network_bytes_per_second=50e9,
        pcie_bytes_per_second=64e9,
        compute_capability=(9, 0),
        cores=132,
        float32_units_per_core=128,
        clock_ghz=1.98,
        threads_per_core=2048,
        shared_memory_bytes_per_core=233_472,
        shared_memory_bytes_per_block=232_448,
        l2_cache_bytes=52_428_800,
    ),
    "h200": Chip(
        name="NVIDIA H200",
        memory_bytes=151_397_597_184,
        memory_bytes_per_second=4.8e12,
        peak_flops=_HOPPER,
        nvlink_bytes_per_second=450e9,
        network_bytes_per_second=50e9,
        pcie_bytes_per_second=64e9,
        compute_capability=(9, 0),
        cores=132,
        float32_units_per_core=128,
        clock_ghz=1.98,
        threads_per_core=2048,
        shared_memory_bytes_per_core=233_472,
        shared_memory_bytes_per_block=232_448,
        l2_cache_bytes=52_428_800,
    ),
    "b200": Chip(
        name="NVIDIA B200",
        memory_bytes=191_514_411_008,
        memory_bytes_per_second=7.67e12,
        peak_flops={"bfloat16": 2250e12, "float16": 2250e12, "float32": 1125e12, "float8": 4500e12, "int8": 4500e12},
        nvlink_bytes_per_second=900e9,
        network_bytes_per_second=50e9,
        pcie_bytes_per_second=64e9,
        compute_capability=(10, 0),
        cores=148,
        float32_units_per_core=128,
        clock_ghz=1.965,
        threads_per_core=2048,
        shared_memory_bytes_per_core=233_472,
        shared_memory_bytes_per_block=232_448,
        l2_cache_bytes=132_644_864,
    ),
    "4090": Chip(
        name="NVIDIA GeForce RTX 4090",
        memory_bytes=25_250_627_584,
        memory_bytes_per_second=1.008e12,
        peak_flops=_ADA,
        nvlink_bytes_per_second=32e9,
        network_bytes_per_second=1.5625e9,
        pcie_bytes_per_second=32e9,
        compute_capability=(8, 9),
        cores=128,
        float32_units_per_core=128,
        clock_ghz=2.52,
        threads_per_core=1536,
        shared_memory_bytes_per_core=102_400,
        shared_memory_bytes_per_block=101_376,
        l2_cache_bytes=75_497_472,
    ),
}


def seconds_at_peak(chip: Chip, flops: Mapping[str, float]) -> float:
    """Of products, by XLA's names of their operands' dtype (see hlo.dot_flops_by_dtype)."""
    return sum(count / chip.peak_flops[PEAK_OF[dtype]] for dtype, count in flops.items())


def lower(function: Any, *arguments: Any) -> jax.stages.Lowered:
    """`function.lower(*arguments)`, with those in host memory placed there.

    JAX places them by the jitted function's shardings, which drop a memory that devices of a topology do not have.
    arguments: ShapeDtypeStructs, those in host memory with shardings over the abstract mesh, which keep it.
    """
    lowered = function.lower(*arguments)
    module = lowered.compiler_ir()
    (main,) = (each for each in module.body.operations if each.attributes["sym_name"].value == "main")
    kept = sorted(lowered._lowering.compile_args["kept_var_idx"])
    shardings = [each.sharding for each in jax.tree.leaves(arguments)]
    with module.context:
        given, results = (list(main.attributes[name]) for name in ("arg_attrs", "res_attrs"))
        for i, number in enumerate(kept):
            if shardings[number].memory_kind == HOST:
                given[i] = _in_host_memory(given[i])
                if "tf.aliasing_output" in given[i]:
                    result = given[i]["tf.aliasing_output"].value  # which takes the place of a donated argument
                    results[result] = _in_host_memory(results[result])
        main.attributes["arg_attrs"], main.attributes["res_attrs"] = map(ir.ArrayAttr.get, (given, results))
    return lowered


def _in_host_memory(attributes: Any) -> ir.DictAttr:
    own = {each.name: each.attr for each in attributes}
    return ir.DictAttr.get(own | {"mhlo.memory_kind": ir.StringAttr.get(HOST)})


NO_KERNEL = "No supported config found"  # a part of XLA's message


def compile(lowered: jax.stages.Lowered, options: Mapping[str, Any] = {}) -> jax.stages.Compiled:
    """`lowered.compile(options)` for devices of a topology: all that XLA decides - the partition over devices, fusions,
    buffers, schedule - and no machine code, which nobody would run and which takes more than half of the time.

    Needs no part of NVIDIA's toolkit.
    """
    # Without a GPU to time kernels on, the fusions' autotuner takes the first that compiles, and compiles to see.
    skipped: dict[str, Any] = {
        "xla_gpu_cuda_data_dir": _toolkit().name,
        "xla_gpu_experimental_enable_fusion_autotuner": False,
    }
    try:
        return run_xla(lowered, {**options, **skipped})
    except jax.errors.JaxRuntimeError as error:
        # JAX 0.11 has no kernel for some products of one row, with no GPU to try any on: let a library multiply.
        if NO_KERNEL not in str(error):
            raise
        return run_xla(lowered, {**options, **skipped, "xla_gpu_enable_triton_gemm": False})


def run_xla(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> jax.stages.Compiled:
    """Compile with XLA, without JAX's cache of compiled programs, which cannot restore those of a topology.

    The tests replace this function by one that keeps what it returned.
    """
    with without_cache():
        return lowered.compile(compiler_options=dict(options))


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Compile within this context without JAX's cache of compiled programs."""
    enabled = jax.config.values["jax_enable_compilation_cache"]
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX looks at the setting once
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


@functools.cache
def _toolkit() -> tempfile.TemporaryDirectory[str]:
    """A CUDA toolkit as far as XLA looks, whose assembler assembles nothing."""
    folder = tempfile.TemporaryDirectory(prefix="jaxopt_llm-toolkit-")
    assembler = Path(folder.name, "bin", "ptxas")
    assembler.parent.mkdir()
    assembler.write_text(_ASSEMBLER)
    assembler.chmod(0o700)
    return folder


_ASSEMBLER = """#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V13.0.88"; exit; fi
while [ "$1" != -o ]; do shift; done
: > "$2"
"""


def chip_of(device_kind: str) -> Chip | None:
    """The entry of CHIPS for what JAX calls a device, None where there is none: an H100 PCIe or NVL, a GH200, an A100
    of 40 GB and a part of a GPU (MIG) have other rates than the GPU whose name theirs has in it."""
    return next((chip for chip in CHIPS.values() if chip.name == device_kind), None)


def check_multiplies(device: Any, matmul: Matmul) -> None:
    """Raises InputError for fp8 on a GPU without it, which would multiply in 16 bits and only lose. CPUs emulate it."""
    capability = capability_of(device)
    if matmul == "fp8" and capability is not None and capability < FLOAT8_CAPABILITY:
        raise InputError(
            f"precision.matmul=fp8: {device.device_kind} has no tensor cores for it (H100, H200, B200 and others of "
            "compute capability 8.9 and above have): set --precision.matmul int8, or compute_dtype for "
            "--precision.compute-dtype bfloat16"
        )


def choose_attention(device: Any, asked: str, head_dim: int, dtype: str, keys: int) -> Choice:
    """The implementation of attention that is asked for or, for "auto", that is the fastest for calls of so many keys:
    the same for a device and for one of a topology of its kind.

    Raises InputError where what is asked for does not go with the device, the heads or their dtype.
    """
    capability = capability_of(device)
    problems = unsupported(head_dim, dtype, capability)
    if asked == "auto":
        return fastest(head_dim, dtype, keys, capability, problems)
    others = " or ".join(name for name, found in problems.items() if not found)
    mend = f"set --training.attention auto, or {others}"
    if problems[asked] and capability is None:
        raise InputError(f"training.attention={asked} is for GPUs, not for {device.device_kind}: {mend}")
    if problems[asked]:
        raise InputError(f"training.attention={asked}: {'; '.join(problems[asked])}: {mend}")
    return Choice(asked)


def check_exchanges(device: Any, exchange: str) -> None:
    """Raises InputError where devices cannot send experts' tokens so."""
    if exchange == "ragged" and capability_of(device) is None:
        raise InputError(
            f"sharding.expert_exchange=ragged is for GPUs, not for {device.device_kind}: set --sharding.expert-exchange"
            " auto, or all_to_all, which sends what is not filled as well"
        )


def choose_expert_products(device: Any, asked: str, dtype: str) -> str:
    """The implementation of experts' products that is asked for, or for "auto" the kernel wherever it is supported.

    Raises InputError where what is asked for does not go with the device or the dtype.
    """
    capability = capability_of(device)
    if asked == "auto":
        return "xla" if capability is None or grouped_matmul_pallas.problems(dtype, capability) else "pallas"
    if asked == "pallas":
        found = (
            [f"is for GPUs, not for {device.device_kind}"]
            if capability is None
            else grouped_matmul_pallas.problems(dtype, capability)
        )
        if found:
            raise InputError(
                f"training.expert_products=pallas: {'; '.join(found)}: set --training.expert-products auto"
            )
    return asked


def gpu_topology(chip: str = "h200", hosts: int = 1, gpus_per_host: int = 8) -> list[jax.Device]:
    """Devices of `hosts` × `gpus_per_host` GPUs to compile for; no GPU is needed and none is touched.

    They go into an ordinary `jax.sharding.Mesh`; a function jitted over it can be lowered and compiled with
    `jax.ShapeDtypeStruct`s, but not run. The default backend stays what it was.

    Raises:
        InputError: unknown chip or impossible counts; JAX's CUDA plugin is not installed, or was loaded too early.
    """
    if chip not in CHIPS:
        raise InputError(f"chip {chip!r} is unknown: choose one of {', '.join(CHIPS)}")
    if hosts < 1 or gpus_per_host < 1:
        raise InputError(f"{hosts} hosts of {gpus_per_host} GPUs make no machine: give at least 1 of each")
    if not _cuda_plugin_installed():
        raise InputError("compiling for GPUs needs JAX's CUDA plugin: pip install 'jaxopt_llm[plan]'")
    # Read when JAX first looks for devices and loads its plugins, once: without it, the plugin wants a driver.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    shape = f"1x{hosts}x{gpus_per_host}"  # slices x hosts per slice x GPUs per host
    try:
        topology = topologies.get_topology_desc(
            shape, "cuda", topology=shape, target_config=_target_config(CHIPS[chip])
        )
    except NotImplementedError as error:
        raise InputError(
            "JAX's CUDA plugin is not loaded, most likely because JAX looked for devices before gpu_topology() ran: "
            "set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before the program starts, or call gpu_topology() first"
        ) from error
    return list(topology.devices)


def _cuda_plugin_installed() -> bool:
    plugins = importlib.util.find_spec("jax_plugins")
    return plugins is not None and any(
        module.name.startswith("xla_cuda") for module in pkgutil.iter_modules(plugins.submodule_search_locations)
    )


def _target_config(chip: Chip) -> str:
    """XLA's `GpuTargetConfigProto` as text. A field that an older jaxlib does not know makes it refuse the whole."""
    major, minor = chip.compute_capability
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024
          threads_per_warp: 32
          threads_per_core_limit: {chip.threads_per_core}
          shared_memory_per_block: 49152
          shared_memory_per_block_optin: {chip.shared_memory_bytes_per_block}
          shared_memory_per_core: {chip.shared_memory_bytes_per_core}
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          thread_dim_limit_x: 1024
          thread_dim_limit_y: 1024
          thread_dim_limit_z: 64
          core_count: {chip.cores}
          fpus_per_core: {chip.float32_units_per_core}
          clock_rate_ghz: {chip.clock_ghz}
          l2_cache_size: {chip.l2_cache_bytes}
          device_memory_size: {chip.memory_bytes}
          memory_bandwidth: {chip.memory_bytes_per_second:.0f}
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          device_vendor: "NVIDIA Corporation"
          platform_version: "Compute Capability {major}.{minor}"
          model_str: "{chip.name}"
          dnn_version: "9.10.0"
          runtime_version: "13.0.0"
        }}
        platform_name: "CUDA"
        device_description_str: "{chip.name}"
    """
