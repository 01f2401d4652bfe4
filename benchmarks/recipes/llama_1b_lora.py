"""Adapters over llama_1b.py, its base in bf16.

Hardware: one GPU of 80 GB. As compiled for an H200, 44.3 GiB at the peak.
"""

from pathlib import Path

from jaxopt_llm.config import Config, cli, fields


def get_config() -> Config:
    return fields.replace_fields(
        cli.load_recipe(str(Path(__file__).with_name("llama_1b.py"))),
        {
            "lora.rank": 16,
        },
    )
