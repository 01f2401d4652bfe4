"""Which settings are named, at what price, and whether they save what is predicted."""

import functools
import itertools
import json
from typing import Any

import jax
import pytest
from commands import ROOT

from jaxopt_llm import advice
from jaxopt_llm import config as configuration
from jaxopt_llm.advice import Advice, advice_lines, advise
from jaxopt_llm.config import TrainConfig
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.parallel import hlo, topology
from jaxopt_llm.parallel.mesh import MeshConfig, make_mesh
from jaxopt_llm.parallel.sharding import Placement, ShardingConfig
from jaxopt_llm.parallel.topology import gpu_topology
from jaxopt_llm.training.memory import GIB
from jaxopt_llm.training.program import make_program
from jaxopt_llm.training.step import TrainingConfig

SMALL = TrainConfig(
    model=ModelConfig(width=1024, layers=8, heads=8, kv_heads=8, head_dim=128, mlp_width=4096, vocabulary_size=7_680),
    training=TrainingConfig(batch_size=8, sequence_length=128),
    mesh=MeshConfig(fsdp=8),
    sharding=ShardingConfig(zero_stage=0),
)


def changed(config: TrainConfig, **settings: Any) -> TrainConfig:
    """settings: section__field."""
    found = advice.apply(config, {name.replace("__", "."): value for name, value in settings.items()})
    assert found is not None
    return found


def llama(**settings: Any) -> TrainConfig:
    return changed(configuration.load("llama2_7b.py"), training__batch_size=8, **settings)


# ---- What is predicted.


def rows(name: str) -> Any:
    """Of a benchmark's results, where the same jax wrote them: another gathers weights otherwise."""
    recorded = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    if recorded["jax"].split(".")[:2] != jax.__version__.split(".")[:2]:
        pytest.skip(f"recorded by jax {recorded['jax']}")
    return recorded["rows"]


@pytest.mark.parametrize(
    ("policy", "offload", "name"),
    [
        ("none", (), "none"),
        ("dots", (), "dots"),
        ("save_qkv", (), "save_qkv"),
        ("save_attention", (), "save_attention"),
        ("none", ("query", "mlp_gate", "mlp_up"), "none, offload query mlp_gate mlp_up"),
        ("full", ("block_input",), "full, offload block_input"),
    ],
)
def test_rematerialisation_as_recorded(policy: str, offload: tuple[str, ...], name: str) -> None:
    """Of Llama 2 7B, against what benchmarks/remat.py found compiled: within a fifth, or 0.4 GiB of its 26."""
    recorded = rows("remat-llama2_7b-h200.json")
    found = recorded[name]["temporaries"] - recorded["full"]["temporaries"]
    predicted = saved(llama(remat__policy=policy, remat__offload=offload), llama())
    assert predicted == pytest.approx(found, rel=0.2, abs=0.4 * GIB)


def saved(before: TrainConfig, after: TrainConfig) -> int:
    return advice.predict(before).peak - advice.predict(after).peak


@pytest.mark.parametrize("devices", [8, 64])
def test_zero_stages_as_recorded(devices: int) -> None:
    """Of the 10B recipe with 4 rows on each device, against what benchmarks/sharding.py found compiled."""
    recorded = rows("sharding-10b-h200.json")
    found = {
        each["zero_stage"]: each["memory"]["peak"]
        for each in recorded
        if (each["devices"], each["tensor"]) == (devices, 1)
    }
    recipe = changed(configuration.load("10b.py"), mesh__fsdp=devices, training__batch_size=4 * devices)
    for before, after in itertools.combinations(range(4), 2):
        predicted = saved(changed(recipe, sharding__zero_stage=before), changed(recipe, sharding__zero_stage=after))
        assert predicted == pytest.approx(found[before] - found[after], rel=0.2), (before, after)


def test_where_gradients_are_summed_they_are_there_twice() -> None:
    """On two GPUs that is the peak: what benchmarks/sharding.py --devices 2 found compiled."""
    two = changed(configuration.load("10b.py"), mesh__fsdp=2, training__batch_size=8, sharding__zero_stage=1)
    assert advice.predict(two).peak / GIB == pytest.approx(133.42, rel=0.02)


def test_updated_in_the_backward_gradients_are_a_layers() -> None:
    plain = llama(mesh__fsdp=1, sharding__zero_stage=0)
    settings = {"optimizer__in_backward": True, "optimizer__clip_norm": 0, "training__skip_limit": 1}
    assert advice.predict(changed(plain, **settings)).gradients < 0.2 * advice.predict(plain).gradients


def test_what_waits_on_the_host_is_counted_there() -> None:
    inputs = 32 * 4096 * 4096 * 2  # of all layers, a row on each GPU
    assert advice.predict(llama(remat__offload=("block_input",))).host == inputs
    assert advice.predict(llama()).host == 0


# A microbatch of 2048 tokens on each GPU, and a vocabulary whose logits show.
WIDE = changed(
    SMALL,
    model__vocabulary_size=32_000,
    training__batch_size=128,
    training__loss_chunk=1024,
    sharding__zero_stage=3,
)


def test_what_is_outside_the_stacks_comes_from_the_host_early_by_jax_0_11() -> None:
    found = advice.predict(changed(WIDE, sharding__zero_stage=0, offload__optimizer=True))
    moments = 2 * 4 * (32_000 + 1) * 1024  # of the table, and of the last norm
    early = moments if jax.__version_info__ >= (0, 11) else 0
    assert found.optimizer == pytest.approx(early, abs=1024)  # numbers of steps are on the device
    assert found.host > 4 * moments


def test_whole_logits_can_be_the_peak() -> None:
    found = advice.predict(changed(WIDE, remat__policy="none", training__loss_chunk=0))
    assert found.loss > (4 + 2) * 2048 * 32_000 > found.working
    assert found.peak == found.parameters + found.optimizer + found.activations + found.loss


@functools.cache
def peak(config: TrainConfig) -> int:
    mesh = make_mesh(config.mesh, gpu_topology("h200"))
    placement = Placement(mesh, config.sharding, config.precision, config.offload)
    program = make_program(
        config.model, config.training, config.optimizer, config.schedule, config.remat, config.lora, placement
    )
    lowered = topology.lower(program.step, program.state, program.batch)
    return hlo.memory(topology.compile(lowered, {"xla_gpu_enable_triton_gemm": False})).peak


WHOLE: advice.Settings = {"sharding.zero_stage": 0}


# beyond: MiB that are saved beyond what is predicted, as compiled by jax 0.10.2 and by 0.11.2. Of WHOLE the prediction
# is 87 and 32 MiB too high: it counts the table's gradient twice in the backward, and too little beside it.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "beyond"),
    [
        # With remat none the zeros of attention's gradients are there at the loss, too (16), and with 0.10.2 beside the
        # last layer's intermediates what is computed from them (12).
        ({"remat.policy": "none"}, {"remat.policy": "full"}, (29, 17)),
        # With chunks of 256 the peak is at the loss with 0.10.2 (28 above the prediction), in the backward with 0.11.2
        # (18 below it).
        ({"remat.policy": "none", "training.loss_chunk": 0}, {"training.loss_chunk": 256}, (-20, 28)),
        # With four microbatches the peak is in a layer's backward.
        ({"remat.policy": "none"}, {"training.accumulation": 4}, (39, 7)),
        # With 0.10.2 the peak is then in the update. With 0.11.2 30 MiB lie unused between the arrays.
        (WHOLE, {"offload.optimizer": True}, (-15, -29)),
        # With 0.10.2 the peak is then in the update: beside all gradients the table's new moments.
        (WHOLE, {"optimizer.state_dtype": "int8"}, (-47, 0)),
        (WHOLE, {"mesh.fsdp": 4, "mesh.tensor": 2, "sharding.sequence_parallel": True}, (-51, -13)),
        (WHOLE, {"lora.rank": 16}, (-104, -45)),
    ],
)
def test_savings_as_compiled(before: advice.Settings, after: advice.Settings, beyond: tuple[int, int]) -> None:
    first = advice.apply(WIDE, before)
    assert first is not None
    second = advice.apply(first, after)
    assert second is not None
    for each in (first, second):
        assert advice.predict(each).peak == pytest.approx(peak(each), rel=0.05)
    found = peak(first) - peak(second) - saved(first, second)
    assert found / 2**20 == pytest.approx(beyond[jax.__version_info__ >= (0, 11)], abs=1)


# ---- What is named.


def test_only_what_is_legal_and_not_yet_on() -> None:
    for config in (SMALL, llama(remat__policy="none")):
        for each in advise(config, GIB):
            after = advice.apply(config, each.settings)
            assert after is not None and after != config
            assert each.saves == saved(config, after) > 0
            assert each.same == (not configuration.differences(config, after))


# A row of 65,536 tokens on each GPU: nothing but its own length fills them.
LONG = llama(training__sequence_length=65_536, training__attention="pallas")


def test_long_sequences_are_divided() -> None:
    found = {tuple(each.settings): each for each in advise(LONG, 60 * GIB)}
    divided = found["mesh.fsdp", "mesh.context", "training.accumulation"]
    assert divided.same and divided.saves > 0.4 * advice.predict(LONG).peak
    sizes = divided.settings
    assert sizes["mesh.fsdp"] * sizes["mesh.context"] == 8 == sizes["training.accumulation"] * sizes["mesh.fsdp"]
    assert not any("context" in each.flags for each in advise(changed(LONG, training__sequence_length=2048), GIB))


def test_experts_go_to_more_devices_or_to_fewer() -> None:
    """Of experts that rest whole, fewer on each; where rows fill memory, room for fewer tokens' choices."""

    def divided(config: TrainConfig) -> Advice:
        names = ["mesh.fsdp", "mesh.expert"]
        return next(each for each in advise(config, 60 * GIB) if list(each.settings) == names)

    experts = {"model__experts": 8, "model__experts_per_token": 4, "model__expert_width": 4096}
    whole = divided(changed(SMALL, **experts, sharding__zero_stage=2))
    assert whole.same and whole.settings == {"mesh.fsdp": 1, "mesh.expert": 8}
    rows = changed(
        SMALL, **experts, mesh__fsdp=1, mesh__expert=8, sharding__zero_stage=3, training__sequence_length=4096
    )
    fewer = divided(changed(rows, remat__policy="none"))
    assert fewer.same and fewer.settings == {"mesh.fsdp": 8, "mesh.expert": 1}
    assert not any("expert" in each.flags for each in advise(SMALL, GIB))


def test_scores_that_fill_memory_are_kept_on_the_chip() -> None:
    scores = changed(LONG, training__attention="xla", training__sequence_length=16_384)

    def kernels(**of: Any) -> list[Advice]:
        return [each for each in advise(scores, 4 * GIB, **of) if "training.attention" in each.settings]

    assert kernels()[0].settings == {"training.attention": "pallas"}
    # 0.10.2, which gathers ahead, keeps the scores' masks, too.
    assert kernels()[0].saves / GIB == pytest.approx(2.50 if jax.__version_info__ >= (0, 11) else 4.62, rel=0.01)
    assert not kernels(simulated=True), "a CPU has none"
    odd = changed(scores, model__head_dim=96)
    assert not any("training.attention" in each.settings for each in advise(odd, GIB))


def test_a_resume_is_told_nothing_that_it_may_not_change() -> None:
    fresh, resumed = advise(SMALL, GIB), advise(SMALL, GIB, resumes=True)
    assert {"lora.rank": 16} in [each.settings for each in fresh]
    assert resumed and all(each.same for each in resumed)
    # What leaves the run as it is comes first, the most saved before the others.
    assert [(not each.same, -each.saves) for each in fresh] == sorted((not each.same, -each.saves) for each in fresh)


def test_simulated_devices_gain_nothing_by_offloading() -> None:
    def offloads(found: tuple[Advice, ...]) -> bool:
        return any("offload" in each.flags for each in found)

    assert offloads(advise(SMALL, 1)) and not offloads(advise(SMALL, 1, simulated=True))


def test_the_cheapest_of_a_ladder_that_is_enough() -> None:
    config = llama(remat__policy="none")

    def policy(lacking: float) -> str:
        found = advise(config, int(lacking * GIB))
        return next(each.settings["remat.policy"] for each in found if list(each.settings) == ["remat.policy"])

    assert [policy(lacking) for lacking in (0.5, 5, 8, 9.8, 40)] == [
        "dots",
        "save_qkv",
        "save_attention",
        "full",
        "full",
    ]


def test_what_is_enough_together_comes_first() -> None:
    config = llama(mesh__fsdp=1)
    lacking = 55 * GIB
    first, *singles = advise(config, lacking)
    assert first.fits and first.same and not any(each.fits and each.same for each in singles)
    assert len(first.settings) > 1
    after = advice.apply(config, first.settings)
    assert after is not None and saved(config, after) >= lacking


def test_the_lines() -> None:
    both = {"sharding.zero_stage": 3, "remat.offload": ("block_input", "query")}
    found = [
        Advice(both, 3 * GIB // 2, "much", True, True),
        Advice({"lora.rank": 16}, GIB, "another run", False, False),
    ]
    assert advice_lines(found) == [
        "what would save most       GiB   predicted, by arithmetic",
        "  fits                    1.50   --sharding.zero-stage 3 --remat.offload block_input query: much",
        "                          1.00   --lora.rank 16: another run",
    ]
    assert advice_lines(found[1:])[-1] == "  not enough even together: more GPUs, a smaller model or shorter sequences"
    assert configuration.override(SMALL, found[0].flags.split(), "") == advice.apply(SMALL, both)
