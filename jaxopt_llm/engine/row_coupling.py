"""Products between rows of a batch, found in the jaxpr of a loss.

The gradients of microbatches add up to the batch's only if the loss is a mean, or a sum, over rows. A
contrastive loss compares each row with all others, so a microbatch's loss has other terms than the batch's.

A walk of the jaxpr follows the dimensions that count the rows. Three things couple rows:

pairs: a value has two dimensions that count rows, such as the [B, B] logits of a contrastive loss, pairwise distances,
    or the Gram matrix of a kernel.
moments: the loss is a nonlinear function of a product that sums over rows, such as the [D, D] matrix of correlations
    of Barlow Twins (Zbontar et al. 2021, arXiv:2103.03230).
softmax: a sum of exponentials over rows is a divisor, or its logarithm is taken.

Only values that depend on the parameters count. A mean over rows that goes back into the rows, as in BatchNorm, does
not count either: each microbatch then has statistics of its own, as with accumulation everywhere. What an operation
without a rule below does with rows is unknown and does not count, so a coupling may be missed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.jaxpr import follow_values, split_scan, typeof
from jaxopt_llm.engine.user_model import UserModel
from jaxopt_llm.execution.weight_uses import drop_callbacks, drop_results

LossOver = Literal["rows", "batch"]  # what a loss is a mean over, see `initialize`
# Linear operations with one operand, and those that are linear in one operand if the others do not depend on the batch.
_LINEAR = {
    *("convert_element_type", "neg", "reshape", "broadcast_in_dim", "transpose", "squeeze", "reduce_sum", "slice"),
    *("copy", "add", "add_any", "stack", "sub", "concatenate", "pad", "rev", "cumsum", "split", "reduce_precision"),
}
_LINEAR_IN_ONE = {"mul", "div", "dot_general", "select_n", "gather", "dynamic_slice"}


# The dimensions of a value that count rows -> the numbers of values along it that one row and that all rows take. A
# reshape of [B, S] to [B · S] makes {0: (S, B · S)} of {0: (1, B)}, and one of [S, B] makes {0: (1, B)} of {1: (1, B)}.
Rows = dict[int, tuple[int, int]]


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

    rows: Rows = field(default_factory=dict)
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


def check_loss_over(loss_over: LossOver | None, accumulation: int, model: UserModel, have_rows: Sequence[bool]) -> None:
    """Raise InputError if the loss of a batch is not the sum or mean over its microbatches.

    Args:
        loss_over: see `initialize`.
        have_rows: see describe_coupling.
    """
    if loss_over not in (None, *get_args(LossOver)):
        raise InputError(f'loss_over={loss_over!r}: give "rows" or "batch", or leave it out')
    if accumulation == 1 or loss_over == "rows":
        return
    remedy = 'set training.accumulation=1, or loss_over="rows" if each microbatch may have a loss of its own'
    if loss_over == "batch":
        raise InputError(
            f'loss_over="batch": the loss of the batch is not that of its training.accumulation={accumulation} '
            f"microbatches; {remedy}"
        )
    parameters = len(model.frontend.parameters)
    if found := describe_coupling(model.traced, parameters, parameters, have_rows):
        raise InputError(
            f"loss: {found}, so the loss of the batch is not the mean over its training.accumulation={accumulation} "
            f"microbatches; {remedy}"
        )


def describe_coupling(closed: ClosedJaxpr, result: int, parameters: int, have_rows: Sequence[bool]) -> str | None:
    """Return where a loss multiplies rows of the batch with each other, or None.

    Args:
        closed: the jaxpr of the loss.
        result: index of the loss among its results.
        parameters: the number of its first arguments that are parameters.
        have_rows: whether the first dimension counts rows, for each of its last arguments, the arrays of the batch.
    """
    needed = drop_results(drop_callbacks(closed), [index == result for index in range(len(closed.jaxpr.outvars))])
    arguments = [_Value(trained=True)] * parameters + [_CONSTANT] * (
        len(closed.jaxpr.invars) - parameters - len(have_rows)
    )
    shapes = [typeof(var).shape for var in closed.jaxpr.invars[len(arguments) :]]
    arguments += [
        _Value({0: (1, shape[0])} if has_rows else {}, batch=True)
        for shape, has_rows in zip(shapes, have_rows, strict=True)
    ]
    walk = _Walk()
    (loss,) = walk.run(needed.jaxpr, arguments)
    if walk.pairs is not None:
        return f"it compares all rows with each other, {_locate(walk.pairs)}"
    if walk.softmax is not None:
        return f"it normalises by a sum of exponentials over rows, {_locate(walk.softmax)}"
    if loss.product is not None and not loss.linear:
        return f"it is a nonlinear function of a product that sums over rows, {_locate(loss.product)}"
    return None


def _locate(eqn: JaxprEqn) -> str:
    aval = typeof(eqn.outvars[0])
    return f"in the {aval.dtype}{list(aval.shape)} of {source_info_util.summarize(eqn.source_info)}"


@dataclass
class _Walk:
    """Walks a jaxpr.

    pairs: the first equation whose result has two dimensions of rows.
    softmax: the first one that divides by a sum of exponentials over rows, or takes its logarithm.
    """

    pairs: JaxprEqn | None = None
    softmax: JaxprEqn | None = None

    def run(self, jaxpr: Jaxpr, arguments: Sequence[_Value]) -> list[_Value]:
        return follow_values(jaxpr, arguments, self._apply, _CONSTANT)

    def _apply(self, eqn: JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        if not any(value.batch or value.trained for value in inputs):
            return [_CONSTANT] * len(eqn.outvars)
        name = eqn.primitive.name
        if name == "scan":
            return self._scan(eqn, inputs)
        if name == "while":
            return self._while(eqn, inputs)
        if name == "cond":
            each = [self.run(branch.jaxpr, inputs[1:]) for branch in eqn.params["branches"]]
            return [_join(results) for results in zip(*each, strict=True)]
        if inner := _find_inner(eqn):
            results = self.run(inner, inputs)
            # The equations of JAX's own jitted functions may have no line of the user's code.
            if self.softmax is not None and not source_info_util.summarize(self.softmax.source_info):
                self.softmax = eqn
            return results
        results = [_Value(rows) for rows in _RULES.get(name, _keep_rows)(eqn, inputs)]
        results = [_follow(eqn, inputs, result) for result in results]
        if self.pairs is None and any(result.has_pairs for result in results):
            self.pairs = eqn
        if self.softmax is None and name in ("div", "log") and inputs[-1].exponential and not inputs[-1].rows:
            self.softmax = eqn
        return results

    def _scan(self, eqn: JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        constants, carried = split_scan(eqn)
        begin = constants + carried
        items = [
            replace(value, rows={dim - 1: span for dim, span in value.rows.items() if dim}, looped=0 in value.rows)
            for value in inputs[begin:]
        ]

        def step(carry: list[_Value]) -> list[_Value]:
            return self.run(eqn.params["jaxpr"].jaxpr, [*inputs[:constants], *carry, *items])

        carry = _repeat(lambda carry: step(carry)[:carried], inputs[constants:begin])
        stacked = []
        for value in step(carry)[carried:]:
            own = {0: (1, eqn.params["length"])} if value.looped else {}
            stacked.append(replace(value, rows=own | {dim + 1: span for dim, span in value.rows.items()}, looped=False))
        return [*(replace(value, looped=False) for value in carry), *stacked]

    def _while(self, eqn: JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        constants, carry = inputs[first : first + second], inputs[first + second :]
        return _repeat(lambda carry: self.run(eqn.params["body_jaxpr"].jaxpr, [*constants, *carry]), carry)


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
        {dim: span for value in reversed(values) for dim, span in value.rows.items()},
        any(value.looped for value in values),
        any(value.batch for value in values),
        any(value.trained for value in values),
        products[0].product if products else None,
        all(value.linear for value in values),
        any(value.exponential for value in values),
    )


def _find_inner(eqn: JaxprEqn) -> Jaxpr | None:
    """Return the jaxpr of an equation that calls one with its own inputs, such as jit, remat and custom_vjp_call."""
    for value in eqn.params.values():
        inner = value.jaxpr if isinstance(value, ClosedJaxpr) else value
        if isinstance(inner, Jaxpr) and len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(eqn.outvars):
            return inner
    return None


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


# --- rules: the rows of the results of an equation


def _keep_rows(eqn: JaxprEqn, inputs: Sequence[_Value]) -> list[Rows]:
    """Return the rows of an operation that keeps the dimensions of its operands: elementwise, or a slice."""

    def keep(shape: tuple[int, ...]) -> Rows:
        rows: Rows = {}
        for atom, value in zip(eqn.invars, inputs, strict=True):
            if len(typeof(atom).shape) == len(shape):
                rows = {
                    dim: (one, min(all_of_them, shape[dim]))
                    for dim, (one, all_of_them) in value.rows.items()
                    if shape[dim] > 1
                } | rows
        return rows

    return [keep(typeof(var).shape) for var in eqn.outvars]


def _broadcast(eqn: JaxprEqn, inputs: Sequence[_Value]) -> list[Rows]:
    dims = eqn.params["broadcast_dimensions"]
    return [{dims[dim]: span for dim, span in inputs[0].rows.items()}]


def _transpose(eqn: JaxprEqn, inputs: Sequence[_Value]) -> list[Rows]:
    permutation = eqn.params["permutation"]
    return [{permutation.index(dim): span for dim, span in inputs[0].rows.items()}]


def _drop_dims(eqn: JaxprEqn, inputs: Sequence[_Value]) -> list[Rows]:
    """Return the rows after a reduction or a squeeze."""
    dropped = eqn.params["axes" if "axes" in eqn.params else "dimensions"]
    kept = [dim for dim in range(len(typeof(eqn.invars[0]).shape)) if dim not in dropped]
    return [{kept.index(dim): span for dim, span in inputs[0].rows.items() if dim in kept} for _ in eqn.outvars]


def _reshape(eqn: JaxprEqn, inputs: Sequence[_Value]) -> list[Rows]:
    """Return the rows after a reshape. Of rows that it divides into groups, [N, K], those of the groups count."""
    before, after = typeof(eqn.invars[0]).shape, typeof(eqn.outvars[0]).shape
    rows: Rows = {}
    for dim, span in inputs[0].rows.items():
        one, all_of_them = (values * math.prod(before[dim + 1 :]) for values in span)
        for new, size in enumerate(after):
            below = math.prod(after[new + 1 :])
            if size > 1 and one % below == 0 and all_of_them <= below * size:
                rows[new] = one // below, all_of_them // below
            elif size > 1 and below % one == 0 and below < all_of_them == below * size:
                rows[new] = 1, size
    return [rows]


def _dot_general(eqn: JaxprEqn, inputs: Sequence[_Value]) -> list[Rows]:
    contracting, batch = eqn.params["dimension_numbers"]
    rows: Rows = {}
    position = len(batch[0])
    for value, atom, summed, shared in zip(inputs, eqn.invars, contracting, batch, strict=True):
        for dim in range(len(typeof(atom).shape)):
            if dim in summed:
                continue
            place = shared.index(dim) if dim in shared else position
            position += dim not in shared
            if dim in value.rows:
                rows[place] = value.rows[dim]
    return [rows]


def _convolve(eqn: JaxprEqn, inputs: Sequence[_Value]) -> list[Rows]:
    left, right, out = eqn.params["dimension_numbers"]
    grouped = eqn.params["feature_group_count"] > 1
    rows: Rows = {}
    for place, dim in enumerate(left):
        if dim in inputs[0].rows and (place != 1 or grouped):
            rows[out[place]] = inputs[0].rows[dim]
    if right[0] in inputs[1].rows:
        rows[out[1]] = inputs[1].rows[right[0]]
    return [rows]


def _gather(eqn: JaxprEqn, inputs: Sequence[_Value]) -> list[Rows]:
    numbers = eqn.params["dimension_numbers"]
    rank = len(typeof(eqn.outvars[0]).shape)
    indexed = [dim for dim in range(rank) if dim not in numbers.offset_dims]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [dim for dim in range(len(typeof(eqn.invars[0]).shape)) if dim not in gone]
    rows = {indexed[dim]: span for dim, span in inputs[1].rows.items() if dim < len(indexed)}
    for dim, span in inputs[0].rows.items():
        if dim in kept and eqn.params["slice_sizes"][dim] > 1:
            rows[numbers.offset_dims[kept.index(dim)]] = span
        elif dim in numbers.operand_batching_dims:
            of = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(dim)]
            rows[indexed[of]] = span
    return [rows]


def _stack(eqn: JaxprEqn, inputs: Sequence[_Value]) -> list[Rows]:
    axis = eqn.params["axis"]
    return [{dim + (dim >= axis): span for value in inputs for dim, span in value.rows.items()}]


def _unstack(eqn: JaxprEqn, inputs: Sequence[_Value]) -> list[Rows]:
    axis = eqn.params["axis"]
    return [{dim - (dim > axis): span for dim, span in inputs[0].rows.items() if dim != axis} for _ in eqn.outvars]


def _scatter(eqn: JaxprEqn, inputs: Sequence[_Value]) -> list[Rows]:
    return [inputs[0].rows]


_REDUCTIONS = ("sum", "max", "min", "prod", "and", "or", "xor")
_RULES: dict[str, Any] = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "dot_general": _dot_general,
    "conv_general_dilated": _convolve,
    "gather": _gather,
    "stack": _stack,
    "unstack": _unstack,
    **dict.fromkeys((f"reduce_{name}" for name in _REDUCTIONS), _drop_dims),
    **dict.fromkeys(("reduce", "argmax", "argmin", "squeeze"), _drop_dims),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), _scatter),
}
