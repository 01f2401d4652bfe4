"""A small model folder in the place of the one that a reader of a guide has downloaded."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import toy
from folders import params
from texts import train_tokenizer
from tokenizers import Tokenizer, processors

from jaxopt_llm.checkpoint.huggingface.model_folder import write_model_folder
from jaxopt_llm.config import ModelConfig, RopeConfig
from jaxopt_llm.data.reading.source import read_standard_library

# In the order of Llama 3: the ids of its special tokens, too, follow those of its words.
SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
# Like the template of Llama 3.2: a system turn that is always present and has today's date.
TEMPLATE = """\
{{- bos_token }}
{%- set ns = namespace(day=date_string or strftime_now('%d %b %Y')) %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + ns.day + '\\n\\n' }}
{%- if messages[0]['role'] == 'system' %}
    {{- messages[0]['content'] | trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
MODEL = ModelConfig(
    vocabulary_size=512,
    width=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp_width=128,
    norm_epsilon=1e-5,
    rope=RopeConfig(theta=500_000.0, scaling="llama3", factor=32.0, original_length=8192),
)

# config.json of Llama-3.2-1B-Instruct, as far as the sizes of its arrays and its computation need it.
SETTINGS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128_256},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True},
    **{"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "max_position_embeddings": 131_072},
    "rope_scaling": {
        **{"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    **{"attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16"},
    **{"bos_token_id": 128_000, "eos_token_id": [128_001, 128_008, 128_009]},
}


def write_settings_of_llama(path: Path) -> None:
    """Write config.json of Llama-3.2-1B-Instruct, without weights."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SETTINGS))


def write_llama(path: Path) -> Path:
    """Write random weights in bfloat16, with the files and the fields of Llama-3.2-1B-Instruct."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = params(MODEL, jnp.bfloat16)
    table = arrays["non_layer"]["embedding"]["table"]
    # Rows as different as those of a trained model: an answer is then not the same token again and again.
    table[:] = np.random.default_rng(0).normal(scale=0.3, size=table.shape)
    write_model_folder(path, jax.device_put(arrays, toy.placement().replicated), MODEL)
    settings = json.loads((path / "config.json").read_text())
    ends = {"bos_token_id": 0, "eos_token_id": [1, 4]}
    settings |= {"max_position_embeddings": 131_072, "initializer_range": 0.02, "use_cache": True, **ends}
    (path / "config.json").write_text(json.dumps(settings, indent=2))
    (path / "generation_config.json").write_text(json.dumps(ends | {"do_sample": True, "temperature": 0.6}))
    words = [source.content.decode(errors="ignore") for source in list(read_standard_library())[:40]]
    train_tokenizer(path / "tokenizer.json", words, MODEL.vocabulary_size, SPECIAL)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(f"{SPECIAL[0]} $0", special_tokens=[(SPECIAL[0], 0)])
    tokenizer.save(str(path / "tokenizer.json"))
    declared = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[-1], "model_max_length": 131_072}
    declared |= {"chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(declared))
    return path
