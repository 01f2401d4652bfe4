"""Folders of models that are not supported: one line that names the field, its value, and what can be done."""

import contextlib
import json
from pathlib import Path
from typing import Any

import folders
import numpy as np
import pytest
import texts
from commands import command, some_text

import jaxopt_llm
from jaxopt_llm import convert
from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface.codecs import Unsupported
from jaxopt_llm.checkpoint.huggingface.family import list_differences
from jaxopt_llm.checkpoint.huggingface.find_family import FAMILIES
from jaxopt_llm.core.errors import InputError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# The class of the configuration, its settings, and what the message says.
REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("Gemma3nText", {}, ["model_type='gemma3n_text'", "the nearest is", "altup_num_inputs=4"]),
    ("Gemma3n", {}, ["model_type='gemma3n_text'", "the nearest is", "altup_num_inputs=4"]),
    ("StableLm", {"qk_layernorm": True}, ["qk_layernorm=True", "each head has its own scale"]),
    ("StableLm", {"use_parallel_residual": True}, ["use_parallel_residual=True", "read the same input"]),
    ("Jais2", {}, ["model_type='jais2'", "the nearest is"]),
    ("MiniMax", {}, ["model_type='minimax'", "mixtral", "block_size=256"]),
    ("GPTNeoX", {}, ["model_type='gpt_neox'", "use_parallel_residual=True"]),
    (
        "Qwen3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
        ["partial_rotary_factor=0.75", "RoPE on a part of each head"],
    ),
    ("SeedOss", {"attention_bias": False, "attention_out_bias": True}, ["attention_out_bias=True", "biases of other"]),
    ("Qwen3", {"attention_bias": True}, ["attention_bias=True", "biases of the attention projections"]),
    ("Olmoe", {"clip_qkv": 8.0}, ["clip_qkv=8.0", "cut to a range"]),
    ("GPT2", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx=True", "divided by"]),
]


def write_config(path: Path, name: str, settings: dict[str, Any]) -> Path:
    path.mkdir()
    config = getattr(transformers, f"{name}Config")(**settings)
    (path / "config.json").write_text(config.to_json_string(use_diff=False))
    return path


@pytest.mark.parametrize(
    ("name", "settings", "parts"), REFUSED, ids=[f"{name}-{number}" for number, (name, *_) in enumerate(REFUSED)]
)
def test_an_unsupported_model_is_refused_with_a_way_out(
    name: str, settings: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    folder = write_config(tmp_path / "model", name, settings)
    with pytest.raises(InputError) as error:
        huggingface.read_config(folder)
    message = str(error.value)
    assert message.startswith(f"{folder / 'config.json'}: ") and "\n" not in message and len(message) < 900
    assert not [part for part in parts if part not in message], message
    assert "docs/pretrained.md" in message and "jaxopt_llm.initialize (docs/guides/any_model.md)" in message


def test_a_renamed_family_is_not_read_in_silence(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", "Llama", {})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"model_type": "llamafied"}))
    with pytest.raises(
        InputError, match=r"the nearest is .*llama.*, which has the same fields, but perhaps other layers"
    ):
        huggingface.read_config(folder)


def test_a_renamed_family_is_offered_and_read_on_request(tmp_path: Path) -> None:
    """If the tensors fit, too. What is written from it has the name of the family."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 258}
    config = transformers.Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.Qwen2ForCausalLM(config).eval()
    model.save_pretrained(folder := tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"model_type": "fourth", "architectures": ["FourthForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(settings))
    # Not of llama, whose class has biases everywhere or nowhere.
    offer = r"Its fields and tensors are those of qwen2: if its class computes the same, give --model.family qwen2"
    with pytest.raises(InputError, match=offer):
        huggingface.read_config(folder)
    family, read = huggingface.read_config(folder, "qwen2")
    assert (family.model_type, read.biases) == ("qwen2", "qkv")

    options = ("--training.steps", 1, "--training.batch-size", 8, "--training.sequence-length", 16)
    options += (
        "--optimizer.learning-rate",
        1e-30,
        "--optimizer.weight-decay",
        0,
        "--data.tokenizer",
        tmp_path / "t.json",
    )
    texts.write_byte_tokenizer(tmp_path / "t.json")
    options += (*some_text(tmp_path / "a.jsonl"), "--evaluation.batches", 1, "--run.directory", tmp_path / "run")
    options += ("--lora.rank", 2, "--config", "finetune.py", "--data.content", "text", "--model.pretrained", folder)
    refused = command("train", *options)
    assert refused.returncode == 2 and "--model.family qwen2" in refused.stderr
    found = command("train", *options, "--model.family", "qwen2")
    assert found.returncode == 0, found.stderr
    found = command("convert", "merge", "--checkpoint", tmp_path / "run", "--to", tmp_path / "merged")
    assert found.returncode == 0, found.stderr
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.model_type == "qwen2"
    for name, values in model.state_dict().items():
        np.testing.assert_array_equal(merged.state_dict()[name].numpy(), values.numpy())


def test_every_command_reads_a_renamed_family_on_request(tmp_path: Path) -> None:
    """And the family that was named is written, although another one comes first and fits, too."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 258}
    config = transformers.MistralConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=None
    )
    model = transformers.MistralForCausalLM(config).eval()
    model.save_pretrained(folder := tmp_path / "model")
    texts.write_byte_tokenizer(folder / "tokenizer.json")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"model_type": "fourth", "architectures": ["Fourth"]}))

    def check_is_own(path: Path) -> None:
        written = transformers.AutoModelForCausalLM.from_pretrained(path)
        assert type(written) is transformers.MistralForCausalLM
        for name, values in model.state_dict().items():
            np.testing.assert_array_equal(written.state_dict()[name].numpy(), values.numpy())

    with pytest.raises(InputError, match="give family mistral"):
        jaxopt_llm.load_pretrained(folder)
    loaded = jaxopt_llm.load_pretrained(folder, family="mistral")
    tokens = np.arange(20).reshape(2, 10)
    with torch.no_grad():
        np.testing.assert_allclose(loaded.logits(tokens), model(torch.tensor(tokens)).logits, rtol=0, atol=1e-5)
    loaded.save_pretrained(tmp_path / "saved")
    check_is_own(tmp_path / "saved")

    folders.make_run(folder, tmp_path / "run", "mistral")
    convert.export_run(tmp_path / "run", tmp_path / "exported", None, 10**9)
    check_is_own(tmp_path / "exported")
    with pytest.raises(InputError, match=r"family=mistral: .*run is a run, which has no model_type; leave it out"):
        jaxopt_llm.load_pretrained(tmp_path / "run", family="mistral")

    peft = pytest.importorskip("peft")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    convert.merge_folders(folder, tmp_path / "adapter", tmp_path / "merged", None, 10**9, family="mistral")
    model = transformers.MistralForCausalLM.from_pretrained(tmp_path / "saved")  # B is zero
    check_is_own(tmp_path / "merged")

    documents = some_text(tmp_path / "a.jsonl")
    for arguments in (("generate", "--prompt", "a", "--tokens", 2), ("evaluate", "--batches", 1, *documents)):
        found = command(*arguments, "--checkpoint", folder, "--adapter", tmp_path / "adapter", "--family", "mistral")
        assert found.returncode == 0, found.stderr
        found = command(*arguments, "--checkpoint", tmp_path / "run", "--family", "mistral")
        assert (found.returncode, "is a run, which has no model_type" in found.stderr) == (2, True)


@pytest.mark.parametrize(
    ("changes", "name", "message"),
    [
        ({"model_type": "fourth"}, "lama", "model.family=lama: no such family; choose one of .*llama"),
        ({}, "mistral", "model.family=mistral: its model_type is 'llama', which is read; leave model.family out"),
        (
            {"architectures": ["LlamaModel", "LlamaForCausalLM"]},
            "",
            "only LlamaForCausalLM or LlamaForSequenceClassification is read",
        ),
        ({"model_type": ["llama"]}, "", r"model_type=\['llama'\]: no family of this name is read"),
    ],
)
def test_a_family_that_is_named_for_nothing_is_refused(
    changes: dict[str, object], name: str, message: str, tmp_path: Path
) -> None:
    folder = write_config(tmp_path / "model", "Llama", {})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(InputError, match=message):
        huggingface.read_config(folder, name)


@pytest.mark.parametrize("architectures", [None, [], ["LlamaForCausalLM", "Other"]])
def test_the_class_may_be_absent_or_the_first_of_several(architectures: list[str] | None, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", "Llama", {})
    settings = json.loads((folder / "config.json").read_text()) | {"architectures": architectures}
    (folder / "config.json").write_text(json.dumps(settings))
    assert huggingface.read_config(folder)[0].model_type == "llama"


def test_heads_are_tied_where_transformers_ties_them(tmp_path: Path) -> None:
    """If config.json does not say it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = [(family, each) for family in FAMILIES for each in family.model_types if each in CONFIG_MAPPING]
    for family, model_type in known:
        is_of_whole = family.architecture.endswith("ForConditionalGeneration")  # the class that has the head
        own = CONFIG_MAPPING[model_type.removesuffix("_text") if is_of_whole else model_type]()
        if hasattr(own, "tie_word_embeddings"):  # the text of some models has it in the whole config.json
            assert family.defaults["tie_word_embeddings"] == own.tie_word_embeddings, model_type


# What a class needs beside its own defaults, to describe a model that is read.
READABLE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "glm4_moe": {"head_dim": 64},
    "granitemoehybrid": {"layer_types": ["attention"] * 32, "num_local_experts": 0},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
}
# The whole config.json of a larger model has the first; with another value of the second, tensors have other shapes.
NOT_COMPARED = {"tie_word_embeddings", "num_key_value_heads"}


def test_a_field_that_is_missing_has_the_value_of_the_class_or_is_refused() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    compared: dict[str, int] = {}
    for model_type, family in {name: each for each in FAMILIES for name in each.model_types}.items():
        if model_type not in CONFIG_MAPPING or model_type == "gemma4_text":  # its own defaults are not read
            continue
        changed = READABLE.get(model_type, {})
        own = CONFIG_MAPPING[model_type](**changed).to_json_string(use_diff=False)
        settings = {name: value for name, value in json.loads(own).items() if value is not None}
        expected = family.read(settings)
        for name in settings.keys() - changed.keys() - NOT_COMPARED:
            with contextlib.suppress(Unsupported):
                found = family.read({key: value for key, value in settings.items() if key != name})
                assert found == expected or not list_differences(expected, found), (model_type, name)
                compared[model_type] = compared.get(model_type, 0) + 1
    assert len(compared) > 40 and min(compared.values()) > 10, compared


def test_commands_end_with_one_line(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", "MiniMax", {})
    found = command("generate", "--checkpoint", folder, "--prompt", "a")
    assert (found.returncode, found.stdout) == (2, "")
    (line,) = found.stderr.splitlines()
    assert "model_type='minimax'" in line
