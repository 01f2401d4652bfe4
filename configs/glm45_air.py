"""GLM-4.5-Air (GLM-4.5 team 2025, arXiv:2508.06471): 106,852,251,264 parameters.

    python -m jaxopt_llm.train --config glm45_air.py --model.pretrained FOLDER --data.paths chats.jsonl

Hardware: 8 hosts of 8 GPUs of 80 GB. Memory and communication per GPU and step, as compiled by

    python -m jaxopt_llm.plan --config glm45_air.py --remat.policy full --gpu h100 --hosts 8 --gpus-per-host 8

are 63.6 GiB at the peak and 368.2 GiB sent. Its roofline says 165,000 tokens/s on all GPUs, which is not measured.

All parameters are trained. Each GPU of a host holds 16 experts of each layer, which ZeRO-3 divides over the hosts.
Tokens go to their experts within the host. With 4 rows of 4096 tokens on each GPU at a time, gathers over the network
take a third of the step. --training.batch-size 128 takes 44.5 GiB. For chats.jsonl see docs/chat.md.
"""

from jaxopt_llm.config import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    RopeConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(directory="runs/glm45_air"),
        model=ModelConfig(
            vocabulary_size=151_552,
            width=4096,
            layers=46,
            heads=96,
            kv_heads=8,
            head_dim=128,
            mlp_width=10_944,
            biases="qkv",
            tied_head=False,
            rope=RopeConfig(theta=1_000_000.0, size=64),
            moe=MoEConfig(
                experts=128,
                experts_per_token=8,
                expert_width=1408,
                shared_expert_width=1408,
                dense_layers=1,
                router="sigmoid",
                router_bias=True,
            ),
        ),
        data=DataConfig(paths=("chats.jsonl",), content="chat"),
        mesh=MeshConfig(fsdp=8, expert=8),
        training=TrainingConfig(steps=1000, batch_size=256, sequence_length=4096),
        optimizer=OptimizerConfig(learning_rate=1e-5),
        schedule=ScheduleConfig(warmup_steps=30),
    )
