"""Adapters over Llama 3 8B, its base in bf16: a row of 8192 tokens a step, nothing computed again but in attention.

Hardware: one GPU of 80 GB. As compiled for an H200, 52.6 GiB at the peak.
"""

from pathlib import Path

from jaxopt_llm.config import Config, cli, fields


def get_config() -> Config:
    return fields.replace_fields(
        cli.load_recipe(str(Path(__file__).with_name("llama_8b.py"))),
        {
            "lora.rank": 16,
            "optimizer.state_dtype": "float32",
        },
    )
