"""DeepSpeed's keys that plait has not built yet: each is refused by name, never ignored."""

from __future__ import annotations

__all__ = ["NOT_BUILT"]

_TOP_LEVEL = """
    managed_gradient_accumulation steps_per_print wall_clock_breakdown memory_breakdown
    dump_state seed prescale_gradients gradient_predivide_factor gradient_allreduce_op
    communication_data_type seq_parallel_communication_data_type sparse_gradients
    disable_allgather zero_allow_untested_optimizer zero_force_ds_cpu_optimizer graph_harvesting
    dataloader_drop_last use_data_before_expert_parallelism vocabulary_size log_level
    sequence_parallel_size data_parallel_size data_types timers quantize_training
    progressive_layer_drop nebula datastates_ckpt weight_quantization fp16 bfloat16 amp
    torch_autocast aio checkpoint activation_checkpointing tensor_parallel expert_parallel
    compile pipeline hybrid_engine sparse_attention tensorboard csv_monitor wandb comet
    flops_profiler comms_logger autotuning elasticity curriculum_learning data_efficiency
    compression_training
"""
_ZERO_OPTIMIZATION = """
    overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size
    use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size
    round_robin_gradients sub_group_size stage3_prefetch_bucket_size prefetch_bucket_size
    stage3_param_persistence_threshold param_persistence_threshold
    stage3_model_persistence_threshold model_persistence_threshold stage3_max_live_parameters
    max_live_parameters stage3_max_reuse_distance max_reuse_distance
    stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save
    stage3_gather_fp16_weights_on_model_save stage3_module_granularity_threshold
    module_granularity_threshold stage3_use_all_reduce_for_fetch_params
    use_all_reduce_for_fetch_params stage3_allgather_sequential allgather_sequential
    load_from_fp32_weights ignore_unused_parameters memory_efficient_linear
    override_module_apply elastic_checkpoint legacy_stage1 pipeline_loading_checkpoint
    log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory
    zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
    zero_quantized_gradients zeropp_loco_param mics_shard_size mics_hierarchical_params_gather
    leaf_module offload_optimizer offload_param zenflow cpu_offload cpu_offload_param
    cpu_offload_use_pin_memory
"""
_BF16 = """
    immediate_grad_update check_grad_overflow bf16_master_weights_and_grads
    bf16_optimizer_states auto_cast
"""
_OPTIMIZER_PARAMS = """
    torch_adam fp32_optimizer_states bias_correction freeze_step cuda_aware comm_backend_name
    var_freeze_step var_update_scaler local_step_scaler local_step_clipper
"""
NOT_BUILT: frozenset[str] = frozenset(
    [
        *_TOP_LEVEL.split(),
        *(f"zero_optimization.{name}" for name in _ZERO_OPTIMIZATION.split()),
        *(f"bf16.{name}" for name in _BF16.split()),
        *(f"optimizer.params.{name}" for name in _OPTIMIZER_PARAMS.split()),
        "optimizer.legacy_fusion",
    ]
)
