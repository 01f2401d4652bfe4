"""Folders with weights as codes: values equal to the bit, from a folder to an exported one that transformers loads.

Values of FP8 and MXFP4 are those that transformers dequantises. Other methods need packages that this test does not:
their values are those of support/codes.py, from the published descriptions.
"""

import json
from pathlib import Path
from typing import Any

import codes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import ROOT, metrics
from test_convert import done
from texts import write_byte_tokenizer

import jaxopt_llm
from jaxopt_llm.checkpoint.huggingface import safetensors
from jaxopt_llm.checkpoint.huggingface.quantised import methods
from jaxopt_llm.core.errors import InputError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
save = pytest.importorskip("safetensors.torch")

SIZES = {
    **{"vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "max_position_embeddings": 64}
BLOCK = 32
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}


def quantise(weight: Any, block: int) -> tuple[Any, Any]:
    """Return codes and the factor of each block; block 0: one factor."""
    rows, columns = weight.shape
    size = (block, block) if block else (rows, columns)
    blocks = weight.reshape(rows // size[0], size[0], columns // size[1], size[1])
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).reshape(rows, columns)
    return codes, scales if block else scales.reshape(())


def write_float(folder: Path, prefix: str, more: dict[str, Any], dtype: str = "bfloat16") -> Path:
    config = getattr(transformers, f"{prefix}Config")(**SIZES | more)
    torch.manual_seed(0)
    getattr(transformers, f"{prefix}ForCausalLM")(config).to(getattr(torch, dtype)).save_pretrained(folder / "float")
    return folder / "float"


def write(folder: Path, prefix: str, more: dict[str, Any], block: int = BLOCK) -> Path:
    write_float(folder, prefix, more)
    tensors: dict[str, Any] = {}
    for name, tensor in save.load_file(folder / "float" / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            codes, scales = quantise(tensor.float(), block)
            tensors |= {name: codes, f"{name}_scale_inv": scales}
    (folder / "fp8").mkdir()
    save.save_file(tensors, folder / "fp8" / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "float" / "config.json").read_text())
    method = FP8 if block else {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    (folder / "fp8" / "config.json").write_text(json.dumps(settings | {"quantization_config": method}))
    return folder / "fp8"


@pytest.mark.parametrize("kind", ["fp8", "int4 in groups", "gptq", "awq", "nf4"])
def test_the_config_of_a_quantised_copy_changes_no_whole_weights_and_codes_need_theirs(
    kind: str, tmp_path: Path
) -> None:
    """As where one config.json was copied over the other."""
    whole = write_float(tmp_path, "Qwen3", {}, "float32")
    quantised = tmp_path / "codes"
    codes.quantise_folder(whole, quantised, codes.KINDS[kind])
    expected = jaxopt_llm.load_pretrained(whole)
    own, other = ((folder / "config.json").read_text() for folder in (whole, quantised))
    (whole / "config.json").write_text(other)
    found = jaxopt_llm.load_pretrained(whole)
    assert found.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
    (quantised / "config.json").write_text(own)
    with pytest.raises(InputError) as error:
        jaxopt_llm.load_pretrained(quantised)
    assert "\n" not in str(error.value) and "self_attn.q_proj.weight' is" in str(error.value)


@pytest.mark.parametrize(("prefix", "more"), [("Qwen3", {}), ("Qwen3Moe", EXPERTS)])
def test_values_are_those_of_transformers(prefix: str, more: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path, prefix, more)
    here = jaxopt_llm.load_pretrained(folder)
    here.save_pretrained(tmp_path / "back")
    there = getattr(transformers, f"{prefix}ForCausalLM").from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    )
    back, said = type(there).from_pretrained(tmp_path / "back", dtype=torch.bfloat16, output_loading_info=True)
    assert not any(said.values()), said
    for name, value in there.state_dict().items():
        assert value.dtype == torch.bfloat16 and torch.equal(back.state_dict()[name], value), name
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    written = safetensors.open_folder(tmp_path / "back").values()
    assert {each.array.dtype for each in written} == {jnp.dtype(jnp.bfloat16)}


def test_a_part_of_a_weight_has_its_own_scales(tmp_path: Path) -> None:
    """As a device reads it: some rows and columns, transposed."""
    folder = write(tmp_path, "Qwen3", {})
    settings = json.loads((folder / "config.json").read_text())
    stored = methods.join_codes(safetensors.open_folder(folder), settings)["model.layers.0.mlp.gate_proj.weight"]
    part = np.s_[40:70, 20:50]
    np.testing.assert_array_equal(stored.read(stored.array[part].T), stored.read()[part].T)


def test_a_weight_may_have_one_scale(tmp_path: Path) -> None:
    folder = write(tmp_path, "Qwen3", {}, block=0)
    here = jaxopt_llm.load_pretrained(folder)
    stored = save.load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    expected = (stored[name].float() * stored[f"{name}_scale_inv"]).bfloat16().float().numpy().T
    found = np.asarray(here.params["segment_0"]["block_0"]["attention"]["key"][1], np.float32)
    np.testing.assert_array_equal(found.reshape(expected.shape), expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t, n: t.pop(f"{n}_scale_inv"),
            "k_proj.weight' has no 'model.layers.0.self_attn.k_proj.weight_scale_inv'",
        ),
        (lambda t, n: t.update({n: t[n].float()}), "k_proj.weight_scale_inv' belongs to no tensor of codes"),
        (lambda t, n: t.update({f"{n}_scale_inv": torch.ones(3, 2)}), r"shape \[3, 2\], but the weight needs \[1, 2\]"),
        (
            lambda t, n: t[f"{n}_scale_inv"].fill_(float("nan")),
            "k_proj.weight_scale_inv' has values that are not finite",
        ),
    ],
)
def test_corrupt_scales_are_named(change: Any, said: str, tmp_path: Path) -> None:
    folder = write(tmp_path, "Qwen3", {})
    tensors = save.load_file(folder / "model.safetensors")
    change(tensors, "model.layers.0.self_attn.k_proj.weight")
    save.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=said):
        jaxopt_llm.load_pretrained(folder)


# Kind of codes -> dtype of the folder, class, and what holds the frozen base in training.
FOLDERS = {
    "fp8": ("bfloat16", "Qwen3", "float"),
    "mxfp4": ("bfloat16", "GptOss", "float"),
    "int4 with zero-points": ("bfloat16", "Qwen3Moe", "float"),
    "int8 by rows": ("bfloat16", "Llama", "float"),
    "float8 by rows": ("bfloat16", "Qwen3", "nf4"),
    "gptq in act-order": ("float16", "Qwen2", "int8"),
    "awq": ("float16", "Llama", "float"),
    "nf4 with codes of scales": ("bfloat16", "Qwen3", "float"),
    "int8 of bitsandbytes": ("float16", "Llama", "float"),
}


KINDS = codes.KINDS | {"mxfp4": codes.MXFP4}


def write_codes(folder: Path, kind: str) -> tuple[Path, dict[str, np.ndarray]]:
    """Write the folder of a model with codes. Return it with the values of its tensors."""
    dtype, prefix, _ = FOLDERS[kind]
    source = write_float(folder, prefix, {"Qwen3Moe": EXPERTS, "GptOss": GPT_OSS}.get(prefix, {}), dtype)
    values = codes.quantise_folder(source, folder / "codes", KINDS[kind])
    if kind == "fp8":  # a folder that does not say its dtype
        file = folder / "codes" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": None}))
    rounded = np.dtype(getattr(jnp, dtype))
    return folder / "codes", {name: np.asarray(value, np.float32).astype(rounded) for name, value in values.items()}


def load_in_transformers(folder: Path) -> dict[str, Any]:
    model, said = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(said.values()), said
    return dict(model.state_dict())


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_is_read_and_written_with_the_values_of_its_codes(kind: str, tmp_path: Path) -> None:
    folder, values = write_codes(tmp_path, kind)
    jaxopt_llm.load_pretrained(folder).save_pretrained(tmp_path / "back")
    back = safetensors.open_folder(tmp_path / "back")
    assert back.keys() == values.keys() and any(name.endswith(KINDS[kind].weights) for name in values)
    for name, value in values.items():
        assert back[name].array.dtype == value.dtype, name
        np.testing.assert_array_equal(back[name].read(), value, err_msg=name)
    settings = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in settings and settings["torch_dtype"] == FOLDERS[kind][0]
    loaded = load_in_transformers(tmp_path / "back")
    assert {value.dtype for value in loaded.values()} == {getattr(torch, FOLDERS[kind][0])}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FOLDERS)
def test_lora_of_a_folder_as_a_new_user_trains_and_merges_it(kind: str, tmp_path: Path) -> None:
    (folder, values), base = write_codes(tmp_path, kind), FOLDERS[kind][2]
    write_byte_tokenizer(folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text((ROOT / "configs/quickstart_chat.jinja").read_text())
    rows = ({"prompt": f"What is {n} + {n}?", "completion": f" It is {2 * n}."} for n in range(40))
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done(
        *("train", "--config", "finetune.py", "--model.pretrained", folder, "--data.paths", tmp_path / "pairs.jsonl"),
        *("--data.content", "pairs", "--run.directory", tmp_path / "run", "--lora.base", base),
        *("--lora.rank", 2, "--training.steps", 8, "--training.epochs", 0, "--training.batch-size", 4),
        *("--training.accumulation", 1, "--training.sequence-length", 32, "--optimizer.learning-rate", 0.005),
        *("--logging.every", 1),
    )
    losses = [record["loss"] for record in metrics(tmp_path / "run") if "loss" in record]
    assert losses[-1] < losses[0]
    done("convert", "merge", "--checkpoint", tmp_path / "run", "--to", tmp_path / "merged", "--dtype", "float32")
    merged = {name: each.read() for name, each in safetensors.open_folder(tmp_path / "merged").items()}
    assert merged.keys() == values.keys()
    rounding = {"float": 1e-6, "int8": 0.02, "nf4": 0.15}[base]  # relative, of the codes of `lora.base`
    for name, value in values.items():
        before = value.astype(np.float32)
        difference = merged[name] - before
        if not name.endswith(("_proj", "_proj.weight")):
            assert not difference.any(), name
        else:
            rank = 4 if name.endswith("gate_up_proj") else 2  # of one adapter, or of those of gate and up
            sizes = np.linalg.svd(difference, compute_uv=False)
            rest = np.linalg.norm(sizes[..., rank:]) / np.linalg.norm(before)  # beyond the rank of the adapter
            assert sizes.max() > 0 and rest < rounding and (base == "float" or rest > rounding / 10), name
    done("convert", "merge", "--checkpoint", tmp_path / "run", "--to", tmp_path / "mine")
    settings = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert "quantization_config" not in settings and settings["torch_dtype"] == FOLDERS[kind][0]
    load_in_transformers(tmp_path / "mine")


def test_gpt_oss_has_the_values_that_transformers_has(tmp_path: Path) -> None:
    folder, _ = write_codes(tmp_path, "mxfp4")
    jaxopt_llm.load_pretrained(folder).save_pretrained(tmp_path / "back")
    there = transformers.GptOssForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    back = load_in_transformers(tmp_path / "back")
    for name, value in there.state_dict().items():
        assert torch.equal(back[name], value), name


def test_experts_in_mxfp4_have_the_values_that_transformers_has(tmp_path: Path) -> None:
    """Every code with every exponent that a matrix can have: the smallest values are subnormal."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 40, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.arange(240, dtype=torch.uint8).reshape(3, 40, 2)
    tensors = {"x.experts.gate_up_proj_blocks": blocks, "x.experts.gate_up_proj_scales": scales}
    save.save_file(tensors | {"x.experts.gate_up_proj_bias": torch.zeros(3, 40)}, tmp_path / "model.safetensors")
    settings = {"quantization_config": codes.MXFP4.options}
    found = methods.join_codes(safetensors.open_folder(tmp_path), settings)
    assert found.keys() == {"x.experts.gate_up_proj", "x.experts.gate_up_proj_bias"}
    stored = found["x.experts.gate_up_proj"]
    for dtype in (torch.bfloat16, torch.float32):
        expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        assert stored.array.shape == expected.shape == (3, 64, 40)
        np.testing.assert_array_equal(stored.read(), expected.float().numpy())
    np.testing.assert_array_equal(stored.read(stored.array[1, 20:50, 1::2].T), expected[1, 20:50, 1::2].T.numpy())
