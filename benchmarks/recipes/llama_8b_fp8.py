"""llama_8b.py with its blocks' products in fp8.

Hardware: one H200. As compiled, 102.5 GiB at the peak.
"""

from pathlib import Path

from jaxopt_llm.config import Config, cli, fields


def get_config() -> Config:
    return fields.replace_fields(
        cli.load_recipe(str(Path(__file__).with_name("llama_8b.py"))),
        {
            "precision.matmul": "fp8",
        },
    )
