"""Settings of JAX that must be made before it opens a device."""

import hashlib
import math
import os
import platform
import re
import stat
import sys
from pathlib import Path
from typing import Any

import jax
from jax._src import xla_bridge  # whether a device is open has no public name

from jaxopt_llm.config import MeshConfig
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.files import cache_home
from jaxopt_llm.distributed.launchers import Job

# Share of a GPU's memory that XLA allocates at the start (JAX's default is 0.75). The rest is for the CUDA context,
# NCCL and other libraries. Without that rest, programs that fit according to the compiler would not fit.
MEMORY_FRACTION = "0.92"
_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")

# At least one of these files exists where the driver of an NVIDIA GPU is loaded: on Linux, in a container, in WSL.
NVIDIA_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")

# XLA's threads per simulated CPU device; XLA's own choice is one per device or core. A collective holds a thread while
# it waits for the other devices, and a device can wait in several collectives at once: a stage of a pipeline waits in
# the permutes of its neighbours and in the sums of its tensor group. If all threads wait, none is left to run the work
# that they wait for, and XLA ends the process after 40 s.
CPU_THREADS = 8


def simulate_cpu_devices(count: int, processes: int = 1) -> None:
    """Make the CPU appear as `count` devices in this process. Must run before JAX uses a backend."""
    jax.config.update("jax_num_cpu_devices", count)
    if count * processes > 1:
        os.environ["PJRT_NPROC"] = str(CPU_THREADS * count)


def find_simulated() -> int:
    """Return the number of CPU devices that the user's environment simulates, or 0 if it names none."""
    if (count := jax.config.values["jax_num_cpu_devices"]) > 0:
        return int(count)
    named = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(named[-1]) if named else 0


def prepare_devices() -> None:
    """Set the environment in which JAX opens devices. It has no effect after JAX has opened one.

    The memory fraction of GPUs is set unless the user's environment has one. Simulated CPU devices get threads, see
    CPU_THREADS. JAX opens the CPU without a word about CUDA if this machine has no NVIDIA GPU: JAX's CUDA plugin, which
    the extra `plan` installs, otherwise prints a traceback because NVIDIA's libraries are missing. With a GPU, or if
    the user names a platform, JAX reports as always.
    """
    if (count := find_simulated()) > 1:
        os.environ.setdefault("PJRT_NPROC", str(CPU_THREADS * count))
    if not any(name in os.environ for name in _FRACTION_VARIABLES):
        os.environ[_FRACTION_VARIABLES[0]] = MEMORY_FRACTION
    if not jax.config.values["jax_platforms"] and not any(map(os.path.exists, NVIDIA_DEVICES)):
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"


def check_no_device(where: str) -> None:
    """Raise InputError if JAX has opened a device, after which its devices can no longer be configured.

    where: what has run so far, for the message.
    """
    if xla_bridge.backends_are_initialized():
        raise InputError(f"{where}: it opens a device of JAX too early; make arrays inside of functions only")


def configure_mesh(mesh: MeshConfig, job: Job, *, cache: bool) -> None:
    """Configure JAX for the devices of a mesh, before `join_job`.

    On CPUs, a mesh without `auto` is simulated. One with `auto` takes the devices that the environment simulates, or as
    few as its other axes need.

    Raises:
        InputError: the devices do not divide over the processes; or as `configure_jax`.
    """
    if mesh.fsdp != AUTO and mesh.devices % job.processes:
        problem = f"{mesh.devices} device(s) do not divide over {job.processes} processes, one per host"
        raise InputError(f"mesh: {problem}; change --mesh.* or --distributed.processes")
    is_open = mesh.fsdp == AUTO
    local = find_simulated() if is_open else 0
    needed = local * job.processes or math.lcm(mesh.devices, job.processes)
    finds = is_open and job.processes == 1 and (local > 0 or needed == 1)
    configure_jax(None if finds else needed, job.processes, cache=cache)


def configure_jax(devices: int | None, processes: int = 1, *, cache: bool) -> None:
    """Set the number of simulated CPU devices, the memory fraction of GPUs, and the compilation cache.

    The user's environment variables for the memory fraction and the cache take precedence.

    Args:
        devices: number of devices of all processes together; None for those that JAX finds.
        cache: whether compiled programs are cached.

    Raises:
        InputError: another user can write to the cache.
    """
    if devices is not None:
        simulate_cpu_devices(devices // processes, processes)
    prepare_devices()
    if not cache:
        jax.config.update("jax_enable_compilation_cache", False)
    elif not jax.config.values["jax_compilation_cache_dir"]:
        try:
            jax.config.update("jax_compilation_cache_dir", str(make_private(cache_directory())))
        except OSError as error:
            remedy = "set JAX_COMPILATION_CACHE_DIR to a writable directory"
            print(f"compiled programs are not cached ({error}); {remedy}", file=sys.stderr)


def repeatable_options(program: Any, directory: Path, writes: bool = True) -> dict[str, str | bool]:
    """Return compiler options with which a lowered program gives the same bits on all GPUs of the same kind.

    The options exclude operations that add in arbitrary order. They also fix the algorithms that autotuning chose at
    the first start of the run.

    Args:
        directory: folder of the file with these algorithms.
        writes: whether this process writes the file. The processes of a job choose the algorithms together.
    """
    name = hashlib.sha256(program.as_text().encode()).hexdigest()[:16]
    choices = directory / f"autotuning.{name}.textproto"
    options: dict[str, str | bool] = {"xla_gpu_exclude_nondeterministic_ops": True}
    if choices.exists():
        return options | {"xla_gpu_load_autotune_results_from": str(choices)}
    return options | ({"xla_gpu_dump_autotune_results_to": str(choices)} if writes else {})


def cache_directory() -> Path:
    """Return the directory of the compilation cache for this processor.

    Machines can share a home directory, and XLA compiles for the processor that it runs on.
    """
    return cache_home() / "programs" / hashlib.sha256(_processor().encode()).hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:  # not Linux
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def make_private(folder: Path) -> Path:
    """Create the folder for this user only, and return it.

    Raises:
        InputError: another user owns the folder or can write to it. Compiled programs in it run without a check.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InputError(
            f"{folder}, the cache of compiled programs, belongs to another user or is writable by others; run chmod "
            "700 on it, or set JAX_COMPILATION_CACHE_DIR to another directory"
        )
    return folder
