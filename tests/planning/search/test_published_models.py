"""The arithmetic of the search for published models of all families, on named GPUs."""

import math

import pytest
from published import PUBLISHED, published

from jaxopt_llm.checkpoint.huggingface.find_family import find_by_settings
from jaxopt_llm.config import Config, LoraConfig, MeshConfig, RematConfig, TrainingConfig
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.model.flops import count_active_parameters
from jaxopt_llm.planning.free_memory import leave_free
from jaxopt_llm.planning.search.ranking import estimate
from jaxopt_llm.planning.search.roofline import Cluster
from jaxopt_llm.planning.search.state_sizes import compute_state_sizes

LENGTH = 1024


def choose_cluster(parameters: int) -> Cluster:
    """Return the fewest H100s of which bfloat16 weights take at most 60%."""
    clusters = [Cluster("h100", 1, count) for count in (1, 2, 4, 8)]
    clusters += [Cluster("h100", hosts, 8) for hosts in (2, 4, 8)]
    return next(each for each in clusters if 2 * parameters < 0.6 * each.devices * each.chip.memory_bytes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_adapters_of_attention_fit(name: str) -> None:
    parameters = PUBLISHED[name][1]
    model, cluster = find_by_settings(published(name)).read(published(name)), choose_cluster(parameters)
    expert = (
        math.gcd(model.moe.experts, cluster.gpus_per_host) if model.moe.experts else 1
    )  # gathered whole, a layer of 256 does not fit
    config = Config(
        model=model,
        lora=LoraConfig(rank=8, targets=("*/attention/*",)),
        remat=RematConfig("full"),
        mesh=MeshConfig(fsdp=cluster.devices // expert, expert=expert),
        training=TrainingConfig(sequence_length=LENGTH, batch_size=cluster.devices),
    )
    state = compute_state_sizes(config)
    assert state is not None
    found = estimate(config, cluster, state)
    limit = leave_free(int(0.92 * cluster.chip.memory_bytes))
    assert 2 * parameters / cluster.devices < found.footprint.peak < limit
    # A token is multiplied with all active parameters in the forward, and with those after the first layer's for dx.
    multiplied = 2 * 2 * count_active_parameters(model, param_specs(model)) * LENGTH
    assert found.time.total > 0.8 * multiplied / cluster.chip.peak_flops["bfloat16"]
