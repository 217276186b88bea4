"""DeepSpeed's keys that plait honours or decides itself, as data.

What is not built is in `_unbuilt_keys`. Defaults are DeepSpeed's, but for those of honoured keys,
which are plait's own.
"""

from __future__ import annotations

import sys

from plait._batch import DEFAULT_TRAIN_BATCH_SIZE
from plait._key import Key, Use
from plait._kinds import (
    Flag,
    Integer,
    Kind,
    Number,
    OneOf,
    PrintInterval,
    Text,
    TextList,
)

__all__ = ["BATCH_KEYS", "DECIDED_KEYS", "HONOURED_KEYS"]

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

_FROM_OTHERS = "from the other two"
_TRAIN_BATCH_SIZE = f"{DEFAULT_TRAIN_BATCH_SIZE}, or from the other two"
_ACCUMULATION = "1, or from the other two"


def _honoured(
    path: str, kind: Kind, meaning: str, *, default: object = None, said: str = ""
) -> Key:
    return Key(path=path, kind=kind, default=default, meaning=meaning, default_said=said, auto=True)


HONOURED_KEYS: tuple[Key, ...] = (
    _honoured(
        "zero_optimization.stage", OneOf((0, 1, 2, 3)), "what the ranks share out", default=3
    ),
    _honoured(
        "zero_optimization.reduce_bucket_size",
        Integer(1),
        "longest message in elements; less memory, never other bits",
        said="a message a unit",
    ),
    _honoured(
        "zero_optimization.allgather_bucket_size",
        Integer(1),
        "the same; the smaller of the two counts",
        said="a message a unit",
    ),
    _honoured(
        "zero_optimization.overlap_comm", Flag(), "send while the model computes", default=True
    ),
    _honoured(
        "zero_optimization.zero_quantized_weights",
        Flag(),
        "8-bit parameters on the wire, stage 3",
        default=False,
    ),
    _honoured(
        "zero_optimization.zero_quantized_nontrainable_weights",
        Flag(),
        "8-bit parameters on the wire where they are not trained, stage 3; they rest exact",
        default=False,
    ),
    _honoured(
        "zero_optimization.zero_quantized_gradients",
        Flag(),
        "4-bit gradients on the wire, at every stage",
        default=False,
    ),
    _honoured(
        "zero_optimization.zero_hpz_partition_size",
        Integer(0),
        "ranks a node, among which parameters are shared out once more; stage 3",
        default=1,
    ),
    _honoured(
        "zero_optimization.zeropp_loco_param.err_beta",
        Number(at_least=0.0, below=1.0),
        "error feedback for 4-bit gradients: weight of the past",
        said="no feedback; 0.8 with `reset_T`",
    ),
    _honoured(
        "zero_optimization.zeropp_loco_param.reset_T",
        Integer(1),
        "error feedback begins again after so many updates",
        said="no feedback; 1024 with `err_beta`",
    ),
    _honoured("bf16.enabled", Flag(), "16-bit parameters with fp32 masters", default=False),
    _honoured(
        "bf16.check_grad_overflow",
        Flag(),
        "leave out an update whose gradients are not finite",
        said="`true` with bf16, else `false`",
    ),
    _honoured(
        "gradient_clipping", Number(at_least=0.0), "largest gradient norm; 0 is none", default=1.0
    ),
    _honoured(
        "train_batch_size",
        Integer(1),
        "sequences an update, over all ranks",
        said=_TRAIN_BATCH_SIZE,
    ),
    _honoured(
        "train_micro_batch_size_per_gpu",
        Integer(1),
        "sequences a backward, on one rank",
        said=_FROM_OTHERS,
    ),
    _honoured("gradient_accumulation_steps", Integer(1), "backwards an update", said=_ACCUMULATION),
    _honoured(
        "steps_per_print", PrintInterval(), "updates between two lines of progress", said="none"
    ),
    _honoured("seed", Integer(0, below=2**63), "another name of `run.seed`", said="`run.seed`"),
    _honoured(
        "dataloader_drop_last", Flag(), "leave out the samples that fill no batch", default=False
    ),
    _honoured(
        "data_parallel_size", Integer(1), "must be the number of ranks", said="the number of ranks"
    ),
)


def _decided(path: str, kind: Kind, default: object, meaning: str) -> Key:
    return Key(path=path, kind=kind, default=default, meaning=meaning, use=Use.DECIDED, auto=True)


_SIZE = Integer(1)
_COUNT = Integer(0)
_FLAG = Flag()
_GATHERS = "a unit is gathered ahead of its turn and freed after it"
_SHARES = "every parameter is shared out, small ones too"
_ONE_MESSAGE = "a unit goes in one message, cut by `reduce_bucket_size`"
_RANK_ORDER = "sums are reduce-scattered in rank order, at every stage"
_FLAT = "gradients lie in one flat buffer"
_UNUSED = "there is one path for all stages"
_SAVES = "a checkpoint is one folder of whole tensors that any number of ranks loads"
_PINNED = "nothing is offloaded"

_ZERO_DECIDED = (
    ("contiguous_gradients", _FLAG, True, _FLAT),
    ("reduce_scatter", _FLAG, True, _RANK_ORDER),
    ("use_multi_rank_bucket_allreduce", _FLAG, True, _RANK_ORDER),
    ("allgather_partitions", _FLAG, True, _ONE_MESSAGE),
    ("round_robin_gradients", _FLAG, False, _FLAT),
    ("parameter_alignment", _FLAG, False, "every parameter starts on a 64-byte boundary"),
    ("compute_grad_norm", _FLAG, True, "the norm is computed where it is asked for"),
    ("sub_group_size", _SIZE, 10**9, "the optimizer steps over the rank's whole slice"),
    ("stage3_prefetch_bucket_size", _COUNT, 5 * 10**7, _GATHERS),
    ("stage3_param_persistence_threshold", _COUNT, 10**5, _SHARES),
    ("stage3_model_persistence_threshold", _COUNT, sys.maxsize, _SHARES),
    ("stage3_max_live_parameters", _COUNT, 10**9, _GATHERS),
    ("stage3_max_reuse_distance", _COUNT, 10**9, _GATHERS),
    ("stage3_module_granularity_threshold", _COUNT, 0, _GATHERS),
    ("stage3_use_all_reduce_for_fetch_params", _FLAG, False, _ONE_MESSAGE),
    ("stage3_allgather_sequential", _FLAG, False, _ONE_MESSAGE),
    (
        "stage3_gather_16bit_weights_on_model_save",
        _FLAG,
        False,
        "`save_16bit_model` always gathers",
    ),
    ("memory_efficient_linear", _FLAG, True, "linear layers stay torch's own"),
    ("override_module_apply", _FLAG, True, "`Module.apply` stays torch's own"),
    ("elastic_checkpoint", _FLAG, False, _SAVES),
    ("pipeline_loading_checkpoint", _FLAG, False, "checkpoints are read slice by slice"),
    ("legacy_stage1", _FLAG, False, _UNUSED),
    ("log_trace_cache_warnings", _FLAG, False, "the order of gathers is agreed after a step"),
    ("enable_sanity_checks", _FLAG, False, "the checks are always on"),
    ("leaf_module.classes", TextList(), None, _GATHERS),
    ("leaf_module.names", TextList(), None, _GATHERS),
    ("leaf_module.name_suffixes", TextList(), None, _GATHERS),
    ("cpu_offload_use_pin_memory", _FLAG, False, _PINNED),
)
_OTHERS_DECIDED = (
    ("zero_allow_untested_optimizer", _FLAG, False, "every optimizer is probed before it is used"),
    ("zero_force_ds_cpu_optimizer", _FLAG, True, "the optimizer is torch's, on every device"),
    ("bf16.immediate_grad_update", _FLAG, False, "gradients are added up as they are reduced"),
    ("vocabulary_size", _SIZE, None, "DeepSpeed only warns by it"),
    ("log_level", Text(), None, "plait prints the same at every level"),
    ("disable_python_gc", _FLAG, False, "Python's garbage collector is left alone"),
    ("timers.throughput.enabled", _FLAG, True, "throughput is what the command reports"),
    ("timers.throughput.synchronized", _FLAG, True, "throughput is what the command reports"),
    (
        "checkpoint.tag_validation",
        OneOf(("WARN", "IGNORE", "FAIL", "Warn", "Ignore", "Fail")),
        "WARN",
        "ranks that save under different names are an error",
    ),
    ("checkpoint.load_universal", _FLAG, False, _SAVES),
    ("checkpoint.checkpoint_serialization", _FLAG, True, _SAVES),
    ("checkpoint.parallel_write.pipeline_stage", _FLAG, False, _SAVES),
)
DECIDED_KEYS: tuple[Key, ...] = (
    *(_decided(f"zero_optimization.{name}", *rest) for name, *rest in _ZERO_DECIDED),
    *(_decided(*row) for row in _OTHERS_DECIDED),
)
