"""Model FLOP utilisation of a run, under both conventions (see model/flops.py)."""

import jax

from jaxopt_llm.config import TrainConfig
from jaxopt_llm.model import flops
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.parallel.topology import chip_of
from jaxopt_llm.training.program import Program


def utilisation(config: TrainConfig, program: Program, placement: Placement) -> dict[str, float]:
    """The share of the devices' peak that one token per second is, by the name of its convention: the time that its
    operations take there, each kind at the peak of its dtype. Nothing where the peak is not known."""
    chip, precision = chip_of(jax.devices()[0].device_kind), config.precision
    if chip is None:
        return {}
    masters = program.specs.masters
    needed = flops.per_token(config.model, masters, program.specs.frozen, config.training.sequence_length)
    narrow = flops.quantised_per_token(config.model, masters, precision)
    peak = chip.peak_flops[precision.compute_dtype]
    peak_of_narrow = chip.peak_flops[{"fp8": "float8", "int8": "int8"}[precision.matmul]] if narrow else peak

    def seconds(operations: float) -> float:
        return ((operations - narrow) / peak + narrow / peak_of_narrow) / placement.mesh.size

    return {"mfu": seconds(needed.causal), "mfu_full_attention": seconds(needed.full)}
