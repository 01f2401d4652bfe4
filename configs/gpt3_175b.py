"""GPT-3 175B (Brown et al. 2020, arXiv:2005.14165): 174,604,836,864 parameters.

    python -m jaxopt_llm.train --config gpt3_175b.py --data.paths prepared --data.tokenizer tokenizer.json

Hardware: 12 hosts with 8 GPUs of 80 GB each. Run the command on every host (scripts/slurm.sbatch). Memory and
communication per GPU and step, as compiled by

    python -m jaxopt_llm.plan --config gpt3_175b.py --remat.policy full --gpu h100 --hosts 12 --gpus-per-host 8

are 49.8 GiB at the peak and 307.4 GiB sent. Without --remat.policy full, a run recomputes less where the memory
suffices. The recipe uses ZeRO-3 between hosts and tensor parallelism inside a host; the 96 heads are divisible by the
96 GPUs. All layers have dense attention; the paper alternates it with banded layers.

The paper's batch is 1536 rows: --training.batch-size 1536 --training.accumulation 32. Megatron-LM's layout, which is
tensor parallelism in an interleaved pipeline of 12 stages (Narayanan et al. 2021, arXiv:2104.04473), takes 30.4 GiB:
--mesh.fsdp 1 --mesh.pipeline 12 --pipeline.schedule interleaved --pipeline.virtual-stages 8 --remat.policy none
--sharding.sequence-parallel True --training.batch-size 1536 --training.accumulation 768.
"""

from jaxopt_llm.config import (
    Config,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(directory="runs/gpt3_175b"),
        model=ModelConfig(
            vocabulary_size=50_257,
            width=12_288,
            layers=96,
            heads=96,
            kv_heads=96,
            head_dim=128,
            mlp_width=49_152,
            positions="learned",
            max_positions=2048,
            norm="layer",
            biases="all",
            mlp="gelu",
            tied_head=True,
        ),
        training=TrainingConfig(steps=95_000, batch_size=48, sequence_length=2048),
        optimizer=OptimizerConfig(learning_rate=0.6e-4),
        schedule=ScheduleConfig(warmup_steps=120),
        mesh=MeshConfig(fsdp=12, tensor=8),
    )
