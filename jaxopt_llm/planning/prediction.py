"""Memory and time of a step by arithmetic. Nothing is compiled."""

import functools

import jax

from jaxopt_llm.compiler.chips import CHIPS, chip_of
from jaxopt_llm.config import Config
from jaxopt_llm.planning.search.footprint import Footprint, compute_footprint
from jaxopt_llm.planning.search.roofline import Cluster, compute_step_time
from jaxopt_llm.planning.search.state_sizes import compute_state_sizes
from jaxopt_llm.planning.search.workload import estimate_work

STAND_IN = "h100"  # GPU by whose rates a run on other devices is estimated


@functools.cache
def predict_footprint(config: Config) -> Footprint:
    """Return the memory of a step by arithmetic."""
    state = compute_state_sizes(config)
    assert state is not None, "`validate` refuses such moments"
    return compute_footprint(config, state)


@functools.cache
def predict_seconds(config: Config, cluster: Cluster) -> float:
    """Return the time of a step by the arithmetic with which `plan --search` ranks settings."""
    state = compute_state_sizes(config)
    assert state is not None, "`validate` refuses such moments"
    return compute_step_time(estimate_work(config, state, cluster), cluster.chip, config.precision.compute_dtype).total


def describe_cluster(devices: int) -> Cluster:
    """Return the GPUs of this run; for devices without figures, GPUs whose rates have similar proportions.

    devices: number of devices in all processes.
    """
    chip, hosts = chip_of(jax.devices()[0].device_kind), jax.process_count()
    name = next((name for name, known in CHIPS.items() if known is chip), STAND_IN)
    return Cluster(name, hosts, devices // hosts)
