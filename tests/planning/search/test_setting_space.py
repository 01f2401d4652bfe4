"""Settings that a search goes through."""

import dataclasses

from jaxopt_llm.config import Config, MeshConfig, PipelineConfig, ShardingConfig, cli, fields
from jaxopt_llm.execution import stage_layout
from jaxopt_llm.kernels.attention import KERNELS
from jaxopt_llm.model.decoder_specs import list_segments
from jaxopt_llm.planning.search.roofline import Cluster
from jaxopt_llm.planning.search.setting_space import (
    enumerate_meshes,
    enumerate_settings,
    list_mesh_problems,
    list_variants,
)
from jaxopt_llm.step.validation import validate

RECIPE = cli.load_recipe("10b.py")
MIXED = fields.replace_fields(RECIPE, {"model.moe.experts": 12, "model.moe.expert_width": 1024})


def test_meshes_use_all_gpus_and_keep_tensor_within_a_host() -> None:
    found = list(enumerate_meshes(RECIPE, Cluster("h100", 2, 4)))
    assert len(found) == len(set(found))
    assert {mesh.devices for mesh in found} == {8}
    assert {mesh.tensor for mesh in found} == {1, 2, 4}
    assert {mesh.pipeline for mesh in found} == {mesh.fsdp for mesh in found} == {1, 2, 4, 8}


def test_every_setting_is_legal_and_keeps_the_batch() -> None:
    for mesh in (MeshConfig(data=2, fsdp=4), MeshConfig(pipeline=4, tensor=2)):
        found = list(enumerate_settings(RECIPE, mesh))
        assert len(found) == len(set(found)) > 50
        for config in found[::37]:
            validate(config)
        assert {config.training.batch_size for config in found} == {32}
        assert {config.training.accumulation for config in found} >= {1, 2, 4}


def test_expert_axis_divides_the_number_of_experts() -> None:
    found = list(enumerate_meshes(MIXED, Cluster("h100", 2, 4)))
    assert len(found) == len(set(found)) > len(list(enumerate_meshes(RECIPE, Cluster("h100", 2, 4))))
    assert ({mesh.devices for mesh in found}, {mesh.expert for mesh in found}) == ({8}, {1, 2, 4})  # of 12
    assert {mesh.expert for mesh in enumerate_meshes(RECIPE, Cluster("h100", 2, 4))} == {1}
    settings = list(enumerate_settings(MIXED, MeshConfig(expert=4, tensor=2)))
    assert {config.sharding.zero_stage for config in settings} == {1, 2, 3}
    for config in settings[::23]:
        validate(config)


def with_rows(count: int, sequence: int) -> Config:
    return dataclasses.replace(
        RECIPE, training=dataclasses.replace(RECIPE.training, batch_size=count, sequence_length=sequence)
    )


def test_context_requires_long_parts() -> None:
    def sizes(sequence: int) -> set[int]:
        return {mesh.context for mesh in enumerate_meshes(with_rows(8, sequence), Cluster("h100", 2, 4))}

    assert [sizes(each) for each in (2048, 4096, 131_072)] == [{1}, {1, 2}, {1, 2, 4, 8}]
    assert len({mesh.context * mesh.fsdp for mesh in enumerate_meshes(with_rows(8, 8192), Cluster("h100", 2, 4))}) > 1


def test_context_is_used_only_if_rows_cannot_be_divided() -> None:
    """Check the settings: otherwise a larger `fsdp` leaves each device as many tokens without exchange in attention."""
    mesh = MeshConfig(fsdp=2, context=4)
    found = list(enumerate_settings(with_rows(8, 32_768), mesh))
    assert {config.training.accumulation for config in found} == {4}
    assert {config.training.accumulation for config in enumerate_settings(with_rows(6, 32_768), mesh)} == {1, 3}
    for config in found[::7]:
        validate(config)
    assert {(each.sharding.zero_stage, each.sharding.context_exchange) for each in found} == {
        (stage, exchange) for stage in (2, 3) for exchange in ("ring", "all_to_all")
    }


def test_all_to_all_requires_enough_heads() -> None:
    few = with_rows(1, 32_768)
    few = dataclasses.replace(few, model=dataclasses.replace(few.model, heads=4, kv_heads=4))
    exchanges = {each.sharding.context_exchange for each in enumerate_settings(few, MeshConfig(context=8))}
    assert exchanges == {"ring"}
    by_heads = dataclasses.replace(few, sharding=ShardingConfig(context_exchange="all_to_all"))
    assert set(enumerate_settings(by_heads, MeshConfig(context=8))) == set(
        enumerate_settings(few, MeshConfig(context=8))
    )


def test_kernels_are_tried_only_if_allowed() -> None:
    def walked(config: Config, *allowed: str) -> set[str]:
        return {each.training.attention for each in list_variants(config, allowed)}

    assert walked(RECIPE) == {RECIPE.training.attention}
    assert walked(RECIPE, "training.attention") == {RECIPE.training.attention, *KERNELS}


def test_every_number_of_stages_has_legal_schedules() -> None:
    """Check the schedules for several schedules of the recipe."""

    def walked(own: PipelineConfig, **axes: int) -> set[PipelineConfig]:
        """Return the schedules that come with both forms of residuals, if there are stages."""
        found = {
            each.pipeline for each in enumerate_settings(dataclasses.replace(RECIPE, pipeline=own), MeshConfig(**axes))
        }
        if "pipeline" not in axes:
            return found
        stored, again = (
            {dataclasses.replace(each, residuals="auto") for each in found if each.residuals == form}
            for form in ("store", "recompute")
        )
        assert stored == again
        return stored

    one, two, nine = PipelineConfig(), PipelineConfig("interleaved", 2), PipelineConfig("interleaved", 9)
    assert walked(one, pipeline=4, tensor=2) == {one, PipelineConfig("interleaved", 3), nine}  # 9 layers a stage
    assert walked(one, pipeline=2, tensor=4) == {one, two, PipelineConfig("interleaved", 18)}
    gpipe, split = PipelineConfig("gpipe"), PipelineConfig(split=(20, 16))
    assert gpipe in walked(gpipe, pipeline=4, tensor=2)
    assert split in walked(split, pipeline=2, tensor=4) and split not in walked(split, pipeline=4, tensor=2)
    assert one in walked(split, pipeline=4, tensor=2)
    assert walked(split, fsdp=8) == {split}  # has no effect
    for each in enumerate_settings(dataclasses.replace(RECIPE, pipeline=split), MeshConfig(pipeline=4, tensor=2)):
        assert not stage_layout.split_problems(list_segments(RECIPE.model), 4, each.pipeline)


def test_zero_stages_follow_fsdp() -> None:
    def zero_stages(mesh: MeshConfig) -> set[int]:
        return {config.sharding.zero_stage for config in enumerate_settings(RECIPE, mesh)}

    assert zero_stages(MeshConfig(fsdp=1)) == {1, 3}, "stages 0 and 3 are the same on one device, and the recipe has 3"
    assert zero_stages(MeshConfig(data=8)) == {0, 1}
    assert {
        config.offload.optimizer
        for config in enumerate_settings(RECIPE, MeshConfig(data=8))
        if config.sharding.zero_stage
    } == {True}
    assert zero_stages(MeshConfig(data=2, fsdp=4)) == {1, 2, 3}


def test_problems_of_illegal_meshes() -> None:
    narrow = dataclasses.replace(RECIPE, model=dataclasses.replace(RECIPE.model, heads=10, kv_heads=2))
    problems = list_mesh_problems(narrow, MeshConfig(fsdp=2, tensor=4))
    assert "model.heads=10 is not divisible by mesh.tensor=4" in problems[0]
    assert not list(enumerate_settings(narrow, MeshConfig(fsdp=2, tensor=4)))
    assert list_mesh_problems(RECIPE, MeshConfig(pipeline=64)) == [
        "mesh.pipeline=64 exceeds the 36 layers of model.layers=36: set --mesh.pipeline to at most 36"
    ]


def test_fields_that_change_training_vary_only_if_allowed() -> None:
    def dtypes(config: Config, *allowed: str) -> set[tuple[str, str]]:
        return {(each.optimizer.state_dtype, each.precision.reduce_dtype) for each in list_variants(config, allowed)}

    own = ("float32", "float32")
    assert dtypes(RECIPE) == {own}
    assert dtypes(RECIPE, "optimizer.state_dtype") == {own, ("bfloat16", "float32"), ("int8", "float32")}
    narrow = dataclasses.replace(RECIPE, optimizer=dataclasses.replace(RECIPE.optimizer, state_dtype="bfloat16"))
    assert dtypes(narrow, "optimizer.state_dtype") == {("bfloat16", "float32"), ("int8", "float32")}
    sgd = dataclasses.replace(RECIPE, optimizer=dataclasses.replace(RECIPE.optimizer, name="adafactor"))
    assert dtypes(sgd, "optimizer.state_dtype") == {own}  # keeps its few moments in float32


def test_optimizer_in_backward_requires_full_remat() -> None:
    optimizer = dataclasses.replace(RECIPE.optimizer, in_backward=True, clip_norm=0)
    recipe = dataclasses.replace(RECIPE, optimizer=optimizer)
    found = [
        *enumerate_settings(recipe, MeshConfig(fsdp=8)),
        *enumerate_settings(recipe, MeshConfig(pipeline=2, fsdp=4)),
    ]
    for config in found:
        validate(config)
    assert {config.mesh.pipeline for config in found} == {1}


def test_optimizer_in_backward_is_tried_if_allowed() -> None:
    mesh = MeshConfig(fsdp=8)
    own, both = (list(enumerate_settings(RECIPE, mesh, allowed)) for allowed in ((), ("optimizer.in_backward",)))
    added = [config for config in both if config not in own]
    assert added and set(own) < set(both)
    for config in added:
        validate(config)
    assert {(config.optimizer.in_backward, config.optimizer.clip_norm) for config in added} == {(True, 0)}
    assert {config.offload.optimizer for config in added} == {False, True}
    assert set(enumerate_settings(RECIPE, MeshConfig(pipeline=2, fsdp=4), ("optimizer.in_backward",))) == set(
        enumerate_settings(RECIPE, MeshConfig(pipeline=2, fsdp=4))
    )
