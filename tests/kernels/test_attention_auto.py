"""Choice of the implementation of attention for "auto", by tables made for the tests."""

import tomllib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from commands import ROOT

from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.compiler.kernel_choice import choose_attention
from jaxopt_llm.compiler.topology import gpu_topology
from jaxopt_llm.config import (
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RematConfig,
    ScheduleConfig,
    ShardingConfig,
    TrainingConfig,
)
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.kernels import attention as kernels
from jaxopt_llm.kernels import attention_auto, attention_xla
from jaxopt_llm.kernels.attention import attention
from jaxopt_llm.kernels.attention_auto import AttentionCall, AttentionChoice, Measurement, choose_fastest
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step import program

pytestmark = pytest.mark.core

ROW = Measurement("9.0", "bfloat16", 128, 2048, 1, "NVIDIA H200", "0.11.2", {"xla": 4.0, "pallas": 2.0, "triton": 1.0})
TABLE = [ROW, replace(ROW, length=32_768, seconds={"xla": 80.0, "pallas": 30.0, "triton": 50.0})]
ALL: dict[str, list[str]] = {"xla": [], "pallas": [], "triton": []}


def choose(
    keys: int = 2048,
    unsupported: dict[str, list[str]] = ALL,
    table: list[Measurement] = TABLE,
    capability: tuple[int, int] | None = (9, 0),
) -> AttentionChoice:
    return choose_fastest(AttentionCall(128, "bfloat16", keys), capability, unsupported, table)


def test_the_fastest_is_taken() -> None:
    choice = choose()
    assert choice.name == "triton" and "the fastest" in choice.reason
    assert all(each in str(choice) for each in ("triton", "128", "bfloat16", "2048", "NVIDIA H200"))


@pytest.mark.parametrize(
    "keys, name",
    [(1, "triton"), (8191, "triton"), (8192, "triton"), (8193, "pallas"), (32_768, "pallas"), (10**6, "pallas")],
)
@pytest.mark.parametrize("table", [TABLE, TABLE[::-1]], ids=["in order", "out of order"])
def test_the_nearest_length_decides(keys: int, name: str, table: list[Measurement]) -> None:
    """On a log scale, 8192 is as far from 2048 as from 32,768. The shorter length is used."""
    assert choose(keys, table=table).name == name


@pytest.mark.parametrize(("segments", "name"), [(1, "triton"), (17, "pallas"), (None, "pallas")])
def test_packed_documents_have_measurements_of_their_own(segments: int | None, name: str) -> None:
    packed = replace(ROW, documents=6, length=64, seconds={"xla": 2.0, "pallas": 1.0, "triton": 3.0})
    call = AttentionCall(128, "bfloat16", 2048, segments)
    choice = choose_fastest(call, (9, 0), ALL, [ROW, packed])
    assert choice.name == name and ("6 documents in a row, on NVIDIA H200" in choice.reason) == (name == "pallas")
    assert choose_fastest(call, (9, 0), ALL, [ROW]).name == "triton"


@pytest.mark.parametrize("other", [{"capability": "8.0"}, {"dtype": "float16"}, {"head_dim": 64}])
def test_measurements_of_other_calls_decide_nothing(other: dict[str, Any]) -> None:
    choice = choose(table=[replace(ROW, **other, seconds={"xla": 1.0, "pallas": 2.0, "triton": 3.0})])
    assert choice.name == "triton" and "by the order" in choice.reason
    assert all(each in choice.reason for each in ("9.0", "bfloat16", "128", "--write-table"))
    assert "\n" not in str(choice)


def test_a_kernel_that_does_not_support_the_call_is_skipped() -> None:
    choice = choose(unsupported=ALL | {"triton": ["jax_triton not installed"]})
    assert choice.name == "pallas"
    assert choice.reason.endswith("; except triton (jax_triton not installed)")


def test_a_kernel_that_the_caller_cannot_use_does_not_count() -> None:
    table = [replace(ROW, seconds={**ROW.seconds, "cudnn": 0.5})]
    assert choose(table=table).name == "triton" and "cudnn" not in str(choose(table=table))
    assert choose(table=table, unsupported=ALL | {"cudnn": []}).name == "cudnn"


def test_a_kernel_without_a_measurement_is_not_chosen_before_those_with_one() -> None:
    row = replace(ROW, seconds={"triton": 1.0, "xla": 9.0})
    assert choose(table=[row], unsupported=ALL | {"triton": ["no"]}).name == "xla"
    row = replace(ROW, seconds={"triton": 1.0})
    assert choose(table=[row], unsupported=ALL | {"triton": ["no"]}).name == "pallas"


@pytest.mark.parametrize(
    ("capability", "order"),
    [
        ((8, 0), ["pallas", "cudnn", "xla"]),
        ((8, 9), ["pallas", "cudnn", "xla"]),
        ((9, 0), ["cudnn", "triton", "pallas", "xla"]),
        ((10, 3), ["cudnn", "triton", "pallas", "xla"]),
        ((12, 0), ["pallas", "cudnn", "xla"]),
    ],
)
def test_the_order_without_measurements(capability: tuple[int, int], order: list[str]) -> None:
    """Of those that the call supports, the next is taken, and the reason names those before it."""
    unsupported: dict[str, list[str]] = {name: [] for name in ("xla", "cudnn", "triton", "pallas")}
    for number, name in enumerate(order[:-1]):
        choice = choose(table=[], capability=capability, unsupported=unsupported)
        assert choice.name == name and choice.reason.startswith("by the order")
        assert choice.reason.count("lacks") == number
        unsupported[name] = [f"{name} lacks something"]
    assert choose(table=[], capability=capability, unsupported=unsupported).name == order[-1]


def test_a_call_that_only_one_supports_needs_no_measurement() -> None:
    choice = choose(unsupported={"xla": [], "pallas": ["head_dim=96"], "triton": ["head_dim=96"]}, table=[])
    assert choice.name == "xla"
    assert "only implementation" in choice.reason and "head_dim=96" in choice.reason


def test_without_a_gpu_there_is_no_reason() -> None:
    choice = choose_fastest(AttentionCall(128, "bfloat16", 8), None, ALL)
    assert choice == AttentionChoice("xla") and str(AttentionChoice("xla")) == "xla"


# ---- The table.


def test_the_packages_own_table_can_be_read() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shipped, *_ = project["tool"]["setuptools"]["package-data"]["jaxopt_llm"]
    for row in attention_auto.read_table(ROOT / "jaxopt_llm" / shipped):
        assert row.seconds.keys() <= {*kernels.IMPLEMENTATIONS, "cudnn"}


# ---- In training.


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> list[Measurement]:
    """Table of every chip, for implementations that need no package: xla wins for few tokens, pallas for many."""
    versions = {".".join(map(str, chip.compute_capability)) for chip in CHIPS.values()}
    short, long = {"xla": 1.0, "pallas": 2.0}, {"xla": 2.0, "pallas": 1.0}
    rows = [
        replace(ROW, capability=version, length=length, seconds=seconds)
        for version in versions
        for length, seconds in ((1024, short), (8192, long))
    ]
    monkeypatch.setattr(attention_auto, "read_table", lambda file: rows)
    return rows


@pytest.mark.parametrize("chip", CHIPS)
def test_plan_and_training_make_the_same_choice(chip: str, table: list[Measurement]) -> None:
    """A real GPU has another name than a compilation target, but the same compute capability."""
    target = gpu_topology(chip, gpus_per_host=1)[0]
    capability = ".".join(map(str, CHIPS[chip].compute_capability))
    real = SimpleNamespace(platform="gpu", device_kind="NVIDIA, as the driver says", compute_capability=capability)
    found = {keys: choose_attention(target, "auto", AttentionCall(128, "bfloat16", keys)) for keys in (1024, 8192)}
    assert [found[keys].name for keys in found] == ["xla", "pallas"]
    assert found == {keys: choose_attention(real, "auto", AttentionCall(128, "bfloat16", keys)) for keys in found}


@pytest.mark.parametrize("requested, on", [("pallas", "cpu"), ("triton", "a100"), ("pallas", "h200")])
def test_an_unsupported_request_is_rejected(requested: str, on: str) -> None:
    device = jax.devices("cpu")[0] if on == "cpu" else gpu_topology(on, gpus_per_host=1)[0]
    with pytest.raises(InputError, match=f"training.attention={requested}.*set --training.attention auto or xla$"):
        choose_attention(device, requested, AttentionCall(96, "bfloat16", 1024))
    assert choose_attention(device, "xla", AttentionCall(96, "bfloat16", 1024)) == AttentionChoice("xla")


def test_the_message_names_the_implementations_that_support_the_call() -> None:
    (device,) = gpu_topology("h200", gpus_per_host=1)
    with pytest.raises(InputError, match="=triton: dtype=float32.*set --training.attention auto or xla or pallas$"):
        choose_attention(device, "triton", AttentionCall(128, "float32", 1024))


@pytest.mark.parametrize(
    "context, exchange, name", [(1, "ring", "pallas"), (8, "ring", "xla"), (8, "all_to_all", "pallas")]
)
def test_a_training_step_uses_the_choice(
    context: int, exchange: Any, name: str, table: list[Measurement], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choose for calls with 8192 keys, or with an eighth of them in a ring."""
    made = []
    Decoder = program.Decoder
    monkeypatch.setattr(
        program, "Decoder", lambda *of, **named: made.append(named["attention"]) or Decoder(*of, **named)
    )
    model = ModelConfig(width=64, layers=1, heads=8, kv_heads=8, head_dim=128, mlp_width=64, vocabulary_size=256)
    assert TrainingConfig().attention == "auto"
    training = TrainingConfig(batch_size=8, sequence_length=8192)
    mesh = make_mesh(MeshConfig(context=context, data=8 // context), gpu_topology("h200"))
    placement = Placement(mesh, ShardingConfig(context_exchange=exchange), PrecisionConfig(compute_dtype="bfloat16"))
    of = (OptimizerConfig(), ScheduleConfig(), RematConfig(), LoraConfig(), placement)
    found = toy.make_program(model, training, *of)
    assert found.attention.name == name and made == [name]


# ---- Called by hand.


class Recorded:
    """Implementation that counts its calls."""

    reads_out = False

    def __init__(self) -> None:
        self.called = 0
        self.backward = attention_xla.backward

    def forward(self, *of: Any) -> Any:
        self.called += 1
        return attention_xla.forward(*of)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "get_compute_capability", lambda device: (9, 0))


def arrays(head_dim: int = 128, dtype: Any = jnp.bfloat16) -> list[jax.Array]:
    return [jnp.ones((1, 8, heads, head_dim), dtype) for heads in (2, 1, 1)]


@pytest.mark.usefixtures("hopper", "table")
def test_auto_by_hand(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    pallas = Recorded()
    monkeypatch.setitem(kernels.IMPLEMENTATIONS, "pallas", pallas)  # type: ignore[arg-type]
    attention(*arrays())
    assert not pallas.called and not recwarn.list
    monkeypatch.setattr(
        attention_auto, "read_table", lambda file: [replace(ROW, seconds={"pallas": 1.0, "cudnn": 0.5})]
    )
    attention(*arrays(), segment_ids=jnp.zeros((1, 8), jnp.int32))  # cudnn is faster, but needs max_segments
    assert pallas.called == 1
    attention(*arrays(), softcap=2.0)
    assert pallas.called == 2


@pytest.mark.usefixtures("hopper")
def test_auto_by_hand_logs_a_measured_choice_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    row = replace(ROW, device="NVIDIA H200 of this test", seconds={"xla": 1.0})
    monkeypatch.setattr(attention_auto, "read_table", lambda file: [row])
    with caplog.at_level("INFO", logger=kernels.__name__):
        attention(*arrays())
        attention(*arrays())
    (message,) = caplog.messages
    assert message.startswith("attention: xla, the fastest") and row.device in message


@pytest.mark.usefixtures("hopper")
def test_auto_by_hand_says_that_there_is_no_measurement(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cudnn = Recorded()
    monkeypatch.setitem(kernels.IMPLEMENTATIONS, "cudnn", cudnn)  # type: ignore[arg-type]
    with caplog.at_level("INFO", logger=kernels.__name__):
        attention(*arrays(head_dim=72))
    (message,) = caplog.messages
    assert cudnn.called == 1
    assert message.startswith("attention: cudnn, by the order") and "--write-table" in message


def test_auto_by_hand_is_silent_without_a_gpu(recwarn: pytest.WarningsRecorder) -> None:
    out = attention(*arrays())
    np.testing.assert_array_equal(out, attention(*arrays(), implementation="xla"))
    assert not recwarn.list


def test_auto_by_hand_uses_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[jax.Device] = []
    monkeypatch.setattr(kernels, "get_compute_capability", devices.append)
    last = jax.devices("cpu")[-1]
    with jax.default_device(last):
        attention(*arrays())
    with jax.default_device("cpu"):  # type: ignore[arg-type]
        attention(*arrays())
    assert devices == [last, jax.devices("cpu")[0]]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "implementation, call, message",
    [
        ("pallas", {"head_dim": 96}, "head_dim=96.*supports this call: xla, cudnn$"),
        ("triton", {"head_dim": 96}, "head_dim=96.*supports this call: xla, cudnn$"),
        ("cudnn", {"head_dim": 100}, "head_dim=100.*supports this call: xla$"),
        ("pallas", {"dtype": jnp.int8}, "dtype=int8.*supports this call: xla$"),
        ("triton", {"dtype": jnp.float32}, "dtype=float32.*supports this call: xla, pallas$"),
        ("cudnn", {"dtype": jnp.float32}, "dtype=float32.*supports this call: xla, pallas$"),
        (
            "cudnn",
            {"segment_ids": np.zeros((1, 8), np.int32)},
            "any number of doc.*supports this call: xla, pallas",
        ),
        ("cudnn", {"softcap": 2.0}, "softcap=2: .*supports this call: xla, pallas"),
        ("cudnn", {"positions": np.zeros((1, 8), np.int32)}, ".*positions: .*supports this call: xla, pallas"),
        ("pallas", {"values": 64}, "v has head size 64, q and k have 128.*supports this call: xla$"),
        ("triton", {"values": 64}, ".*v has head size 64, q and k have 128.*supports this call: xla$"),
        ("cudnn", {"values": 64}, "v has head size 64, q and k have 128.*supports this call: xla$"),
    ],
)
def test_unsupported_calls_are_rejected(implementation: str, call: dict[str, Any], message: str) -> None:
    q, k, v = arrays(call.pop("head_dim", 128), call.pop("dtype", jnp.bfloat16))
    v = v[..., : call.pop("values", v.shape[-1])]
    with pytest.raises(ValueError, match=f"implementation='{implementation}': {message}"):
        attention(q, k, v, implementation=implementation, **call)


@pytest.mark.parametrize("implementation", ["pallas", "triton", "cudnn"])
def test_kernels_for_gpus_are_rejected_on_a_cpu(implementation: str) -> None:
    with pytest.raises(ValueError, match=f"implementation='{implementation}': it runs on GPUs only.*: xla$"):
        attention(*arrays(), implementation=implementation)
