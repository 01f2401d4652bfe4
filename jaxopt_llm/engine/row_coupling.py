"""Products between rows of a batch, found in the jaxpr of a loss.

The gradients of microbatches add up to the batch's only if the loss is a mean, or a sum, over rows. A
contrastive loss compares each row with all others, so a microbatch's loss has other terms than the batch's.

A dimension of a value counts rows if it is larger in a trace with twice as many rows. Three things couple rows:

pairs: a value has two dimensions that count rows, such as the [B, B] logits of a contrastive loss, pairwise distances,
    or the Gram matrix of a kernel.
moments: the loss is a nonlinear function of a product that sums over rows, such as the [D, D] matrix of correlations
    of Barlow Twins (Zbontar et al. 2021, arXiv:2103.03230).
softmax: a sum of exponentials over rows is a divisor, or its logarithm is taken.

Only values that depend on the parameters count. A mean over rows that goes back into the rows, as in BatchNorm, does
not count either: each microbatch then has statistics of its own, as with accumulation everywhere. Of a loss that is
another program with twice as many rows, or that fails with them, nothing is known, so a coupling may be missed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.jaxpr import find_called, follow_values, pair_jaxprs, split_scan, typeof
from jaxopt_llm.engine.microbatches import count_rows, with_rows
from jaxopt_llm.engine.program import EngineProgram, Job, trace_loss
from jaxopt_llm.engine.user_model import make_selector
from jaxopt_llm.execution.weight_uses import drop_callbacks, drop_results

Pair = tuple[Jaxpr, Jaxpr]  # a jaxpr, and that of the same program for twice as many rows
LossOver = Literal["rows", "batch"]  # what a loss is a mean over, see `initialize`
# Linear operations with one operand, and those that are linear in one operand if the others do not depend on the batch.
_LINEAR = {
    *("convert_element_type", "neg", "reshape", "broadcast_in_dim", "transpose", "squeeze", "reduce_sum", "slice"),
    *("copy", "add", "add_any", "stack", "sub", "concatenate", "pad", "rev", "cumsum", "split", "reduce_precision"),
}
_LINEAR_IN_ONE = {"mul", "div", "dot_general", "select_n", "gather", "dynamic_slice"}


@dataclass(frozen=True)
class _Value:
    """Description of a value of the jaxpr: where its rows are, and what it depends on.

    rows: its dimensions that count rows.
    looped: whether it belongs to the row of one iteration of a loop over rows.
    batch, trained: whether it depends on the batch, and on the parameters.
    product: a product that summed over rows, if this is a function of it; None if this has rows of its own.
    linear: whether it is a linear function of the product.
    exponential: whether it is a linear function of exponentials that depend on the parameters. Without rows of its own,
        it is one of their sum over rows.
    """

    rows: frozenset[int] = frozenset()
    looped: bool = False
    batch: bool = False
    trained: bool = False
    product: JaxprEqn | None = None
    linear: bool = True
    exponential: bool = False

    @property
    def has_pairs(self) -> bool:
        return self.trained and len(self.rows) + self.looped > 1


_CONSTANT = _Value()


def check_loss_over(job: Job, program: EngineProgram, accumulation: int) -> None:
    """Raise InputError if the loss of a batch is not the sum or mean over this number of microbatches.

    Args:
        program: of the job.
    """
    if job.loss_over not in (None, *get_args(LossOver)):
        raise InputError(f'loss_over={job.loss_over!r}: give "rows" or "batch", or leave it out')
    if accumulation == 1 or job.loss_over == "rows":
        return
    remedy = 'set training.accumulation=1, or loss_over="rows" if each microbatch may have a loss of its own'
    if job.loss_over == "batch":
        raise InputError(
            f'loss_over="batch": the loss of the batch is not that of its training.accumulation={accumulation} '
            f"microbatches; {remedy}"
        )
    parameters, arrays = len(job.frontend.parameters), len(jax.tree.leaves(job.example))
    if found := describe_coupling(*_trace_twice(job, program), parameters, parameters, arrays):
        raise InputError(
            f"loss: {found}, so the loss of the batch is not the mean over its training.accumulation={accumulation} "
            f"microbatches; {remedy}"
        )


def _trace_twice(job: Job, program: EngineProgram) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Return the jaxpr of the loss of a microbatch, and that for twice as many rows."""

    def trace(factor: int) -> ClosedJaxpr:
        rows = factor * count_rows(job.example, job.replicated)
        larger = replace(job, example=with_rows(job.example, rows, job.replicated))
        return trace_loss(larger, placement, make_selector(placement, job.config.training.attention)).closed

    traced, placement = program.model.traced, program.placement
    try:
        # A loss of one row may be another program than a loss of several.
        is_single = count_rows(job.example, job.replicated) == job.config.training.accumulation
        return (trace(2), trace(4)) if is_single else (traced, trace(2))
    except Exception:  # the user's loss takes no other number of rows
        return traced, traced


def describe_coupling(
    closed: ClosedJaxpr, doubled: ClosedJaxpr, result: int, parameters: int, arrays: int
) -> str | None:
    """Return where a loss multiplies rows of the batch with each other, or None.

    Args:
        closed, doubled: the jaxprs of the loss, and of the loss of twice as many rows.
        result: index of the loss among its results.
        parameters: the number of its first arguments that are parameters.
        arrays: the number of its last arguments that are the arrays of the batch.
    """
    keep = [index == result for index in range(len(closed.jaxpr.outvars))]
    needed, larger = (drop_results(drop_callbacks(each), keep).jaxpr for each in (closed, doubled))
    first = len(needed.invars) - arrays
    arguments = [
        _Value(_find_larger(*pair), batch=index >= first, trained=index < parameters)
        for index, pair in enumerate(zip(needed.invars, larger.invars, strict=True))
    ]
    walk = _Walk()
    try:
        (loss,) = walk.run((needed, larger), arguments)
    except ValueError:  # they are different programs
        return None
    if walk.pairs is not None:
        return f"it compares all rows with each other, {_locate(walk.pairs)}"
    if walk.softmax is not None:
        return f"it normalises by a sum of exponentials over rows, {_locate(walk.softmax)}"
    if loss.product is not None and not loss.linear:
        return f"it is a nonlinear function of a product that sums over rows, {_locate(loss.product)}"
    return None


def _find_larger(var: Any, other: Any) -> frozenset[int]:
    """Return the dimensions of a variable that are larger in another one."""
    sizes = zip(typeof(var).shape, typeof(other).shape, strict=True)
    return frozenset(dim for dim, (size, larger) in enumerate(sizes) if size < larger)


def _locate(eqn: JaxprEqn) -> str:
    aval = typeof(eqn.outvars[0])
    return f"in the {aval.dtype}{list(aval.shape)} of {source_info_util.summarize(eqn.source_info)}"


@dataclass
class _Walk:
    """Walks a jaxpr, next to that of twice as many rows.

    rows: the dimensions of each variable that count rows.
    others: the same equation for twice as many rows.
    pairs: the first equation whose result has two dimensions of rows.
    softmax: the first one that divides by a sum of exponentials over rows, or takes its logarithm.
    """

    rows: dict[Any, frozenset[int]] = field(default_factory=dict)
    others: dict[JaxprEqn, JaxprEqn] = field(default_factory=dict)
    pairs: JaxprEqn | None = None
    softmax: JaxprEqn | None = None

    def run(self, jaxprs: Pair, arguments: Sequence[_Value]) -> list[_Value]:
        equations, variables = pair_jaxprs(*jaxprs)
        self.others |= equations
        self.rows |= {var: _find_larger(var, other) for var, other in variables.items()}
        return follow_values(jaxprs[0], arguments, self._apply, _CONSTANT)

    def _pair(self, eqn: JaxprEqn, find: Callable[[JaxprEqn], Any]) -> Pair:
        """Return a jaxpr inside of an equation, and that for twice as many rows."""
        one, other = (getattr(found, "jaxpr", found) for found in map(find, (eqn, self.others[eqn])))
        return one, other

    def _apply(self, eqn: JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        if not any(value.batch or value.trained for value in inputs):
            return [_CONSTANT] * len(eqn.outvars)
        name = eqn.primitive.name
        if name == "scan":
            return self._scan(eqn, inputs)
        if name == "while":
            return self._while(eqn, inputs)
        if name == "cond":
            branches = zip(*(each.params["branches"] for each in (eqn, self.others[eqn])), strict=True)
            each = [self.run((one.jaxpr, other.jaxpr), inputs[1:]) for one, other in branches]
            return [_join(results) for results in zip(*each, strict=True)]
        if find_called(eqn):
            results = self.run(self._pair(eqn, find_called), inputs)
            # The equations of JAX's own jitted functions may have no line of the user's code.
            if self.softmax is not None and not source_info_util.summarize(self.softmax.source_info):
                self.softmax = eqn
            return results
        results = [_follow(eqn, inputs, _Value(self.rows[var])) for var in eqn.outvars]
        if self.pairs is None and any(result.has_pairs for result in results):
            self.pairs = eqn
        if self.softmax is None and name in ("div", "log") and inputs[-1].exponential and not inputs[-1].rows:
            self.softmax = eqn
        return results

    def _scan(self, eqn: JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        constants, carried = split_scan(eqn)
        begin, bodies = constants + carried, self._pair(eqn, lambda eqn: eqn.params["jaxpr"])
        items = [
            replace(value, rows=frozenset(dim - 1 for dim in value.rows if dim), looped=0 in value.rows)
            for value in inputs[begin:]
        ]

        def step(carry: list[_Value]) -> list[_Value]:
            return self.run(bodies, [*inputs[:constants], *carry, *items])

        carry = _repeat(lambda carry: step(carry)[:carried], inputs[constants:begin])
        return [
            replace(value, rows=self.rows[var], looped=False)
            for var, value in zip(eqn.outvars, [*carry, *step(carry)[carried:]], strict=True)
        ]

    def _while(self, eqn: JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        constants, carry = inputs[first : first + second], inputs[first + second :]
        bodies = self._pair(eqn, lambda eqn: eqn.params["body_jaxpr"])
        return _repeat(lambda carry: self.run(bodies, [*constants, *carry]), carry)


def _repeat(step: Any, carry: list[_Value]) -> list[_Value]:
    """Return the descriptions of the values that a loop carries, after as many iterations as still change them."""
    while True:
        after = [_join(pair) for pair in zip(carry, step(carry), strict=True)]
        if after == carry:
            return carry
        carry = after


def _join(values: Sequence[_Value]) -> _Value:
    """Return the description of a value that is one of several, such as the result of a branch."""
    products = [value for value in values if value.product is not None]
    return _Value(
        frozenset[int]().union(*(value.rows for value in values)),
        any(value.looped for value in values),
        any(value.batch for value in values),
        any(value.trained for value in values),
        products[0].product if products else None,
        all(value.linear for value in values),
        any(value.exponential for value in values),
    )


def _follow(eqn: JaxprEqn, inputs: Sequence[_Value], result: _Value) -> _Value:
    """Complete the description of a result, which has its rows, from the inputs' descriptions."""
    looped, batch, trained = (any(getattr(value, name) for value in inputs) for name in ("looped", "batch", "trained"))
    exponential = _is_exponential(eqn, inputs, result)
    made = replace(result, looped=looped, batch=batch, trained=trained, exponential=exponential)
    if made.rows or made.looped:
        return made
    found = next((value.product for value in inputs if value.product is not None), None)
    if found is None:
        return replace(made, product=eqn) if _sums_trained_rows(eqn, inputs) else made
    name = eqn.primitive.name
    one = name in _LINEAR_IN_ONE and sum(value.batch for value in inputs) == 1
    one = one and not (name == "div" and inputs[1].batch)
    linear = (name in _LINEAR or one) and all(value.linear for value in inputs)
    return replace(made, product=found, linear=linear)


def _is_exponential(eqn: JaxprEqn, inputs: Sequence[_Value], result: _Value) -> bool:
    """Return whether a result is a linear function of exponentials with rows, or of their sum over rows."""
    name = eqn.primitive.name
    if name == "exp":
        return inputs[0].trained and bool(inputs[0].rows)
    given = [value for value in inputs if value.exponential]
    if not given or name not in _LINEAR | _LINEAR_IN_ONE:
        return False
    return bool(result.rows) or name in ("reduce_sum", "dot_general") or not any(value.rows for value in given)


def _sums_trained_rows(eqn: JaxprEqn, inputs: Sequence[_Value]) -> bool:
    """Return whether an equation is a product that sums over rows, and both factors depend on the parameters.

    A mean that is weighted by a mask of the batch is no such product.
    """
    if eqn.primitive.name != "dot_general" or not all(value.trained for value in inputs):
        return False
    (left, right), _ = eqn.params["dimension_numbers"]
    return any(a in inputs[0].rows and b in inputs[1].rows for a, b in zip(left, right, strict=True))
