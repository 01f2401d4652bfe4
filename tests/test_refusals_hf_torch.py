"""Folders of models that are not supported: one line that names the field, its value, and what can be done."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import command

from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.core.errors import InputError

transformers = pytest.importorskip("transformers")

# The class of the configuration, its settings, and what the message says.
REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("Gemma3nText", {}, ["model_type='gemma3n_text'", "the nearest is", "altup_num_inputs=4"]),
    ("Gemma3n", {}, ["model_type='gemma3n_text'", "the nearest is", "altup_num_inputs=4"]),
    ("GptOss", {}, ["model_type='gpt_oss'", "mixtral", "attention_bias=True", "swiglu_limit=7.0"]),
    ("Glm", {}, ["model_type='glm'", "the nearest is"]),
    ("MiniMax", {}, ["model_type='minimax'", "mixtral", "block_size=256"]),
    ("GraniteMoe", {}, ["model_type='granitemoe'", "the nearest is"]),
    ("Qwen2Moe", {}, ["model_type='qwen2_moe'", "the nearest is qwen3_moe", "shared_expert_intermediate_size=5632"]),
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


def test_commands_end_with_one_line(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", "GraniteMoe", {})
    found = command("generate", "--checkpoint", folder, "--prompt", "a")
    assert (found.returncode, found.stdout) == (2, "")
    (line,) = found.stderr.splitlines()
    assert "model_type='granitemoe'" in line
