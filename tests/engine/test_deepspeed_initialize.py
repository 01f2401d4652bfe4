"""initialize with the path of a DeepSpeed configuration: the engine trains as with a Config, and says what it read."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxopt_llm
from jaxopt_llm import Config, Engine
from jaxopt_llm.config import OptimizerConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine.deepspeed import read_file

SETTINGS = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}},
    "gradient_clipping": 0.05,
    "zero_optimization": {"stage": 2, "overlap_comm": True},
}


def make_batch() -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(0).normal(size=(16, 10)).astype(np.float32)
    return inputs, inputs.sum(1, keepdims=True)


def loss(model: nnx.Module, batch: Any) -> jax.Array:
    inputs, targets = batch
    return ((model(inputs) - targets) ** 2).mean()


def start(config: Any, **arguments: Any) -> Engine:
    return jaxopt_llm.initialize(lambda: nnx.Linear(10, 1, rngs=nnx.Rngs(0)), loss, make_batch(), config, **arguments)


def train(engine: Engine) -> list[float]:
    return [float(engine.step(make_batch())["loss"]) for _ in range(4)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path, SETTINGS)


def write(folder: Path, settings: dict[str, Any]) -> Path:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(settings))
    return path


def test_a_file_trains_like_a_config(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    engine = start(str(file))
    assert capfd.readouterr().err == "\n".join([*read_file(file, 8).lines(), ""])
    same = Config(
        mesh={"fsdp": 8},
        training={"batch_size": 16, "accumulation": 2},
        sharding={"zero_stage": 2},
        precision={"compute_dtype": "float32"},
        optimizer={"name": "sgd", "learning_rate": 0.1, "momentum": 0.5, "weight_decay": 0.0, "clip_norm": 0.05},
        schedule={"kind": "constant", "warmup_steps": 0},
    )
    assert engine.config == same
    found = train(engine)
    assert found == train(start(same))
    assert found != train(start(same, optimizer=optax.sgd(0.1, 0.5))), "without the clip"


@pytest.mark.parametrize(
    ("optimizer", "replaced"),
    [
        (optax.adam(0.01), "optimizer, gradient_clipping, scheduler"),
        (OptimizerConfig(learning_rate=0.01), "optimizer, gradient_clipping"),
    ],
    ids=["optax", "settings"],
)
def test_an_argument_replaces_the_optimizer_of_the_file(
    optimizer: Any, replaced: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}}
    engine = start(write(tmp_path, SETTINGS | {"scheduler": scheduler}), optimizer=optimizer)
    assert capfd.readouterr().err.endswith(f"\nreplaced by initialize(optimizer=...): {replaced}\n")
    assert train(engine) == train(start(engine.config, optimizer=optimizer))


def test_a_dict_is_taken_as_a_file_is(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = json.loads(json.dumps(SETTINGS))
    engine = start(given)
    from_dict = capfd.readouterr().err
    assert given == SETTINGS, "the caller's dict is not changed"
    assert (engine.config, train(engine)) == (start(file).config, train(start(file)))
    assert from_dict == capfd.readouterr().err.split("ds_config.json:")[1].join(["config:", ""])
    with pytest.raises(InputError, match="^config: gradient_acumulation_steps: unknown key; did you mean"):
        start(SETTINGS | {"gradient_acumulation_steps": 2})
    with pytest.raises(InputError, match="^config: Object of type .* is not JSON serializable; give a dict of strings"):
        start(SETTINGS | {"gradient_clipping": optax.adam})


@pytest.mark.parametrize("sizes", [{}, {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}])
def test_the_batch_size_that_is_printed_is_the_one_that_runs(
    sizes: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    engine = start({name: value for name, value in SETTINGS.items() if name != "train_batch_size"} | sizes)
    assert "training.batch_size = 16 " in capfd.readouterr().err
    assert engine.config.training.batch_size == 16
    assert start(Config(mesh={"fsdp": 8})).config.training.batch_size == 16  # type: ignore[arg-type]


def test_the_rates_of_a_file_without_a_type_are_logarithmic() -> None:
    """The formula of DeepSpeed's WarmupLR: the rate of iteration i of N is log(i + 1) / log(N)."""
    scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.02, "warmup_max_lr": 0.1, "warmup_num_steps": 5}}
    engine = start(SETTINGS | {"scheduler": scheduler})
    found = [float(engine.step(make_batch())["learning_rate"]) for _ in range(7)]
    expected = [0.02 + 0.08 * min(np.log(iteration + 1) / np.log(5), 1) for iteration in range(1, 8)]
    assert found == pytest.approx(expected, rel=1e-6)


def test_automatic_values_train_as_the_trainer_would() -> None:
    """AdamW with rate 5e-5, betas 0.9 and 0.999, no decay, no warm-up, a clip of 1, in float32."""
    parameters = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    warmup = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
    engine = start(
        {
            "bf16": {"enabled": "auto"},
            "train_batch_size": "auto",
            "gradient_clipping": "auto",
            "optimizer": {"type": "AdamW", "params": parameters},
            "scheduler": {"type": "WarmupLR", "params": warmup},
            "zero_optimization": {"stage": 3},
        }
    )
    plain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(5e-5, weight_decay=0.0))
    config = Config(mesh={"fsdp": 8}, precision={"compute_dtype": "float32"})  # type: ignore[arg-type]
    assert train(engine) == pytest.approx(train(start(config, optimizer=plain)), rel=1e-6)


def test_a_micro_batch_in_place_of_a_batch(tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        start(write(tmp_path, SETTINGS | {"train_batch_size": 32}))
    assert str(raised.value) == (
        "example: it has 16 rows, and the batch sizes of ds_config.json make 32 for all devices and microbatches "
        "together; give a whole batch, or change the file"
    )


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("pipeline.stages", {"pipeline": {"stages": 2}}),
        ("sequence_parallel_size", {"sequence_parallel_size": 2}),
        ("activation_checkpointing.cpu_checkpointing", {"activation_checkpointing": {"cpu_checkpointing": True}}),
    ],
)
def test_what_only_the_decoder_has(key: str, section: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"ds_config.json: {key}: only the decoder of this package has an equivalent"):
        start(write(tmp_path, SETTINGS | section))
