"""Llama 3 8B on one H200, all of it trained by AdamW: 8,030,261,248 parameters, a row of 8192 tokens a step.

10 bytes a parameter on the GPU: masters in float32, moments and gradients in bfloat16. Only attention's scores are
computed again, in its backward: 2% of the FLOPs that the model needs. With moments in float32 only remat `full` fits,
with 26%.

Hardware: one H200. As compiled, 112.5 GiB at the peak. It is not for learning.
"""

from pathlib import Path

from jaxopt_llm.config import Config, cli, fields

RECIPE = Path(__file__).parents[2] / "configs" / "llama3_8b.py"


def get_config() -> Config:
    return fields.replace_fields(
        cli.load_recipe(str(RECIPE)),
        {
            "mesh.fsdp": 1,
            "data.documents_per_row": 1,
            "training.batch_size": 1,
            "optimizer.state_dtype": "bfloat16",
            "precision.reduce_dtype": "bfloat16",
            "remat.policy": "none",
        },
    )
