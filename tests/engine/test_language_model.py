"""LanguageModel: the decoder in a loss of the user's is the decoder that `train` trains, in values and in bytes."""

import functools
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import folders
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from marks import slow

import jaxopt_llm
from jaxopt_llm.compiler import hlo, topology
from jaxopt_llm.config import (
    Config,
    LoraConfig,
    MeshConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    PrecisionConfig,
    RematConfig,
    ScheduleConfig,
    ShardingConfig,
    TrainingConfig,
)
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine.engine import Engine
from jaxopt_llm.engine.frontends import unbox
from jaxopt_llm.engine.program import EngineProgram, differentiate_user_model, make_engine_program
from jaxopt_llm.execution import scan
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import AUXILIARY_LOSS, OBJECTIVE
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement

# Biases, norms of queries and keys, a head of its own, soft caps; with windows, in two segments.
SWITCHES = replace(toy.CONFIG, biases="all", qk_norm="head", norm_placement="both", tied_head=False, logit_softcap=3.0)
LATENT = replace(toy.UNIFORM, mla=MLAConfig(kv_rank=8, rotary_head_dim=2), kv_heads=4, norm_epsilon=1e-6)
CONFIGS = {
    "toy": toy.CONFIG,
    "switches": SWITCHES,
    "learned": replace(toy.UNIFORM, positions="learned", max_positions=16, norm="layer", mlp="gelu"),
    "latent": LATENT,
    "shared keys": replace(toy.CONFIG, shared_key_layers=2, wide_mlp=True, layer_input_size=8),
    # A dense layer, and experts with biases, a shared expert, and both auxiliary losses.
    "experts": replace(
        toy.UNIFORM,
        biases="mlp",
        moe=MoEConfig(
            **dict(experts=4, experts_per_token=2, expert_width=16, shared_expert_width=8, dense_layers=1),
            **dict(router_bias=True, router_z_loss=0.1),
        ),
    ),
}
FIELDS = ("tokens", "targets", "loss_mask", "segment_ids", "positions")


def next_token_loss(model: jaxopt_llm.LanguageModel, parameters: Any, batch: Any) -> Any:
    hidden, balance = model.hidden_with_balance(
        *(parameters, batch["tokens"], batch["segment_ids"]), mask=batch["loss_mask"]
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(model.head(parameters, hidden), batch["targets"])
    count = batch["loss_mask"].sum()
    return (losses * batch["loss_mask"]).sum() + count * balance, count


def make_engine(model: jaxopt_llm.LanguageModel, batch: Any, rules: Any = None, **sections: Any) -> Engine:
    loss = functools.partial(next_token_loss, model)
    sections = {"precision": {"compute_dtype": "float32"}} | sections
    return jaxopt_llm.initialize(functools.partial(model.initialize, 0), loss, batch, Config(**sections), rules=rules)


def as_dict(batch: Any) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in FIELDS}


@functools.cache
def of_the_decoder(name: str) -> tuple[float, Any]:
    """Return the mean loss and the gradients of the decoder's own executor, on one device."""
    decoder, placement, batch = Decoder(CONFIGS[name]), toy.placement(), toy.packed(8, 16)
    parameters = jax.jit(lambda: unbox(LANGUAGE[name].initialize(0)))()
    weight = jnp.float32(1 / batch.loss_mask.sum())
    run = functools.partial(
        scan.loss_and_gradients, decoder, placement=placement, remat=RematConfig("none"), loss_weight=weight
    )
    nothing = jax.tree.map(lambda _: None, parameters)
    sums, gradients = jax.jit(run)(parameters, nothing, toy.microbatches(batch, 1))
    for path, spec in tree.leaves_with_path(decoder.specs):
        if spec.sign_rate:  # it follows the load in `train` only
            gradients = tree.map_with_path(lambda at, x, path=path: 0 * x if at == path else x, gradients)
    return float((sums[OBJECTIVE] + sums[AUXILIARY_LOSS]) * weight), gradients


LANGUAGE = {name: jaxopt_llm.LanguageModel(config) for name, config in CONFIGS.items()}
TENSOR = {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocabulary": "tensor"}


@pytest.mark.parametrize(
    ("name", "sections", "rules"),
    [
        ("toy", {"mesh": {"fsdp": 8}, "remat": {"policy": "full"}}, None),
        ("switches", {"mesh": {"fsdp": 4, "tensor": 2}}, TENSOR),
        (
            "learned",
            {"mesh": {"data": 2, "fsdp": 4}, "training": {"accumulation": 1}, "sharding": {"zero_stage": 1}},
            None,
        ),
        ("latent", {"mesh": {"fsdp": 8}, "remat": {"policy": "full"}}, None),
        ("shared keys", {"mesh": {"fsdp": 8}, "remat": {"policy": "full"}}, None),
        ("experts", {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "remat": {"policy": "full"}}, TENSOR),
    ],
)
def test_losses_and_gradients_are_those_of_the_decoder(name: str, sections: Any, rules: Any) -> None:
    engine = make_engine(LANGUAGE[name], as_dict(toy.packed(8, 16)), rules, **sections)
    job, program, batch = engine._job, engine.program, engine.place(as_dict(toy.packed(8, 16)))
    differentiate = differentiate_user_model(program.model, program.placement)

    @jax.jit
    def mean(state: Any, batch: Any) -> Any:
        found = differentiate(state, batch, 1.0)
        gradients = jax.tree.map(lambda gradient: gradient / found.divisor, found.gradients)
        return found.loss, job.frontend.as_tree(program.model.flatten(gradients))

    (loss, gradients), (expected_loss, expected) = mean(engine.state, batch), of_the_decoder(name)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    jax.tree.map_with_path(assert_close, gradients, expected)


def assert_close(path: Any, found: Any, expected: Any) -> None:
    distance = toy.distance(found, expected) if np.any(expected) else np.abs(found).max()
    np.testing.assert_array_less(distance, 1e-5, str(path))


# --- log-probabilities


@pytest.mark.parametrize(("name", "changed"), [("switches", {"logit_scale": 0.5}), ("toy", {"tied_head": True})])
def test_log_probabilities_are_those_of_the_logits(name: str, changed: dict[str, Any]) -> None:
    """With a soft cap, a scale, rows that pad the table, several documents, and a last chunk that is padded."""
    model, batch = jaxopt_llm.LanguageModel(replace(CONFIGS[name], **changed)), toy.packed(4, 16)
    parameters = jax.jit(lambda: unbox(model.initialize(0)))()
    tokens, segments, positions = batch.tokens, batch.segment_ids, batch.positions
    weights = np.random.default_rng(0).normal(size=tokens.shape)  # of each token, as of an advantage

    def of_logits(parameters: Any) -> Any:
        every = jax.nn.log_softmax(model.logits(parameters, tokens, segments, positions))[:, :-1]
        next_ones = jnp.take_along_axis(every, tokens[:, 1:, None], 2)[..., 0]
        found = jnp.pad(jnp.where(segments[:, 1:] == segments[:, :-1], next_ones, 0), ((0, 0), (0, 1)))
        return (found * weights).sum(), found

    def in_chunks(parameters: Any) -> Any:
        found = model.log_probabilities(parameters, tokens, segments, positions, chunk=6)
        return (found * weights).sum(), found

    (expected, found) = (jax.jit(jax.grad(each, has_aux=True))(parameters) for each in (of_logits, in_chunks))
    assert found[1].dtype == jnp.float32 and (found[1][:, -1] == 0).all() and (found[1] != 0).any(0)[:-1].all()
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-6)
    jax.tree.map_with_path(assert_close, found[0], expected[0])
    given = model.log_probabilities(
        *(parameters, tokens, segments), hidden=model.hidden(parameters, tokens, segments), chunk=64
    )
    np.testing.assert_allclose(given, expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.core
@pytest.mark.parametrize("devices", [1, 8])
def test_the_logits_of_one_chunk_exist(devices: int) -> None:
    """The head is gathered once and its gradient is reduced once, in spite of the loop over chunks."""
    rows, length, chunk = 16 * devices, 1024, 64
    config = replace(describe_model(1), vocabulary_size=8 * VOCABULARY, tied_head=False)
    model = jaxopt_llm.LanguageModel(config)

    def loss(parameters: Any, batch: Any) -> jax.Array:
        return -model.log_probabilities(parameters, batch["tokens"], chunk=chunk).mean()

    batch, mesh_config = {"tokens": jax.ShapeDtypeStruct((rows, length), jnp.int32)}, MeshConfig(fsdp=devices)
    sections: Any = {"mesh": mesh_config, "training": {"attention": "xla"}}
    engine = jaxopt_llm.initialize(functools.partial(model.initialize, 0), loss, batch, Config(**sections))
    mesh = make_mesh(mesh_config, topology.gpu_topology("h200", 1, devices))
    program = make_engine_program(engine._job, mesh)
    lowered = topology.lower_without_gpu(program.step, program.state, program.batch)
    step = topology.compile_without_gpu(lowered, {"xla_gpu_enable_triton_gemm": False})
    logits = 4 * config.vocabulary_size * 16 * length  # of a device; a step that forms them holds 2.8 times as much
    assert hlo.read_memory(step).temporaries < logits / 2
    moved: Counter[Any] = Counter()
    for each in hlo.list_collectives(step.as_text(), mesh) if devices > 1 else ():
        moved[each.kind] += each.array_bytes * each.times
    tables = 2 * config.vocabulary_size * config.width
    matrices = 3 * config.width * (config.mlp_width + config.width)  # of the layer, at most
    small = 2**15  # norms and tokens
    assert moved["all-gather"] <= 2 * (tables + 2 * matrices) + small, "in bfloat16; the layer's backward gathers again"
    assert moved["reduce-scatter"] <= 4 * (tables + matrices) + small


# --- bytes, of programs that are compiled for eight H200s

MESH, SEQUENCE, BATCH, VOCABULARY = MeshConfig(fsdp=8), 128, 16, 4096


@dataclass(frozen=True)
class Moved:
    """Bytes of a step: of arrays that collectives gather or reduce, and of temporaries. They are differences."""

    collectives: Counter[tuple[str, tuple[str, ...]]]
    temporaries: int


def describe_model(layers: int) -> ModelConfig:
    return ModelConfig(
        width=512, layers=layers, heads=4, kv_heads=2, head_dim=128, mlp_width=2048, vocabulary_size=VOCABULARY
    )


def make_own_step(layers: int, remat: RematConfig, lora: LoraConfig, mesh: Any) -> Any:
    placement = Placement(mesh, ShardingConfig(3), PrecisionConfig())
    training = TrainingConfig(batch_size=BATCH, sequence_length=SEQUENCE, attention="xla")
    return toy.make_program(
        describe_model(layers), training, OptimizerConfig(), ScheduleConfig(), remat, lora, placement
    )


def make_engine_step(
    layers: int, remat: RematConfig, lora: LoraConfig, mesh: Any, attention: str = "xla"
) -> EngineProgram:
    shape = (BATCH, SEQUENCE)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in FIELDS} | {
        "loss_mask": jax.ShapeDtypeStruct(shape, bool)
    }
    sections = {"mesh": MESH, "sharding": ShardingConfig(3), "precision": PrecisionConfig(), "lora": lora}
    sections |= {"training": {"attention": attention}}
    engine = make_engine(jaxopt_llm.LanguageModel(describe_model(layers)), batch, remat=remat, **sections)
    return make_engine_program(engine._job, mesh)


def per_layer(make_step: Any, remat: str, rank: int) -> Moved:
    """Return the bytes of each layer: what is outside of the layers cancels."""
    mesh = make_mesh(MESH, topology.gpu_topology("h200", 1, 8))

    def measure(layers: int) -> Moved:
        program = make_step(layers, RematConfig(remat), LoraConfig(rank=rank, base="int8" if rank else "float"), mesh)
        lowered = topology.lower_without_gpu(program.step, program.state, program.batch)
        step = topology.compile_without_gpu(lowered, {"xla_gpu_enable_triton_gemm": False})
        found: Counter[Any] = Counter()
        for each in hlo.list_collectives(step.as_text(), mesh):
            found[each.kind, each.dtypes] += each.array_bytes * each.times
        return Moved(found, hlo.read_memory(step).temporaries)

    deep, shallow = measure(16), measure(12)  # of 4 layers, the peak of the memory may be outside of the layers
    moved = Counter({key: (deep.collectives[key] - shallow.collectives[key]) // 4 for key in deep.collectives})
    return Moved(moved, (deep.temporaries - shallow.temporaries) // 4)


@pytest.mark.core
@pytest.mark.parametrize(("remat", "rank"), [("none", 0), *slow(("full", 0), ("full", 8))])
def test_a_layer_gathers_and_holds_what_it_does_in_the_decoder(remat: str, rank: int) -> None:
    own, engine = (per_layer(make_step, remat, rank) for make_step in (make_own_step, make_engine_step))
    large = {
        key
        for key in own.collectives | engine.collectives
        if max(own.collectives[key], engine.collectives[key]) > 2**15
    }
    assert {kind for kind, _ in large} == {"all-gather", "reduce-scatter"}
    for key in large:
        assert engine.collectives[key] == pytest.approx(own.collectives[key], rel=0.02), key
    assert engine.temporaries < 1.1 * own.temporaries


@pytest.mark.core
def test_attention_is_a_kernel_that_the_engine_chooses() -> None:
    mesh = make_mesh(MESH, topology.gpu_topology("h200", 1, 8))
    program = make_engine_step(2, RematConfig("none"), LoraConfig(), mesh, "auto")
    (choice,) = program.model.attention.choices.values()
    assert choice.name != "xla"  # pallas, or triton where it is installed


@pytest.mark.core
def test_experts_are_products_and_the_router_is_none() -> None:
    """The router is computed in float32 as it is written: nothing to warn about, and no adapter for it."""
    config = replace(describe_model(2), moe=MoEConfig(experts=8, expert_width=64))
    model, batch = jaxopt_llm.LanguageModel(config), {"tokens": jax.ShapeDtypeStruct((8, 16), jnp.int32)}

    def loss(parameters: Any, batch: Any) -> jax.Array:
        hidden, balance = model.hidden_with_balance(parameters, batch["tokens"])
        return balance - model.log_probabilities(parameters, batch["tokens"], hidden=hidden).mean()

    engine = jaxopt_llm.initialize(functools.partial(model.initialize, 0), loss, batch, Config(mesh={"fsdp": 8}))
    found = make_engine_program(engine._job, make_mesh(MESH, topology.gpu_topology("h200", 1, 8))).model
    assert found.oddities == ()
    prefix = "segment_0/segment_0/block_0/mlp/"
    assert {path.removeprefix(prefix) for path in found.products if path.startswith(prefix)} == {"gate", "up", "down"}
    spec = found.specs["segment_0"]["segment_0"]["block_0"]["mlp"]["up"]
    assert (spec.axes[:2], spec.contracting) == (("layers", "experts"), (2,))


# --- folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(folders.CONFIG, layers=2, pattern=("global",))
    return folders.folder(tmp_path_factory.mktemp("folders") / "model", config)


def test_weights_of_a_folder_are_read_by_index(tmp_path: Path) -> None:
    """Two segments, two kinds of block, and rows that pad the tables."""
    found = jaxopt_llm.LanguageModel(folders.folder(tmp_path / "model")).weights
    expected = dict(tree.leaves_with_path(jaxopt_llm.load_pretrained(tmp_path / "model").params))
    assert found.keys() == expected.keys()
    for path, weight in found.items():
        array, inner = np.asarray(expected[path]), [slice(None)] * (len(weight.shape) - 1)
        assert (weight.shape, weight.dtype) == (array.shape, array.dtype)
        for first in (slice(None), slice(1, None), slice(-4, None), *([0] if path.startswith("segment") else [])):
            np.testing.assert_array_equal(weight[(first, *inner)], array[first], err_msg=path)


EXPERTS = replace(
    folders.CONFIG, layers=2, pattern=("global",), biases="none", moe=MoEConfig(experts=4, expert_width=8)
)
FOLDERS = {
    "mixtral": EXPERTS,
    "qwen3_moe": replace(EXPERTS, qk_norm="head", moe=replace(EXPERTS.moe, router_renormalises=False)),
}


@pytest.mark.parametrize("family", FOLDERS)
def test_a_folder_with_experts_is_read_by_devices_and_trained(family: str, tmp_path: Path) -> None:
    """The experts of Mixtral as int8 codes, with adapters; those of Qwen3-MoE whole."""
    path = folders.folder(tmp_path / "model", FOLDERS[family])
    model, original = jaxopt_llm.LanguageModel(path), jaxopt_llm.load_pretrained(path)
    lora = {"rank": 2, "base": "int8", "targets": ("*/mlp/up", "*/mlp/down")} if family == "mixtral" else {}
    tokens = np.random.default_rng(0).integers(200, size=(8, 12))

    def loss(parameters: Any, batch: Any) -> jax.Array:
        hidden, balance = model.hidden_with_balance(parameters, batch["tokens"])
        return balance - model.log_probabilities(parameters, batch["tokens"], hidden=hidden).mean()

    engine = jaxopt_llm.initialize(
        *(model.initialize, loss, {"tokens": tokens}),
        Config(
            mesh={"data": 2, "fsdp": 4},
            precision={"compute_dtype": "float32"},
            lora=lora,
            optimizer={"learning_rate": 1e-2},
            schedule={"kind": "constant", "warmup_steps": 0},
        ),
        weights=model.weights,
    )
    found = jax.jit(model.logits)(engine.model(), jnp.asarray(tokens))
    assert toy.distance(found, original.logits(tokens)) < (0.1 if lora else 1e-5)
    if lora:
        up = engine.state.frozen["segment_0"]["segment_0"]["block_0"]["mlp"]["up"]
        assert up.base.codes.dtype == jnp.int8
        adapter = engine.state.masters["segment_0"]["segment_0"]["block_0"]["mlp"]["up"].lora_a
        assert adapter.shape == (2, 4, model.config.width, 2), "layers, experts, width, rank"
    losses = [float(engine.step({"tokens": tokens})["loss"]) for _ in range(5)]
    assert losses[-1] < losses[0] - 0.01
    if not lora:
        model.save_pretrained(tmp_path / "trained", engine.model())
        assert jaxopt_llm.load_pretrained(tmp_path / "trained").config == original.config


def dpo_loss(model: jaxopt_llm.LanguageModel, pair: Any, batch: Any) -> Any:
    """Return the loss of the answers after the fourth token."""
    policy, reference = (
        model.log_probabilities(pair[name], batch["tokens"], chunk=5)[:, 3:].sum(1) for name in ("policy", "reference")
    )
    margin = jnp.where(batch["chosen"], 1, -1) * (policy - reference)
    return -jax.nn.log_sigmoid(margin).mean()


def test_dpo_of_a_folder_trains_the_policy_only(folder: Path, tmp_path: Path) -> None:
    model, original = jaxopt_llm.LanguageModel(folder), jaxopt_llm.load_pretrained(folder)
    random = np.random.default_rng(0)
    batch = {"tokens": random.integers(model.config.vocabulary_size, size=(8, 12)), "chosen": np.arange(8) % 2 == 0}
    engine = jaxopt_llm.initialize(
        lambda: {name: model.initialize() for name in ("policy", "reference")},
        functools.partial(dpo_loss, model),
        batch,
        Config(
            mesh={"fsdp": 8},
            precision={"compute_dtype": "float32"},
            training={"trainable": ("*/policy/*",)},
            optimizer={"learning_rate": 1e-2},
            schedule={"kind": "constant", "warmup_steps": 0},
        ),
        weights={"policy": model.weights, "reference": model.weights},
    )
    before = engine.model()
    jax.tree.map(np.testing.assert_array_equal, before, {"policy": original.params, "reference": original.params})
    losses = [float(engine.step(batch)["loss"]) for _ in range(5)]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6) and losses[-1] < 0.5
    after = engine.model()
    jax.tree.map(np.testing.assert_array_equal, after["reference"], original.params)
    model.save_pretrained(tmp_path / "trained", after["policy"])
    trained = jaxopt_llm.load_pretrained(tmp_path / "trained")
    assert trained.config == original.config
    logits = jax.jit(model.logits)(after["policy"], jnp.asarray(batch["tokens"]))
    np.testing.assert_allclose(trained.logits(batch["tokens"]), logits, atol=1e-4)
    assert np.abs(trained.logits(batch["tokens"]) - original.logits(batch["tokens"])).max() > 0.1


def test_a_new_head_keeps_its_initial_values_and_the_base_is_quantised(folder: Path) -> None:
    """A reward model: adapters over an int8 base, and a head that is trained whole."""
    model, original = jaxopt_llm.LanguageModel(folder), jaxopt_llm.load_pretrained(folder)

    def loss(parameters: Any, batch: Any) -> jax.Array:
        last = model.hidden(parameters["base"], batch["tokens"])[:, -1]
        return jnp.mean((last @ parameters["head"] - batch["reward"]) ** 2)

    random = np.random.default_rng(0)
    batch = {"tokens": random.integers(200, size=(8, 12)), "reward": random.normal(size=8).astype(np.float32)}
    engine = jaxopt_llm.initialize(
        lambda: {"base": model.initialize(), "head": jnp.full(model.config.width, 0.1)},
        loss,
        batch,
        Config(
            mesh={"fsdp": 8},
            precision={"compute_dtype": "float32"},
            lora={"rank": 2, "base": "int8"},
            training={"trainable": ("*head",)},
            optimizer={"learning_rate": 1e-2},
            schedule={"kind": "constant", "warmup_steps": 0},
        ),
        weights={"base": model.weights, "head": None},
    )
    found = engine.model()
    np.testing.assert_array_equal(found["head"], np.full(model.config.width, 0.1, np.float32))
    for part, kept in zip(jax.tree.leaves(found["base"]), jax.tree.leaves(original.params), strict=True):
        assert toy.distance(part, kept) < 0.01
    query = engine.state.frozen["segment_0"]["base"]["segment_0"]["block_0"]["attention"]["query"]
    assert query.base.codes.dtype == jnp.int8
    losses = [float(engine.step(batch)["loss"]) for _ in range(10)]
    assert losses[-1] < losses[0] / 2


# --- errors


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"widht": 8}, "config: model has no setting widht; did you mean width"),
        ({"heads": 3, "kv_heads": 2}, "LanguageModel: model.heads=3: must be a multiple of"),
        ({"width": "8"}, "LanguageModel: model.width='8': must be"),
        ({"pretrained": "models/llama"}, "LanguageModel: give the folder itself, LanguageModel\\('models/llama'\\)"),
        (ModelConfig(scores=1), "LanguageModel\\(model\\): this model gives documents scores, and predicts no tokens"),
        ("no/such/folder", "no/such/folder"),
    ],
)
def test_a_model_that_is_no_decoder_is_one_line(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        jaxopt_llm.LanguageModel(given)
    assert "\n" not in str(caught.value)


def test_tokens_that_do_not_fit_are_refused() -> None:
    model, parameters = LANGUAGE["learned"], jax.eval_shape(LANGUAGE["learned"].initialize)
    for shape, dtype, message in (
        ((2, 17), jnp.int32, "tokens: 17 of them exceed 16 learned positions"),
        ((2, 8), jnp.float32, r"tokens: must be integers \[batch, sequence\], not float32\[2, 8\]"),
        ((8,), jnp.int32, r"not int32\[8\]"),
    ):
        with pytest.raises(InputError, match=message):
            jax.eval_shape(model.logits, parameters, jax.ShapeDtypeStruct(shape, dtype))


def test_a_model_of_settings_has_no_weights() -> None:
    with pytest.raises(InputError, match="LanguageModel: it was made from settings, which have no weights"):
        LANGUAGE["toy"].weights  # noqa: B018
