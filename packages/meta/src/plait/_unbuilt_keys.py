"""DeepSpeed's keys for what plait has not built, as data.

Each is taken where its value asks for nothing and refused by name where it asks.
"""

from __future__ import annotations

from plait._key import Key, Use
from plait._kinds import Anything, Flag, Integer, Kind, Number, Object, OneOf, Text, TextList

__all__ = ["ASKING_KEYS", "PART_KEYS"]

_REMOVE = "remove it"
_FP32 = OneOf(("fp32", "fp16", "bf16", "float32", "float16", "bfloat16"))
_IN_FP32 = ("fp32", "float32", None)
_DEVICE = OneOf(("none", "cpu", "nvme"))
_OFFLOAD = 'write "none": nothing is offloaded yet; more ranks or bf16 need less memory a rank'
_BF16 = "use bf16.enabled: it needs no loss scale"
_LOSES = "sums are kept in fp32, so that no stage or message size changes bits; write fp32"


def _flags(prefix: str, instead: str = _REMOVE, **meanings: str) -> list[Key]:
    """Flags that ask when true."""
    return [
        Key(
            path=f"{prefix}{name}",
            kind=Flag(),
            default=False,
            off=(False,),
            meaning=meaning,
            use=Use.ASKS,
            instead=instead,
            auto=True,
        )
        for name, meaning in meanings.items()
    ]


def _asks(
    path: str,
    kind: Kind,
    off: tuple[object, ...],
    meaning: str,
    instead: str = _REMOVE,
    *,
    deprecated: bool = False,
) -> Key:
    """A key that asks when its value is none of `off`, the first of which is the default."""
    return Key(
        path=path,
        kind=kind,
        default=off[0],
        off=off,
        meaning=meaning,
        use=Use.ASKS,
        instead=instead,
        auto=True,
        deprecated=deprecated,
    )


_TOP_LEVEL = (
    *_flags(
        "",
        wall_clock_breakdown="times of forward, backward and step",
        memory_breakdown="memory at each part of a step",
        dump_state="print the engine's state",
        graph_harvesting="CUDA graphs",
        sparse_gradients="sparse gradients of embeddings",
        use_data_before_expert_parallelism="order of the ranks with experts",
    ),
    *_flags(
        "",
        "a gradient is divided once, after the sum; that is what gradient_clipping sees",
        prescale_gradients="divide before the sum",
    ),
    *_flags("", "gathers are all-gathers; remove it", disable_allgather="gather by broadcasts"),
    _asks(
        "managed_gradient_accumulation",
        Flag(),
        (True,),
        "the engine counts the micro-batches",
        "a loop that counts them itself uses zero_partition without the engine",
    ),
    _asks(
        "gradient_predivide_factor",
        Number(),
        (1.0,),
        "divide before and after the sum",
        "a gradient is divided once, after the sum; remove it",
    ),
    _asks(
        "gradient_allreduce_op",
        OneOf(("mean", "sum")),
        ("mean",),
        "gradients as sums over the ranks",
        "multiply the loss by the number of ranks instead",
    ),
    _asks("communication_data_type", _FP32, _IN_FP32, "type of the sums", _LOSES),
    _asks("data_types.grad_accum_dtype", _FP32, _IN_FP32, "type of the accumulator", _LOSES),
    _asks("data_types.param_dtype", _FP32, (None,), "type of the parameters", "use bf16.enabled"),
    _asks("data_types.buffer_dtype", _FP32, (None,), "type of the buffers"),
    _asks("data_types.keep_in_fp32_modules", TextList(), (None,), "buffers that stay in fp32"),
    _asks("sequence_parallel_size", Integer(1), (1,), "ranks that share a sequence"),
    _asks("datastates_ckpt", Object(), (None,), "checkpoints written in the background"),
    _asks("sparse_attention", Object(), (None,), "attention over a block layout"),
    _asks("optimizer.legacy_fusion", Flag(), (False,), "the old fused fp16 optimizer"),
)
_PRECISION = (
    *_flags("fp16.", _BF16, enabled="16-bit parameters with a loss scale"),
    *_flags(
        "bf16.",
        "masters and moments are fp32; remove it",
        bf16_master_weights_and_grads="masters in bf16",
        bf16_optimizer_states="moments in bf16",
        auto_cast="cast the inputs",
    ),
    *_flags("amp.", "use bf16.enabled", enabled="NVIDIA's apex"),
    *_flags(
        "torch_autocast.",
        "use bf16.enabled, or torch.autocast in the model",
        enabled="torch.autocast around the forward",
    ),
)
_ZERO = (
    _asks(
        "zero_optimization.offload_optimizer.device",
        _DEVICE,
        ("none",),
        "optimizer state in host memory or files",
        _OFFLOAD,
    ),
    _asks(
        "zero_optimization.offload_param.device",
        _DEVICE,
        ("none",),
        "parameters in host memory or files",
        _OFFLOAD,
    ),
    _asks(
        "zero_optimization.cpu_offload",
        Flag(),
        (False, None),
        "old name of offload_optimizer.device",
        _OFFLOAD.replace('"none"', "false"),
        deprecated=True,
    ),
    _asks(
        "zero_optimization.cpu_offload_param",
        Flag(),
        (False, None),
        "old name of offload_param.device",
        _OFFLOAD.replace('"none"', "false"),
        deprecated=True,
    ),
    *_flags(
        "zero_optimization.",
        mics_hierarchical_params_gather="gathers within a node first",
        save_muon_momentum_buffer_in_memory="Muon's momentum in memory",
    ),
    _asks("zero_optimization.mics_shard_size", Integer(-1), (-1,), "share-out in groups of ranks"),
    _asks("zero_optimization.zenflow", Object(), (None,), "updates that overlap with offload"),
    _asks(
        "zero_optimization.ignore_unused_parameters",
        Flag(),
        (True,),
        "an error where a parameter is unused",
        "unused parameters are left alone by the optimizer; remove it",
    ),
    _asks(
        "zero_optimization.load_from_fp32_weights",
        Flag(),
        (True,),
        "masters from the checkpoint",
        "masters are always loaded where the checkpoint has them; remove it",
    ),
)
_CHECKPOINTS = (
    *_flags(
        "checkpoint.",
        "save to a folder that all ranks see; remove it",
        use_node_local_storage="each node saves on its own disk",
    ),
    _asks("checkpoint.writer", Object(), (None,), "how files are written"),
    *_flags(
        "activation_checkpointing.",
        "use torch.utils.checkpoint in the model",
        partition_activations="share activations out over model-parallel ranks",
        cpu_checkpointing="activations in host memory",
        contiguous_memory_optimization="one buffer for all of them",
        synchronize_checkpoint_boundary="synchronise at each of them",
        profile="times of each of them",
    ),
)
_PARALLEL = (
    _asks("tensor_parallel.autotp_size", Integer(0), (0, 1), "ranks that share a layer"),
    _asks("tensor_parallel.tp.tp_size", Integer(1), (1,), "ranks that share a layer"),
    *_flags("expert_parallel.", enabled="experts on several ranks"),
    *_flags("compile.", "call torch.compile on the model", deepcompile="DeepSpeed's compiler"),
    _asks("compile.passes", TextList(), (None,), "passes of DeepSpeed's compiler"),
    _asks("pipeline.stages", Anything(), ("auto", None, 1), "stages of a pipeline"),
    _asks("pipeline.seed_layers", Flag(), (False,), "a seed for each layer"),
    _asks("pipeline.activation_checkpoint_interval", Integer(0), (0,), "layers a checkpoint"),
    *_flags("hybrid_engine.", enabled="generation within training"),
)
_LOG = "read the progress that plait prints, or log from the loop"
_WATCHING = (
    *_flags("tensorboard.", _LOG, enabled="TensorBoard"),
    *_flags("csv_monitor.", _LOG, enabled="CSV files"),
    *_flags("wandb.", _LOG, enabled="Weights & Biases"),
    *_flags("comet.", _LOG, enabled="Comet"),
    *_flags("flops_profiler.", "use torch.profiler", enabled="FLOPs and times of the modules"),
    *_flags("comms_logger.", "use torch.profiler", enabled="bytes and times of messages"),
    *_flags("autotuning.", "write the batch sizes", enabled="search for batch sizes"),
    *_flags(
        "elasticity.",
        "a checkpoint loads on any number of ranks",
        enabled="batch sizes for a changing number of ranks",
    ),
    *_flags("nebula.", enabled="Azure's checkpoint service"),
)
_DATA = (
    *_flags("curriculum_learning.", enabled="sequences that grow in length"),
    *_flags("data_efficiency.", enabled="sampling and routing of the data"),
    *_flags("progressive_layer_drop.", enabled="layers left out at random"),
    *_flags("quantize_training.", enabled="quantisation during training"),
    *_flags("weight_quantization.", enabled="quantised weights for inference"),
    _asks("weight_quantization.quantized_initialization", Object(), (None,), "quantised weights"),
    _asks("weight_quantization.post_init_quant", Object(), (None,), "quantised weights"),
    *(
        _asks(f"compression_training.{name}", Object(), (None,), "a smaller model by training")
        for name in (
            "layer_reduction",
            "weight_quantization",
            "activation_quantization",
            "sparse_pruning",
            "row_pruning",
            "head_pruning",
            "channel_pruning",
        )
    ),
)

ASKING_KEYS: tuple[Key, ...] = (
    *_TOP_LEVEL,
    *_PRECISION,
    *_ZERO,
    *_CHECKPOINTS,
    *_PARALLEL,
    *_WATCHING,
    *_DATA,
)

_NUM, _INT, _SIZE, _FLAG, _TEXT, _ANY = (
    Number(),
    Integer(0),
    Integer(1),
    Flag(),
    Text(),
    Anything(),
)
_MONITOR: dict[str, Kind] = {"output_path": _ANY, "job_name": _TEXT}
_OPTIMIZER_OFFLOAD = "zero_optimization.offload_optimizer.device"
_PARAM_OFFLOAD = "zero_optimization.offload_param.device"


def _named(kind: Kind, names: str) -> dict[str, Kind]:
    """The same kind for each of the names."""
    return dict.fromkeys(names.split(), kind)


# What each key that asks brings along, by the key they need.
_PARTS: dict[str, dict[str, Kind]] = {
    "fp16.enabled": _named(_FLAG, "auto_cast consecutive_hysteresis fp16_master_weights_and_grads")
    | {"loss_scale": Number(at_least=0.0)}
    | _named(_INT, "initial_scale_power loss_scale_window hysteresis")
    | {"min_loss_scale": Number(at_least=0.0)},
    "amp.enabled": {"opt_level": _TEXT}
    | _named(_ANY, "loss_scale keep_batchnorm_fp32 master_weights num_losses min_loss_scale")
    | _named(_ANY, "max_loss_scale verbosity cast_model_type cast_model_outputs")
    | _named(_ANY, "patch_torch_functions"),
    "torch_autocast.enabled": {"dtype": _ANY, "lower_precision_safe_modules": _ANY},
    _OPTIMIZER_OFFLOAD: _named(_FLAG, "pin_memory fast_init pipeline pipeline_read pipeline_write")
    | _named(_FLAG, "super_offload")
    | {"nvme_path": _ANY, "buffer_count": _SIZE}
    | _named(Number(at_least=0.0, at_most=1.0), "ratio cpuadam_cores_perc"),
    _PARAM_OFFLOAD: _named(_FLAG, "pin_memory")
    | _named(_ANY, "nvme_path")
    | _named(_SIZE, "buffer_count buffer_size")
    | {"max_in_cpu": _INT},
    f"{_OPTIMIZER_OFFLOAD} aio": _named(_SIZE, "block_size queue_depth intra_op_parallelism")
    | _named(_FLAG, "single_submit overlap_events use_gds"),
    "activation_checkpointing.contiguous_memory_optimization": {"number_checkpoints": _ANY},
    "tensor_parallel.autotp_size": _named(_ANY, "preset_model partition_config dtype tp.tp_group")
    | _named(_FLAG, "tp_overlap_comm keep_module_on_host replace_with_kernel_inject")
    | {"tp.tp_grain_size": _SIZE},
    "expert_parallel.enabled": _named(_FLAG, "use_grouped_mm disable_triton_grouped_mm")
    | _named(_SIZE, "autoep_size expert_tensor_parallel_size")
    | _named(_ANY, "preset_model moe_layer_pattern router_pattern expert_pattern score_func")
    | _named(_ANY, "score_apply combine_impl route_norm route_scale top_k routed_scaling_factor")
    | _named(_ANY, "num_expert_groups num_limited_groups load_balance_coeff expert_w1 expert_w2")
    | _named(_ANY, "expert_w3 num_experts_attr top_k_attr has_shared_experts")
    | _named(_ANY, "shared_experts_pattern shared_experts_gate_pattern validate_folding_routing"),
    "compile.deepcompile": _named(_FLAG, "free_activation offload_activation double_buffer")
    | _named(_FLAG, "offload_activation_pin_memory offload_opt_states offload_parameters")
    | _named(_FLAG, "symmetric_memory debug_log sync_before_reduce sync_after_reduce")
    | _named(_FLAG, "sync_before_allgather sync_after_allgather keep_int_input_tensors")
    | _named(_FLAG, "keep_all_input_tensors")
    | {"free_activation_threshold": _INT},
    "pipeline.stages": _named(_FLAG, "pipe_partitioned grad_partitioned") | {"partition": _TEXT},
    "hybrid_engine.enabled": _named(_SIZE, "max_out_tokens inference_tp_size")
    | {"tp_gather_partition_size": _SIZE}
    | _named(_FLAG, "release_inference_cache pin_parameters enable_cuda_graph"),
    "tensorboard.enabled": _MONITOR,
    "csv_monitor.enabled": _MONITOR,
    "wandb.enabled": _named(_ANY, "group team project"),
    "comet.enabled": _named(_ANY, "samples_log_interval project workspace api_key experiment_name")
    | _named(_ANY, "experiment_key online mode"),
    "flops_profiler.enabled": _named(_INT, "profile_step top_modules")
    | _named(_NUM, "recompute_fwd_factor")
    | {"module_depth": Integer(-1), "detailed": _FLAG, "output_file": _ANY},
    "comms_logger.enabled": _named(_FLAG, "verbose prof_all debug") | {"prof_ops": TextList()},
    "autotuning.enabled": _named(_ANY, "fast results_dir exps_dir overwrite start_profile_step")
    | _named(_ANY, "end_profile_step metric tuner_type tuner_early_stopping tuner_num_trials")
    | _named(_ANY, "arg_mappings max_train_batch_size min_train_batch_size mp_size metric_path")
    | _named(_ANY, "max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu")
    | _named(_ANY, "num_tuning_micro_batch_sizes model_info model_info_path"),
    "elasticity.enabled": _named(_ANY, "max_train_batch_size micro_batch_sizes min_gpus max_gpus")
    | _named(_ANY, "min_time prefer_larger_batch ignore_non_elastic_batch_info version")
    | _named(_ANY, "num_gpus_per_node model_parallel_size"),
    "nebula.enabled": _named(_ANY, "persistent_storage_path persistent_time_interval")
    | _named(_ANY, "num_of_version_in_retention enable_nebula_load nebula_load_path"),
    "curriculum_learning.enabled": _named(_ANY, "curriculum_type min_difficulty max_difficulty")
    | _named(_ANY, "schedule_type schedule_config"),
    "data_efficiency.enabled": {"seed": _INT, "data_sampling": Object(), "data_routing": Object()},
    "progressive_layer_drop.enabled": {"theta": _NUM, "gamma": _NUM},
    "quantize_training.enabled": _named(_ANY, "verbose max_iter tol stability layer_name layer_num")
    | _named(_ANY, "gas_boundary_resolution quantize_bits quantize_schedule quantize_groups")
    | _named(_ANY, "quantize_type quantize_algo fp16_mixed_quantize eigenvalue quantize_verbose")
    | _named(_ANY, "quantizer_kernel quantize_change_ratio schedule_offset"),
    "weight_quantization.enabled": _named(_ANY, "num_bits q_type q_groups"),
    "sequence_parallel_size": {"seq_parallel_communication_data_type": _ANY},
}


def _part_keys() -> list[Key]:
    keys = []
    for needed, parts in _PARTS.items():
        needs, _, elsewhere = needed.partition(" ")
        section = elsewhere or needs.rpartition(".")[0]
        keys += [
            Key(
                path=f"{section}.{name}".lstrip("."),
                kind=kind,
                default=None,
                meaning=f"part of `{needs}`",
                use=Use.PART,
                needs=needs,
                auto=True,
            )
            for name, kind in parts.items()
        ]
    return keys


PART_KEYS: tuple[Key, ...] = tuple(_part_keys())
