"""llama_1b.py with its blocks' products in fp8.

Hardware: one H100 or H200. As compiled for an H200, 50.5 GiB at the peak.
"""

from pathlib import Path

from jaxopt_llm.config import Config, cli, fields


def get_config() -> Config:
    return fields.replace_fields(
        cli.load_recipe(str(Path(__file__).with_name("llama_1b.py"))),
        {
            "precision.matmul": "fp8",
        },
    )
