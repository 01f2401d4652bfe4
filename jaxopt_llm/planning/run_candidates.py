"""Candidates for the settings that a run leaves open, on its own devices."""

import os

import jax

from jaxopt_llm.compiler.chips import chip_of
from jaxopt_llm.config import Config
from jaxopt_llm.distributed.runtime import MEMORY_FRACTION
from jaxopt_llm.planning.prediction import describe_cluster
from jaxopt_llm.planning.settings_choice import Candidate, list_candidates

CPU_SHARE = 0.5  # of the host's memory, which CPU devices share with everything else


def list_run_candidates(config: Config, device: jax.Device, limit: int) -> list[Candidate]:
    """Return the candidates for the devices of this run, of which `device` is one.

    Args:
        limit: bytes of a device that a step may use.
    """
    return list_candidates(config, describe_cluster(), limit, device.platform == "gpu")


def count_usable_bytes(device: jax.Device) -> int:
    """Return the bytes of a device that a step may use; 0 if nothing is known, which means to save memory."""
    if device.platform == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(CPU_SHARE * memory) // jax.local_device_count()
    # Not every allocator that XLA_PYTHON_CLIENT_ALLOCATOR can name has statistics.
    if limit := (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"):
        return int(limit)
    chip = chip_of(device.device_kind)
    return int(float(MEMORY_FRACTION) * chip.memory_bytes) if chip else 0
