"""Choice of the exchange of attention over `mesh.context`, where the configuration leaves it open with `auto`.

A ring sends more bytes, beside its kernels; an all-to-all sends fewer, while the kernels wait. A ring also merges what
it computes for the parts of the keys, and not every kernel supports the keys of a window in parts. So the time of the
whole step decides, by the arithmetic of `plan --search`, with the kernel that each of them can use.
"""

from collections.abc import Sequence
from dataclasses import replace

from jaxopt_llm.compiler.chips import USUAL_LINKS
from jaxopt_llm.config import Config, fields
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.kernels.attention import find_unsupported
from jaxopt_llm.planning.prediction import predict_seconds
from jaxopt_llm.planning.search.attention_cost import ALL_TO_ALL, RING, describe_attention, resolve_attention
from jaxopt_llm.planning.search.roofline import Cluster
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
