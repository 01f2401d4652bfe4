"""The optimizer: optax, per layer (see update.py)."""

from dataclasses import dataclass

import jax
import optax

from jaxopt_llm import tree
from jaxopt_llm.model.param import ParamSpec


@dataclass(frozen=True)
class OptimizerConfig:
    learning_rate: float = 3e-4
    """peak of the schedule"""
    beta1: float = 0.9
    """decay of the first moment, per step"""
    beta2: float = 0.95
    """decay of the second moment, per step"""
    epsilon: float = 1e-8
    """added to the root of the second moment"""
    weight_decay: float = 0.1
    """decoupled; of matrices and tables, not of norms and biases"""
    clip_norm: float = 1.0
    """largest global norm of the gradient; larger ones are scaled down to it"""

    def problems(self) -> list[str]:
        found = [
            f"optimizer.{name}={getattr(self, name)}: must be above 0"
            for name in ("learning_rate", "epsilon", "clip_norm")
            if not getattr(self, name) > 0
        ]
        found += [
            f"optimizer.{name}={getattr(self, name)}: must lie in [0, 1)"
            for name in ("beta1", "beta2")
            if not 0 <= getattr(self, name) < 1
        ]
        if self.weight_decay < 0:
            found.append(f"optimizer.weight_decay={self.weight_decay}: must be at least 0")
        return found


def adamw(config: OptimizerConfig, schedule: optax.Schedule, specs: tree.Tree) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) for the parameters of one layer, or those outside the stacks.

    specs: of one layer.
    """

    def decays(spec: ParamSpec) -> bool:
        assert not spec.leading
        return bool(spec.contracting)  # not its rank: a bias by heads has two dimensions

    return optax.adamw(
        schedule,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=jax.tree.map(decays, specs),
    )
