"""A user's model and loss under the engine: specs of its parameters, and its loss over placed weights."""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, Mesh

from jaxopt_llm.compiler.kernel_choice import choose_attention
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine.checks import (
    check_captured,
    check_parameters,
    check_rules,
    find_oddities,
    find_unread_parameters,
)
from jaxopt_llm.engine.frontends import ArrayInfo, Frontend, Loss, LossParts, nest, normalise_loss
from jaxopt_llm.execution.placed_evaluation import Lazy, run_placed
from jaxopt_llm.execution.weight_uses import CONVOLUTION, LOOKUP, PRODUCT, Use, drop_callbacks, drop_results, find_uses
from jaxopt_llm.kernels.attention import IMPLEMENTATIONS, SELECT, AttentionRequest, Implementation, exclude_sizes
from jaxopt_llm.kernels.attention_auto import FALLBACK, AttentionChoice
from jaxopt_llm.kernels.attention_wrappers import CopiedHeads
from jaxopt_llm.model import param
from jaxopt_llm.model.linear.leaves import LoraWeight, QuantisedWeight, adapter_paths, is_wrapped
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel import offload, zero
from jaxopt_llm.parallel.activations import PerDevice
from jaxopt_llm.parallel.gathering import PlacedWeight, attach_shardings
from jaxopt_llm.parallel.mesh import visible_devices
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.run.attention_choice import choose_working

# --- Implementations of `jaxopt_llm.attention` in a loss
#
# They are chosen for the devices of a program, and divided over them, while `kernels.attention.SELECT` traces the loss.


@dataclass(frozen=True, eq=False)
class AttentionSelector:
    """Selector of the implementation of each call of `attention` in a loss, for one placement.

    Selectors are compared by identity: JAX's caches have them in their keys, so that a function that the loss jits is
    traced anew for each program, and each program has all of its calls in `choices`.

    Attributes:
        requested: value of `training.attention`.
        device: a device of the placement, or one like it.
        choices: choices so far, with warnings of what the user probably did not intend.
    """

    placement: Placement
    requested: str
    device: Any
    choices: dict[AttentionRequest, AttentionChoice] = field(default_factory=dict)

    def __call__(self, request: AttentionRequest) -> Implementation:
        if request not in self.choices:
            self.choices[request] = self._choose(request)
        name = self.choices[request].name
        if name == FALLBACK:
            return IMPLEMENTATIONS[name]  # XLA divides its own operations
        divides = self._divides_heads(request)
        kernel = PerDevice(IMPLEMENTATIONS[name], self.placement, divides)
        copies = math.lcm(request.kv_heads, self.placement.size("tensor")) // request.kv_heads if divides else 1
        return CopiedHeads(kernel, copies) if copies > 1 else kernel

    def warnings(self) -> Iterator[str]:
        """Yield what the user probably did not intend about the calls so far."""
        yield from dict.fromkeys(choice.warning for choice in self.choices.values() if choice.warning)
        tensor = self.placement.size("tensor")
        for request, choice in self.choices.items():
            if choice.name != FALLBACK and not self._divides_heads(request):
                yield (
                    f"mesh.tensor={tensor} does not divide the {request.heads} heads of an attention: each device "
                    "along it computes all of them"
                )

    def _divides_heads(self, request: AttentionRequest) -> bool:
        return request.heads % self.placement.size("tensor") == 0

    def _choose(self, request: AttentionRequest) -> AttentionChoice:
        is_gpu = self.device.platform == "gpu"
        if isinstance(self.placement.mesh, AbstractMesh) and not is_gpu:
            return AttentionChoice(FALLBACK)  # nothing is refused: the program may be planned for GPUs
        requested = self.requested if request.requested == AUTO else request.requested
        axes = self.placement.batch_axes
        if requested != FALLBACK and is_gpu and request.rows % self.placement.size(*axes):
            sizes = " × ".join(f"mesh.{axis}={self.placement.size(axis)}" for axis in axes)
            reason = f"{sizes} does not divide its {request.rows} rows, and a kernel needs whole rows on each device"
            return AttentionChoice(FALLBACK, reason, f"an attention is computed by XLA's operations, because {reason}")
        excluded = exclude_sizes(request.call.head_dim, request.value_dim)
        if self.device not in visible_devices():  # it is only compiled for
            return choose_attention(self.device, requested, request.call, excluded)
        with jax.ensure_compile_time_eval():  # the check of a kernel runs now, and is no part of the loss
            group = request.heads // request.kv_heads
            return choose_working(self.device, requested, request.call, group, excluded)


def make_selector(placement: Placement, requested: str) -> AttentionSelector:
    """Return the selector for a placement. requested: value of `training.attention`."""
    mesh = placement.mesh
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else visible_devices()[0]
    return AttentionSelector(placement, requested, device)


# --- Repeated blocks: equal layers in a list, found by the paths of their parameters


_NUMBERED = re.compile(r"(.*?)\d+")  # an item of a list, `3`, or a numbered name, `Block_3`
_PRODUCTS = 2  # of a block: rematerialising a single product saves nothing but its activation function


def name_blocks(parameters: Sequence[ArrayInfo], uses: Sequence[Sequence[Use]]) -> tuple[str, ...]:
    """Return the name of each parameter's block, such as `layers/3`; "" for a parameter of none.

    Blocks are the items of a list of layers: numbered parts of the model. At least two have parameters of the
    same names and shapes and compute at least two products each. If blocks contain blocks, the outer ones count.

    Args:
        uses: how the loss reads each parameter.
    """
    names = [""] * len(parameters)
    paths = [info.path.split("/") for info in parameters]
    for depth in range(max(map(len, paths))):
        lists: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))  # list -> item -> parameters
        for index, path in enumerate(paths):
            match = _NUMBERED.fullmatch(path[depth]) if depth < len(path) - 1 and not names[index] else None
            if match:
                lists["/".join([*path[:depth], match[1]])]["/".join(path[: depth + 1])].append(index)
        for items in lists.values():
            shapes = Counter(
                tuple(("/".join(paths[index][depth + 1 :]), parameters[index].shape) for index in indices)
                for indices in items.values()
            )
            for name, indices in items.items() if max(shapes.values()) > 1 else ():
                products = sum(use.kind in (PRODUCT, CONVOLUTION) for index in indices for use in uses[index])
                for index in indices if products >= _PRODUCTS else ():
                    names[index] = name
    return tuple(names)


# --- Models


Rules = Mapping[str, str | None]  # the user's names of dimensions -> mesh axis


@dataclass(frozen=True, eq=False)
class UserModel:
    """A user's model as the step sees it.

    Attributes:
        specs: {"non_layer": parameters outside of loops, "segment_0": parameters of a loop over layers, ...}, each as
            nested dicts by the parameter's path.
        sections: the section of each parameter of the front-end.
        uses: how the losses of the engine read each parameter.
        blocks: the block of each parameter; see `name_blocks`.
        oddities: what the user probably did not intend; see checks.py.
        attention: selects the implementations of the loss's attention.
        traced: the jaxpr of the loss of a microbatch, from `make_user_model`.
        written: indices of the parameters that the loss assigns to.
        saved: rematerialise loops over layers and blocks, except for the results with these checkpoint names; None
            leaves the loss as it is written.
    """

    frontend: Frontend
    loss: Loss
    specs: Params
    sections: tuple[str, ...]
    uses: tuple[tuple[Use, ...], ...]
    blocks: tuple[str, ...]
    oddities: tuple[str, ...]
    attention: AttentionSelector
    traced: ClosedJaxpr
    written: frozenset[int] = frozenset()
    saved: tuple[str, ...] | None = None

    def with_specs(self, specs: Params) -> "UserModel":
        """Return the model over other parameters: with adapters, or with a quantised base."""
        return replace(self, specs=specs)

    @property
    def products(self) -> set[str]:
        """Paths of the parameters that only matrix products over the same dimensions read, in the compute dtype.

        They can have adapters and be quantised.
        """
        return {
            path
            for path, found, section in zip(self.paths, self.uses, self.sections, strict=True)
            if found
            and all(use.kind == PRODUCT and not use.exact and use.leading == (section != "non_layer") for use in found)
            and len({use.contracting for use in found}) == 1
        }

    @property
    def paths(self) -> list[str]:
        """Path in `specs` of each parameter of the front-end."""
        return [f"{section}/{info.path}" for section, info in zip(self.sections, self.frontend.parameters, strict=True)]

    @property
    def recomputes(self) -> bool:
        """True if the loss rematerialises layers."""
        return self.saved is not None or any(use.in_remat for uses in self.uses for use in uses)

    @property
    def keeps_layers(self) -> bool:
        """True if the loss has a loop over layers, or blocks, whose intermediates it keeps for the backward."""
        return self.saved is None and any(
            (use.leading or block) and not use.in_remat
            for uses, block in zip(self.uses, self.blocks, strict=True)
            for use in uses
        )

    @property
    def has_layers(self) -> bool:
        """True if a loss of the engine has a loop over stacked layers, or repeated blocks."""
        blocks = name_blocks(self.frontend.parameters, self.uses)
        return any(section != "non_layer" for section in self.sections) or any(blocks)

    def evaluate(
        self, params: Params, perturbations: Params, variables: Params, batch: Any, placement: Placement
    ) -> tuple[LossParts, Params]:
        """Return the loss of a microbatch, and the variables after it; see `run`."""
        parts: LossParts
        parts, after = self.run(as_parts(self.loss), params, perturbations, variables, batch, placement)
        return parts, after

    def run(
        self,
        function: Callable[[Any, Any], Any],
        params: Params,
        perturbations: Params,
        variables: Params,
        batch: Any,
        placement: Placement,
    ) -> tuple[Any, Params]:
        """Return what a function (model, batch) returns, a pytree of arrays, and the variables after it.

        Args:
            params, perturbations: by section; see attach_shardings.
        """
        weights = {
            name: attach_shardings(
                param.period_specs(specs),
                params[name],
                perturbations[name],
                placement,
                keep_gathered=False,
                matmul="compute_dtype" if name == "non_layer" else placement.precision.matmul,
                in_compute_dtype=adapter_paths(specs),
            )
            for name, specs in self.specs.items()
        }
        placed = _list_by_path(self.paths, weights, _is_weight)
        parameters, lazy = [], []
        dtype = jnp.dtype(placement.precision.compute_dtype)
        for info, section, block, weight in zip(
            self.frontend.parameters, self.sections, self.blocks, placed, strict=True
        ):
            leading = 0 if section == "non_layer" else 1
            lazy.append(Lazy(weight, leading, tuple(range(len(info.shape) - leading)), dtype, block=block))
            parameters.append(jax.ShapeDtypeStruct(info.shape, dtype))
        flat = list_variables(self.frontend, variables)
        closed, structure = trace_function(self.frontend, function, self.attention, parameters, flat, batch)
        keep = [index >= len(parameters) for index in range(len(closed.jaxpr.outvars))]
        arguments = [*lazy, *flat, *jax.tree.leaves(batch)]
        results = run_placed(drop_results(closed, keep), arguments, self.saved)
        _, output, changed = jax.tree.unflatten(structure, [*[None] * len(parameters), *results])
        after = nest_variables(self.frontend, changed)
        resting = zero.variable_sharding(nest_variables(self.frontend, list_variable_specs(self.frontend)), placement)
        return output, jax.tree.map(jax.lax.with_sharding_constraint, after, resting)

    def compute_written(self, params: Params, variables: Params, batch: Any) -> Params:
        """Return the values that the loss assigns to parameters, float32, with None for all other parameters.

        Layers such as `nnx.WeightNorm` and `nnx.SpectralNorm` assign the normalised kernel to its parameter. The values
        are computed from the float32 parameters, because those in the compute dtype have lost bits.

        Args:
            params: arrays by section, float32 where they are trained.
            batch: a microbatch; no value depends on it.
        """
        flat, rows = list_variables(self.frontend, variables), jax.tree.leaves(batch)
        given = [jax.ShapeDtypeStruct(info.shape, jnp.float32) for info in self.frontend.parameters]
        closed, _ = trace_function(self.frontend, as_parts(self.loss), self.attention, given, flat, batch)
        needed, used = _trace_written(closed, self.written)
        arguments = [
            value for value, is_used in zip([*self.flatten(params), *flat, *rows], used, strict=True) if is_used
        ]
        fetched = offload.fetch_to_device(arguments)
        typed = [value.astype(var.aval.dtype) for value, var in zip(fetched, needed.jaxpr.invars, strict=True)]
        values = jaxpr_as_fun(needed)(*typed)
        by_index = dict(zip(sorted(self.written), values, strict=True))
        return self.nest([by_index.get(index) for index in range(len(given))])

    def nest(self, leaves: Sequence[Any]) -> Params:
        """Return leaves in the order of the front-end's parameters as a tree like `specs`."""
        return nest(self.paths, leaves)

    def flatten(self, params: Params) -> list[Any]:
        """Return the leaves of a tree like `specs` in the order of the front-end's parameters, with None for no leaf.

        A parameter with an adapter, or that is quantised, is one leaf.
        """
        return _list_by_path(self.paths, params, is_wrapped)


def _list_by_path(paths: Sequence[str], params: Params, is_leaf: Callable[[Any], bool]) -> list[Any]:
    by_path = dict(tree.leaves_with_path(params, is_leaf))
    return [by_path.get(path) for path in paths]


def _is_weight(leaf: Any) -> bool:
    return isinstance(leaf, PlacedWeight | LoraWeight | QuantisedWeight)


def list_variables(frontend: Frontend, variables: Params) -> list[Any]:
    by_path = dict(tree.leaves_with_path(variables))
    return [by_path[info.path] for info in frontend.variables]


def nest_variables(frontend: Frontend, leaves: Sequence[Any]) -> Params:
    return nest([info.path for info in frontend.variables], leaves)


def as_parts(loss: Loss) -> Callable[[Any, Any], LossParts]:
    """Return a loss whose results are LossParts."""
    return lambda model, batch: normalise_loss(loss(model, batch))


def list_variable_specs(frontend: Frontend) -> list[ParamSpec]:
    infos = frontend.variables
    return [ParamSpec(info.shape, (None,) * len(info.shape), dtype=np.dtype(info.dtype)) for info in infos]


def trace_function(
    frontend: Frontend,
    function: Callable[[Any, Any], Any],
    attention: AttentionSelector,
    parameters: Sequence[Any],
    variables: Sequence[Any],
    batch: Any,
) -> tuple[ClosedJaxpr, Any]:
    """Return the jaxpr of (parameters, variables, batch) -> (parameters, output, variables), and its tree.

    Raises:
        InputError: the function closes over arrays that change.
    """

    def call(parameters: Sequence[Any], variables: Sequence[Any], batch: Any) -> Any:
        output, after, changed = frontend.call(function, parameters, variables, batch)
        return after, output, [_cast_float(*pair) for pair in zip(changed, variables, strict=True)]

    with SELECT(attention):
        closed, shapes = jax.make_jaxpr(call, return_shape=True)(list(parameters), list(variables), batch)
    check_captured(closed)
    return closed, jax.tree.structure(shapes)


def _cast_float(value: Any, like: Any) -> Any:
    """Return a float in the dtype of another: what a loss stores may be computed in fewer bits than it rests in."""
    floats = jnp.issubdtype(value.dtype, jnp.floating) and jnp.issubdtype(like.dtype, jnp.floating)
    return value.astype(like.dtype) if floats else value


@dataclass(frozen=True)
class LossTrace:
    """The jaxpr of a loss of a microbatch, how it reads each parameter, and the indices of those that it assigns to."""

    closed: ClosedJaxpr
    uses: Sequence[Sequence[Use]]
    written: frozenset[int]


def run_abstractly(
    frontend: Frontend, loss: Loss, batch: Any, placement: Placement, attention: AttentionSelector
) -> LossTrace:
    """Run a loss abstractly on a microbatch, given as ShapeDtypeStructs.

    Raises:
        InputError: the loss assigns to a parameter what depends on the batch, or an attention cannot be computed as
            requested.
    """
    check_parameters(frontend.parameters)
    dtype = jnp.dtype(placement.precision.compute_dtype)
    parameters = [jax.ShapeDtypeStruct(info.shape, dtype) for info in frontend.parameters]
    variables = [jax.ShapeDtypeStruct(info.shape, info.dtype) for info in frontend.variables]
    closed, _ = trace_function(frontend, as_parts(loss), attention, parameters, variables, batch)
    uses, unchanged = find_uses(closed, len(parameters))
    written = frozenset(index for index, argument in enumerate(unchanged[: len(parameters)]) if argument != index)
    _check_written(frontend, closed, written)
    _check_variables(frontend, closed.out_avals[len(closed.out_avals) - len(variables) :])
    return LossTrace(closed, uses, written)


def make_user_model(
    frontend: Frontend,
    loss: Loss,
    batch: Any,
    rules: Rules,
    placement: Placement,
    attention: AttentionSelector,
    others: Sequence[LossTrace] = (),
) -> UserModel:
    """Return the model, after one abstract run of the loss that shows how it reads each parameter.

    Args:
        batch: a microbatch as ShapeDtypeStructs.
        others: traces of the other losses of the engine. Its parameters have specs that fit all losses.

    Raises:
        InputError: a rule does not fit; or see `run_abstractly`.
    """
    trace = run_abstractly(frontend, loss, batch, placement, attention)
    closed, own = trace.closed, trace.uses
    uses = [[*itertools.chain(*each)] for each in zip(own, *(other.uses for other in others), strict=True)]
    named = [_name_dimensions(*pair) for pair in zip(frontend.parameters, uses, strict=True)]
    specs = [_make_spec(info, found, rules) for info, found in zip(named, uses, strict=True)]
    oddities = check_rules(named, rules, placement)
    oddities += find_unread_parameters(frontend, uses)
    oddities += find_oddities(frontend, closed, own, placement.precision.compute_dtype)
    oddities += attention.warnings()
    lengths = list(dict.fromkeys(spec.shape[0] for spec in specs if spec.leading))
    sections = tuple(f"segment_{lengths.index(spec.shape[0])}" if spec.leading else "non_layer" for spec in specs)
    paths = [f"{section}/{info.path}" for section, info in zip(sections, frontend.parameters, strict=True)]
    return UserModel(
        frontend=frontend,
        loss=loss,
        specs=nest(paths, specs),
        sections=sections,
        uses=tuple(map(tuple, uses)),
        blocks=name_blocks(frontend.parameters, own),
        oddities=tuple(oddities),
        attention=attention,
        traced=closed,
        written=trace.written,
    )


def _trace_written(closed: ClosedJaxpr, written: frozenset[int]) -> tuple[ClosedJaxpr, list[bool]]:
    """Return the jaxpr of what a loss assigns to parameters, and flags of the arguments that it has."""
    keep = [index in written for index in range(len(closed.jaxpr.outvars))]
    jaxpr, used = partial_eval.dce_jaxpr(drop_callbacks(closed).jaxpr, keep)
    return ClosedJaxpr(jaxpr, closed.consts), list(used)


def _check_written(frontend: Frontend, closed: ClosedJaxpr, written: frozenset[int]) -> None:
    """Raise InputError if the loss assigns to a parameter what depends on the batch, or is of another shape."""
    for index in sorted(written):
        info = frontend.parameters[index]
        _, used = _trace_written(closed, frozenset([index]))
        if any(used[len(frontend.parameters) + len(frontend.variables) :]):
            raise InputError(
                f"loss: it assigns to the parameter {info.path} what depends on the batch; keep it in a variable of "
                "another type than nnx.Param, such as nnx.BatchStat"
            )
        if (shape := closed.out_avals[index].shape) != info.shape:
            raise InputError(
                f"loss: it changes the parameter {info.path} from {list(info.shape)} to {list(shape)}; keep its shape"
            )


def _check_variables(frontend: Frontend, changed: Sequence[Any]) -> None:
    """Raise InputError if the loss changes the shape or the kind of a variable, which the next step reads."""
    for info, after in zip(frontend.variables, changed, strict=True):
        if (after.shape, after.dtype) != (info.shape, info.dtype):
            raise InputError(
                f"loss: it changes the variable {info.path} from {info.dtype}{list(info.shape)} to "
                f"{after.dtype}{list(after.shape)}; keep its shape and dtype"
            )


def _name_dimensions(info: ArrayInfo, uses: Sequence[Use]) -> ArrayInfo:
    """Return a parameter with a name or None for each dimension. The dimensions of a stack have none.

    The user's names may leave out the last dimensions, as in a PartitionSpec. As many names as a layer has dimensions
    are those of a layer: `nnx.vmap` adds no name for a stack unless it is told one.
    """
    names, rank, leading = info.axes or (), len(info.shape), _count_leading(uses)
    if len(names) > rank:
        raise InputError(f"model: {info.path} has {rank} dimensions, and names for {len(names)}: {names}")
    of_layer = names if leading and len(names) == rank - leading else names[leading:]
    return replace(info, axes=(*(None,) * leading, *of_layer, *(None,) * (rank - leading - len(of_layer))))


def _count_leading(uses: Sequence[Use]) -> int:
    """Return the number of dimensions of a stack that loops take apart."""
    return min((use.leading for use in uses), default=0)


def _make_spec(info: ArrayInfo, uses: Sequence[Use], rules: Rules) -> ParamSpec:
    leading = _count_leading(uses)
    # The smallest of each kind, so that the order of several losses does not matter.
    kinds = [sorted(use.contracting for use in uses if use.kind == kind) for kind in (PRODUCT, CONVOLUTION, LOOKUP)]
    products = [*itertools.chain(*kinds)]
    axes = [rules.get(name) if name else None for name in info.axes or ()]
    axes[:leading] = ["layers"] * leading
    for dim in {dim for use in uses for dim in use.groups}:
        axes[dim] = "experts"
    return ParamSpec(
        info.shape,
        tuple(axes),
        contracting=products[0] if products else (),
        layers=tuple(range(info.shape[0])) if leading else None,
    )
