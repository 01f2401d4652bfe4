"""Products of bfloat16: on one CPU device in the form of XLA's fast kernels, otherwise as plain matmuls."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.compiler import hlo
from jaxopt_llm.compiler.topology import gpu_topology
from jaxopt_llm.config import MeshConfig, ModelConfig, PrecisionConfig, ShardingConfig
from jaxopt_llm.kernels import products
from jaxopt_llm.kernels.cross_entropy import Classifier
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.linear import vocabulary, weights
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.gathering import attach_shardings, make_perturbations
from jaxopt_llm.parallel.mesh import make_abstract_mesh, make_mesh
from jaxopt_llm.parallel.placement import Placement

pytestmark = pytest.mark.core

ROWS, SEQUENCE, WIDTH, HIDDEN, VOCABULARY = 8, 32, 64, 128, 256
SPECS = {
    "up": ParamSpec((WIDTH, HIDDEN), ("embed", "mlp"), (0,)),
    "down": ParamSpec((HIDDEN, WIDTH), ("mlp", "embed"), (0,)),
    "head": ParamSpec((VOCABULARY, WIDTH), ("vocabulary", "embed"), (1,)),
}
CLASSIFIER = Classifier(VOCABULARY, 0.0, 0.0, 64)
LAYOUT_CONSTRAINT = "LayoutConstraint"  # the custom call of `with_layout_constraint` in a lowered program


def loss_and_gradients(
    placement: Placement, on_one_cpu: bool, perturbations: Any, params: Any, x: Any, tokens: Any
) -> Any:
    """Return the loss of an MLP with a head, and the gradients of x and of the three matrices."""

    def loss(perturbations: Any, x: jax.Array) -> jax.Array:
        placed = attach_shardings(SPECS, params, perturbations, placement, keep_gathered=True)
        hidden = weights.einsum("BSD,DF->BSF", x.astype(placement.precision.compute_dtype), placed["up"])
        y = weights.einsum("BSF,FD->BSD", hidden, placed["down"])
        classifier = dataclasses.replace(CLASSIFIER, on_one_cpu=on_one_cpu)
        return vocabulary.cross_entropy(y, placed["head"], tokens, jnp.float32(1 / x.size), classifier, placement)[0]

    return jax.value_and_grad(loss, (0, 1))(perturbations, x)


def arrays() -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, SEQUENCE, WIDTH)).astype(np.float32)
    targets = random.integers(VOCABULARY, size=(ROWS, SEQUENCE), dtype=np.int32)
    return toy.params(SPECS), x, (targets, np.ones((ROWS, SEQUENCE), bool))


def lower(placement: Placement) -> jax.stages.Lowered:
    params, x, tokens = arrays()
    run = functools.partial(loss_and_gradients, placement, products.runs_on_one_cpu(placement.mesh))
    jitted = jax.jit(lambda *given: run(make_perturbations(SPECS, placement), *given))
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=placement.replicated), (params, x, tokens)
    )
    return jitted.lower(*shapes)


def flops(placement: Placement) -> dict[str, float]:
    return dict(hlo.count_dot_flops_by_dtype(str(lower(placement).compile().as_text())))


def test_on_a_cpu_no_product_of_bfloat16_is_widened() -> None:
    """Nine products: three matrices with a forward and the gradients of both operands.

    XLA's fast kernels take bfloat16 operands; products in another form would have operands that are converted first.
    """
    once = 2 * ROWS * SEQUENCE * WIDTH * (2 * HIDDEN + VOCABULARY)
    assert flops(toy.placement(compute_dtype="bfloat16")) == {"bf16": 3 * once}
    assert flops(toy.placement()) == {"f32": 3 * once}


def test_the_decoder_says_where_its_loss_runs() -> None:
    """The logits, the gradient of the head's input, and that of the table."""
    placement = toy.placement(compute_dtype="bfloat16")
    decoder = Decoder(ModelConfig(vocabulary_size=VOCABULARY, width=WIDTH, tied_head=False), 64)
    specs = {name: decoder.specs["non_layer"][name] for name in ("head", "final_norm")}

    def loss(perturbations: Any, x: jax.Array, params: Any, batch: Batch) -> Any:
        non_layer = attach_shardings(specs, params, perturbations, placement, keep_gathered=True)
        context = decoder.make_context(batch, placement)
        return decoder.loss(non_layer, x, batch, context, jnp.float32(1 / x.size))

    gradients = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    x = jnp.zeros((ROWS, SEQUENCE, WIDTH), jnp.bfloat16)
    ids, mask = jnp.zeros((ROWS, SEQUENCE), jnp.int32), jnp.ones((ROWS, SEQUENCE), bool)
    batch = Batch(ids, ids, mask, ids, ids)
    text = gradients.lower(make_perturbations(specs, placement), x, toy.params(specs), batch).compile().as_text()
    assert hlo.count_dot_flops_by_dtype(str(text)) == {"bf16": 3 * 2 * ROWS * SEQUENCE * WIDTH * VOCABULARY}


def test_both_forms_agree_within_the_rounding_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(placement: Placement, on_one_cpu: bool = True) -> Any:
        jitted = jax.jit(functools.partial(loss_and_gradients, placement, on_one_cpu))
        return jax.device_get(jitted(make_perturbations(SPECS, placement), *arrays()))

    found, exact = run(toy.placement(compute_dtype="bfloat16")), run(toy.placement())
    monkeypatch.setattr(products, "_are_bfloat16", lambda *_: False)
    plain = run(toy.placement(compute_dtype="bfloat16"), on_one_cpu=False)
    assert toy.distance(found, plain) < 2**-8  # a value that lies between two bfloat16 is rounded once or twice
    assert toy.distance(found, exact) < 1.1 * toy.distance(plain, exact)


def make_gpus(**axes: int) -> Placement:
    mesh = MeshConfig(**axes)
    devices = gpu_topology("h200")[: mesh.devices]
    return Placement(make_mesh(mesh, devices), ShardingConfig(3), PrecisionConfig(compute_dtype="bfloat16"))


@pytest.mark.parametrize(
    "make",
    [
        make_gpus,
        functools.partial(make_gpus, fsdp=4, tensor=2),
        functools.partial(toy.placement, 3, "bfloat16", fsdp=4),
    ],
    ids=["a GPU", "8 GPUs", "4 CPU devices"],
)
def test_gpus_and_several_devices_get_plain_matmuls(make: Callable[[], Placement]) -> None:
    """Results in the dtype that is kept, and no array transposed in memory."""
    text, alone = (lower(each).as_text() for each in (make(), toy.placement(compute_dtype="bfloat16")))
    assert LAYOUT_CONSTRAINT not in text and LAYOUT_CONSTRAINT in alone
    results = [line.rsplit("->", 1)[1] for line in text.splitlines() if "stablehlo.dot_general" in line]
    # Float32: the logits and the gradients of the three matrices. 16 bits: two forwards, three gradients of inputs.
    assert sorted("bf16" in result for result in results) == [False] * 4 + [True] * 5


def test_an_abstract_mesh_is_no_cpu() -> None:
    assert not products.runs_on_one_cpu(make_abstract_mesh(MeshConfig()))
    assert products.runs_on_one_cpu(toy.placement().mesh)
