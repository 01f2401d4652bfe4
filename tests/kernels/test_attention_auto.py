"""Which implementation of attention is taken where none is named, by a table made up."""

import tomllib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import ROOT

from jaxopt_llm.errors import InputError
from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.kernels import attention as kernels
from jaxopt_llm.kernels import attention_auto, attention_xla
from jaxopt_llm.kernels.attention import attention
from jaxopt_llm.kernels.attention_auto import Choice, Measured, fastest
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.parallel.mesh import MeshConfig, make_mesh
from jaxopt_llm.parallel.precision import PrecisionConfig
from jaxopt_llm.parallel.sharding import Placement, ShardingConfig
from jaxopt_llm.parallel.topology import CHIPS, choose_attention, gpu_topology
from jaxopt_llm.training import program
from jaxopt_llm.training.lora import LoraConfig
from jaxopt_llm.training.optimizer import OptimizerConfig
from jaxopt_llm.training.schedule import ScheduleConfig
from jaxopt_llm.training.step import TrainingConfig

pytestmark = pytest.mark.core

ROW = Measured("9.0", "bfloat16", 128, 2048, "NVIDIA H200", "0.11.2", {"xla": 4.0, "pallas": 2.0, "triton": 1.0})
TABLE = [ROW, replace(ROW, length=32_768, seconds={"xla": 80.0, "pallas": 30.0, "triton": 50.0})]
ALL: dict[str, list[str]] = {"xla": [], "pallas": [], "triton": []}


def chosen(
    keys: int = 2048,
    unsupported: dict[str, list[str]] = ALL,
    table: list[Measured] = TABLE,
    capability: tuple[int, int] | None = (9, 0),
) -> Choice:
    return fastest(128, "bfloat16", keys, capability, unsupported, table)


def test_the_fastest_is_taken() -> None:
    choice = chosen()
    assert choice.name == "triton" and choice.measured
    assert all(each in str(choice) for each in ("triton", "128", "bfloat16", "2048", "NVIDIA H200"))


@pytest.mark.parametrize(
    "keys, name",
    [(1, "triton"), (8191, "triton"), (8192, "triton"), (8193, "pallas"), (32_768, "pallas"), (10**6, "pallas")],
)
@pytest.mark.parametrize("table", [TABLE, TABLE[::-1]], ids=["in order", "out of order"])
def test_the_nearest_length_decides(keys: int, name: str, table: list[Measured]) -> None:
    """On a log scale: 8192 is as far from 2048 as from 32,768, and the shorter is taken."""
    assert chosen(keys, table=table).name == name


@pytest.mark.parametrize("other", [{"capability": "8.0"}, {"dtype": "float16"}, {"head_dim": 64}])
def test_what_was_measured_of_others_decides_nothing(other: dict[str, Any]) -> None:
    choice = chosen(table=[replace(ROW, **other)])
    assert choice.name == "xla" and not choice.measured
    assert all(each in choice.reason for each in ("9.0", "bfloat16", "128", "--write-table"))
    assert "\n" not in str(choice)


def test_what_does_not_support_the_call_is_left_for_the_next_fastest() -> None:
    choice = chosen(unsupported=ALL | {"triton": ["not installed: jax_triton"]})
    assert choice.name == "pallas"
    assert choice.reason.endswith("but for triton (not installed: jax_triton)")


def test_what_the_caller_cannot_take_does_not_count() -> None:
    table = [replace(ROW, seconds={**ROW.seconds, "cudnn": 0.5})]
    assert chosen(table=table).name == "triton" and "cudnn" not in str(chosen(table=table))
    assert chosen(table=table, unsupported=ALL | {"cudnn": []}).name == "cudnn"


def test_what_was_not_measured_is_not_taken() -> None:
    choice = chosen(table=[replace(ROW, seconds={"triton": 1.0})], unsupported=ALL | {"triton": ["no"]})
    assert choice.name == "xla" and not choice.measured


def test_where_one_alone_supports_the_call_nothing_is_to_be_measured() -> None:
    choice = chosen(unsupported={"xla": [], "pallas": ["head_dim=96"], "triton": ["head_dim=96"]}, table=[])
    assert choice.name == "xla" and choice.measured
    assert "only one" in choice.reason and "head_dim=96" in choice.reason


def test_without_a_gpu_nothing_is_said() -> None:
    assert chosen(capability=None) == Choice("xla") and str(Choice("xla")) == "xla"


# ---- The table.


def test_the_packages_own_table_can_be_read() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (shipped,) = project["tool"]["setuptools"]["package-data"]["jaxopt_llm"]
    for row in attention_auto.read(ROOT / "jaxopt_llm" / shipped):
        assert row.seconds.keys() <= {*kernels.IMPLEMENTATIONS, "cudnn"}


# ---- In training.


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> list[Measured]:
    """Of every chip, and of what needs no package: xla is the fastest of few tokens, pallas of many."""
    versions = {".".join(map(str, chip.compute_capability)) for chip in CHIPS.values()}
    short, long = {"xla": 1.0, "pallas": 2.0}, {"xla": 2.0, "pallas": 1.0}
    rows = [
        replace(ROW, capability=version, length=length, seconds=seconds)
        for version in versions
        for length, seconds in ((1024, short), (8192, long))
    ]
    monkeypatch.setattr(attention_auto, "read", lambda file: rows)
    return rows


@pytest.mark.parametrize("chip", CHIPS)
def test_plan_chooses_what_training_will(chip: str, table: list[Measured]) -> None:
    """A GPU's name is not that of the one that is compiled for; its compute capability is."""
    compiled_for = gpu_topology(chip, gpus_per_host=1)[0]
    capability = ".".join(map(str, CHIPS[chip].compute_capability))
    real = SimpleNamespace(platform="gpu", device_kind="NVIDIA, as the driver says", compute_capability=capability)
    found = {keys: choose_attention(compiled_for, "auto", 128, "bfloat16", keys) for keys in (1024, 8192)}
    assert [found[keys].name for keys in found] == ["xla", "pallas"]
    assert found == {keys: choose_attention(real, "auto", 128, "bfloat16", keys) for keys in found}


@pytest.mark.parametrize("asked, on", [("pallas", "cpu"), ("triton", "a100"), ("pallas", "h200")])
def test_what_is_asked_for_and_not_supported_is_refused(asked: str, on: str) -> None:
    device = jax.devices("cpu")[0] if on == "cpu" else gpu_topology(on, gpus_per_host=1)[0]
    with pytest.raises(InputError, match=f"training.attention={asked}.*set --training.attention auto, or xla$"):
        choose_attention(device, asked, 96, "bfloat16", 1024)
    assert choose_attention(device, "xla", 96, "bfloat16", 1024) == Choice("xla")


def test_those_that_support_what_another_does_not_are_named() -> None:
    (device,) = gpu_topology("h200", gpus_per_host=1)
    with pytest.raises(InputError, match="=triton: dtype=float32.*set --training.attention auto, or xla or pallas$"):
        choose_attention(device, "triton", 128, "float32", 1024)


@pytest.mark.parametrize(
    "context, exchange, name", [(1, "ring", "pallas"), (8, "ring", "xla"), (8, "all_to_all", "pallas")]
)
def test_a_step_attends_with_it(
    context: int, exchange: Any, name: str, table: list[Measured], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8192 positions, or of an eighth of them, as many keys as a call has in a ring."""
    made = []
    make_parts = program.make_parts
    monkeypatch.setattr(
        program, "make_parts", lambda *of, **named: made.append(named["attention"]) or make_parts(*of, **named)
    )
    model = ModelConfig(width=64, layers=1, heads=8, kv_heads=8, head_dim=128, mlp_width=64, vocabulary_size=256)
    assert TrainingConfig().attention == "auto"
    training = TrainingConfig(batch_size=8, sequence_length=8192)
    mesh = make_mesh(MeshConfig(context=context, data=8 // context), gpu_topology("h200"))
    placement = Placement(mesh, ShardingConfig(context_exchange=exchange), PrecisionConfig(compute_dtype="bfloat16"))
    of = (OptimizerConfig(), ScheduleConfig(), RematConfig(), LoraConfig(), placement)
    found = program.make_program(model, training, *of)
    assert found.attention.name == name and made == [name]


# ---- Called by hand.


class Recorded:
    """An implementation that tells when it is called."""

    def __init__(self) -> None:
        self.called = 0
        self.backward = attention_xla.backward

    def forward(self, *of: Any) -> Any:
        self.called += 1
        return attention_xla.forward(*of)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "capability_of", lambda device: (9, 0))


def arrays(head_dim: int = 128, dtype: Any = jnp.bfloat16) -> list[jax.Array]:
    return [jnp.ones((1, 8, heads, head_dim), dtype) for heads in (2, 1, 1)]


@pytest.mark.usefixtures("hopper", "table")
def test_auto_by_hand(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    pallas = Recorded()
    monkeypatch.setitem(kernels.IMPLEMENTATIONS, "pallas", pallas)  # type: ignore[arg-type]
    attention(*arrays())
    assert not pallas.called and not recwarn.list
    monkeypatch.setattr(attention_auto, "read", lambda file: [replace(ROW, seconds={"pallas": 1.0, "cudnn": 0.5})])
    attention(*arrays(), segment_ids=jnp.zeros((1, 8), jnp.int32))  # of which cudnn, which is faster, knows nothing
    assert pallas.called == 1
    attention(*arrays(), softcap=2.0)
    assert pallas.called == 2


@pytest.mark.usefixtures("hopper")
def test_auto_by_hand_logs_a_measured_choice_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    row = replace(ROW, device="NVIDIA H200 of this test", seconds={"xla": 1.0})
    monkeypatch.setattr(attention_auto, "read", lambda file: [row])
    with caplog.at_level("INFO", logger=kernels.__name__):
        attention(*arrays())
        attention(*arrays())
    (said,) = caplog.messages
    assert said.startswith("attention: xla, the fastest") and row.device in said


@pytest.mark.usefixtures("hopper")
def test_auto_by_hand_says_where_nothing_was_measured() -> None:
    with pytest.warns(UserWarning, match="attention: xla, as nothing was measured.*--write-table"):
        attention(*arrays())


def test_auto_by_hand_says_nothing_without_a_gpu(recwarn: pytest.WarningsRecorder) -> None:
    out = attention(*arrays())
    np.testing.assert_array_equal(out, attention(*arrays(), implementation="xla"))
    assert not recwarn.list


def test_by_hand_it_is_the_default_device_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[jax.Device] = []
    monkeypatch.setattr(kernels, "capability_of", asked.append)
    last = jax.devices("cpu")[-1]
    with jax.default_device(last):
        attention(*arrays())
    with jax.default_device("cpu"):  # type: ignore[arg-type]
        attention(*arrays())
    assert asked == [last, jax.devices("cpu")[0]]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "implementation, call, said",
    [
        ("pallas", {"head_dim": 96}, "head_dim=96.*supports this call: xla, cudnn$"),
        ("triton", {"head_dim": 96}, "head_dim=96.*supports this call: xla, cudnn$"),
        ("cudnn", {"head_dim": 100}, "head_dim=100.*supports this call: xla$"),
        ("pallas", {"dtype": jnp.int8}, "dtype=int8.*supports this call: xla$"),
        ("triton", {"dtype": jnp.float32}, "dtype=float32.*supports this call: xla, pallas$"),
        ("cudnn", {"dtype": jnp.float32}, "dtype=float32.*supports this call: xla, pallas$"),
        ("cudnn", {"segment_ids": np.zeros((1, 8), np.int32)}, "segment_ids: .*supports this call: xla, pallas"),
        ("cudnn", {"softcap": 2.0}, "softcap=2.0: .*supports this call: xla, pallas"),
        ("cudnn", {"positions": np.zeros((1, 8), np.int32)}, "positions: .*supports this call: xla, pallas"),
        ("pallas", {"values": 64}, "v has heads of 64, q and k of 128.*supports this call: xla$"),
        ("triton", {"values": 64}, ".*v has heads of 64, q and k of 128.*supports this call: xla$"),
        ("cudnn", {"values": 64}, "v has heads of 64, q and k of 128.*supports this call: xla$"),
    ],
)
def test_what_an_implementation_does_not_support(implementation: str, call: dict[str, Any], said: str) -> None:
    q, k, v = arrays(call.pop("head_dim", 128), call.pop("dtype", jnp.bfloat16))
    v = v[..., : call.pop("values", v.shape[-1])]
    with pytest.raises(ValueError, match=f"implementation='{implementation}': {said}"):
        attention(q, k, v, implementation=implementation, **call)


@pytest.mark.parametrize("implementation", ["pallas", "triton", "cudnn"])
def test_kernels_for_gpus_are_refused_on_a_cpu(implementation: str) -> None:
    with pytest.raises(ValueError, match=f"implementation='{implementation}': a kernel for GPUs.*: xla$"):
        attention(*arrays(), implementation=implementation)
