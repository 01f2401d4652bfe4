"""Choice of a run's attention and of the documents in a row, on GPUs that this machine does not have."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from texts import stream

from jaxopt_llm.config import Config, DataConfig, MeshConfig, ModelConfig, PrecisionConfig, TrainingConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens.corpus import Source
from jaxopt_llm.distributed.launchers import Job
from jaxopt_llm.distributed.process_group import SINGLE_PROCESS, Processes
from jaxopt_llm.kernels import attention_auto, attention_triton
from jaxopt_llm.run import attention_choice
from jaxopt_llm.run.attention_choice import Started, resolve_attention

pytestmark = pytest.mark.core

CONFIG = Config(
    model=ModelConfig(heads=8, kv_heads=8, head_dim=128),
    data=DataConfig(long_documents="split"),
    training=TrainingConfig(sequence_length=64),
    precision=PrecisionConfig(compute_dtype="bfloat16"),
)
FEW, MANY = [b"x" * 30] * 100, [b""] * 300  # 32 tokens each, and 2


def gpu(capability: str = "9.0", kind: str = "NVIDIA H200") -> Any:
    return SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)


def source(documents: list[bytes], weight: float = 1.0) -> Source:
    return Source("texts", weight, stream(documents))


@pytest.fixture(autouse=True)
def failures(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """How the check of an implementation fails; none does by default."""
    found: dict[str, str] = {}
    monkeypatch.setattr(attention_choice, "check_attention", lambda name, call, group: found.get(name, ""))
    monkeypatch.setattr(attention_triton, "installation_problems", list)
    monkeypatch.setattr(attention_auto, "read_table", lambda file: [])
    return found


def resolve(
    changes: dict[str, Any] | None = None,
    device: Any = None,
    documents: list[bytes] = FEW,
    started: Started | None = None,
    processes: Processes = SINGLE_PROCESS,
) -> tuple[str, int, str, str]:
    """Return the name, the limit of documents, the reason and the warning."""
    config: Config = replace_fields(CONFIG, changes or {})
    resolved, choice = resolve_attention(config, device or gpu(), [source(documents)], processes, started)
    assert resolved.training.attention == choice.name
    return choice.name, resolved.data.documents_per_row, choice.reason, choice.warning


@pytest.mark.parametrize(
    ("changes", "capability", "documents", "expected"),
    [
        ({}, "9.0", FEW, ("cudnn", 2)),
        ({}, "10.0", FEW, ("cudnn", 2)),
        ({}, "9.0", MANY, ("triton", 0)),
        ({"data.documents_per_row": 16}, "9.0", MANY, ("cudnn", 16)),
        ({"data.documents_per_row": 1}, "9.0", MANY, ("cudnn", 1)),
        ({"training.attention": "cudnn"}, "9.0", MANY, ("cudnn", 16)),
        ({"training.attention": "triton"}, "9.0", FEW, ("triton", 0)),
        ({}, "8.0", FEW, ("pallas", 0)),
        ({"model.head_dim": 96}, "8.0", FEW, ("xla", 0)),
        ({"model.head_dim": 96, "data.documents_per_row": 1}, "8.0", FEW, ("cudnn", 1)),
        ({"model.head_dim": 96}, "9.0", FEW, ("cudnn", 2)),
        ({"model.attention_softcap": 50.0}, "9.0", FEW, ("triton", 0)),
        ({"mesh.context": 2}, "9.0", FEW, ("cudnn", 2)),
        ({"mesh.context": 2, "model.pattern": ("sliding",), "model.window": 32}, "9.0", FEW, ("triton", 0)),
        ({"mesh.context": 2, "sharding.context_exchange": "all_to_all"}, "9.0", FEW, ("cudnn", 2)),
        ({"precision.compute_dtype": "float32"}, "9.0", FEW, ("pallas", 0)),
    ],
)
def test_the_choice(
    changes: dict[str, Any], capability: str, documents: list[bytes], expected: tuple[str, int]
) -> None:
    name, limit, reason, warning = resolve(changes, gpu(capability), documents)
    assert (name, limit) == expected and not warning
    assert bool(reason) == ("training.attention" not in changes or name == "cudnn") and "\n" not in reason


def test_the_start_says_what_a_limit_costs() -> None:
    """32 documents of 2 tokens fill a row of 64 tokens, 16 half of it."""
    assert "2 documents in a row turn 0.0% of the tokens into padding" in resolve()[2]
    reason = resolve(documents=MANY)[2]
    assert "except cudnn (at most 16 documents in a row would turn 47.4% of the tokens" in reason
    assert "set --data.documents-per-row 16" in reason
    assert "turn 47.4%" in resolve({"training.attention": "cudnn"}, documents=MANY)[2]


@pytest.mark.parametrize(("length", "limit"), [(62, 1), (30, 2), (14, 4), (6, 8), (2, 16)])
def test_the_limit_is_as_small_as_the_data_allows(length: int, limit: int) -> None:
    """A document has two tokens more than bytes; rows have 64 tokens."""
    name, found, reason, _ = resolve(documents=[b"x" * length] * 100)
    assert (name, found) == ("cudnn", limit) and f"at most {limit} documents in a row turn" in reason


def test_the_choice_names_why_cudnn_is_left_out() -> None:
    """Not for the documents, if cuDNN does not support the call anyway."""
    unknown = [replace(source(FEW), training=SimpleNamespace(documents=None))]  # type: ignore[arg-type]
    capped: Config = replace_fields(CONFIG, {"model.attention_softcap": 50.0})
    _, choice = resolve_attention(capped, gpu(), unknown, SINGLE_PROCESS, None)
    assert choice.name == "triton" and "softcap=50" in choice.reason and "reading all" not in choice.reason


def test_the_waste_is_that_of_the_mixture() -> None:
    sources = [source(FEW, weight=99.0), source(MANY, weight=1.0)]
    assert resolve_attention(CONFIG, gpu(), sources, SINGLE_PROCESS, None)[1].name == "cudnn"
    sources = [source(FEW, weight=90.0), source(MANY, weight=10.0)]
    assert resolve_attention(CONFIG, gpu(), sources, SINGLE_PROCESS, None)[1].name == "triton"


def test_documents_without_an_index_are_not_searched_for() -> None:
    unknown = [replace(source(FEW), training=SimpleNamespace(documents=None))]  # type: ignore[arg-type]
    _, choice = resolve_attention(CONFIG, gpu(), unknown, SINGLE_PROCESS, None)
    assert choice.name == "triton" and "reading all of its tokens" in choice.reason


def test_on_a_cpu_nothing_is_chosen() -> None:
    assert resolve(device=SimpleNamespace(platform="cpu", device_kind="cpu")) == ("xla", 0, "", "")


def test_a_broken_kernel_is_passed_over_by_name(failures: dict[str, str]) -> None:
    failures["cudnn"] = "is wrong on this GPU"
    name, limit, reason, warning = resolve()
    assert (name, limit) == ("triton", 0)
    assert "except cudnn (is wrong on this GPU)" in reason
    assert warning == "attention cudnn is wrong on this GPU, so that the run uses another implementation"
    failures |= {"triton": "fails on this GPU", "pallas": "fails on this GPU"}
    name, _, _, warning = resolve()
    assert name == "xla" and all(each in warning for each in ("cudnn", "triton", "pallas"))


def test_a_requested_kernel_that_is_broken_ends_the_start(failures: dict[str, str]) -> None:
    failures["pallas"] = "is wrong on this GPU"
    with pytest.raises(
        InputError, match="training.attention=pallas is wrong on this GPU; set --training.attention auto"
    ):
        resolve({"training.attention": "pallas"})


# ---- A run that continues.


def run(attention: str, limit: int, device: str = "NVIDIA H200", **changes: Any) -> Started:
    return Started(
        replace_fields(CONFIG, {"training.attention": attention, "data.documents_per_row": limit, **changes}), device
    )


@pytest.mark.parametrize("started", [run("pallas", 0), run("cudnn", 16), run("xla", 16)])
def test_a_run_keeps_its_choice(started: Started) -> None:
    settings = started.config
    expected = (settings.training.attention, settings.data.documents_per_row, "", "")
    assert resolve(started=started, documents=MANY) == expected


@pytest.mark.parametrize(
    ("started", "expected", "why"),
    [
        (run("pallas", 0, "NVIDIA A100"), ("triton", 0), "the device was NVIDIA A100 and is NVIDIA H200"),
        (run("pallas", 16, "NVIDIA A100"), ("cudnn", 16), "the device was NVIDIA A100"),
        (run("pallas", 0, ""), ("triton", 0), "the device was unknown"),
        (run("pallas", 0, mesh=MeshConfig(fsdp=2)), ("triton", 0), "the mesh changed"),
    ],
)
def test_on_other_devices_it_chooses_anew_but_packs_as_before(
    started: Started, expected: tuple[str, int], why: str
) -> None:
    name, limit, reason, _ = resolve(started=started)
    assert (name, limit) == expected and f"chosen anew because {why}" in reason


def test_a_run_without_a_limit_cannot_change_to_cudnn() -> None:
    with pytest.raises(InputError, match="training.attention=cudnn: any number of documents in a row"):
        resolve({"training.attention": "cudnn"}, started=run("pallas", 0))
    assert resolve({"training.attention": "cudnn"}, started=run("pallas", 16))[:2] == ("cudnn", 16)


def test_a_kept_kernel_that_broke_is_replaced(failures: dict[str, str]) -> None:
    failures["triton"] = "is wrong on this GPU"
    name, limit, _, warning = resolve(started=run("triton", 0))
    assert (name, limit) == ("pallas", 0) and "triton" in warning


# ---- Several processes.


def test_process_0_chooses_for_all() -> None:
    sent: list[str] = []

    class Second(Processes):
        def channel(self, name: str) -> Any:
            return SimpleNamespace(exchange=lambda message: [sent[0], message])

    class First(Processes):
        def channel(self, name: str) -> Any:
            return SimpleNamespace(exchange=lambda message: sent.append(message) or [message, ""])

    first = resolve(processes=First(Job("", 2, 0)))
    assert resolve(processes=Second(Job("", 2, 1)), device=gpu("8.0")) == first
