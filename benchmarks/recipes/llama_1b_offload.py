"""llama_1b.py with its moments in the memory of the host.

Hardware: one GPU of 80 GB. As compiled for an H200, 48.4 GiB at the peak.
"""

from pathlib import Path

from jaxopt_llm.config import Config, cli, fields


def get_config() -> Config:
    return fields.replace_fields(
        cli.load_recipe(str(Path(__file__).with_name("llama_1b.py"))),
        {
            "offload.optimizer": True,
        },
    )
