"""Programs that an earlier run of the tests compiled, kept in the user's cache folder.

Programs for the CPU are kept by JAX's own compilation cache, except those that XLA restores wrongly. It does not
restore programs for GPUs that were compiled without one. Of those the tests read text and numbers, so these are kept
instead, under the hash of everything that XLA is given.
"""

import contextlib
import functools
import gzip
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache
from jax._src.lru_cache import LRUCache

from jaxopt_llm.compiler import topology
from jaxopt_llm.compiler.chips import chip_of
from jaxopt_llm.distributed import runtime

FOLDER = runtime.cache_directory().parent.parent / "tests" / runtime.cache_directory().name
FOLDER /= f"python{sys.version_info.major}.{sys.version_info.minor}"
PROGRAMS = FOLDER / "restorable"  # kept by JAX
READINGS = FOLDER / "readings"  # kept by this module

SIZES = ("argument", "output", "alias", "temp")
# Where XLA writes or reads files: names of folders, which change nothing in the program.
FOLDERS = ("xla_dump_to", "xla_gpu_cuda_data_dir")
COMPILER_PACKAGES = ("jax", "jaxlib", "jax-cuda", "jax-triton", "nvidia-", "triton")
# Settings of JAX that say where programs are kept, not what they are.
CACHE_SETTINGS = ("jax_compilation_cache", "jax_persistent_cache", "jax_enable_compilation_cache")

COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|ragged-all-to-all|recv|reduce-scatter|"
    r"send)(-start)?\("
)

compile_anew = topology.run_xla
keep_any = compilation_cache.put_executable_and_time


class Reading:
    """What XLA says of a compiled program. Everything else is read from the program itself, compiled when asked for."""

    def __init__(self, kept: Mapping[str, Any], lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> None:
        self._kept, self._lowered, self._options = kept, lowered, options

    def as_text(self) -> str:
        return self._kept["text"]

    def memory_analysis(self) -> "Sizes":
        return Sizes(self._kept["sizes"])

    def __getattr__(self, name: str) -> Any:
        return getattr(compile_anew(self._lowered, self._options), name)


class Sizes:
    """Bytes on each device, with the attributes of JAX's `CompiledMemoryStats`."""

    def __init__(self, kept: Mapping[str, int]) -> None:
        self.__dict__.update(kept)


def run_xla(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> Any:
    """Return a `Reading` of the program: the kept one, or a new one that is then kept. Takes the place of
    `topology.run_xla`, with the same arguments."""
    file = READINGS / f"{key(lowered, options)}.gz"
    dump = Path(options["xla_dump_to"]) if "xla_dump_to" in options else None
    if kept := kept_in(file):
        for name, text in kept.get("dumped", {}).items():
            assert dump is not None
            (dump / name).write_text(text)
    else:
        try:
            kept = read(compile_anew(lowered, options), dump)
        except jax.errors.JaxRuntimeError as error:
            # The program need not be the cause: the disk may be full.
            if not any(message in str(error) for message in topology.NO_KERNEL):
                raise
            kept = {"error": str(error)}
        READINGS.mkdir(parents=True, exist_ok=True)
        write_whole(file, gzip.compress(json.dumps(kept).encode(), compresslevel=1))
    if "error" in kept:
        raise jax.errors.JaxRuntimeError(kept["error"])
    return Reading(kept, lowered, options)


def kept_in(file: Path) -> dict[str, Any]:
    """Return what a file of READINGS holds. The result is empty if there is no such file, or if it is not whole because
    the machine stopped before all of it was on disk."""
    try:
        return json.loads(gzip.decompress(file.read_bytes()))
    except (OSError, EOFError, zlib.error, ValueError):
        return {}


def keep_restorable(key: str, name: str, executable: Any, backend: Any, seconds: int) -> None:
    """Let JAX keep a program that it just compiled, unless XLA would restore it wrongly: see
    `mesh.disable_compilation_cache`. Takes the place of `put_executable_and_time` of JAX's compilation cache."""
    if not hasattr(executable, "local_devices"):
        return  # compiled for devices that are not here
    if len(executable.local_devices()) == 1 or is_restorable(executable.hlo_modules()[0].to_string()):
        keep_any(key, name, executable, backend, seconds)


def put_whole(cache: LRUCache, key: str, value: bytes) -> None:
    """Keep a program so that no process ever finds a part of it: tests kill commands at any moment. Takes the place of
    `LRUCache.put`, which writes into the file itself."""
    if not (file := Path(cache.path, f"{key}-cache")).exists():
        write_whole(file, value)


def is_restorable(text: str) -> bool:
    """Return whether all collectives of a compiled program are outside its loops, branches and calls."""
    called, entry = text.split("\nENTRY ")
    _, after = entry.split("\n}", 1)
    return not COLLECTIVE.search(called + after)


def read(compiled: jax.stages.Compiled, dump: Path | None) -> dict[str, Any]:
    """Return what is kept of a program. dump: the folder to which XLA wrote texts. Those that describe buffers are
    kept."""
    stats = compiled.memory_analysis()
    names = [f"{where}{kind}_size_in_bytes" for where in ("", "host_") for kind in SIZES]
    return {
        "text": compiled.as_text(),
        "sizes": {name: getattr(stats, name) for name in names},
        "dumped": {
            file.name: file.read_text()
            for name in ("live-range", "buffer-assignment", "values")
            for file in (dump.glob(f"*{name}.txt") if dump else ())
        },
    }


def key(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> str:
    """Return the hash of everything that XLA is given.

    The text carries the names of operations, which tests read, but no lines of source files: see conftest.py.
    """
    # `compiler_options` of `jax.jit`, shardings and the order of devices are not in the text.
    lowering = lowered._lowering
    devices = [(device.id, device.process_index, device.device_kind) for device in lowering._device_list]
    chips = {kind: chip_of(kind) for _, _, kind in devices}
    settings = {name: value for name, value in jax.config.values.items() if not name.startswith(CACHE_SETTINGS)}
    given = {
        "program": lowered.as_text(debug_info=True),
        "shardings": [str(lowering.compile_args[name]) for name in ("in_shardings", "out_shardings")],
        "options": [*lowering._compiler_options_kvs, *((k, v) for k, v in options.items() if k not in FOLDERS)],
        "dumps": "xla_dump_to" in options,
        # `topology.compile_without_gpu` names a toolkit that assembles nothing. If none is named, XLA takes the
        # machine's own.
        "assembler": topology._ASSEMBLER if "xla_gpu_cuda_data_dir" in options else assembler(),
        "flags": os.environ.get("XLA_FLAGS", ""),
        "settings": sorted((name, str(value)) for name, value in settings.items()),
        "target": [
            devices,
            len(lowering._device_list[0].client.devices()),
            topology.name_topology(len({process for _, process, _ in devices}), 1),
            *(topology._target_config(chip) for chip in chips.values() if chip),
        ],
        "versions": versions(),
        "kept": Path(__file__).read_text(),  # which says what is read of a program
    }
    return hashlib.sha256(json.dumps(given, default=str).encode()).hexdigest()


@functools.cache
def versions() -> list[tuple[str, str]]:
    """Return names and versions of the packages that lower and compile programs."""
    found = ((each.metadata["Name"].lower().replace("_", "-"), each.version) for each in metadata.distributions())
    return sorted({each for each in found if each[0].startswith(COMPILER_PACKAGES)})


def assembler() -> tuple[str, int, int] | None:
    """Return path, size and time of change of NVIDIA's assembler on this machine, None where there is none."""
    path = shutil.which("ptxas")
    return path and (path, Path(path).stat().st_size, Path(path).stat().st_mtime_ns)


def write_whole(file: Path, data: bytes) -> None:
    """Write a file so that no other process ever finds a part of it."""
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
        temporary.write(data)
    Path(temporary.name).replace(file)


def forget_unused(days: int = 14) -> None:
    """Delete what no run of the tests has read for so long."""
    oldest = time.time() - 86_400 * days
    for file in FOLDER.glob("*/*"):
        with contextlib.suppress(FileNotFoundError):  # of another run that does the same
            if max(file.stat().st_atime, file.stat().st_mtime) < oldest:
                file.unlink()
