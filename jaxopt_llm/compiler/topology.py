"""Devices to compile for on a machine that has no GPU, and compilation for them."""

import contextlib
import functools
import importlib.util
import os
import pkgutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.extend.mlir import ir

from jaxopt_llm.compiler.chips import CHIPS, Chip
from jaxopt_llm.core.errors import InputError, describe_install

HOST = "pinned_host"  # memory kind of offloaded arrays


def gpu_topology(chip: str = "h200", hosts: int = 1, gpus_per_host: int = 8) -> list[jax.Device]:
    """Return the devices of `hosts` × `gpus_per_host` GPUs to compile for. No GPU is needed or used.

    The devices go into an ordinary `jax.sharding.Mesh`. A function that is jitted over this mesh can be lowered and
    compiled with `jax.ShapeDtypeStruct`s, but not run. The default backend does not change.

    Raises:
        InputError: the chip is unknown, a count is below 1, or JAX's CUDA plugin is not installed or was loaded too
            early.
    """
    if chip not in CHIPS:
        raise InputError(f"chip {chip!r} is unknown; choose one of {', '.join(CHIPS)}")
    if hosts < 1 or gpus_per_host < 1:
        raise InputError(f"{hosts} hosts with {gpus_per_host} GPUs each: give at least 1 host and at least 1 GPU")
    if not _is_cuda_plugin_installed():
        raise InputError(f"compiling for GPUs requires JAX's CUDA plugin; run: {describe_install('plan')}")
    # Without this variable the plugin requires a driver. JAX reads it only once, when it first looks for devices and
    # loads its plugins.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    shape = name_topology(hosts, gpus_per_host)
    try:
        target = _target_config(CHIPS[chip])
        topology = topologies.get_topology_desc(shape, "cuda", topology=shape, target_config=target)
    except NotImplementedError as error:
        raise InputError(
            "JAX's CUDA plugin is not loaded, probably because JAX looked for devices before gpu_topology() ran; "
            "set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before the program starts, or call gpu_topology() first"
        ) from error
    return list(topology.devices)


def name_topology(hosts: int, gpus_per_host: int) -> str:
    """Return XLA's name of a topology: NVLink domains x hosts in a domain x GPUs in a host.

    A run on several hosts finds the same domains. If all hosts were one, XLA would have no estimate of collectives
    between them, and would schedule them badly.
    """
    return f"{hosts}x1x{gpus_per_host}"


def _is_cuda_plugin_installed() -> bool:
    plugins = importlib.util.find_spec("jax_plugins")
    return plugins is not None and any(
        module.name.startswith("xla_cuda") for module in pkgutil.iter_modules(plugins.submodule_search_locations)
    )


def _target_config(chip: Chip) -> str:
    """Return XLA's `GpuTargetConfigProto` as text. An older jaxlib rejects all of it if it does not know a field."""
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


def lower_without_gpu(function: Any, *arguments: Any) -> jax.stages.Lowered:
    """Return `function.lower(*arguments)` with the arguments in host memory marked as such.

    JAX places arguments by the shardings of the jitted function. These shardings drop a memory kind that the devices of
    a topology do not have.

    Args:
        function: jitted, or a BoundStep.
        arguments: ShapeDtypeStructs. Those in host memory need shardings over the abstract mesh, which keep the memory
            kind.
    """
    lowered = function.lower(*arguments)
    module = lowered.compiler_ir()
    (main,) = (operation for operation in module.body.operations if operation.attributes["sym_name"].value == "main")
    kept_indices = sorted(lowered._lowering.compile_args["kept_var_idx"])
    shardings = [argument.sharding for argument in jax.tree.leaves(arguments)]
    with module.context:
        operands, results = (list(main.attributes[name]) for name in ("arg_attrs", "res_attrs"))
        for i, index in enumerate(kept_indices):
            # The hyperparameters of a step, which `function` adds, follow the arguments.
            if index < len(shardings) and shardings[index].memory_kind == HOST:
                operands[i] = _with_host_memory(operands[i])
                if "tf.aliasing_output" in operands[i]:
                    result = operands[i]["tf.aliasing_output"].value  # it reuses the buffer of a donated argument
                    results[result] = _with_host_memory(results[result])
        main.attributes["arg_attrs"], main.attributes["res_attrs"] = map(ir.ArrayAttr.get, (operands, results))
    return lowered


def _with_host_memory(attributes: Any) -> ir.DictAttr:
    present = {each.name: each.attr for each in attributes}
    return ir.DictAttr.get(present | {"mhlo.memory_kind": ir.StringAttr.get(HOST)})


# Parts of XLA's error messages.
NO_KERNEL = ("No supported config found", "Couldn't find output tile sizes")


def compile_without_gpu(lowered: jax.stages.Lowered, options: Mapping[str, Any] = {}) -> jax.stages.Compiled:
    """Return `lowered.compile(options)` for devices of a topology, without machine code.

    XLA still decides everything else: the partition over devices, fusions, buffers and the schedule. Machine code takes
    more than half of the time, and it would never run. No part of NVIDIA's toolkit is needed.
    """
    # With no GPU to time kernels on, the autotuner of fusions takes the first kernel that compiles. To find it, it
    # compiles.
    skipped: dict[str, Any] = {
        "xla_gpu_cuda_data_dir": _toolkit().name,
        "xla_gpu_experimental_enable_fusion_autotuner": False,
    }
    try:
        return run_xla(lowered, {**options, **skipped})
    except jax.errors.JaxRuntimeError as error:
        # Without a GPU to try kernels on, XLA finds none for some matmuls: with one row, or with sizes that are no
        # powers of two. A library then multiplies.
        if not any(message in str(error) for message in NO_KERNEL):
            raise
        return run_xla(lowered, {**options, **skipped, "xla_gpu_enable_triton_gemm": False})


def run_xla(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> jax.stages.Compiled:
    """Compile with XLA, without JAX's compilation cache, which cannot restore programs of a topology.

    The tests replace this function by one that keeps its results.
    """
    with without_cache():
        return lowered.compile(compiler_options=dict(options))


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Disable JAX's compilation cache within this context."""
    enabled = jax.config.values["jax_enable_compilation_cache"]
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # otherwise JAX does not read the setting again
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


@functools.cache
def _toolkit() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that XLA accepts as a CUDA toolkit, with an assembler that writes empty files.

    Its library of mathematical functions is empty, too. XLA links it into every kernel and ends without it.
    """
    folder = tempfile.TemporaryDirectory(prefix="jaxopt_llm-toolkit-")
    library = Path(folder.name, "nvvm", "libdevice", "libdevice.10.bc")
    library.parent.mkdir(parents=True)
    library.write_text("; no functions\n")
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
