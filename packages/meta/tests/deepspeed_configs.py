"""Whole configurations as people have them, written anew in the styles that are about.

Each with the keys that `plait.initialize` refuses, on four ranks; none refused means that it reads.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CONFIGS"]

Tree = dict[str, Any]


def fp16(**changed: object) -> Tree:
    return {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    } | changed


AUTO_BATCH: Tree = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
AUTO_ADAMW: Tree = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
AUTO_WARMUP: Tree = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
STAGE2: Tree = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
STAGE3: Tree = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
ON_CPU: Tree = {"device": "cpu", "pin_memory": True}
OFFLOADED = [
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
]
AUTO_REFUSED = [
    "optimizer.params.lr",
    "optimizer.params.weight_decay",
    "scheduler.params.warmup_num_steps",
    "train_batch_size",
]

CONFIGS: dict[str, tuple[Tree, list[str]]] = {
    "trainer, stage 2, all from its arguments": (
        {
            "fp16": fp16(),
            "bf16": {"enabled": "auto"},
            "optimizer": AUTO_ADAMW,
            "scheduler": AUTO_WARMUP,
            "zero_optimization": STAGE2,
            "gradient_clipping": "auto",
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
            **AUTO_BATCH,
        },
        AUTO_REFUSED,
    ),
    "trainer, stage 3 with offload": (
        {
            "bf16": {"enabled": "auto"},
            "optimizer": AUTO_ADAMW,
            "scheduler": AUTO_WARMUP,
            "zero_optimization": STAGE3 | {"offload_optimizer": ON_CPU, "offload_param": ON_CPU},
            "gradient_clipping": "auto",
            **AUTO_BATCH,
        },
        [*AUTO_REFUSED, *OFFLOADED],
    ),
    "launcher, stage 1, values filled in": (
        {
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8},
            "gradient_clipping": 1.0,
            "steps_per_print": float("inf"),
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 4,
        },
        [],
    ),
    "launcher, stage 3, without offload": (
        {
            "bf16": {"enabled": True},
            "fp16": fp16(enabled=False),
            "zero_optimization": STAGE3
            | {"offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}},
            "train_micro_batch_size_per_gpu": 2,
            "zero_allow_untested_optimizer": True,
        },
        [],
    ),
    "fine-tuning, stage 0": (
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_allow_untested_optimizer": True,
            "fp16": fp16(),
            "bf16": {"enabled": "auto"},
            "zero_optimization": STAGE2
            | {"stage": 0, "allgather_bucket_size": 5e8, "round_robin_gradients": True},
        },
        [],
    ),
    "fine-tuning, stage 3 with offload": (
        {
            "train_micro_batch_size_per_gpu": 1,
            "fp16": fp16(),
            "zero_optimization": STAGE3 | {"offload_optimizer": ON_CPU, "offload_param": ON_CPU},
        },
        OFFLOADED,
    ),
    "recipe, stage 1 in half precision": (
        {
            "zero_optimization": {"stage": 1, "overlap_comm": True},
            "bf16": {"enabled": True},
            "fp16": {
                "enabled": True,
                "auto_cast": False,
                "loss_scale": 0,
                "initial_scale_power": 32,
                "loss_scale_window": 1000,
                "hysteresis": 2,
                "min_loss_scale": 1,
            },
            "train_micro_batch_size_per_gpu": 2,
        },
        ["fp16.enabled"],
    ),
    "recipe, stage 3 with quantised messages": (
        {
            "zero_optimization": {
                "stage": 3,
                "zero_quantized_weights": True,
                "zero_hpz_partition_size": 1,
                "zero_quantized_gradients": True,
                "zero_quantized_nontrainable_weights": True,
            },
            "train_micro_batch_size_per_gpu": 1,
        },
        [],
    ),
    "image classifier, Adam and a warm-up": (
        {
            "train_batch_size": 16,
            "steps_per_print": 2000,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
            },
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "bf16": {"enabled": False},
            "fp16": {"enabled": False, "fp16_master_weights_and_grads": False, "loss_scale": 0},
            "wall_clock_breakdown": False,
            "zero_optimization": STAGE2 | {"stage": 0, "cpu_offload": False},
        },
        [],
    ),
    "classifier, old names and one cycle": (
        {
            "train_batch_size": 64,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}},
            "scheduler": {
                "type": "OneCycle",
                "params": {
                    "cycle_first_step_size": 1000,
                    "cycle_first_stair_count": 500,
                    "cycle_second_step_size": 1000,
                    "cycle_second_stair_count": 500,
                    "decay_step_size": 1000,
                    "cycle_min_lr": 0.0001,
                    "cycle_max_lr": 0.0010,
                    "decay_lr_rate": 0.001,
                    "cycle_min_mom": 0.85,
                    "cycle_max_mom": 0.99,
                    "decay_mom_rate": 0.0,
                },
            },
            "bfloat16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "prefetch_bucket_size": 1e7,
                "param_persistence_threshold": 1e5,
                "stage3_gather_fp16_weights_on_model_save": True,
                "cpu_offload": True,
            },
        },
        ["zero_optimization.cpu_offload"],
    ),
    "language model, LAMB and sparse attention": (
        {
            "train_batch_size": 4096,
            "train_micro_batch_size_per_gpu": 32,
            "steps_per_print": 100,
            "prescale_gradients": True,
            "optimizer": {
                "type": "Lamb",
                "params": {
                    "lr": 11e-3,
                    "weight_decay": 0.01,
                    "bias_correction": False,
                    "max_coeff": 0.3,
                    "min_coeff": 0.01,
                },
            },
            "gradient_clipping": 1.0,
            "wall_clock_breakdown": True,
            "fp16": {"enabled": True, "loss_scale": 0},
            "sparse_attention": {"mode": "fixed", "block": 16, "attention": "bidirectional"},
        },
        [
            "prescale_gradients",
            "wall_clock_breakdown",
            "fp16.enabled",
            "sparse_attention",
            "optimizer.type",
        ],
    ),
    "large language model, pipeline and activations": (
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 8,
            "steps_per_print": 10,
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "activation_checkpointing": {
                "partition_activations": True,
                "cpu_checkpointing": False,
                "contiguous_memory_optimization": False,
                "number_checkpoints": 4,
            },
            "curriculum_learning": {"enabled": False, "curriculum_type": "seqlen"},
            "pipeline": {"stages": "auto", "partition": "best"},
            "wandb": {"enabled": False, "project": "p"},
            "elasticity": {"enabled": True, "max_train_batch_size": 2000},
        },
        ["activation_checkpointing.partition_activations", "elasticity.enabled"],
    ),
    "compression, all parts off": (
        {
            "train_batch_size": 32,
            "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.01}},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_num_steps": 100, "total_num_steps": 3000},
            },
            "compression_training": {
                "weight_quantization": {
                    "shared_parameters": {"enabled": False, "quantizer_kernel": False},
                    "different_groups": {"wq1": {"params": {"start_bits": 8}, "modules": ["key"]}},
                },
                "sparse_pruning": {"shared_parameters": {"enabled": False}},
            },
            "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1},
            "comms_logger": {"enabled": False, "prof_ops": []},
        },
        [],
    ),
    "tuning on files, and a key that is none": (
        {
            "train_micro_batch_size_per_gpu": 1,
            "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/scratch", "buffer_count": 5},
                "stage3_prefetch_buket_size": 5e7,
            },
            "checkpoint": {"load_universal": True, "tag_validation": "Warn"},
            "autotuning": {"enabled": True, "arg_mappings": {}},
        },
        [
            "zero_optimization.offload_param.device",
            "zero_optimization.stage3_prefetch_buket_size",
            "autotuning.enabled",
        ],
    ),
    "range test, stage 2": (
        {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            "scheduler": {
                "type": "LRRangeTest",
                "params": {
                    "lr_range_test_min_lr": 0.001,
                    "lr_range_test_step_size": 200,
                    "lr_range_test_step_rate": 5,
                    "lr_range_test_staircase": False,
                },
            },
            "communication_data_type": "fp16",
            "gradient_allreduce_op": "sum",
            "zero_optimization": STAGE2 | {"ignore_unused_parameters": True},
        },
        ["communication_data_type", "gradient_allreduce_op"],
    ),
    "for a set number of ranks": (
        {
            "train_batch_size": 256,
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 4,
        },
        ["train_batch_size"],
    ),
}
