"""Text models of folders with a vision tower, made with the classes of transformers: read, written back to the bit."""

import json
from pathlib import Path
from typing import Any

import codes
import jax
import numpy as np
import pytest

import jaxopt_llm
from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.checkpoint.huggingface import find_family, safetensors
from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.peft.adapter_writer import write_adapter_folder
from jaxopt_llm.config import LoraConfig
from jaxopt_llm.core.errors import InputError

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
PARTIAL_MROPE = MROPE | {"mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5}
IMAGES = {"image_token_id": 240, "video_token_id": 241, "vision_start_token_id": 242, "vision_end_token_id": 243}
COHERE2 = {"model_type": "cohere2", "layer_norm_eps": 1e-2, "sliding_window": 4}
# Class, settings of the whole, of the text and of the vision tower.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma 3": (
        "Gemma3",
        {"mm_tokens_per_image": 4, "image_token_index": 240, "boi_token_index": 241, "eoi_token_index": 242},
        {"sliding_window": 4, "query_pre_attn_scalar": 12, "sliding_window_pattern": 2},
        SIGLIP,
    ),
    "gemma 4": (
        "Gemma4",
        {"image_token_id": 240, "video_token_id": 241, "audio_config": None},
        {"sliding_window": 4, "global_head_dim": 12, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
        | {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
        {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
        | {"num_key_value_heads": 2, "patch_size": 4, "position_embedding_size": 64},
    ),
    "gemma 4, shared keys": (
        "Gemma4",
        {"image_token_id": 240, "video_token_id": 241, "audio_config": None},
        {"sliding_window": 4, "global_head_dim": 12, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 6}
        | {"vocab_size_per_layer_input": 250, "use_double_wide_mlp": True, "use_bidirectional_attention": "vision"}
        | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", *["full_attention"] * 3]},
        {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
        | {"num_key_value_heads": 2, "patch_size": 4, "position_embedding_size": 64},
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
    "qwen 3 vl moe": (
        "Qwen3VLMoe",
        IMAGES | {"tie_word_embeddings": False},
        {"rope_parameters": MROPE | {"mrope_interleaved": True}, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 20, "mlp_only_layers": [0]},
        QWEN | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "qwen 3 vl moe tied, square": (
        "Qwen3VLMoe",
        IMAGES | {"tie_word_embeddings": True},
        {"rope_parameters": MROPE | {"mrope_interleaved": True}, "num_experts": 5, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 16, "decoder_sparse_step": 2, "num_hidden_layers": 4, "tie_word_embeddings": True},
        QWEN | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "qwen 3.5": (
        "Qwen3_5",
        IMAGES | {"tie_word_embeddings": False},
        {"rope_parameters": PARTIAL_MROPE, "num_hidden_layers": 4} | DELTA,
        QWEN | {"num_position_embeddings": 16},
    ),
    "qwen 3.5 moe": (
        "Qwen3_5Moe",
        IMAGES | {"tie_word_embeddings": False},
        {"rope_parameters": PARTIAL_MROPE, "num_hidden_layers": 5, "num_experts": 4, "num_experts_per_tok": 2} | DELTA
        | {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 12, "intermediate_size": None},
        QWEN | {"num_position_embeddings": 16},
    ),
    "qwen 2.5 vl": (
        "Qwen2_5_VL",
        IMAGES | {"tie_word_embeddings": True},
        {"rope_parameters": MROPE, "head_dim": None},
        QWEN | {"fullatt_block_indexes": [0], "window_size": 28},
    ),
    "qwen 2 vl": (
        "Qwen2VL",
        IMAGES | {"tie_word_embeddings": False},
        {"rope_parameters": MROPE, "head_dim": None},
        {"depth": 1, "embed_dim": 16, "mlp_ratio": 2, "num_heads": 2, "hidden_size": 32},
    ),
    "llama 4": (
        "Llama4",
        {"image_token_index": 240, "boi_token_index": 241, "eoi_token_index": 242},
        {"num_local_experts": 4, "intermediate_size_mlp": 40, "attention_chunk_size": 5, "no_rope_layer_interval": 2}
        | {"floor_scale": 3, "attn_scale": 0.6, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"image_size": 28, "patch_size": 14, "vision_output_dim": 24, "projector_input_dim": 24}
        | {"projector_output_dim": 24, "pixel_shuffle_ratio": 0.5},
    ),
    "aya vision": (
        "AyaVision",
        {"image_token_index": 240},
        COHERE2 | {"rope_theta": 50_000, "sliding_window_pattern": 4, "logit_scale": 0.25},
        SIGLIP,
    ),
    "command a vision": (
        "Cohere2Vision",
        {"image_token_id": 240, "alignment_intermediate_size": 24},
        COHERE2 | {"rope_theta": 100.0, "sliding_window_pattern": 2, "logit_scale": 0.3},
        SIGLIP,
    ),
}  # fmt: skip


def read_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Return the logits of a whole model. Cohere's classes with a vision tower leave out the factor of the text's."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(tokens), use_cache=False).logits.numpy()
    return logits * np.float32(getattr(model.config.text_config, "logit_scale", 1))


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
    expected = read_logits(model, tokens)
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
    np.testing.assert_array_equal(read_logits(again, tokens), expected)
    read = jaxopt_llm.load_pretrained(tmp_path / "back")
    assert read.config == here.config
    jax.tree.map(np.testing.assert_array_equal, read.params, here.params)


@pytest.mark.parametrize("name", ["aya vision", "command a vision"])
def test_the_text_of_cohere_is_that_of_its_own_class(name: str, tmp_path: Path) -> None:
    """With the factor of the logits, which the class of the whole model leaves out."""
    whole = make(name, tmp_path / "there")
    text = transformers.Cohere2ForCausalLM(whole.config.text_config).eval()
    text.model.load_state_dict(whole.model.language_model.state_dict())
    text.lm_head.load_state_dict(whole.lm_head.state_dict())
    tokens = np.random.default_rng(0).integers(3, 230, (2, 20))
    with torch.no_grad():
        expected = text(torch.tensor(tokens), use_cache=False).logits.numpy()
    found = jaxopt_llm.load_pretrained(tmp_path / "there").logits(tokens)
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()


def test_every_family_without_a_class_of_text_alone_is_here_twice() -> None:
    classes = [f"{prefix}ForConditionalGeneration" for prefix, *_ in CASES.values()]
    of_whole = [each for each in find_family.FAMILIES if each.architecture.endswith("ForConditionalGeneration")]
    assert of_whole and all(classes.count(family.architecture) >= 2 for family in of_whole)


def test_codes_of_the_text_and_of_the_rest_are_written_as_their_values(tmp_path: Path) -> None:
    model = make("mistral small 3", tmp_path / "there")
    values = codes.quantise_folder(tmp_path / "there", tmp_path / "codes", codes.KINDS["int4 with zero-points"])
    here = jaxopt_llm.load_pretrained(tmp_path / "codes")
    here.save_pretrained(tmp_path / "back")
    back = safetensors.open_folder(tmp_path / "back")
    assert back.keys() == values.keys()
    for key, value in values.items():
        np.testing.assert_array_equal(back[key].read(), value.astype(np.float32), err_msg=key)
    assert "quantization_config" not in (tmp_path / "back" / "config.json").read_text()
    _, said = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(said.values()), said


# Which adapters PEFT adds; of experts, as parameters.
ADAPTED: dict[str, dict[str, Any]] = {
    "gemma 3": {"target_modules": r"model\.language_model\..*\.(q_proj|down_proj)"},
    "qwen 3 vl": {"target_modules": r"model\.language_model\..*\.(q_proj|down_proj)"},
    "qwen 3 vl moe": {
        "target_modules": r"model\.language_model\..*\.q_proj",
        "target_parameters": ["0.mlp.up_proj.weight", "experts.gate_up_proj", "experts.down_proj"],
    },
}


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_of_the_text_are_those_of_peft_over_the_whole(name: str, tmp_path: Path) -> None:
    """Read from PEFT and merged here, written here and read by PEFT: the same logits."""
    peft = pytest.importorskip("peft")
    model = make(name, tmp_path / "there")
    tokens = np.random.default_rng(0).integers(3, 230, (2, 20))

    def logits(model: Any) -> np.ndarray:
        with torch.no_grad():
            return model(input_ids=torch.tensor(tokens), use_cache=False).logits.numpy()

    settings = peft.LoraConfig(r=2, init_lora_weights=False, trainable_token_indices=[7, 3], **ADAPTED[name])
    adapted = peft.get_peft_model(model, settings)
    tokens[:, :4] = 7, 3, 8, 4
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "trainable_tokens" in name:
                parameter.mul_(-1)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = logits(adapted)
    here = jaxopt_llm.load_pretrained(tmp_path / "there", adapter=tmp_path / "adapter")
    assert np.abs(here.logits(tokens) - expected).max() <= 2e-5 * np.abs(expected).max()
    here.save_pretrained(tmp_path / "merged")
    merged = type(model).from_pretrained(tmp_path / "merged")
    assert np.abs(logits(merged) - expected).max() <= 2e-5 * np.abs(expected).max()

    family = huggingface.open_model_folder(tmp_path / "there").adapter_family
    lora = LoraConfig(rank=2, alpha=8.0, targets=("*attention/query", "*mlp/down"))
    write_adapter_folder(tmp_path / "back", here.params, family, here.config, lora)
    base = type(model).from_pretrained(tmp_path / "there")
    with torch.no_grad():  # the rows are written with the merged model only
        base.get_input_embeddings().weight.copy_(merged.get_input_embeddings().weight)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "back")
    assert np.abs(logits(again) - expected).max() <= 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("start", ["language_model.model.", "model."])
def test_adapters_with_other_names_of_the_text_are_read(start: str, tmp_path: Path) -> None:
    """Those of an older version of transformers, and those that were trained over the text alone."""
    from safetensors.torch import load_file, save_file

    peft = pytest.importorskip("peft")
    model, read = make("mistral small 3", tmp_path / "there"), pretrained.open_adapter
    spelt = "0.self_attn.v_proj"
    settings = peft.LoraConfig(
        r=2, init_lora_weights=False, target_modules=r"model\.language_model\..*(v_proj|embed_tokens)"
    )
    peft.get_peft_model(model, settings).save_pretrained(tmp_path / "new", save_embedding_layers=True)
    tensors = load_file(tmp_path / "new" / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "new" / "adapter_config.json").read_text())
    (tmp_path / "other").mkdir()
    renamed = {key.replace("model.language_model.", start): value for key, value in tensors.items()}
    save_file(renamed, tmp_path / "other" / "adapter_model.safetensors")
    for folder, name in (("new", "model.language_model."), ("other", start)):
        changed = {"target_modules": ["v_proj", "embed_tokens"], "alpha_pattern": {f"{name}layers.{spelt}": 2}}
        (tmp_path / folder / "adapter_config.json").write_text(json.dumps(settings | changed))

    there = huggingface.open_model_folder(tmp_path / "there")
    new, other = (read(tmp_path / name, there.adapter_family, there.config, "") for name in ("new", "other"))
    other.check_base(there)
    assert other.lora == new.lora and other.parts.keys() == new.parts.keys() and other.base.keys()
    for key, (part,) in new.parts.items():
        (found,) = other.parts[key]
        assert found.factors.has_values_of(part.factors)
    assert len({part.factors.scale for (part,) in other.parts.values()}) == 2


def test_experts_in_the_order_of_published_folders_are_read_and_written(tmp_path: Path) -> None:
    """Qwen3-VL-MoE's are [experts, in, out] there; transformers 5 turns them, and saves [experts, out, in]."""
    from safetensors.torch import save_file

    model = make("qwen 3 vl moe", tmp_path / "there")
    turned = {
        key: value.transpose(1, 2).contiguous() if ".mlp.experts." in key else value
        for key, value in model.state_dict().items()
    }
    (tmp_path / "published").mkdir()
    save_file(turned, tmp_path / "published" / "model.safetensors", {"format": "pt"})
    (tmp_path / "published" / "config.json").write_text((tmp_path / "there" / "config.json").read_text())
    here, other = (jaxopt_llm.load_pretrained(tmp_path / folder) for folder in ("there", "published"))
    jax.tree.map(np.testing.assert_array_equal, other.params, here.params)

    other.save_pretrained(tmp_path / "back")
    back = safetensors.open_folder(tmp_path / "back")
    assert back.keys() == turned.keys()
    for key, value in turned.items():
        np.testing.assert_array_equal(back[key].read(), value.numpy(), err_msg=key)
    again = type(model).from_pretrained(tmp_path / "back").state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(again[key], value), key


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


@pytest.mark.parametrize("name", ["qwen 2 vl", "qwen 2.5 vl", "qwen 3 vl"])
def test_the_older_form_of_the_settings_is_read_and_written(name: str, tmp_path: Path) -> None:
    """In published folders the fields of Qwen2-VL's and Qwen2.5-VL's text lie beside `vision_config`.

    The sections of RoPE are for positions of images: a written folder needs them, though text does not.
    """
    from safetensors.torch import save_file

    model, flat = make(name, tmp_path / "there"), name != "qwen 3 vl"
    names = {"model.language_model.": "model.", "model.visual.": "visual."} if flat else {}
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    for new, old in names.items():
        tensors = {key.replace(new, old): value for key, value in tensors.items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    settings = json.loads((tmp_path / "there" / "config.json").read_text())
    text = settings.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {**rope, "type": "mrope"} if flat else rope}
    settings = {"text_config": None, **text, **settings} if flat else settings | {"text_config": text}
    (tmp_path / "published").mkdir()
    save_file(tensors, tmp_path / "published" / "model.safetensors", {"format": "pt"})
    (tmp_path / "published" / "config.json").write_text(json.dumps(settings))

    here, published = (jaxopt_llm.load_pretrained(tmp_path / folder) for folder in ("there", "published"))
    jax.tree.map(np.testing.assert_array_equal, published.params, here.params)
    published.save_pretrained(tmp_path / "back")
    assert safetensors.open_folder(tmp_path / "back").keys() == tensors.keys()
    again, said = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(said.values()), said
    found = again.config.text_config.rope_parameters
    assert (found["mrope_section"], found["rope_theta"]) == ([2, 1, 1], 100.0)
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert back["vision_config"] == settings["vision_config"] and bool(back["text_config"]) == (not flat)


def test_tensors_of_multi_token_prediction_are_named_and_kept(tmp_path: Path) -> None:
    """Beside the text of a folder with a vision tower, and in a folder of text alone."""
    from safetensors.torch import load_file, save_file

    make("qwen 3.5", tmp_path / "there")
    tensors = {}
    for file in [*(tmp_path / "there").glob("*.safetensors")]:
        tensors |= load_file(file)
        file.unlink()
    (tmp_path / "there" / "model.safetensors.index.json").unlink()
    tensors |= {"mtp.fc.weight": torch.ones(32, 64), "mtp.norm.weight": torch.ones(32)}
    alone = {
        key.replace("model.language_model.", "model."): each for key, each in tensors.items() if "visual" not in key
    }
    settings = json.loads((tmp_path / "there" / "config.json").read_text())
    text = settings["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"]}
    (tmp_path / "alone").mkdir()
    for name, config, each in (("there", settings, tensors), ("alone", text, alone)):
        save_file(each, tmp_path / name / "model.safetensors", {"format": "pt"})
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (line,) = huggingface.open_model_folder(tmp_path / name).describe_mtp()
        assert line == f"{tmp_path / name}: the 2 tensors of multi-token prediction (mtp.fc.weight, ...) are not read"
        jaxopt_llm.load_pretrained(tmp_path / name).save_pretrained(tmp_path / f"{name} back")
        back = safetensors.open_folder(tmp_path / f"{name} back")
        assert back.keys() == each.keys()
        np.testing.assert_array_equal(back["mtp.fc.weight"].read(), 1)


def test_a_text_model_with_other_names_is_refused_by_them(tmp_path: Path) -> None:
    """As in SmolVLM's folders."""
    from safetensors.torch import save_file

    tensors = make("mistral small 3", tmp_path / "there").state_dict()
    renamed = {key.replace(".language_model.", ".text_model."): value for key, value in tensors.items()}
    (tmp_path / "other").mkdir()
    save_file(renamed, tmp_path / "other" / "model.safetensors")
    (tmp_path / "other" / "config.json").write_text((tmp_path / "there" / "config.json").read_text())
    with pytest.raises(
        InputError, match="other: the names of its tensors, such as '.*', are not those of a text model"
    ):
        jaxopt_llm.load_pretrained(tmp_path / "other")
