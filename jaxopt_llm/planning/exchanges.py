"""Choice of the two exchanges that a configuration leaves open with `auto`: of attention, and of experts' tokens.

Attention over `mesh.context` (`sharding.context_exchange`). A ring sends more bytes, beside its kernels; an all-to-all
sends fewer, while the kernels wait. A ring also merges what it computes for the parts of the keys, and not every kernel
supports the keys of a window in parts. So the time of the whole step decides, by the arithmetic of `plan --search`,
with the kernel that each of them can use.

Experts' tokens over `mesh.expert` (`sharding.expert_exchange`). `gather` sends each token once to every device, and has
rows for all choices that can arrive. `all_to_all` sends each choice, and has rows for an even load and its room. So the
links decide, and the memory's rate: every kernel between the experts' matmuls reads and writes all rows, filled or not.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from jaxopt_llm.compiler.chips import USUAL_LINKS
from jaxopt_llm.config import Config, MeshConfig, ModelConfig, PrecisionConfig, ShardingConfig, fields
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.config.precision import Float
from jaxopt_llm.kernels.attention import find_unsupported
from jaxopt_llm.planning.search.attention_cost import ALL_TO_ALL, RING, resolve_attention
from jaxopt_llm.planning.search.block_cost import BlockCost
from jaxopt_llm.planning.search.microbatch import BYTES, MoECost
from jaxopt_llm.planning.search.roofline import LINK_EFFICIENCY, Cluster, seconds_in_memory
from jaxopt_llm.planning.search.transfers import find_link_over
from jaxopt_llm.planning.search.workload import predict_seconds
from jaxopt_llm.step.program import describe_attention
from jaxopt_llm.step.validation import size_problems

FIELD = "sharding.context_exchange"


def resolve_context_exchange(config: Config, cluster: Cluster | None, kept: str = AUTO) -> Config:
    """Replace `sharding.context_exchange=auto` by the exchange with the faster step, on a mesh that has `context`.

    A configuration with an `auto` elsewhere is compared with all activations saved.

    Args:
        cluster: the GPUs; None for other devices, on which a ring is taken. Their links count with the usual rates: a
            run does not know others, and `plan` describes the program of a run.
        kept: exchange of a run that continues on the same devices. It stays if the sizes and the kernel allow it.
    """
    if config.mesh.context == 1 or config.sharding.context_exchange != AUTO:
        return config
    legal = _list_legal(config)
    capability = cluster.chip.compute_capability if cluster else None

    def supports_kernel(setting: Config) -> bool:
        unsupported = find_unsupported(describe_attention(setting), capability)
        return not unsupported.get(setting.training.attention)  # `auto` is not among them

    possible = [setting for setting in legal if supports_kernel(setting)] or legal
    stays = [setting for setting in possible if setting.sharding.context_exchange == kept]
    if stays or cluster is None:
        return (stays or legal)[0]
    usual = replace(cluster, links=USUAL_LINKS)

    def predict(setting: Config) -> float:
        policy = {"remat.policy": "none"} if config.remat.policy == AUTO else {}
        return predict_seconds(fields.replace_fields(resolve_attention(setting, capability), policy), usual)

    return min(possible, key=predict)


def _list_legal(config: Config) -> Sequence[Config]:
    """Return the configuration with each exchange that its sizes allow, a ring first; `validate` refuses none."""
    each = (fields.replace_fields(config, {FIELD: exchange}) for exchange in (RING, ALL_TO_ALL))
    return [
        setting
        for setting in each
        if not size_problems(setting.model, setting.training, setting.mesh, setting.sharding)
    ]


Form = Literal["all_to_all", "gather"]
FORMS: tuple[Form, ...] = ("all_to_all", "gather")
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

    It covers one forward and one backward. The time of matmuls is left out, because no exchange changes it.
    """
    model, mesh = config.model, config.mesh
    cost, value = MoECost.from_config(config), BYTES[config.precision.compute_dtype]
    link, rate = find_link_over(("expert",), cost.dispatch, mesh, cluster)
    sent = CROSSINGS * cost.exchanged * value * model.width * (mesh.expert - 1) / mesh.expert
    # Any of them: they may differ in attention, whose time no exchange changes either.
    layer = next(layer for layer in BlockCost.from_config(config).layers if layer.has_experts)
    streamed = value * sum(layer.count_streamed(config.remat))
    return sent / (LINK_EFFICIENCY[link] * rate) + seconds_in_memory(streamed, cluster.chip)
