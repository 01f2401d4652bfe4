"""Choice of the exchange of experts' tokens (`sharding.expert_exchange=auto`), by the time that it adds to a step.

`gather` sends each token once to every device, and has rows for all choices that can arrive. `all_to_all` sends each
choice, and has rows for an even load and its room. So the links decide, and the memory's rate: every kernel between the
experts' matmuls reads and writes all rows, filled or not.
"""

import functools
from dataclasses import replace
from typing import Literal

from jaxopt_llm.compiler.chips import USUAL_LINKS
from jaxopt_llm.config import Config, MeshConfig, ModelConfig, PrecisionConfig, ShardingConfig
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.config.precision import Float
from jaxopt_llm.planning.search.block_cost import BlockCost
from jaxopt_llm.planning.search.microbatch import BYTES, MoECost
from jaxopt_llm.planning.search.roofline import LINK_EFFICIENCY, Cluster, seconds_in_memory
from jaxopt_llm.planning.search.transfers import find_link_over

Form = Literal["all_to_all", "gather"]
FORMS: tuple[Form, ...] = ("all_to_all", "gather")  # `ragged` has not run on a GPU yet
CROSSINGS = 4  # of the tokens in a layer: there and back, forward and backward


def resolve_expert_exchange(config: Config, cluster: Cluster) -> Config:
    """Replace `auto` by the faster exchange, if the configuration has one.

    Links count with the usual rates: a run does not know others, and `plan` describes the program of a run.
    """
    sharding, dtype = config.sharding, config.precision.compute_dtype
    if sharding.expert_exchange != AUTO or not config.model.moe.experts or config.mesh.expert == 1:
        return config
    usual = replace(cluster, links=USUAL_LINKS)
    fastest = _find_fastest(config.model, config.mesh, sharding.expert_room, dtype, usual)
    return replace(config, sharding=replace(sharding, expert_exchange=fastest))


@functools.cache
def _find_fastest(model: ModelConfig, mesh: MeshConfig, room: float, dtype: Float, cluster: Cluster) -> Form:
    def estimate(form: Form) -> float:
        sharding = ShardingConfig(expert_exchange=form, expert_room=room)
        precision = PrecisionConfig(compute_dtype=dtype)
        return estimate_seconds(Config(model=model, mesh=mesh, sharding=sharding, precision=precision), cluster)

    return min(FORMS, key=estimate)


def estimate_seconds(config: Config, cluster: Cluster) -> float:
    """Return the time per token of a device that the exchange and the kernels between products take in one MoE layer.

    It is that of one forward and one backward. What the matmuls take is left out, because no exchange changes it.
    """
    model, mesh = config.model, config.mesh
    cost, value = MoECost.from_config(config), BYTES[config.precision.compute_dtype]
    link, rate = find_link_over(("expert",), cost.dispatch, mesh, cluster)
    sent = CROSSINGS * cost.exchanged * value * model.width * (mesh.expert - 1) / mesh.expert
    # Any of them: they may differ in attention, whose time no exchange changes either.
    layer = next(layer for layer in BlockCost.from_config(config).layers if layer.has_experts)
    streamed = value * sum(layer.count_streamed(config.remat))
    return sent / (LINK_EFFICIENCY[link] * rate) + seconds_in_memory(streamed, cluster.chip)
