"""Evaluation of a user's loss with weights that rest on many devices.

A loss is written for one device, and JAX traces it to a jaxpr. `run_placed` runs this jaxpr with a `Lazy` weight
wherever the user's code reads a parameter: nothing moves until an equation needs the values. So

- a weight enters a loop over layers (`lax.scan`, `nnx.scan`, `nn.scan`) as it rests, and each iteration gathers its own
  layer;
- a weight enters a rematerialised function (`jax.checkpoint`, `nnx.remat`, `nn.remat`) as it rests, and the backward
  gathers it again;
- a product with a weight (`dot_general`) is the `einsum` of model/linear/, as in the decoder: the gradient is formed in
  the reductions' dtype, adapters and quantised bases are multiplied as such, and outside a rematerialised function the
  backward gathers the weight again instead of keeping it;
- a weight that each iteration of another loop multiplies, such as a head in chunks, is gathered before the loop, and
  its gradient is summed over devices after it;
- with `saved`, the iterations of such loops are rematerialised, and the blocks of a model without one;
- a lookup (`gather`) of rows of a table adds up their gradients in float32, and so does the sum or the product with a
  weight that is repeated, such as a bias;
- every other equation reads the gathered array.

Whatever framework the parameters come from, the jaxpr reads them as inputs, so no read can pass by unnoticed.

A loss that was not written as a loop has blocks too: the equations that read the parameters of one layer of a list. A
model that calls equal layers one after the other is traced to one long jaxpr. The parameters of a layer have a tag,
the name of their block. The equations from the first to the last one that reads a tag make up the block. The cuts
between blocks are where the fewest bytes are live, because a rematerialised block keeps what enters it.
"""

import functools
import itertools
import math
import string
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.core.primitives import add_p, broadcast_in_dim_p, dot_general_p, jit_p, mul_p, remat_p, scan_p, sub_p

from jaxopt_llm.core.jaxpr import bind_equation, read_atoms, run_equations, split_scan, typeof
from jaxopt_llm.execution.weight_uses import PRODUCT, Use, asks_for_precision, find_uses
from jaxopt_llm.model.linear import plain_groups
from jaxopt_llm.model.linear.leaves import LoraWeight
from jaxopt_llm.model.linear.weights import (
    GATHERED_NAME,
    Weight,
    apply_linear,
    einsum,
    gather_before_loop,
    gather_for_use,
    grouped_matmul,
    keep_gathered,
    shardings_of,
)
from jaxopt_llm.parallel import offload
from jaxopt_llm.parallel.gathering import PlacedWeight


@dataclass(frozen=True)
class Block:
    """The equations [start, stop) of a jaxpr.

    Attributes:
        moves: the equations that only cast or transpose weights that are read after the block.
        equations: the others.
        entering: variables that they read and do not make.
        leaving: variables that they make and that are read after the block.
    """

    start: int
    stop: int
    moves: list[JaxprEqn]
    equations: list[JaxprEqn]
    entering: list[Any]
    leaving: list[Any]


def find_blocks(jaxpr: Jaxpr, tags: Sequence[str | None]) -> list[Block]:
    """Return the blocks, in order and disjoint.

    A layer that is called twice, with others in between, is two blocks. One whose equations are rematerialised already
    is none.

    Args:
        tags: for each argument the block of this parameter, "" for one of no block, and None for no parameter.
    """
    weights = _follow_weights(jaxpr, tags)
    readers = _list_readers(jaxpr, weights)
    places = [-1, *readers, len(jaxpr.eqns)]
    before = dict(zip(readers, places[:-2], strict=True))
    after = dict(zip(readers, places[2:], strict=True))
    live = count_live_bytes(jaxpr, weights)

    def cut(after: int, until: int) -> int:
        """Return the last place with the fewest live bytes after an equation and up to another one."""
        return min(range(until, after, -1), key=live.__getitem__)

    of_blocks = [(index, tag) for index, tag in readers.items() if tag]
    runs = [[index for index, _ in run] for _, run in itertools.groupby(of_blocks, key=lambda reader: reader[1])]
    return [
        _make_block(jaxpr, cut(before[run[0]], run[0]), cut(run[-1], after[run[-1]]), weights)
        for run in runs
        if any(jaxpr.eqns[index].primitive is not remat_p for index in run)
    ]


def _make_block(jaxpr: Jaxpr, start: int, stop: int, weights: Container[Any]) -> Block:
    later = {var for eqn in jaxpr.eqns[stop:] for var in _list_variables(eqn.invars)}
    later |= {*_list_variables(jaxpr.outvars)}
    moves: list[JaxprEqn] = []
    equations: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns[start:stop]):
        if any(var in weights and var in later for var in eqn.outvars):
            moves.insert(0, eqn)
            later |= {*_list_variables(eqn.invars)}  # an earlier move of the same weight
        else:
            equations.insert(0, eqn)
    made = dict.fromkeys(var for eqn in equations for var in eqn.outvars)
    read = dict.fromkeys(var for eqn in equations for var in _list_variables(eqn.invars))
    return Block(
        start,
        stop,
        moves,
        equations,
        entering=[var for var in read if var not in made],
        leaving=[var for var in made if var in later],
    )


def _follow_weights(jaxpr: Jaxpr, tags: Sequence[str | None]) -> dict[Any, str]:
    """Return the tag of each variable that is a parameter, or is made of one parameter alone, as by a cast."""
    weights = {var: tag for var, tag in zip(jaxpr.invars, tags, strict=True) if tag is not None}
    for eqn in jaxpr.eqns:
        if (read := _list_variables(eqn.invars)) and len(read) == len(eqn.outvars) == 1 and read[0] in weights:
            weights[eqn.outvars[0]] = weights[read[0]]
    return weights


def _list_readers(jaxpr: Jaxpr, weights: Mapping[Any, str]) -> dict[int, str]:
    """Return the tag by equation of those that read weights and something else, in order.

    It is "" for those that read weights of no or of several blocks.
    """
    readers: dict[int, str] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        tags = {weights[var] for var in _list_variables(eqn.invars) if var in weights}
        if tags and not all(var in weights for var in eqn.outvars):
            readers[index] = tags.pop() if len(tags) == 1 else ""
    return readers


def count_live_bytes(jaxpr: Jaxpr, weights: Container[Any] = ()) -> list[int]:
    """Return, for the place before each equation and after the last one, the bytes that are made before and read after.

    Arguments of the jaxpr and these weights do not count.
    """
    made = {var: index for index, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars if var not in weights}
    last: dict[Any, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        last |= {atom: index for atom in eqn.invars if not isinstance(atom, Literal) and atom in made}
    last |= {atom: len(jaxpr.eqns) for atom in jaxpr.outvars if not isinstance(atom, Literal) and atom in made}
    change = [0] * (len(jaxpr.eqns) + 2)
    for var, index in last.items():
        size = math.prod(typeof(var).shape) * typeof(var).dtype.itemsize
        change[made[var] + 1] += size
        change[index + 1] -= size
    return list(itertools.accumulate(change[:-1]))


def _list_variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


Value = Any  # an array, or a Lazy weight
MOVES = (broadcast_in_dim_p, jax.lax.reshape_p, jax.lax.transpose_p, jax.lax.squeeze_p)
ELEMENTWISE = (add_p, sub_p, mul_p, jax.lax.div_p, jax.lax.max_p, jax.lax.min_p)


@dataclass(frozen=True, eq=False)
class Move:
    """An equation that only moves or repeats values: one of MOVES."""

    eqn: JaxprEqn


@struct.dataclass
class Lazy:
    """A weight that no equation has read yet.

    leading: number of leading dimensions that loops have not taken yet; the weight's shardings are those of one layer.
    order: the weight's dimensions (without the leading ones) in the order in which the program sees them.
    dtype: dtype in which the program sees it.
    rounded: whether the program rounded it from float32 to `dtype`, in which it is then gathered.
    moves: what the program did to the values so far.
    block: name of the block that the weight belongs to (placed_evaluation.py); "" for none.
    """

    weight: Weight
    leading: int = struct.field(pytree_node=False)
    order: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: Any = struct.field(pytree_node=False)
    rounded: bool = struct.field(pytree_node=False, default=False)
    moves: tuple[Move, ...] = struct.field(pytree_node=False, default=())
    block: str = struct.field(pytree_node=False, default="")


def read_array(value: Value) -> jax.Array:
    """Return an array as it is, and a weight gathered, in the dtype in which the program sees it."""
    if not isinstance(value, Lazy):
        return value
    gather = _gather
    for _ in range(value.leading):
        gather = jax.vmap(gather)
    array = gather(offload.fetch_to_device(value.weight))
    order = (*range(value.leading), *(value.leading + dim for dim in value.order))
    return move_array(jnp.transpose(array, order), value.moves).astype(value.dtype)


def _gather(weight: Weight) -> jax.Array:
    """Return the gathered weight. Its gradient is formed whole, before the storage axes divide it.

    Otherwise they would divide what the user's code computes from the weight, and XLA's partitioner has faults there:
    of products of batches of matrices, of slices of paddings, and of transposed convolutions whose window they divide.
    """
    array = gather_for_use(weight)
    assert not isinstance(weight, LoraWeight), "an adapter is only multiplied"
    return jax.lax.with_sharding_constraint(array, shardings_of(weight).gathered)


def read_repeated(value: Value, own: tuple[int, ...], shape: tuple[int, ...]) -> jax.Array:
    """Return what `read_array` returns, repeated to a shape. The gradient of a weight is the sum in float32.

    own: shape in which the equation reads the value; a scalar need not be moved to be repeated.
    """
    if not isinstance(value, Lazy) or value.leading or not isinstance(value.weight, PlacedWeight) or own == shape:
        return read_array(value)

    def repeat(array: jax.Array) -> jax.Array:
        return jnp.broadcast_to(move_array(jnp.transpose(array, value.order), value.moves), shape)

    return apply_linear(repeat, offload.fetch_to_device(value.weight)).astype(value.dtype)


def move_array(array: jax.Array, moves: Sequence[Move]) -> jax.Array:
    for each in moves:
        (array,) = bind_equation(each.eqn, [array])
    return array


def compute_dtype(weight: Weight) -> Any:
    """Return the dtype in which products with a weight are computed."""
    return jnp.dtype(shardings_of(weight.base if isinstance(weight, LoraWeight) else weight).compute_dtype)


def gather_in(weight: Weight, dtype: Any) -> Weight:
    """Return a weight that is gathered and multiplied in `dtype`."""

    def gather_in(placed: PlacedWeight) -> PlacedWeight:
        return replace(placed, shardings=replace(placed.shardings, compute_dtype=str(dtype)))

    return jax.tree.map(gather_in, weight, is_leaf=lambda leaf: isinstance(leaf, PlacedWeight))


def run_placed(closed: ClosedJaxpr, arguments: Sequence[Value], saved: Sequence[str] | None = None) -> list[jax.Array]:
    """Evaluate a jaxpr whose arguments are arrays and `Lazy` weights. Return its results as arrays.

    Args:
        saved: rematerialise the iterations of loops over layers and the blocks, except for the results with these
            checkpoint names; None rematerialises what the user's code does.
    """
    evaluation = _Evaluation(in_remat=False, saved=None if saved is None else tuple(saved))
    return [read_array(value) for value in evaluation.run(closed.jaxpr, closed.consts, arguments)]


@dataclass(frozen=True)
class _Evaluation:
    """Evaluation of a jaxpr.

    in_remat: within a rematerialised function, whose backward keeps what it gathers.
    saved: see `evaluate`.
    """

    in_remat: bool
    saved: tuple[str, ...] | None

    def run(self, jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Value]) -> list[Value]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))
        done = 0
        for block in self._find_blocks(jaxpr, arguments):
            run_equations([*jaxpr.eqns[done : block.start], *block.moves], values, self._apply)
            self._run_block(block, values)
            done = block.stop
        run_equations(jaxpr.eqns[done:], values, self._apply)
        return read_atoms(jaxpr.outvars, values)

    def _find_blocks(self, jaxpr: Jaxpr, arguments: Sequence[Value]) -> list[Block]:
        tags = [value.block if isinstance(value, Lazy) else None for value in arguments]
        return find_blocks(jaxpr, tags) if self._rematerialises and any(tags) else []

    def _run_block(self, block: Block, values: dict[Any, Value]) -> None:
        """Rematerialise a block."""
        inside = replace(self, in_remat=True)

        def run(*inputs: Value) -> list[jax.Array]:
            own = dict(zip(block.entering, inputs, strict=True))
            run_equations(block.equations, own, inside._apply)
            return [read_array(own[var]) for var in block.leaving]

        results = jax.checkpoint(run, policy=self._policy)(*[values[var] for var in block.entering])
        values |= zip(block.leaving, results, strict=True)

    @property
    def _rematerialises(self) -> bool:
        """True where loops over layers and blocks are rematerialised."""
        return self.saved is not None and not self.in_remat

    @property
    def _policy(self) -> Any:
        """The policy of `jax.checkpoint` for these."""
        return jax.checkpoint_policies.save_only_these_names(*self.saved) if self.saved else None

    def _apply(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        if not any(isinstance(value, Lazy) for value in inputs):
            return bind_equation(eqn, inputs)
        if eqn.primitive in MOVES and _can_move(eqn, inputs[0]):
            return [replace(inputs[0], moves=(*inputs[0].moves, Move(eqn)))]
        if plain_groups.find_grouped_matmul(eqn) and isinstance(inputs[1], Lazy):
            return self._multiply_groups(eqn, inputs)
        special = {
            jit_p: self._call,
            remat_p: self._rematerialise,
            scan_p: self._scan,
            jax.lax.conv_general_dilated_p: self._convolve,
            jax.lax.gather_p: self._look_up,
            dot_general_p: self._multiply,
            jax.lax.transpose_p: _transpose,
            jax.lax.convert_element_type_p: self._convert,
        }.get(eqn.primitive)
        return (special or self._use)(eqn, inputs)

    def _call(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        closed = eqn.params["jaxpr"]
        return self.run(closed.jaxpr, closed.consts, inputs)

    def _rematerialise(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        def function(*inputs: Value) -> list[jax.Array]:
            results = replace(self, in_remat=True).run(eqn.params["jaxpr"], (), inputs)
            return [read_array(value) for value in results]

        policy, prevent_cse = eqn.params["policy"], eqn.params["prevent_cse"]
        if policy is not None and not self.in_remat:
            policy = functools.partial(_save_nothing_gathered, policy)
        return jax.checkpoint(function, policy=policy, prevent_cse=prevent_cse)(*inputs)

    def _scan(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        closed, (constants, carried) = eqn.params["jaxpr"], split_scan(eqn)
        fixed, carry, scanned = (
            inputs[:constants],
            inputs[constants : constants + carried],
            inputs[constants + carried :],
        )

        def enter(value: Value) -> Value:
            if isinstance(value, Lazy) and not value.leading:
                return read_array(value)  # the loop is not over the layers of a stack
            return replace(value, leading=value.leading - 1) if isinstance(value, Lazy) else value

        if not any(_is_stack(value) for value in scanned):
            fixed = _gather_before_loop(closed, fixed)
        remat = self._rematerialises and any(_is_stack(value) for value in scanned)
        inside = replace(self, in_remat=True) if remat else self

        def body(carry: Sequence[jax.Array], layer: Sequence[Value]) -> tuple[list[jax.Array], list[jax.Array]]:
            results = [read_array(value) for value in inside.run(closed.jaxpr, closed.consts, [*fixed, *carry, *layer])]
            return results[:carried], results[carried:]

        carry, stacked = jax.lax.scan(
            jax.checkpoint(body, prevent_cse=False, policy=self._policy) if remat else body,
            [read_array(value) for value in carry],
            [enter(value) for value in scanned],
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return [*carry, *stacked]

    def _multiply(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        """Multiply an array with a weight as the decoder does."""
        left, right = inputs
        weight, array = (left, right) if isinstance(left, Lazy) else (right, left)
        if isinstance(array, Lazy):
            array = read_array(array)
        if weight.leading or weight.moves or asks_for_precision(eqn):
            return self._use(eqn, inputs)
        axes, other, result = _name_axes(eqn, weight_first=weight is left)
        stored = "".join(axes[weight.order.index(dim)] for dim in range(len(axes)))
        subscripts, dtype = f"{other},{stored}->{result}", typeof(eqn.outvars[0]).dtype

        def multiply(array: jax.Array, weight: Weight) -> jax.Array:
            placed = keep_gathered(weight) if self.in_remat else weight
            return einsum(subscripts, array.astype(compute_dtype(weight)), offload.fetch_to_device(placed), dtype)

        # What came from the host is not kept on the device for the backward.
        fetches_again = not self.in_remat and offload.any_on_host(weight.weight)
        return [(jax.checkpoint(multiply) if fetches_again else multiply)(array, weight.weight)]

    def _multiply_groups(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        """Multiply rows with the matrices of their experts as the decoder does."""
        rows, lazy, sizes = inputs
        call = plain_groups.find_grouped_matmul(eqn)
        if call is None or lazy.leading or lazy.moves or lazy.order != (0, 1, 2):
            return self._use(eqn, inputs)
        kernel, placement, transposed = (call.params[name] for name in ("kernel", "placement", "transposed"))

        def multiply(rows: jax.Array, weight: Weight) -> jax.Array:
            placed = offload.fetch_to_device(keep_gathered(weight) if self.in_remat else weight)
            return grouped_matmul(rows, placed, sizes, kernel, placement, transposed)

        fetches_again = not self.in_remat and offload.any_on_host(lazy.weight)
        narrow = read_array(rows).astype(compute_dtype(lazy.weight))
        result = (jax.checkpoint(multiply) if fetches_again else multiply)(narrow, lazy.weight)
        return [result.astype(typeof(eqn.outvars[0]).dtype)]

    def _convolve(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        """Convolve an array with a weight in the compute dtype, as `_multiply` multiplies."""
        image, weight = inputs
        if not isinstance(weight, Lazy) or weight.dtype == (compute := compute_dtype(weight.weight)):
            return self._use(eqn, inputs)
        narrow = eqn.replace(params=eqn.params | {"preferred_element_type": None})
        (result,) = self._use(narrow, [image.astype(compute), replace(weight, dtype=compute)])
        return [result.astype(typeof(eqn.outvars[0]).dtype)]

    def _convert(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        """Follow a cast that changes no value, and one from float32 to 16 bits. Any other is a use."""
        (lazy,), new = inputs, jnp.dtype(eqn.params["new_dtype"])
        own = compute_dtype(lazy.weight)
        if not lazy.rounded and new in (own, jnp.float32):
            return [replace(lazy, dtype=new)]
        if not lazy.rounded and own == jnp.float32 and new in (jnp.bfloat16, jnp.float16):
            return [replace(lazy, weight=gather_in(lazy.weight, new), dtype=new, rounded=True)]
        return self._use(eqn, inputs)

    def _look_up(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        """Read rows of a table, whose gradients are added up in float32."""
        table, *indices = inputs
        if not isinstance(table, Lazy) or table.leading or table.moves or not isinstance(table.weight, PlacedWeight):
            return self._use(eqn, inputs)

        def look_up(array: jax.Array, *indices: jax.Array) -> jax.Array:
            (rows,) = bind_equation(eqn, [jnp.transpose(array, table.order), *indices])
            return rows

        dims = eqn.params["dimension_numbers"]
        by_rows = 0 not in dims.offset_dims and not dims.operand_batching_dims
        arrays = map(read_array, indices)
        rows = apply_linear(look_up, offload.fetch_to_device(table.weight), *arrays, by_rows=by_rows)
        return [rows.astype(table.dtype)]

    def _use(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        """Apply an equation to the gathered arrays."""
        repeats = eqn.primitive in ELEMENTWISE
        shape = typeof(eqn.outvars[0]).shape

        def function(*inputs: Value) -> list[jax.Array]:
            if not repeats:
                return bind_equation(eqn, [read_array(value) for value in inputs])
            shapes = [typeof(atom).shape for atom in eqn.invars]
            return bind_equation(eqn, [read_repeated(*pair, shape) for pair in zip(inputs, shapes, strict=True)])

        # The backward gathers again: to keep the gathered weights of all layers would undo ZeRO-3.
        return function(*inputs) if self.in_remat else jax.checkpoint(function)(*inputs)


def _save_nothing_gathered(policy: Any, primitive: Any, *operands: Any, **parameters: Any) -> Any:
    """Decide as a policy of `jax.checkpoint` does, but save no gathered weight.

    A weight that the forward kept for the backward would be held together with all other layers' weights. Within the
    backward, a policy inside may keep it: the decoder's own do.
    """
    is_gathered = parameters.get("name") == GATHERED_NAME
    return False if is_gathered else policy(primitive, *operands, **parameters)


def _can_move(eqn: JaxprEqn, value: Value) -> bool:
    """Return whether a weight can be moved when it is read. `order` keeps the transposes of a whole one."""
    if len(eqn.invars) > 1 or value.leading or not isinstance(value.weight, PlacedWeight):
        return False
    return eqn.primitive is not jax.lax.transpose_p or bool(value.moves)


def _gather_before_loop(closed: ClosedJaxpr, fixed: list[Value]) -> list[Value]:
    """Gather the weights that each iteration of a loop multiplies, such as a head in chunks or a recurrent layer.

    closed: the body of the loop, whose first arguments these values are.
    """
    uses, _ = find_uses(closed, len(fixed))

    def gather(value: Value, uses: list[Use]) -> Value:
        multiplied = bool(uses) and all(use.kind == PRODUCT and not use.exact and not use.groups for use in uses)
        if not isinstance(value, Lazy) or value.leading or value.moves or not multiplied:
            return value
        return replace(value, weight=gather_before_loop(offload.fetch_to_device(value.weight)))

    return [gather(*pair) for pair in zip(fixed, uses, strict=True)]


def _is_stack(value: Value) -> bool:
    return isinstance(value, Lazy) and value.leading > 0


def _transpose(eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
    (lazy,), permutation = inputs, eqn.params["permutation"]
    if lazy.leading:
        return bind_equation(eqn, [read_array(lazy)])
    return [replace(lazy, order=tuple(lazy.order[dim] for dim in permutation))]


def _name_axes(eqn: JaxprEqn, weight_first: bool) -> tuple[str, str, str]:
    """Return a letter for each axis of the weight, of the other operand, and of the result of a `dot_general`."""
    (summed, batch), shapes = eqn.params["dimension_numbers"], [typeof(atom).shape for atom in eqn.invars]
    letters = iter(string.ascii_uppercase)
    left = [next(letters) for _ in shapes[0]]
    right = [""] * len(shapes[1])
    for ours, theirs in (*zip(*summed, strict=True), *zip(*batch, strict=True)):
        right[theirs] = left[ours]
    right = [letter or next(letters) for letter in right]
    contracted, together = ({left[dim] for dim in dims[0]} for dims in (summed, batch))
    result = [left[dim] for dim in batch[0]]
    result += [letter for letter in left + right if letter not in contracted | together]
    names = ["".join(each) for each in (left, right, result)]
    return (names[0], names[1], names[2]) if weight_first else (names[1], names[0], names[2])
