"""Text models of folders with a vision tower, made with the classes of transformers: read, written back to the bit."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxopt_llm
from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface import safetensors
from jaxopt_llm.checkpoint.peft.adapter_writer import write_adapter_folder
from jaxopt_llm.config import LoraConfig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEXT = {
    "vocab_size": 250,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIGLIP = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGLIP |= {"image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"}
PIXTRAL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
PIXTRAL |= {"image_size": 28, "patch_size": 14, "head_dim": 8, "model_type": "pixtral"}
QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
IMAGES = {"image_token_id": 240, "video_token_id": 241, "vision_start_token_id": 242, "vision_end_token_id": 243}
# Class, settings of the whole, of the text and of the vision tower.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma 3": (
        "Gemma3",
        {"mm_tokens_per_image": 4, "image_token_index": 240, "boi_token_index": 241, "eoi_token_index": 242},
        {"sliding_window": 4, "query_pre_attn_scalar": 12, "sliding_window_pattern": 2},
        SIGLIP,
    ),
    "mistral small 3": (
        "Mistral3",
        {"image_token_index": 240, "tie_word_embeddings": False},
        {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False},
        PIXTRAL,
    ),
    "ministral 3": (
        "Mistral3",
        {"image_token_index": 240, "tie_word_embeddings": True},
        {"model_type": "ministral3", "sliding_window": None, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "llama_4_scaling_beta": 0.1}
           | {"original_max_position_embeddings": 16}},
        PIXTRAL,
    ),
    "qwen 3 vl": (
        "Qwen3VL",
        IMAGES | {"tie_word_embeddings": False},
        {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        QWEN | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "qwen 2.5 vl": (
        "Qwen2_5_VL",
        IMAGES | {"tie_word_embeddings": True},
        {"rope_parameters": MROPE, "head_dim": None},
        QWEN | {"fullatt_block_indexes": [0], "window_size": 28},
    ),
}  # fmt: skip


def make(name: str, folder: Path) -> Any:
    prefix, whole, text, vision = CASES[name]
    text = {key: value for key, value in (TEXT | text).items() if value is not None or key == "sliding_window"}
    config = getattr(transformers, f"{prefix}Config")(text_config=text, vision_config=vision, **whole)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.empty_like(parameter).uniform_(-0.5, 0.5)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder, max_shard_size="20KB")
    (folder / "preprocessor_config.json").write_text('{"of": "the processor"}')
    return model


@pytest.mark.parametrize("name", CASES)
def test_a_text_model_is_trained_and_the_rest_is_kept(name: str, tmp_path: Path) -> None:
    model = make(name, tmp_path / "there")
    tokens = np.random.default_rng(0).integers(3, 230, (2, 20))
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(tokens), use_cache=False).logits.numpy()
    here = jaxopt_llm.load_pretrained(tmp_path / "there")
    assert np.abs(here.logits(tokens) - expected).max() <= 2e-5 * np.abs(expected).max()

    here.save_pretrained(tmp_path / "back")
    stored, back = (safetensors.open_folder(tmp_path / folder) for folder in ("there", "back"))
    assert stored.keys() == back.keys()
    for key, tensor in stored.items():
        np.testing.assert_array_equal(back[key].read(), tensor.read(), err_msg=key)
    assert (tmp_path / "back" / "preprocessor_config.json").read_text() == '{"of": "the processor"}'
    again, said = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(said.values()), said
    with torch.no_grad():
        found = again(input_ids=torch.tensor(tokens), use_cache=False).logits.numpy()
    np.testing.assert_array_equal(found, expected)
    read = jaxopt_llm.load_pretrained(tmp_path / "back")
    assert read.config == here.config
    jax.tree.map(np.testing.assert_array_equal, read.params, here.params)


@pytest.mark.parametrize("name", ["gemma 3", "qwen 3 vl"])
def test_adapters_of_the_text_are_those_of_peft_over_the_whole(name: str, tmp_path: Path) -> None:
    """Read from PEFT and merged here, written here and read by PEFT: the same logits."""
    peft = pytest.importorskip("peft")
    model = make(name, tmp_path / "there")
    tokens = np.random.default_rng(0).integers(3, 230, (2, 20))

    def logits(model: Any) -> np.ndarray:
        with torch.no_grad():
            return model(input_ids=torch.tensor(tokens), use_cache=False).logits.numpy()

    targets = r"model\.language_model\..*\.(q_proj|down_proj)"
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    expected = logits(adapted)
    here = jaxopt_llm.load_pretrained(tmp_path / "there", adapter=tmp_path / "adapter")
    assert np.abs(here.logits(tokens) - expected).max() <= 2e-5 * np.abs(expected).max()
    here.save_pretrained(tmp_path / "merged")
    merged = type(model).from_pretrained(tmp_path / "merged")
    assert np.abs(logits(merged) - expected).max() <= 2e-5 * np.abs(expected).max()

    folder = huggingface.open_model_folder(tmp_path / "there")
    lora = LoraConfig(rank=2, alpha=8.0, targets=("*attention/query", "*mlp/down"))
    write_adapter_folder(tmp_path / "back", here.params, folder.adapter_family, here.config, lora)
    again = peft.PeftModel.from_pretrained(type(model).from_pretrained(tmp_path / "there"), tmp_path / "back")
    assert np.abs(logits(again) - expected).max() <= 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize(("name", "prefix"), [("gemma 3", "language_model.model."), ("qwen 2.5 vl", "model.")])
def test_the_names_of_published_folders_are_read(name: str, prefix: str, tmp_path: Path) -> None:
    """In another form than the one that this version of transformers writes."""
    model = make(name, tmp_path / "there")
    here = jaxopt_llm.load_pretrained(tmp_path / "there")
    tensors = {key: value.clone() for key, value in model.state_dict().items() if not key.startswith("lm_head")}
    renamed = {key.replace("model.language_model.", prefix): value for key, value in tensors.items()}
    from safetensors.torch import save_file

    (tmp_path / "other").mkdir()
    save_file(renamed, tmp_path / "other" / "model.safetensors")
    (tmp_path / "other" / "config.json").write_text((tmp_path / "there" / "config.json").read_text())
    other = jaxopt_llm.load_pretrained(tmp_path / "other")
    jax.tree.map(np.testing.assert_array_equal, other.params, here.params)
    other.save_pretrained(tmp_path / "back")
    assert safetensors.open_folder(tmp_path / "back").keys() == renamed.keys()
    settings = json.loads((tmp_path / "back" / "config.json").read_text())
    assert settings["text_config"]["hidden_size"] == 32 and "vision_config" in settings
