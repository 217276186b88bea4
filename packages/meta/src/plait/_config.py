"""What a training run needs to know, read and checked: plain frozen values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from plait._batch import BatchSizes

__all__ = [
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "SchedulerConfig",
    "TrainingConfig",
    "WireConfig",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The size of the byte-level GPT."""

    num_layers: int
    hidden_size: int
    num_heads: int
    context_length: int
    tie_embeddings: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The text; `path` None is the text that ships with Python."""

    path: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How long, how often, where."""

    ranks: int
    device: str
    steps: int
    seed: int
    folder: str | None
    overwrite: bool
    eval_every: int
    eval_windows: int
    save_every: int
    sample_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The type in DeepSpeed's or torch's name, and its options as JSON has them."""

    type: str
    params: dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """The type in DeepSpeed's name and all its parameters."""

    type: str
    params: dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class WireConfig:
    """What travels as codes (ZeRO++).

    Args:
        weights: Parameters in 8 bits.
        frozen_weights: Parameters that are not trained in 8 bits.
        gradients: Gradients in 4 bits.
        ranks_a_node: Ranks among which parameters are shared out once more; 1 is none.
        err_beta: Weight of the past in the error feedback of gradients; None is no feedback.
        reset_steps: Updates after which the feedback begins again.
    """

    weights: bool = False
    frozen_weights: bool = False
    gradients: bool = False
    ranks_a_node: int = 1
    err_beta: float | None = None
    reset_steps: int = 1024

    @property
    def is_plain(self) -> bool:
        """Whether everything travels as it is, in one hop."""
        coded = self.weights or self.frozen_weights or self.gradients
        return not coded and self.ranks_a_node == 1

    def as_json(self) -> dict[str, object]:
        """The keys of ``zero_optimization`` in DeepSpeed's names; none where all is plain."""
        tree: dict[str, object] = {}
        if self.weights:
            tree["zero_quantized_weights"] = True
        if self.frozen_weights:
            tree["zero_quantized_nontrainable_weights"] = True
        if self.gradients:
            tree["zero_quantized_gradients"] = True
        if self.ranks_a_node > 1:
            tree["zero_hpz_partition_size"] = self.ranks_a_node
        if self.err_beta is not None:
            loco = {"err_beta": self.err_beta, "reset_T": self.reset_steps}
            tree["zeropp_loco_param"] = loco
        return tree


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """What DeepSpeed's JSON says of the training itself.

    Args:
        optimizer: Class and options; None where the file names none.
        scheduler: Learning-rate schedule; None is a constant rate.
        stage: ``zero_optimization.stage``.
        wire: What travels as codes.
        bucket_numel: Longest message in elements; None is a message a unit. Never changes bits.
        overlap: Reduce while backward runs.
        bf16: ``bf16.enabled``.
        skip_nonfinite: Leave an update out whose gradients are not finite.
        gradient_clipping: Largest norm; 0 is no clipping.
        batch: The completed batch sizes.
        steps_per_print: Updates between two lines about the progress; None is none.
        seed: ``seed``; None where the file names none.
        drop_last: Leave out the samples that do not fill a batch.
    """

    optimizer: OptimizerConfig | None
    scheduler: SchedulerConfig | None
    stage: int
    wire: WireConfig
    bucket_numel: int | None
    overlap: bool
    bf16: bool
    skip_nonfinite: bool
    gradient_clipping: float
    batch: BatchSizes
    steps_per_print: int | None
    seed: int | None
    drop_last: bool

    def as_json(self) -> dict[str, object]:
        """The sections in DeepSpeed's names, free of the number of ranks."""
        zero: dict[str, object] = {"stage": self.stage, "overlap_comm": self.overlap}
        zero |= self.wire.as_json()
        if self.bucket_numel is not None:
            zero["reduce_bucket_size"] = self.bucket_numel
        tree: dict[str, object] = {
            "optimizer": None if self.optimizer is None else asdict(self.optimizer),
            "scheduler": None if self.scheduler is None else asdict(self.scheduler),
            "zero_optimization": zero,
            "bf16": {"enabled": self.bf16, "check_grad_overflow": self.skip_nonfinite},
            "gradient_clipping": self.gradient_clipping,
            "train_batch_size": self.batch.train_batch_size,
            "gradient_accumulation_steps": self.batch.accumulation_steps,
            "steps_per_print": self.steps_per_print,
            "seed": self.seed,
            "dataloader_drop_last": self.drop_last,
        }
        return {
            key: value for key, value in tree.items() if value is not None or key == "scheduler"
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A checked configuration of `plait train`; `read_config` makes one.

    Args:
        model: Size of the model.
        data: The text to train on.
        run: Ranks, steps, folder and the like.
        training: What DeepSpeed's JSON says of the training itself.
    """

    model: ModelConfig
    data: DataConfig
    run: RunConfig
    training: TrainingConfig

    def as_json(self) -> dict[str, object]:
        """The configuration as JSON that reads back to the same one on any number of ranks.

        The batch size over all ranks is kept, so the micro-batch follows the ranks; where the run
        writes (`run.folder`, `run.overwrite`) is left out.
        """
        run = {key: value for key, value in asdict(self.run).items() if value is not None}
        del run["overwrite"]
        run.pop("folder", None)
        path = self.data.path
        training = self.training.as_json()
        training.pop("seed", None)  # it is run.seed
        return {
            "model": asdict(self.model),
            "data": {} if path is None else {"path": str(Path(path).absolute())},
            "run": run,
            **training,
        }
