"""Model FLOP utilisation (MFU) of a run, with both conventions of model/flops.py."""

import jax

from jaxopt_llm.compiler.chips import Chip, chip_of
from jaxopt_llm.config import Config
from jaxopt_llm.model import flops
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step.program import Program


def utilisation_per_token(config: Config, program: Program, placement: Placement) -> dict[str, float]:
    """Return the MFU at a throughput of one token per second, by the name of its convention.

    It is the time that the operations of one token take on all devices, each operation at the peak of its dtype. The
    result is empty if the peak of the device is not known.
    """
    chip = chip_of(jax.devices()[0].device_kind)
    return compute_utilisation(config, program, placement, chip) if chip else {}


def compute_utilisation(config: Config, program: Program, placement: Placement, chip: Chip) -> dict[str, float]:
    """Return the same for devices that are this chip."""
    precision = config.precision
    specs = program.specs.masters, program.specs.frozen
    needed = flops.count_per_token(config.model, *specs, config.training.sequence_length)
    narrow = flops.count_quantised_per_token(config.model, *specs, precision)
    peak = chip.peak_flops[precision.compute_dtype]
    narrow_peak = chip.peak_flops[{"fp8": "float8", "int8": "int8"}[precision.matmul]] if narrow else peak

    def seconds(operations: float) -> float:
        return ((operations - narrow) / peak + narrow / narrow_peak) / placement.mesh.size

    return {"mfu": seconds(needed.causal), "mfu_full_attention": seconds(needed.full)}
