"""Llama 2 70B (Touvron et al. 2023, arXiv:2307.09288) in a pipeline: 68,976,648,192 parameters.

    python -m jaxopt_llm.train --config llama2_70b_pipeline.py --data.paths prepared --data.tokenizer tokenizer.json

Hardware: 16 hosts with 8 GPUs of 80 GB each. Run the command on every host (scripts/slurm.sbatch). Memory and
communication per GPU and step, as compiled by

    python -m jaxopt_llm.plan --config llama2_70b_pipeline.py --gpu h100 --hosts 16 --gpus-per-host 8

are 45.3 GiB at the peak and 3,254.0 GiB sent. The step compiles in 20 s on two cores.

By the roofline of `plan` it takes 27.5 s (jax 0.11.2), about as long as llama2_70b.py on the same GPUs.

The batch is the paper's: 1024 rows of 4096 tokens. The layout is Megatron-LM's. Between hosts it is an interleaved
pipeline with chunks of one layer, five chunks per stage (Narayanan et al. 2021, arXiv:2104.04473). Inside each host it
is tensor parallelism, which also divides the sequence between its matmuls (Korthikanti et al. 2022, arXiv:2205.05198).
With 256 microbatches, 1% of a step is idle. A chunk stores what its backward reads. With --pipeline.residuals recompute
a step needs 15 GiB and a third more matmuls.
"""

from jaxopt_llm.config import (
    Config,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    RematConfig,
    RunConfig,
    ScheduleConfig,
    ShardingConfig,
    TrainingConfig,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(directory="runs/llama2_70b_pipeline"),
        model=ModelConfig(
            vocabulary_size=32_000,
            width=8192,
            layers=80,
            heads=64,
            kv_heads=8,
            head_dim=128,
            mlp_width=28_672,
            tied_head=False,
        ),
        training=TrainingConfig(steps=500_000, batch_size=1024, sequence_length=4096, accumulation=256),
        optimizer=OptimizerConfig(learning_rate=1.5e-4, epsilon=1e-5),
        schedule=ScheduleConfig(warmup_steps=2000),
        mesh=MeshConfig(pipeline=16, tensor=8),
        sharding=ShardingConfig(sequence_parallel=True),
        pipeline=PipelineConfig("interleaved", virtual_stages=5),
        remat=RematConfig("none"),
    )
