"""Weights as codes, against their published descriptions in NumPy (support/codes.py): whole, in parts, and damaged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import codes
import folders
import numpy as np
import pytest
import toy

from jaxopt_llm.checkpoint.huggingface import model_folder, safetensors
from jaxopt_llm.checkpoint.huggingface.quantised import codes as reader
from jaxopt_llm.checkpoint.huggingface.quantised import methods
from jaxopt_llm.checkpoint.huggingface.safetensors import StoredTensor
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.parallel.zero import parameter_sharding

pytestmark = pytest.mark.core

SHAPE = 72, 96  # [out, in]
EXPERTS = 3, 64, 40  # [E, in, out]
VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "all": lambda x: x,
    "rows": lambda x: x[5:30],
    "columns": lambda x: x[:, 33:71],
    "rows and columns, transposed": lambda x: x[40:70, 20:50].T,
    "some rows": lambda x: x[3::7],
    "every other row": lambda x: x[1::2, 10:11],
    "heads": lambda x: x.reshape(4, 18, 96)[1:3, :, 7:].transpose(2, 0, 1),
    "parts of heads": lambda x: x.reshape(6, -1, 96)[:, 2:5].reshape(6, 3, 8, 12).transpose(3, 1, 0, 2),
    "one": lambda x: x[71, 95, ...],
    "nothing": lambda x: x[3:3],
}


def open_weight(folder: Path, kind: codes.Kind, change: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return the stored weight of one matrix, and its values."""
    weight = np.random.default_rng(0).normal(size=SHAPE)
    tensors, values = kind.quantise(weight, kind.options)
    if change:
        change(tensors)
    codes.write_tensors(folder, {f"a{end}": array for end, array in tensors.items()})
    settings = {"quantization_config": kind.options, "torch_dtype": "float16"}
    return methods.join_codes(safetensors.open_folder(folder), settings)["a.weight"], values


@pytest.mark.parametrize("kind", codes.KINDS)
@pytest.mark.parametrize("most", [reader.MAX_VALUES, 50])
def test_values_are_those_of_the_description(
    kind: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MAX_VALUES", most)
    stored, values = open_weight(tmp_path, codes.KINDS[kind])
    assert stored.array.shape == SHAPE and stored.dtype == np.float16
    for name, view in VIEWS.items():
        found = stored.read(view(stored.array))
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, view(values).astype(np.float32), err_msg=name)


def open_experts(folder: Path, change: Callable[[dict[str, Any]], Any] | None = None) -> tuple[StoredTensor, Any]:
    tensors, values = codes.mxfp4(np.random.default_rng(0).normal(size=EXPERTS), {})
    if change:
        change(tensors)
    codes.write_tensors(folder, {f"a.down_proj{end}": array for end, array in tensors.items()})
    settings = {"quantization_config": codes.MXFP4.options}
    return methods.join_codes(safetensors.open_folder(folder), settings)["a.down_proj"], values


@pytest.mark.parametrize("most", [reader.MAX_VALUES, 50])
def test_values_of_experts_in_mxfp4(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_VALUES", most)
    stored, values = open_experts(tmp_path)
    assert stored.array.shape == EXPERTS and stored.dtype == codes.BF16
    views: tuple[Callable[[np.ndarray], np.ndarray], ...] = (
        lambda x: x,
        lambda x: x[1],
        lambda x: x[1:, 5:50, 3:].transpose(2, 0, 1),
        lambda x: x[..., 1::2][2, 40:],  # one of two projections whose outputs take turns
        lambda x: x.reshape(3, 8, 8, 40)[:, 2, :, 7],
    )
    for view in views:
        np.testing.assert_array_equal(stored.read(view(stored.array)), view(values))


@pytest.mark.parametrize("kind", ["fp8", "int4 with zero-points", "gptq", "awq", "nf4", "int8 of bitsandbytes"])
def test_few_bytes_are_read_for_a_part(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, _ = open_weight(tmp_path, codes.KINDS[kind])
    sizes: list[int] = []
    read = safetensors.StoredFile.read
    monkeypatch.setattr(
        safetensors.StoredFile, "read", lambda self, view: sizes.append(view.nbytes) or read(self, view)
    )
    stored.read(stored.array[24:32, 32:64])
    whole = stored.source.bytes.size
    assert sum(sizes) < whole / 8


@pytest.mark.parametrize("kind", ["fp8", "int4 with zero-points", "gptq in act-order", "awq", "nf4"])
def test_each_device_reads_its_part_of_a_folder(kind: str, tmp_path: Path) -> None:
    values = codes.quantise_folder(folders.folder(tmp_path / "float"), tmp_path / "codes", codes.KINDS[kind])
    folder = model_folder.open_model_folder(tmp_path / "codes")
    one, many = toy.placement(), toy.placement(zero_stage=3, fsdp=2, tensor=2)
    found = {}
    for path, spec in tree.leaves_with_path(Decoder(folders.CONFIG).specs):
        divided, found[path] = (folder.read(path, spec, parameter_sharding(spec, each)) for each in (many, one))
        np.testing.assert_array_equal(divided, found[path], err_msg=path)
    query = found["segment_0/block_0/attention/query"]
    expected = values["model.layers.0.self_attn.q_proj.weight"].T.reshape(query.shape[1:])
    np.testing.assert_array_equal(query[0], expected.astype(np.float32))


CORRUPT = {
    "no scales": ("int4 in groups", lambda t: t.pop(".weight_scale"), "'a.weight_packed' has no 'a.weight_scale'"),
    "scales alone": ("int8", lambda t: t.pop(".weight"), "'a.weight_scale' belongs to no tensor of codes"),
    "codes and the weight": (
        "int4 in groups",
        lambda t: t.update({".weight": np.zeros(SHAPE, np.float32)}),
        "'a.weight_packed' is there next to 'a.weight'",
    ),
    "scales of another shape": (
        "awq",
        lambda t: t.update({".scales": t[".scales"][1:]}),
        r"'a.scales' has shape \[2, 72\], but the weight needs \[3, 72\]",
    ),
    "scales that are no numbers": (
        "gptq",
        lambda t: t[".scales"].fill(np.nan),
        "'a.scales' has values that are not finite",
    ),
    "scales that are codes": (
        "int8",
        lambda t: t.update({".weight_scale": np.ones(1, np.int32)}),
        "'a.weight_scale' is int32, not one of float32",
    ),
    "no zero-points": (
        "int4 with zero-points",
        lambda t: t.pop(".weight_zero_point"),
        "'a.weight_packed' has no zero-points, 'a.weight_zero_point', although its scheme is not symmetric",
    ),
    "zero-points of another shape": (
        "int4 with zero-points",
        lambda t: t.update({".weight_zero_point": t[".weight_zero_point"][:-1]}),
        r"'a.weight_zero_point' has shape \[8, 3\], but the weight needs \[9, 3\]",
    ),
    "zero-points of GPTQ": ("gptq", lambda t: t.pop(".qzeros"), "'a.qweight' has no 'a.qzeros'"),
    "another shape": (
        "int4 in groups",
        lambda t: t.update({".weight_shape": np.array([72, 128], np.int64)}),
        r"'a.weight_packed' has shape \[72, 12\], but a.weight_shape needs \[72, 16\]",
    ),
    "act-order beyond the groups": (
        "gptq in act-order",
        lambda t: t[".g_idx"].__setitem__(3, 3),
        "'a.g_idx' names groups from 0 to 3, but there are 3 from 0 on",
    ),
    "act-order of another length": (
        "int4 in act-order",
        lambda t: t.update({".weight_g_idx": t[".weight_g_idx"][:-1]}),
        r"'a.weight_g_idx' has shape \[95\], but the weight needs \[96\]",
    ),
    "act-order that is no integer": (
        "gptq in act-order",
        lambda t: t.update({".g_idx": t[".g_idx"].astype(np.float32)}),
        "'a.g_idx' is float32, not one of int32, int64",
    ),
    "codes of no matrix": (
        "awq",
        lambda t: t.update({".qweight": np.zeros((), np.int32)}),
        r"'a.qweight' has shape \[\], but codes are those of a matrix",
    ),
    "no act-order": ("gptq in act-order", lambda t: t.pop(".g_idx"), "'a.qweight' has no groups, 'a.g_idx'"),
    "no state": (
        "nf4",
        lambda t: t.pop(".weight.quant_state.bitsandbytes__nf4"),
        "'a.weight' has no state, 'a.weight.quant_state.bitsandbytes__nf4'",
    ),
    "a damaged state": (
        "nf4",
        lambda t: t.update({".weight.quant_state.bitsandbytes__nf4": np.zeros(9, np.uint8)}),
        "'a.weight.quant_state.bitsandbytes__nf4' is not JSON",
    ),
    "a state of another shape": (
        "nf4",
        lambda t: t.update({".weight": t[".weight"][1:]}),
        r"'a.weight' has shape \[3455, 1\], but the weight needs \[3456\]",
    ),
    "a state without scales of scales": (
        "nf4 with codes of scales",
        lambda t: t.pop(".weight.nested_absmax"),
        "'a.weight.absmax' has codes of scales, but there is no 'a.weight.nested_absmax'",
    ),
    "a table with no number": (
        "nf4",
        lambda t: t[".weight.quant_map"].fill(np.inf),
        "'a.weight.quant_map' has values that are not finite",
    ),
    "codes in tiles": (
        "int8 of bitsandbytes",
        lambda t: t[".weight_format"].fill(1),
        "'a.weight_format' is not 0: only codes in the order of rows",
    ),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_corrupt_tensors_are_named(case: str, tmp_path: Path) -> None:
    kind, change, said = CORRUPT[case]
    with pytest.raises(InputError, match=f"model.safetensors: tensor {said}"):
        open_weight(tmp_path, codes.KINDS[kind], change)[0].read()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("_scales"), "'a.down_proj_blocks' has no 'a.down_proj_scales'"),
        (lambda t: t.pop("_blocks"), "'a.down_proj_scales' belongs to no tensor of codes"),
        (lambda t: t["_scales"].fill(255), "'a.down_proj_scales' has values that are not finite"),
        (
            lambda t: t.update({"_scales": t["_scales"][:2]}),
            r"'a.down_proj_scales' has shape \[2, 40, 2\], but .*\[3, ",
        ),
        (lambda t: t.update({"_blocks": t["_blocks"][0]}), r"'a.down_proj_blocks' has shape \[40, 2, 16\] instead of"),
    ],
)
def test_corrupt_experts_are_named(change: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"model.safetensors: tensor {said}"):
        open_experts(tmp_path, change)[0].read()


SCHEME = codes.KINDS["int4 in groups"].options


def with_group(**changes: Any) -> dict[str, Any]:
    return SCHEME | {"config_groups": {"group_0": SCHEME["config_groups"]["group_0"] | changes}}


def with_weights(**changes: Any) -> dict[str, Any]:
    return with_group(weights=SCHEME["config_groups"]["group_0"]["weights"] | changes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quant_method": ["fp8"]}, r"quant_method=\['fp8'\]: of weights as codes"),
        ({"quant_method": "hqq"}, "quant_method='hqq': of weights as codes, only those of fp8, mxfp4, .* are read"),
        (codes.FP8 | {"weight_block_size": [128]}, r"weight_block_size=\[128\]: must be two sizes"),
        (SCHEME | {"format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized': only pack-quantized, "),
        (SCHEME | {"config_groups": {"W4A16": ["Linear"]}}, "config_groups=.* must be schemes"),
        (SCHEME | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config=.*sparse weights"),
        (SCHEME | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config=.*rotations"),
        (with_group(format="mxfp4-pack-quantized"), "format='mxfp4-pack-quantized'"),
        (SCHEME | {"ignore": ["re:*"]}, r"ignore=\['re:\*'\]: must be names, or patterns"),
        (with_group(targets=[None]), "config_groups.group_0.targets=.*must be names, or patterns"),
        (with_weights(num_bits=3), "config_groups.group_0.weights: type='int', num_bits=3: only int of 2, 4, 8 bits"),
        (
            with_weights(group_size=None),
            "config_groups.group_0.weights.strategy='group': only tensor, channel, block, and group with a group_size",
        ),
        (codes.AWQ | {"version": "gemv"}, "version='gemv': only 'gemm' is read"),
        (codes.AWQ | {"zero_point": False}, "zero_point=False: only True is read"),
        (codes.AWQ | {"group_size": 0}, "group_size=0: must be a whole number above 0, or -1"),
        (codes.KINDS["gptq"].options | {"bits": 3}, "bits=3: only 2 or 4 or 8 is read"),
        (codes.KINDS["gptq"].options | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin': only 'gptq' or"),
        (codes.KINDS["nf4"].options | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage='bfloat16'"),
    ],
)
def test_what_is_not_read_is_refused_by_its_name_and_value(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=f"quantization_config.{said}"):
        methods.check_method({"quantization_config": options})


def test_no_option_of_a_kind_that_is_read_is_refused() -> None:
    for kind in codes.KINDS.values():
        methods.check_method({"quantization_config": kind.options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            SCHEME | {"ignore": ["re:.*"]},
            "'a.weight_packed' has codes, but quantization_config.ignore names its module",
        ),
        (with_group(targets=["re:b.*"]), "'a.weight_packed' has codes, but no group of .* has its module as a target"),
        (
            with_weights(num_bits=8, type="float"),
            "'a.weight_packed' has codes of type int, but its scheme .* type float",
        ),
    ],
)
def test_codes_without_a_scheme_are_named(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        open_weight(tmp_path, codes.Kind(options, lambda weight, _: codes.compressed(weight, SCHEME)))


def test_a_name_comes_before_a_pattern_and_that_before_a_class(tmp_path: Path) -> None:
    """As where projections of attention are float8 and those of experts int4."""
    tensors: dict[str, np.ndarray] = {}
    values, groups = {}, {}
    kinds = {"Linear": "float8 by rows", "re:.*mlp": "int4 in groups", "x.mlp.b": "packed int8"}
    for module, (target, kind) in zip(("x.attn.q", "x.mlp.a", "x.mlp.b"), kinds.items(), strict=True):
        options = codes.KINDS[kind].options
        found, values[module] = codes.compressed(np.random.default_rng(0).normal(size=SHAPE), options)
        tensors |= {f"{module}{end}": array for end, array in found.items()}
        groups[kind] = options["config_groups"]["group_0"] | {"targets": [target]}
    codes.write_tensors(tmp_path, tensors)
    settings = {"quantization_config": SCHEME | {"format": "mixed-precision", "config_groups": groups}}
    stored = methods.join_codes(safetensors.open_folder(tmp_path), settings)
    for module, expected in values.items():
        np.testing.assert_array_equal(stored[f"{module}.weight"].read(), expected.astype(np.float32))


def test_scales_of_activations_are_not_read(tmp_path: Path) -> None:
    more = {".input_scale": np.ones(1, np.float32), ".k_scale": np.ones(1, np.float32)}
    stored, values = open_weight(tmp_path, codes.KINDS["float8"], lambda t: t.update(more))
    np.testing.assert_array_equal(stored.read(), values)
