"""A mixture of experts as the arithmetic of memory and of time sees it: how many rows a device has, and what goes over
`expert` (see model/exchange.py). Of one layer that has experts, for each token of a device.
"""

import dataclasses
import functools
from dataclasses import dataclass

from jax.sharding import AbstractMesh

from jaxopt_llm.config import TrainConfig
from jaxopt_llm.model import exchange, routes
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.parallel.mesh import AXES, MeshConfig
from jaxopt_llm.parallel.precision import PrecisionConfig
from jaxopt_llm.parallel.sharding import Placement, ShardingConfig
from jaxopt_llm.search.passes import tokens


@dataclass(frozen=True)
class Mixture:
    """share: of the layers that have experts, 0 of a dense model. rows: that a device has room for.
    exchanged: rows of the residual stream that a group along `expert` exchanges at once, there and back by collectives
    of these kinds; summed: those that `tensor` sums. rounds: in which rows go where a load is at its worst; the
    arithmetic counts one, that of an even load."""

    share: float
    rows: float
    exchanged: float
    summed: float
    there: str
    back: str
    rounds: int

    @classmethod
    def of(cls, config: TrainConfig) -> "Mixture":
        return _of(config.model, config.mesh, config.sharding, config.precision, tokens(config))


@functools.cache
def _of(
    model: ModelConfig, mesh: MeshConfig, sharding: ShardingConfig, precision: PrecisionConfig, count: int
) -> Mixture:
    """count: tokens of a device."""
    share = sum(map(model.has_experts, range(model.layers))) / model.layers
    if not share:
        return Mixture(0, 0, exchanged=0, summed=0, there="all-gather", back="reduce-scatter", rounds=1)
    placement = Placement(AbstractMesh(dataclasses.astuple(mesh), AXES), sharding, precision)
    rows = exchange.rows(model, placement, count) / count
    form = exchange.form(model, placement)
    if form == "gather":
        return Mixture(share, rows, mesh.expert, mesh.expert, there="all-gather", back="reduce-scatter", rounds=1)
    kind = {"all_to_all": "all-to-all", "ragged": "ragged-all-to-all"}[form]
    _, rounds = routes.room(model, placement, count)
    return Mixture(share, rows, exchanged=rows, summed=1, there=kind, back=kind, rounds=rounds)
