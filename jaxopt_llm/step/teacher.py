"""The teacher of a distillation: a frozen model, which runs forward before the loss of a step.

Its forward returns the input of its head for all tokens of the step, which takes 2 bytes per token and unit of its
width in 16 bits. The head of the model then forms the logits of both, chunk by chunk (kernels/divergence.py). For that,
the executor gets the teacher's table as one more frozen parameter outside the segments. So every executor
places, gathers and divides it like the model's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.core import tree
from jaxopt_llm.execution.executor import Executor
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import TEACHER_HEAD, Model, Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.placement import Placement

SCOPE = "teacher"  # named scope of this forward in compiled programs and profiles


@dataclass(frozen=True)
class Teacher:
    """The teacher as a program knows it.

    model: over its frozen parameters. rows: number of rows of the student's tables.
    """

    model: Decoder
    executor: Executor
    rows: int

    def add_inputs(self, params: Params, batch: Batch, placement: Placement) -> Batch:
        """Return the batch, fields [M, B, S], with the inputs of the teacher's head, [M, B, S, D]."""
        with jax.named_scope(SCOPE):
            found = self.executor.read_tokens(
                self.model.head_input, self.model, params, batch, placement.for_evaluation()
            )
        sharding = placement.activation(None, "batch", "residual_sequence", "embed")
        return replace(batch, teacher=jax.lax.with_sharding_constraint(jax.lax.stop_gradient(found), sharding))

    def extend(self, model: Model) -> Model:
        """Return the student with the teacher's table among its specs."""
        spec: ParamSpec = self.model.head_table(self.model.specs["non_layer"])
        return model.with_specs(_add_table(model.specs, replace(spec, shape=(self.rows, *spec.shape[1:]))))

    def extend_trainable(self, trainable: Params) -> Params:
        """Return the trained half of the student's parameters in the structure of `extend`."""
        return _add_table(trainable, None)

    def extend_frozen(self, frozen: Params, params: Params) -> Params:
        """Return the frozen half of the student's parameters with the teacher's table. params: the teacher's."""
        table: jax.Array = self.model.head_table(params["non_layer"])
        # Tables of one tokenizer may be padded differently. No other row stands for a token of both.
        missing = self.rows - table.shape[0]
        table = jnp.pad(table, [(0, missing), (0, 0)]) if missing > 0 else table[: self.rows]
        return _add_table(frozen, table)


def remove_table(params: Params) -> Params:
    """Return parameters without the teacher's table."""
    outside = {name: part for name, part in params["non_layer"].items() if name != TEACHER_HEAD}
    return params | {"non_layer": outside}


def _add_table(params: Mapping[str, Any], table: tree.Leaf) -> Params:
    return {**params, "non_layer": {**params["non_layer"], TEACHER_HEAD: {"table": table}}}
