"""llama_8b.py for a GPU of 80 GB: 8.1 bytes a parameter, moments in 8 bits, and of each block its input alone is kept.

Hardware: one H100. As compiled for it, 66.3 GiB at the peak, and 26% more FLOPs than the model needs.
"""

from pathlib import Path

from jaxopt_llm.config import Config, cli, fields


def get_config() -> Config:
    return fields.replace_fields(
        cli.load_recipe(str(Path(__file__).with_name("llama_8b.py"))),
        {
            "optimizer.state_dtype": "int8",
            "remat.policy": "full",
            "xla.options": ("xla_gpu_memory_limit_slop_factor=150",),  # see llama_8b_two_rows.py
        },
    )
