"""What is settled before JAX opens a device, because it cannot be settled after."""

import hashlib
import os
import platform
import stat
import sys
from pathlib import Path
from typing import Any

import jax

from jaxopt_llm.errors import InputError
from jaxopt_llm.parallel.mesh import simulate_cpu_devices

# Of a GPU's memory, given to XLA at the start (JAX's own default is 0.75). The rest is the CUDA context's, NCCL's, and
# the libraries' own: without it, what the compiler says fits would not.
MEMORY_FRACTION = "0.92"
_FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def start(devices: int, processes: int = 1, *, cache: bool) -> None:
    """Simulated devices on CPUs, the memory fraction on GPUs, and the cache of compiled programs; what the user's
    environment says of the last two stands. devices: of all processes."""
    simulate_cpu_devices(devices // processes, processes)
    if not any(name in os.environ for name in _FRACTION_VARIABLES):
        os.environ[_FRACTION_VARIABLES[0]] = MEMORY_FRACTION
    if not cache:
        jax.config.update("jax_enable_compilation_cache", False)
    elif not jax.config.values["jax_compilation_cache_dir"]:
        try:
            jax.config.update("jax_compilation_cache_dir", str(make_private(compilation_cache())))
        except OSError as error:
            print(
                f"compiled programs are not kept ({error}); JAX_COMPILATION_CACHE_DIR names a directory for them",
                file=sys.stderr,
            )


def repeatable(program: Any, directory: Path, writes: bool = True) -> dict[str, str | bool]:
    """Compiler options with which a lowered program gives the same bits every time, there and on GPUs of the same kind:
    without operations that add in any order, and with the algorithms that autotuning chose for it at the first start.

    writes: whether this process keeps them; those of a job choose together."""
    name = hashlib.sha256(program.as_text().encode()).hexdigest()[:16]
    choices = directory / f"autotuning.{name}.textproto"
    options: dict[str, str | bool] = {"xla_gpu_exclude_nondeterministic_ops": True}
    if choices.exists():
        return options | {"xla_gpu_load_autotune_results_from": str(choices)}
    return options | ({"xla_gpu_dump_autotune_results_to": str(choices)} if writes else {})


def compilation_cache() -> Path:
    """Where compiled programs are kept: by processor, since home directories are shared by machines and XLA compiles
    for the very processor that it runs on."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "jaxopt_llm" / "programs" / hashlib.sha256(_processor().encode()).hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:  # not Linux
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def make_private(folder: Path) -> Path:
    """Makes the folder for this user alone. Raises InputError where others may write to it: a compiled program is
    code that is run as it is found."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InputError(
            f"{folder}, the cache of compiled programs, is another user's or can be written by others: mend it with "
            "chmod 700, or name another with JAX_COMPILATION_CACHE_DIR"
        )
    return folder
