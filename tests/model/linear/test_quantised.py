"""Products of quantised operands against the same in numpy, and where they are used."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import toy

from jaxopt_llm.compiler.chips import CHIPS, chip_of
from jaxopt_llm.compiler.kernel_choice import check_matmul
from jaxopt_llm.compiler.topology import gpu_topology
from jaxopt_llm.config import (
    Config,
    LoraConfig,
    Matmul,
    MoEConfig,
    OptimizerConfig,
    PrecisionConfig,
    RematConfig,
    ScheduleConfig,
    TrainingConfig,
)
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.execution import executor, segments
from jaxopt_llm.execution.segments import PrecisionSpan, scan_spans
from jaxopt_llm.model import flops
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.linear import quantised, weights
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.gathering import attach_shardings, make_perturbations
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import inside_gradient_group, parameter_sharding
from jaxopt_llm.planning.step_plan import make_plan
from jaxopt_llm.run.compile import make_held_out_loss
from jaxopt_llm.step import program as training_program
from jaxopt_llm.step import state as training_state
from jaxopt_llm.step.program import Program
from jaxopt_llm.step.validation import validate

QUANTISED = ("fp8", "int8", "int8_qat", "int4_qat")


def values(*shape: int, seed: int = 0) -> np.ndarray:
    """Return normal values with different scales for each row and each column."""
    random = np.random.default_rng(seed)
    sizes = np.exp(random.normal(size=(*shape[:-1], 1)) + random.normal(size=shape[-1]))
    return (random.normal(size=shape) * sizes).astype(np.float32)


# ---- One operand.


@pytest.mark.parametrize(("dtype", "bits", "least"), [(quantised.E4M3, 3, 2.0**-9), (quantised.E5M2, 2, 2.0**-16)])
def test_float8_error_is_within_half_a_step(dtype: Any, bits: int, least: float) -> None:
    array = values(64, 48)
    found = jax.jit(lambda x: quantised.to_float8(x, dtype))(array)
    assert found.codes.dtype == dtype and found.scales.shape == ()
    error = np.abs(np.asarray(quantised.dequantise(found, "float32")) - array)
    step = np.maximum(np.abs(array) * 2.0**-bits, least * float(found.scales))
    assert np.all(error <= 0.501 * step)
    assert np.max(np.abs(np.asarray(found.codes, np.float32))) == float(ml_dtypes.finfo(dtype).max)


@pytest.mark.parametrize(
    ("matmul", "most", "of_scale"), [("int8", 127, (64, 1)), ("int8_qat", 127, (64, 1)), ("int4_qat", 7, (64, 3))]
)
def test_integer_error_is_within_half_a_step(matmul: Matmul, most: int, of_scale: tuple[int, int]) -> None:
    array = values(64, 96)
    found = quantised.quantise_weight(matmul, jnp.asarray(array), (1,))
    assert found.codes.dtype == np.int8 and found.scales.shape == of_scale
    groups = array.reshape(64, of_scale[1], -1)
    step = np.max(np.abs(groups), axis=-1, keepdims=True) / most
    error = np.abs(np.asarray(quantised.dequantise(found, "float32")) - array).reshape(groups.shape)
    assert np.all(error <= 0.501 * step)
    assert np.all(np.max(np.abs(np.asarray(found.codes).reshape(groups.shape)), axis=-1) == most)


@pytest.mark.parametrize("matmul", QUANTISED)
def test_zeros_stay_zero_and_nonfinite_values_stay_nonfinite(matmul: Matmul) -> None:
    @jax.jit
    def rounded(value: jax.Array) -> jax.Array:
        array = jnp.zeros((32, 64), jnp.float32).at[3, 5].set(value)
        return quantised.dequantise(quantised.quantise_weight(matmul, array, (1,)), "float32")

    for value in (0.0, 1e-25, 1e30):
        found = np.asarray(rounded(value))
        assert found[3, 5] == pytest.approx(value, rel=0.005)
        assert np.count_nonzero(found) == (value != 0)
    for value in (np.inf, np.nan):
        assert not np.all(np.isfinite(rounded(value)))


# ---- The three products.


def float8(array: np.ndarray, dtype: Any) -> np.ndarray:
    scale = np.float32(np.max(np.abs(array)) / float(ml_dtypes.finfo(dtype).max)).astype(ml_dtypes.bfloat16)
    return (array / np.float32(scale)).astype(dtype).astype(np.float32) * np.float32(scale)


def integers(array: np.ndarray, dims: tuple[int, ...], most: int) -> np.ndarray:
    scale = np.max(np.abs(array), axis=dims, keepdims=True) / np.float32(most)
    return np.round(array / scale) * scale


def in_groups(array: np.ndarray, dim: int, most: int) -> np.ndarray:
    parts = np.split(array, array.shape[dim] // quantised.INT4_GROUP, axis=dim)
    return np.concatenate([integers(part, (dim,), most) for part in parts], axis=dim)


def rounded(matmul: Matmul, x: np.ndarray, w: np.ndarray, dy: np.ndarray, summed: Any) -> tuple[np.ndarray, ...]:
    """Return the operands rounded. summed: the dimensions of x and of w that the product sums over."""
    match matmul:
        case "fp8":
            return float8(x, quantised.E4M3), float8(w, quantised.E4M3), float8(dy, quantised.E5M2)
        case "int8":
            return integers(x, summed[0], 127), integers(w, summed[1], 127), dy
        case "int8_qat":
            return x, integers(w, summed[1], 127), dy
        case _:
            return x, in_groups(w, summed[1][-1], 7), dy


PRODUCTS = {
    "BSD,DHK->BSHK": (ParamSpec((64, 2, 32), ("embed", "heads", "head_dim"), (0,)), ((2,), (0,))),
    "BSHK,HKD->BSD": (ParamSpec((2, 32, 48), ("heads", "head_dim", "embed"), (0, 1)), ((2, 3), (0, 1))),
}


@functools.cache
def three_products(subscripts: str, matmul: Matmul, placement: Placement) -> tuple[np.ndarray, ...]:
    """Return x, w, dy, and the results of einsum and of its backward: y, dx, dw."""
    spec, _ = PRODUCTS[subscripts]
    sizes = {"B": 4, "S": 8} | dict(zip(subscripts.split("->")[0].split(",")[1], spec.shape, strict=True))
    left, result = subscripts.split(",")[0], subscripts.split("->")[1]
    x, dy = (values(*(sizes[axis] for axis in axes), seed=seed) for seed, axes in enumerate((left, result)))
    w = values(*spec.shape, seed=2)

    def run(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        x, dy = (placement.constrain(each, *("batch", "sequence", *(None,) * (each.ndim - 2))) for each in (x, dy))

        def product(x: jax.Array, perturbation: jax.Array) -> jax.Array:
            return weights.einsum(
                subscripts, x, attach_shardings(spec, w, perturbation, placement, keep_gathered=True, matmul=matmul)
            )

        y, pull = jax.vjp(product, x, make_perturbations(spec, placement))
        return y, *pull(dy)

    w = jax.device_put(w, parameter_sharding(spec, placement))
    return tuple(map(np.asarray, (x, w, dy, *jax.jit(run)(x, w, dy))))


@pytest.mark.parametrize("subscripts", PRODUCTS)
@pytest.mark.parametrize("matmul", QUANTISED)
def test_products_use_rounded_operands_and_gradients_pass_straight_through(subscripts: str, matmul: Matmul) -> None:
    x, w, dy, *found = three_products(subscripts, matmul, toy.placement())
    X, W, DY = rounded(matmul, x, w, dy, PRODUCTS[subscripts][1])
    left, right, result = weights.split_subscripts(subscripts)
    of_x, of_w = f"{result},{right}->{left}", f"{left},{result}->{right}"

    def products(x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, ...]:
        return np.einsum(subscripts, x, w), np.einsum(of_x, dy, w), np.einsum(of_w, x, dy)

    for each, expected in zip(found, products(X, W, DY), strict=True):
        assert toy.distance(each, expected) < 2e-6
    bound = {"fp8": 0.1, "int8": 0.03, "int8_qat": 0.02, "int4_qat": 0.35}[matmul]
    for each, expected in zip(found, products(x, w, dy), strict=True):
        assert toy.distance(each, expected) < bound


@pytest.mark.parametrize("matmul", QUANTISED)
def test_quantised_products_are_the_same_on_many_devices(matmul: Matmul) -> None:
    """The scale of a tensor in shards uses the largest value of all shards."""
    for subscripts in PRODUCTS:
        alone = three_products(subscripts, matmul, toy.placement())
        divided = three_products(subscripts, matmul, toy.placement(3, fsdp=2, tensor=2))
        for found, expected in zip(divided, alone, strict=True):
            assert toy.distance(found, expected) < 1e-6


def test_gradient_groups_share_a_scale() -> None:
    """ZeRO stages 0 and 1 run each group of rows by itself; the scale is still that of the whole tensor."""
    spec = ParamSpec((64, 32), ("embed", "mlp"), (0,))
    rows = np.asarray([[1, 50], [2, 3], [4, 1000], [6, 7]], np.int32)
    fields = jnp.asarray(rows[None])
    batch = Batch(tokens=fields, targets=fields, loss_mask=fields, segment_ids=fields, positions=fields)
    basis, w = jnp.asarray(values(64)), jnp.asarray(values(64, 32))

    def gradient(placement: Placement) -> np.ndarray:
        inside = inside_gradient_group(placement)

        def one_group(batch: Batch) -> Any:
            x = batch.tokens[0].astype(jnp.float32)[..., None] * basis  # [B, S, D]

            def loss(perturbations: Any) -> jax.Array:
                placed = attach_shardings(spec, w, perturbations["non_layer"], inside, keep_gathered=True, matmul="fp8")
                return jnp.sum(jnp.square(weights.einsum("BSD,DF->BSF", x, placed)))

            value, found = jax.value_and_grad(loss)({"non_layer": make_perturbations(spec, inside)})
            return {"loss": value}, found

        run = jax.jit(lambda batch: executor.sum_over_groups(one_group, batch, {"non_layer": spec}, placement)[1])
        return np.asarray(run(batch)["non_layer"])

    assert toy.distance(gradient(toy.placement(0, data=2, fsdp=2)), gradient(toy.placement())) < 1e-6


# ---- Which layers.


def test_loops_over_runs_of_layers_write_one_stack_of_gradients() -> None:
    stacked = {"a": jnp.asarray(values(5, 3)), "b": None}
    spans = [PrecisionSpan(0, 1, (False,)), PrecisionSpan(1, 4, (True,)), PrecisionSpan(4, 5, (False,))]

    def step(quantised: tuple[bool, ...], x: jax.Array, period: Any) -> tuple[jax.Array, None]:
        row, perturbations = period
        return jnp.tanh(x * perturbations["a"] + row) * (2 if quantised[0] else 1), None

    def scanned(stacked: Any) -> jax.Array:
        bodies = [functools.partial(step, span.quantised) for span in spans]
        return jnp.sum(scan_spans(bodies, spans, jnp.ones(3), stacked, ()))

    def unrolled(stacked: Any) -> jax.Array:
        x = jnp.ones(3)
        for row in range(5):
            x, _ = step((0 < row < 4,), x, (jnp.int32(row), {"a": stacked["a"][row], "b": None}))
        return jnp.sum(x)

    (value, found), expected = (jax.value_and_grad(each)(stacked) for each in (scanned, unrolled))
    assert value == pytest.approx(float(expected[0]), rel=1e-6)
    np.testing.assert_allclose(found["a"], expected[1]["a"], rtol=1e-6)


MODEL = replace(toy.CONFIG, layers=6, width=32, heads=2, kv_heads=2, head_dim=32, mlp_width=64)  # periods of two kinds
TRAINING = TrainingConfig(batch_size=4, sequence_length=8)


def make(matmul: Matmul, exempt: int = 0) -> tuple[Program, Placement]:
    precision = PrecisionConfig(compute_dtype="float32", matmul=matmul, compute_dtype_layers=exempt)
    placement = replace(toy.placement(), precision=precision)
    others = (OptimizerConfig(), ScheduleConfig(), RematConfig("none"), LoraConfig())
    return toy.make_program(MODEL, TRAINING, *others, placement), placement


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Matmul]]:
    """Record for each tree of weights that is placed its first name and its matmul format."""
    calls: list[tuple[str, Matmul]] = []

    def spy(specs: Any, *args: Any, matmul: Matmul = "compute_dtype", **kwargs: Any) -> Any:
        calls.append((min(specs), matmul))
        return attach_shardings(specs, *args, matmul=matmul, **kwargs)

    monkeypatch.setattr(segments, "attach_shardings", spy)
    return calls


@pytest.mark.parametrize(
    ("exempt", "expected"),
    [
        (0, ["fp8", "fp8"]),  # one loop over pairs
        (1, ["compute_dtype", "fp8", "fp8", "fp8", "fp8", "compute_dtype"]),  # a loop for each pair
        (2, ["compute_dtype", "compute_dtype", "fp8", "fp8", "compute_dtype", "compute_dtype"]),
    ],
)
def test_exempt_layers_and_parameters_outside_the_segments_stay_in_compute_dtype(
    exempt: int, expected: list[Matmul], placed: list[tuple[str, Matmul]]
) -> None:
    program, placement = make("fp8", exempt)
    loss = functools.partial(program.executor.loss, program.model, placement=placement)
    jax.eval_shape(loss, program.state.masters, program.batch)
    of_blocks = [matmul for name, matmul in placed if name == "attention"]
    assert of_blocks == expected
    assert {matmul for name, matmul in placed if name != "attention"} == {"compute_dtype"}


@pytest.mark.parametrize("exempt", [0, 1, 2])
def test_quantised_flops(exempt: int) -> None:
    specs = make("compute_dtype")[0].specs.masters
    of_layer = 32 * (2 * 2 * 32 + 2 * 2 * 32 + 3 * 64)
    for matmul, products in (("compute_dtype", 0), ("fp8", 3), ("int8", 1), ("int4_qat", 0)):
        precision = PrecisionConfig(matmul=matmul, compute_dtype_layers=exempt)  # type: ignore[arg-type]
        assert flops.count_quantised_per_token(MODEL, specs, {}, precision) == pytest.approx(
            2 * products * of_layer * (6 - 2 * exempt)
        )


def test_utilisation_counts_each_operation_at_the_peak_of_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_program, "chip_of", lambda kind: chip_of("NVIDIA H200"))
    peak = CHIPS["h200"].peak_flops
    shares = {}
    for matmul, of_codes in (("compute_dtype", "float32"), ("fp8", "float8"), ("int8", "int8")):
        program, placement = make(matmul)  # type: ignore[arg-type]
        config = Config(model=MODEL, training=TRAINING, precision=placement.precision)
        narrow = flops.count_quantised_per_token(MODEL, program.specs.masters, {}, placement.precision)
        needed = flops.count_per_token(MODEL, program.specs.masters, {}, TRAINING.sequence_length).causal
        shares[matmul] = training_program.utilisation_per_token(config, program, placement)["mfu"]
        assert shares[matmul] == pytest.approx((needed - narrow) / peak["float32"] + narrow / peak[of_codes])
    assert shares["fp8"] < shares["int8"] < shares["compute_dtype"]


# ---- Where the weights are used, and where they cannot be.


@pytest.mark.parametrize(
    ("matmul", "evaluated"),
    [("fp8", "compute_dtype"), ("int8", "compute_dtype"), ("int8_qat", "int8_qat"), ("int4_qat", "int4_qat")],
)
def test_evaluation_uses_weights_as_they_will_be_served(
    matmul: Matmul, evaluated: Matmul, placed: list[tuple[str, Matmul]]
) -> None:
    program, placement = make(matmul)
    jax.eval_shape(make_held_out_loss(program.model, program.executor, placement), program.state, program.batch)
    assert {found for name, found in placed if name == "attention"} == {evaluated}


def test_groups_of_4_bits_are_those_of_the_base_and_not_of_adapters() -> None:
    config = Config(model=MODEL, precision=PrecisionConfig(matmul="int4_qat"), lora=LoraConfig(rank=4))
    validate(config)
    with pytest.raises(InputError, match="mlp/down sums over 48 values on each device"):
        validate(replace(config, model=replace(MODEL, mlp_width=48)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"precision": {"compute_dtype": "float16"}}, ["precision.matmul=fp8", "--precision.compute-dtype bfloat16"]),
        ({"precision": {"compute_dtype_layers": -1}}, ["precision.compute_dtype_layers=-1: must be at least 0"]),
        ({"precision": {"compute_dtype_layers": 2}}, ["compute_dtype_layers=2", "all of model.layers=4", "at most 1"]),
        (
            {"precision": {"compute_dtype_layers": 1}, "mesh": {"pipeline": 2}},
            [
                "precision.compute_dtype_layers=1 does not support mesh.pipeline=2",
                "set --precision.compute-dtype-layers 0",
            ],
        ),
        (
            {"precision": {"compute_dtype_layers": 1}, "remat": {"every": 2}},
            ["precision.compute_dtype_layers=1 does not support remat.every=2"],
        ),
        (
            {"precision": {"matmul": "compute_dtype", "compute_dtype_layers": 1}},
            ["precision.compute_dtype_layers=1 has no effect, because precision.matmul=compute_dtype quantises none"],
        ),
        ({"lora": {"rank": 4, "dora": True}}, ["precision.matmul=fp8 does not support lora.dora"]),
        (
            {"lora": {"rank": 4, "base": "int8"}},
            [
                "precision.matmul=fp8 does not support lora.base=int8",
                "set --precision.matmul compute_dtype or int8, or",
            ],
        ),
        (
            {"lora": {"rank": 4, "base": "nf4"}, "precision": {"matmul": "int8"}},
            ["precision.matmul=int8 does not support lora.base=nf4", "set --precision.matmul compute_dtype, or"],
        ),
        (
            {"precision": {"outlier_threshold": 6.0}},
            ["precision.outlier_threshold=6.0 has no effect with precision.matmul=fp8: set --precision.matmul int8"],
        ),
        (
            {"precision": {"matmul": "int8", "outlier_threshold": 6.0}, "model": {"moe": MoEConfig(experts=4)}},
            ["precision.outlier_threshold=6.0 does not support experts: set --precision.outlier-threshold 0"],
        ),
        (
            {"precision": {"matmul": "int4_qat"}, "model": {"mlp_width": 96}, "mesh": {"tensor": 2}},
            ["int4_qat: segment_0/block_0/mlp/down sums over 48 values on each device", "int8_qat"],
        ),
    ],
)
def test_invalid_settings_are_reported_in_one_line(changes: dict[str, Any], words: list[str]) -> None:
    config = Config(precision=PrecisionConfig(matmul="fp8"))
    for section, fields in changes.items():
        config = replace(config, **{section: replace(getattr(config, section), **fields)})
    with pytest.raises(InputError) as refused:
        validate(config)
    assert all(word in str(refused.value) for word in words), refused.value
    assert "\n" not in str(refused.value) and ";" not in str(refused.value)


def test_fp8_is_refused_on_gpus_without_it() -> None:
    a100, h100 = (gpu_topology(chip)[0] for chip in ("a100", "h100"))
    with pytest.raises(InputError, match=r"fp8: NVIDIA A100.*--precision.matmul int8, or compute_dtype"):
        check_matmul(a100, "fp8")
    check_matmul(h100, "fp8")
    check_matmul(a100, "int8")
    check_matmul(jax.devices("cpu")[0], "fp8")


def test_a_plan_refuses_fp8_on_gpus_without_it() -> None:
    with pytest.raises(InputError, match="fp8: NVIDIA A100"):
        make_plan(Config(precision=PrecisionConfig(matmul="fp8")), "a100", hosts=1, gpus_per_host=1)


# ---- The whole of a model.


@functools.cache
def one_step(
    matmul: Matmul, exempt: int = 0, zero: int = 0, remat: str = "full", accumulation: int = 2, **axes: int
) -> tuple[float, Any]:
    """Return the loss, and the gradients as the update of one SGD step."""
    config = replace(MODEL, layers=4, pattern=("global",))
    precision = PrecisionConfig(compute_dtype="float32", matmul=matmul, compute_dtype_layers=exempt)
    placement = replace(toy.placement(zero, **axes), precision=precision)
    training = TrainingConfig(batch_size=8, sequence_length=16, accumulation=accumulation)
    optimizer = OptimizerConfig(name="sgd", learning_rate=1.0, momentum=0.0, weight_decay=0.0, clip_norm=1e9)
    others = (optimizer, ScheduleConfig(1, 10), RematConfig(remat), LoraConfig())  # type: ignore[arg-type]
    program = toy.make_program(config, training, *others, placement)
    state = training_state.initialize_state(program.specs, program.optimizers, 0, placement)
    before = jax.tree.map(np.asarray, program.to_checkpoint(state)["masters"])
    rows = toy.microbatches(toy.packed(8, 16), accumulation)
    state, metrics = program.step(state, jax.device_put(rows, program.batch_sharding))
    after = jax.tree.map(np.asarray, program.to_checkpoint(state)["masters"])
    return float(metrics["loss"]), jax.tree.map(np.subtract, before, after)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("matmul", "placed"),
    [
        *((matmul, {"zero": 3, "fsdp": 2, "tensor": 2}) for matmul in QUANTISED),
        ("int8", {"zero": 1, "data": 2, "fsdp": 2, "remat": "none"}),
        ("fp8", {"zero": 1, "pipeline": 2, "fsdp": 2, "remat": "save_qkv"}),
        ("int4_qat", {"zero": 3, "fsdp": 2, "remat": "none", "exempt": 1}),
    ],
    ids=str,
)
def test_all_placements_compute_the_same(matmul: Matmul, placed: dict[str, Any]) -> None:
    loss, expected = one_step(matmul, exempt=placed.get("exempt", 0))
    found_loss, found = one_step(matmul, **placed)
    assert found_loss == pytest.approx(loss, rel=1e-5)
    # A value halfway between two codes may round to either: then a few values differ by one step.
    assert toy.distance(found, expected) < 1e-2
    unquantised = one_step("compute_dtype")[1]
    error = toy.distance(expected, unquantised)
    assert toy.distance(found, expected) < 0.1 * error < 0.1 * 0.35
