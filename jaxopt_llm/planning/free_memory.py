"""Memory of a device: the units of tables, and the rule that `plan`, its search, the start of a run and advice share.

XLA may use a share of a GPU's memory (runtime.MEMORY_FRACTION). A chosen setting leaves FREE of that share unused,
unless no setting can. Arithmetic decides which settings are compiled, and may err by SLACK; the compiler's figure
decides which fit.
"""

import os

import jax

from jaxopt_llm.compiler.chips import Chip, chip_of
from jaxopt_llm.distributed.runtime import MEMORY_FRACTION

GIB = 2**30


def choose_unit(size: int) -> tuple[str, int]:
    """Return the name and the bytes of the unit in which a table of parts of `size` bytes is printed."""
    return ("GiB", GIB) if size >= GIB else ("MiB", 2**20)


def format_bytes(size: int, digits: int = 1) -> str:
    """Return a number of bytes in the unit that fits."""
    name, unit = choose_unit(size)
    return f"{size / unit:,.{digits}f} {name}"


# Share of what XLA may use that a step leaves free: for the fragments of XLA's allocator, samples and evaluations.
FREE = 0.05
SLACK = 0.05  # a setting is compiled if, by arithmetic, it would fit with this much less
CPU_SHARE = 0.5  # share of the host's memory for CPU devices, which share it with everything else


def count_chip_bytes(chip: Chip) -> int:
    """Return the bytes of a GPU that XLA may use."""
    return int(chip.memory_bytes * float(MEMORY_FRACTION))


def count_usable_bytes(device: jax.Device) -> int:
    """Return the bytes of this device that a step may use; 0 if nothing is known, which means to save memory."""
    if device.platform == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(CPU_SHARE * memory) // jax.local_device_count()
    # Not every allocator that XLA_PYTHON_CLIENT_ALLOCATOR can name has statistics.
    if limit := (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"):
        return int(limit)
    chip = chip_of(device.device_kind)
    return count_chip_bytes(chip) if chip else 0


def leave_free(limit: int) -> int:
    """Return the bytes that a step may need so that FREE of the limit stays free."""
    return int((1 - FREE) * limit)


def add_slack(limit: int) -> float:
    """Return the largest estimate, in bytes, with which a step is worth compiling."""
    return (1 + SLACK) * limit
