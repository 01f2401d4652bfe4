"""Work of a step by arithmetic: experts, and the time of each family of models against the compiler."""

import json
from dataclasses import replace
from typing import Any

import pytest

from jaxopt_llm.config import Config, ModelConfig, cli
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.model import gated_delta
from jaxopt_llm.model.decoder_specs import pad_vocabulary_size
from jaxopt_llm.planning.search.delta_cost import DeltaCost
from jaxopt_llm.planning.search.footprint import compute_footprint
from jaxopt_llm.planning.search.grouped_rate import LEGS, Groups, find_efficiency
from jaxopt_llm.planning.search.passes import Passes
from jaxopt_llm.planning.search.ranking import estimate
from jaxopt_llm.planning.search.roofline import Cluster, Work, compute_step_time
from jaxopt_llm.planning.search.state_sizes import compute_state_sizes
from jaxopt_llm.planning.search.workload import estimate_work
from jaxopt_llm.planning.step_plan import make_plan
from jaxopt_llm.step.validation import validate

CLUSTER = Cluster("h200", 1, 8)


def work_of(config: Config) -> Work:
    state = compute_state_sizes(config)
    assert state is not None
    return estimate_work(config, state, CLUSTER)


@pytest.mark.parametrize("recipe", ["mixtral_8x7b.py", "qwen3_30b_a3b.py"])
def test_experts_count_at_the_rate_of_their_groups(recipe: str) -> None:
    """Without recomputation: one product forward and two backward, of the rows that an even load fills."""
    config = replace_fields(cli.load_recipe(recipe), {"remat.policy": "none", "training.attention": "cudnn"})
    model, moe, step_tokens = config.model, config.model.moe, config.training.batch_size * 4096 / 8
    work = work_of(config)
    assert work.grouped is not None
    matrices = 3 * model.width * moe.expert_width
    assert work.grouped.flops == 3 * 2 * step_tokens * moe.experts_per_token * model.layers * matrices
    rows = 2 * 4096 * moe.experts_per_token * 8 / moe.experts  # of a microbatch
    assert work.grouped.groups == Groups(rows, model.width, moe.expert_width)
    slowed = sum(1 / find_efficiency(CLUSTER.chip, leg, work.grouped.groups) for leg in LEGS)
    assert work.grouped.efficiency == pytest.approx(3 / slowed)
    # FLOPs of experts are in no other sum, and take longer than those of one dense matrix.
    others = replace(work, grouped=None)
    assert work.all_flops - others.all_flops == work.grouped.flops
    longer = replace(work, flops=work.flops + work.grouped.flops, grouped=None)
    times = [compute_step_time(each, CLUSTER.chip, "bfloat16").compute for each in (others, longer, work)]
    assert times[0] < times[1] < times[2]


def test_a_gated_delta_layer_costs_what_its_products_do() -> None:
    """FLOPs by hand of the chunked form; layers without any attention are estimated, too."""
    switches = {"model.pattern": ("gated_delta",), "training.attention": "cudnn", "remat.policy": "none"}
    config = replace_fields(cli.load_recipe("llama3_8b.py"), switches | {"model.delta.key_head_dim": 64})
    delta, cost = config.model.delta, DeltaCost.from_config(config, Passes.from_config(config))
    chunk, keys, values = gated_delta.CHUNK, delta.key_head_dim, delta.value_head_dim
    levels = 5  # of the inversion, the first of which multiplies nothing
    of_key_head = 2 * chunk * keys  # keys with keys, and queries with keys
    of_head = chunk * (2 * levels * chunk + values + keys + values) + 3 * keys * values  # the inverse, two uses, scores
    assert cost.forward.flops == 2 * (delta.key_heads * of_key_head + delta.value_heads * of_head)
    assert cost.layers == config.model.layers and cost.backward.flops > 2 * cost.forward.flops
    without = work_of(replace_fields(config, {"model.pattern": ("global",)}))
    work = work_of(config)
    assert work.attention_flops == 0 < without.attention_flops
    assert compute_step_time(work, CLUSTER.chip, "bfloat16").total > 0
    tensor = DeltaCost.from_config(replace_fields(config, {"mesh.tensor": 2}), Passes.from_config(config))
    assert tensor.forward.flops == cost.forward.flops / 2 and tensor.projected == cost.projected / 2


def test_recomputation_repeats_the_experts_forward() -> None:
    config = replace_fields(cli.load_recipe("mixtral_8x7b.py"), {"training.attention": "cudnn"})
    none, full = (work_of(replace_fields(config, {"remat.policy": policy})).grouped for policy in ("none", "full"))
    assert none is not None and full is not None
    # Nothing reads the result of the third matrix again.
    assert full.flops / none.flops == pytest.approx((3 * 3 + 2) / (3 * 3))


def test_a_dense_model_and_the_reference_have_no_grouped_matmuls() -> None:
    dense = replace_fields(cli.load_recipe("llama3_8b.py"), {"training.attention": "cudnn", "remat.policy": "none"})
    by_xla = {"training.attention": "cudnn", "remat.policy": "none", "training.grouped_matmul": "xla"}
    assert work_of(dense).grouped is None
    assert work_of(replace_fields(cli.load_recipe("mixtral_8x7b.py"), by_xla)).grouped is None


@pytest.mark.parametrize(("matmul", "dtype", "legs"), [("fp8", "float8", 3), ("int8", "int8", 1)])
def test_products_of_codes_count_at_the_peak_of_their_dtype(matmul: str, dtype: str, legs: int) -> None:
    """Those of the blocks, but neither the head's nor those of attention."""
    switches = {"training.attention": "cudnn", "remat.policy": "none"}
    plain = work_of(replace_fields(cli.load_recipe("llama3_8b.py"), switches))
    coded = work_of(replace_fields(cli.load_recipe("llama3_8b.py"), switches | {"precision.matmul": matmul}))
    model, tokens = cli.load_recipe("llama3_8b.py").model, 16 * 8192 / 8
    heads = 2 * model.head_dim * (model.heads + model.kv_heads)
    matrices = model.layers * model.width * (heads + 3 * model.mlp_width)
    assert plain.code_flops == {} and coded.code_flops == {dtype: 2 * tokens * legs * matrices}
    assert coded.all_flops == plain.all_flops
    saved = [compute_step_time(each, CLUSTER.chip, "bfloat16").compute for each in (plain, coded)]
    rate = 0.75 * CLUSTER.chip.peak_flops["bfloat16"]
    factor = CLUSTER.chip.peak_flops[dtype] / CLUSTER.chip.peak_flops["bfloat16"]
    assert saved[0] - saved[1] == pytest.approx(2 * tokens * legs * matrices / rate * (1 - 1 / factor))


SMALL = replace_fields(
    Config(
        model=ModelConfig(
            width=1024, layers=8, heads=8, kv_heads=8, head_dim=128, mlp_width=4096, vocabulary_size=7_680
        )
    ),
    {
        "training.batch_size": 64,
        "training.sequence_length": 1024,
        "training.loss_chunk": 1024,
        "training.attention": "cudnn",
        "remat.policy": "none",
    },
)
STAGES = {"mesh.pipeline": 4, "mesh.fsdp": 2, "training.batch_size": 128, "training.accumulation": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {"mesh.fsdp": 8},
    "experts": {
        "mesh.fsdp": 2,
        "mesh.expert": 4,
        "model.moe.experts": 8,
        "model.moe.experts_per_token": 2,
        "model.moe.expert_width": 2048,
    },
    "latent attention": {
        "mesh.fsdp": 8,
        "model.mla.kv_rank": 256,
        "model.mla.query_rank": 384,
        "model.mla.rotary_head_dim": 64,
        "model.mla.value_head_dim": 128,
    },
    "pipeline": STAGES | {"pipeline.residuals": "recompute"},
    "pipeline that stores": STAGES | {"pipeline.residuals": "store"},
    "adapters": {"mesh.fsdp": 8, "lora.rank": 16},
    "preferences": {"mesh.fsdp": 8, "lora.rank": 16, "training.objective": "dpo"},
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder of a model without weights."""
    folder = tmp_path_factory.mktemp("teacher")
    model = {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
        **{"vocab_size": SMALL.model.vocabulary_size, "hidden_size": 2048, "intermediate_size": 6144},
        **{"num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128},
        **{"rope_theta": 10_000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "hidden_act": "silu"},
    }
    (folder / "config.json").write_text(json.dumps(model))
    return str(folder)


@pytest.mark.parametrize("stages", [1, 4])
def test_a_teacher_counts_as_its_forward_and_its_weights(stages: int, teacher: str) -> None:
    given = {"mesh.fsdp": 8 // stages, "mesh.pipeline": stages, "training.attention": "cudnn", "remat.policy": "full"}
    given |= {"training.accumulation": stages} if stages > 1 else {}
    plain = replace_fields(SMALL, given)
    taught = replace_fields(plain, {"training.objective": "distill", "distillation.teacher": teacher})
    works, states = zip(*((work_of(each), compute_state_sizes(each)) for each in (plain, taught)), strict=True)
    tokens = plain.training.batch_size * plain.training.sequence_length / 8
    matrices = 12 * 2048 * (2 * 128 * (16 + 4) + 3 * 6144)
    table = pad_vocabulary_size(plain.model.vocabulary_size) * 2048
    ticks = (2 * stages - 1) / stages  # stages also compute while they have no microbatch
    assert works[1].flops - works[0].flops == pytest.approx(2 * tokens * (ticks * matrices + table), rel=1e-3)
    scores = 4 * tokens * ticks * 12 * 2048 * (plain.training.sequence_length + 1) / 2
    assert works[1].attention_flops - works[0].attention_flops == pytest.approx(scores, rel=0.01)
    norms = 25 * 2048
    assert states[1].parameters - states[0].parameters == pytest.approx(
        2 * (matrices + 2 * table + norms) / 8, rel=0.01
    )
    footprints = [compute_footprint(each, state) for each, state in zip((plain, taught), states, strict=True)]
    assert footprints[1].teacher == 2 * tokens * stages * 2048 and footprints[0].teacher == 0
    stored = replace_fields(taught, {"distillation.teacher": ""})  # what the data hold of it takes neither
    assert compute_state_sizes(stored) == states[0] and compute_footprint(stored, states[0]).teacher == 0
    assert work_of(stored).flops == works[0].flops


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "a teacher"])
def test_memory_and_time_match_the_compiler(family: str, teacher: str) -> None:
    """Check small models, of whose step a fifth and more is memory traffic."""
    taught = {"mesh.fsdp": 8, "training.objective": "distill", "distillation.teacher": teacher}
    config = replace_fields(SMALL, FAMILIES.get(family, taught))
    validate(config)
    plan, state = make_plan(config, "h200", 1, 8), compute_state_sizes(config)
    assert state is not None
    found = estimate(config, CLUSTER, state)
    assert found.footprint.peak == pytest.approx(plan.memory.peak, rel=0.1)
    assert found.time.total == pytest.approx(plan.speed.step_seconds, rel=0.15)
