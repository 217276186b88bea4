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
class Config:
    """A checked configuration; `read_config` makes one.

    Args:
        model: Size of the model.
        data: The text to train on.
        run: Ranks, steps, folder and the like.
        optimizer: Class and options.
        scheduler: Learning-rate schedule; None is a constant rate.
        stage: ``zero_optimization.stage``.
        bf16: ``bf16.enabled``.
        gradient_clipping: Largest norm; 0 is no clipping.
        batch: The completed batch sizes.
    """

    model: ModelConfig
    data: DataConfig
    run: RunConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig | None
    stage: int
    bf16: bool
    gradient_clipping: float
    batch: BatchSizes

    def as_json(self) -> dict[str, object]:
        """The configuration as JSON that reads back to the same one on any number of ranks.

        The batch size over all ranks is kept, so the micro-batch follows the ranks; where the run
        writes (`run.folder`, `run.overwrite`) is left out.
        """
        run = {key: value for key, value in asdict(self.run).items() if value is not None}
        del run["overwrite"]
        run.pop("folder", None)
        return {
            "model": asdict(self.model),
            "data": {}
            if self.data.path is None
            else {"path": str(Path(self.data.path).absolute())},
            "run": run,
            "optimizer": asdict(self.optimizer),
            "scheduler": None if self.scheduler is None else asdict(self.scheduler),
            "zero_optimization": {"stage": self.stage},
            "bf16": {"enabled": self.bf16},
            "gradient_clipping": self.gradient_clipping,
            "train_batch_size": self.batch.train_batch_size,
            "gradient_accumulation_steps": self.batch.accumulation_steps,
        }
