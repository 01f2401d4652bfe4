"""Single rows of tables that PEFT's own classes train, `trainable_token_indices`: read and merged."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from test_peft_hf_torch import Model, library, models, same, start_run, torch, write_run

import jaxopt_llm
from jaxopt_llm import convert
from jaxopt_llm.checkpoint.huggingface import safetensors
from jaxopt_llm.checkpoint.peft.adapter_folder import WEIGHTS
from jaxopt_llm.core.errors import InputError

__all__ = ["models"]  # a fixture

BOTH = {"embed_tokens": [7, 3], "lm_head": [7, 3]}
OTHERS = {"embed_tokens": [7, 3], "lm_head": [3, 9, 4]}
# Model, rows of resized tables, what get_peft_model is given, and whether PEFT's merged model is that of its adapters.
ROWS: list[tuple[str, int, dict[str, Any], bool]] = [
    ("llama", 0, {"trainable_token_indices": [7, 3]}, True),
    ("llama", 0, {"trainable_token_indices": OTHERS}, True),
    ("llama", 0, {"trainable_token_indices": {"lm_head": [3]}, "modules_to_save": ["embed_tokens", "norm"]}, True),
    ("llama", 0, {"trainable_token_indices": [7, 3], "target_modules": ["q_proj", "lm_head"]}, True),
    ("llama", 157, {"trainable_token_indices": [3, 155]}, True),
    ("qwen2", 0, {"trainable_token_indices": [7, 3], "modules_to_save": ["norm"]}, True),
    ("qwen2", 0, {"trainable_token_indices": {"model.embed_tokens": [7, 3]}, "ensure_weight_tying": True}, True),
    ("qwen2", 0, {"trainable_token_indices": BOTH}, True),
    # PEFT computes with two tables here, and merges both into one.
    ("qwen2", 0, {"trainable_token_indices": OTHERS}, False),
    ("qwen2", 0, {"trainable_token_indices": {"lm_head": [7, 3]}}, False),
    ("qwen2", 0, {"trainable_token_indices": {"lm_head": [7]}, "modules_to_save": ["embed_tokens"]}, True),
    ("qwen2", 157, {"trainable_token_indices": [3, 155]}, True),
    ("gemma2", 0, {"trainable_token_indices": [7, 3], "use_dora": True}, True),  # which scales its embeddings
    ("gpt2", 0, {"trainable_token_indices": {"wte": [7, 3], "wpe": [1]}, "target_modules": ["c_attn"]}, True),
]


def adapted(model: Model, rows: int, settings: dict[str, Any], path: Path) -> tuple[Any, np.ndarray, np.ndarray]:
    """Write a folder of PEFT's with random rows. Return PEFT's model, tokens with these rows, and their logits."""
    own = model.fresh()
    if rows:
        own.resize_token_embeddings(rows)
    config = library.LoraConfig(
        **{"r": 4, "task_type": "CAUSAL_LM", "target_modules": ["k_proj"]} | copy.deepcopy(settings)
    )
    theirs = library.get_peft_model(own, config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter += torch.empty_like(parameter).normal_(0, 1 / math.sqrt(parameter.shape[-1]))
        tokens = model.tokens.copy()
        tokens[:, :5] = 3, 7, 9, 4, (rows or 150) - 2
        expected = theirs(torch.tensor(tokens), use_cache=False).logits.numpy()
    theirs.save_pretrained(path)
    assert any(name.endswith("trainable_tokens_delta") for name in safetensors.open_file(path / WEIGHTS))
    return theirs, tokens, expected


@pytest.mark.parametrize(("name", "rows", "settings", "merges"), ROWS, ids=str)
def test_rows_that_peft_writes_are_loaded_and_merged(
    name: str, rows: int, settings: dict[str, Any], merges: bool, models: dict[str, Model], tmp_path: Path
) -> None:
    model = models[name]
    theirs, tokens, expected = adapted(model, rows, settings, tmp_path / "adapter")
    same(jaxopt_llm.load_pretrained(model.folder, adapter=tmp_path / "adapter").logits(tokens), expected)

    convert.merge_folders(model.folder, tmp_path / "adapter", tmp_path / "merged", None, 10**9)
    merged = model.fresh(tmp_path / "merged")
    with torch.no_grad():
        same(merged(torch.tensor(tokens), use_cache=False).logits.numpy(), expected)
    if merges:
        wanted = theirs.merge_and_unload().state_dict()
        for key, found in merged.state_dict().items():
            assert (found - wanted[key]).abs().max() <= 1e-6 * wanted[key].abs().max(), key


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainable_token_indices": {"q_proj": [1]}}, "'q_proj' is not an embedding or the head of this decoder"),
        (
            {"trainable_token_indices": {"model.embed_tokens": [1]}, "modules_to_save": ["embed_tokens"]},
            "trainable_token_indices and modules_to_save both select model.embed_tokens",
        ),
    ],
    ids=str,
)
def test_other_rows_of_peft_are_refused(
    settings: dict[str, Any], message: str, models: dict[str, Model], tmp_path: Path
) -> None:
    model = models["llama"]
    config = library.LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", "target_modules": ["k_proj"]} | settings)
    library.get_peft_model(model.fresh(), config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=message):
        jaxopt_llm.load_pretrained(model.folder, adapter=tmp_path)


def test_rows_beyond_the_base_are_refused(models: dict[str, Model], tmp_path: Path) -> None:
    """The adapter was trained over larger tables, which were not saved with it."""
    model, own = models["llama"], models["llama"].fresh()
    own.resize_token_embeddings(157)
    config = library.LoraConfig(r=4, target_modules=["k_proj"], trainable_token_indices=[3, 155])
    library.get_peft_model(own, config).save_pretrained(tmp_path, save_embedding_layers=False)
    message = f"{tmp_path / WEIGHTS}: row 155 of trainable_token_indices: model.embed_tokens of the model has only 150"
    with pytest.raises(InputError, match=message):
        jaxopt_llm.load_pretrained(model.folder, adapter=tmp_path)


def write_tokenizer(file: Path) -> Path:
    words = {f"word{index}": index for index in range(150)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word9"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["word2"])
    tokenizer.save(str(file))
    return file


def test_no_run_begins_with_rows(models: dict[str, Model], tmp_path: Path) -> None:
    """Not even beside adapters, because checkpoints would lack them."""
    adapted(models["llama"], 0, {"trainable_token_indices": [7, 3]}, tmp_path)
    settings = {"model.pretrained": str(models["llama"].folder), "lora.pretrained": str(tmp_path)}
    with pytest.raises(InputError, match="rows of tables .*, which no run trains; merge it .*convert merge"):
        start_run(settings)


def test_codes_of_a_base_are_not_exported_as_trained(models: dict[str, Model], tmp_path: Path) -> None:
    """Matrices without an adapter beside trained parameters."""
    model = models["llama"]
    library.get_peft_model(model.fresh(), library.LoraConfig(r=4, target_modules=["k_proj"])).save_pretrained(tmp_path)
    settings = {"model.pretrained": str(model.folder), "lora.pretrained": str(tmp_path), "data.eos": "word2"}
    settings["data.tokenizer"] = str(write_tokenizer(tmp_path / "tokenizer.json"))
    write_run(tmp_path / "run", *start_run(settings | {"lora.base": "nf4", "training.trainable": ("final_norm",)}))
    convert.export_run(tmp_path / "run", tmp_path / "out", None, 10**9)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["modules_to_save"] == ["model.norm"]


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("targets", [None, ["lm_head"]], ids=str)
def test_rows_without_adapters_are_loaded_and_merged(
    name: str, targets: Any, models: dict[str, Model], tmp_path: Path
) -> None:
    """Of PEFT's own class for them. They begin no run, in which nothing would be trained."""
    model, tokens = models[name], models[name].tokens.copy()
    config = library.TrainableTokensConfig(token_indices=[7, 3], target_modules=targets, task_type="CAUSAL_LM")
    theirs = library.get_peft_model(model.fresh(), config).eval()
    tokens[:, :5] = 3, 7, 9, 4, 148
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter += torch.empty_like(parameter).normal_(0, 1 / math.sqrt(parameter.shape[-1]))
        expected = theirs(torch.tensor(tokens), use_cache=False).logits.numpy()
    theirs.save_pretrained(tmp_path / "adapter")
    same(jaxopt_llm.load_pretrained(model.folder, adapter=tmp_path / "adapter").logits(tokens), expected)
    convert.merge_folders(model.folder, tmp_path / "adapter", tmp_path / "merged", None, 10**9)
    with torch.no_grad():
        same(model.fresh(tmp_path / "merged")(torch.tensor(tokens), use_cache=False).logits.numpy(), expected)
    settings = {"model.pretrained": str(model.folder), "lora.pretrained": str(tmp_path / "adapter")}
    with pytest.raises(InputError, match="it has rows of tables .*convert merge"):
        start_run(settings)


def test_rows_are_rounded_to_the_dtype_of_the_table(models: dict[str, Model], tmp_path: Path) -> None:
    model = models["qwen2"]
    adapted(model, 0, {"trainable_token_indices": [7, 3]}, tmp_path / "adapter")
    model.fresh().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    found = jaxopt_llm.load_pretrained(tmp_path / "base", adapter=tmp_path / "adapter")
    table = found.params["non_layer"]["embedding"]["table"]
    stored = safetensors.open_file(tmp_path / "adapter" / WEIGHTS)
    delta = next(each for key, each in stored.items() if key.endswith("trainable_tokens_delta"))
    assert table.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(table)[[7, 3]], delta.read().astype(jnp.bfloat16))
