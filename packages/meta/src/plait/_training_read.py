"""What DeepSpeed's JSON says of the training itself, put together from the values of its keys."""

from __future__ import annotations

from dataclasses import replace

import torch

from plait._batch import BatchSizes, BatchSizesError, Given, plan_batch_sizes
from plait._config import OptimizerConfig, SchedulerConfig, TrainingConfig, WireConfig
from plait._config_values import Values
from plait._deepspeed_keys import BATCH_KEYS
from plait._fates import Became, Fate
from plait._optimizers import check_optimizer, optimizer_class
from plait._overrides import Origins
from plait._problems import ProblemList
from plait._schedulers import check_scheduler, scheduler_rate
from plait._typed_sections import TypedSection, complete_section

__all__ = ["TrainingReader"]

_STAGE = "zero_optimization.stage"
_WEIGHTS = "zero_optimization.zero_quantized_weights"
_FROZEN_WEIGHTS = "zero_optimization.zero_quantized_nontrainable_weights"
_GRADIENTS = "zero_optimization.zero_quantized_gradients"
_NODE = "zero_optimization.zero_hpz_partition_size"
_LOCO = "zero_optimization.zeropp_loco_param"
_BUCKETS = ("zero_optimization.reduce_bucket_size", "zero_optimization.allgather_bucket_size")
_OVERFLOW = "bf16.check_grad_overflow"
_WINS = "the one passed to plait.initialize wins"
_COMMAND_ONLY = "of plait train alone"
_NOT_OF_COMMAND = {
    "dataloader_drop_last": "plait train fills every batch",
    "steps_per_print": "plait train shows every update",
}


class TrainingReader:
    """Puts a TrainingConfig together, and tells what became of every key.

    Args:
        values: The keys of the file, read.
        problems: Takes everything that is wrong.
        origins: Where values came from that are not from the file.
        source: The file's name.
        is_command: For `plait train`, which has a recipe and defaults for what the file leaves out;
            else for `plait.initialize`, where it means what it means in DeepSpeed.
        num_steps: The length of the run, where it is known.
    """

    def __init__(
        self,
        values: Values,
        problems: ProblemList,
        origins: Origins,
        source: str,
        *,
        is_command: bool,
        num_steps: int | None = None,
    ) -> None:
        self.values = values
        self.problems = problems
        self.origins = origins
        self.source = source
        self.is_command = is_command
        self.num_steps = num_steps
        self.typed_fates: dict[str, tuple[Fate, ...]] = {}

    def training(
        self,
        ranks: Given | None,
        *,
        optimizer_given: bool = False,
        scheduler_given: bool = False,
    ) -> TrainingConfig | None:
        """The configuration; None where something it needs is wrong.

        Args:
            ranks: How many share the batch; None where that itself is wrong.
            optimizer_given: One is passed, and wins over the file's.
            scheduler_given: The same of the schedule.
        """
        values = self.values
        batch = None if ranks is None else self._batch(ranks)
        optimizer = None if optimizer_given else self._optimizer()
        scheduler = None if scheduler_given else self._scheduler()
        for name, is_given in (("optimizer", optimizer_given), ("scheduler", scheduler_given)):
            if is_given:
                self._leave_out(name, _WINS)
        if optimizer is None and not optimizer_given and not self.problems.found:
            self._leave_out("scheduler", "there is no optimizer to schedule")
            scheduler = None
        self._check_momentum(optimizer, scheduler)
        wire = self._wire(ranks)
        if self.problems.found or batch is None:
            return None
        bf16 = bool(values.get("bf16.enabled"))
        overflow = values.given(_OVERFLOW)
        steps_per_print, seed = values.get("steps_per_print"), values.given("seed")
        return TrainingConfig(
            optimizer=optimizer,
            scheduler=scheduler,
            stage=self._stage(),
            wire=wire,
            bucket_numel=self._bucket_numel(),
            overlap=bool(values.get("zero_optimization.overlap_comm")),
            bf16=bf16,
            skip_nonfinite=bf16 and overflow is not False,
            gradient_clipping=float(str(values.get("gradient_clipping"))),
            batch=batch,
            steps_per_print=steps_per_print if isinstance(steps_per_print, int) else None,
            seed=seed if isinstance(seed, int) else None,
            drop_last=bool(values.get("dataloader_drop_last")),
        )

    def fates(self, training: TrainingConfig) -> tuple[Fate, ...]:
        """What became of every key, and what was filled in for those that are absent."""
        derived = self._derived(training)
        found = []
        for fate in self.values.fates():
            path = fate.path
            if path.startswith(("model.", "data.", "run.")) and not self.is_command:
                found.append(Fate(path, fate.value, Became.OFF, _COMMAND_ONLY))
            elif fate.became is Became.DERIVED and path in derived:
                value, why = derived.pop(path)
                found.append(Fate(path, value, Became.DERIVED, f"auto: {why}"))
            else:
                found.append(self._noted(fate, training))
        for fates in self.typed_fates.values():
            found += fates
        given = self.values.entries
        found += [
            Fate(path, value, Became.DERIVED, f"absent: {why}")
            for path, (value, why) in derived.items()
            if path not in given
        ]
        return tuple(found)

    def _noted(self, fate: Fate, training: TrainingConfig) -> Fate:
        """A fate with what the whole configuration adds to it."""
        if fate.path in _BUCKETS and fate.became is Became.HONOURED:
            note = f"messages of at most {training.bucket_numel} elements; never other bits"
            return Fate(fate.path, fate.value, fate.became, note)
        if fate.path.endswith("check_grad_overflow") and not training.bf16:
            return Fate(fate.path, fate.value, Became.OFF, "bf16.enabled is off")
        if fate.path in _NOT_OF_COMMAND and self.is_command:
            return Fate(fate.path, fate.value, Became.DECIDED, _NOT_OF_COMMAND[fate.path])
        return fate

    def _derived(self, training: TrainingConfig) -> dict[str, tuple[object, str]]:
        """Values that a key has when it is absent and that change numbers or memory."""
        batch = training.batch
        found: dict[str, tuple[object, str]] = {
            "gradient_clipping": (training.gradient_clipping, "1.0, as in DeepSpeed"),
            _STAGE: (training.stage, "the default"),
            "train_batch_size": (batch.train_batch_size, "from the others"),
            "train_micro_batch_size_per_gpu": (batch.micro_batch_size, "from the others"),
            "gradient_accumulation_steps": (batch.accumulation_steps, "from the others"),
        }
        if training.bf16:
            found[_OVERFLOW] = (training.skip_nonfinite, "true with bf16")
        return found

    def _stage(self) -> int:
        """The stage; absent it is DeepSpeed's 0 for `plait.initialize`."""
        if not self.is_command and self.values.given(_STAGE) is None:
            return 0
        return self.values.int(_STAGE)

    def _wire(self, ranks: Given | None) -> WireConfig:
        """What travels as codes; problems where that cannot be."""
        paths = (_WEIGHTS, _FROZEN_WEIGHTS, _GRADIENTS)
        weights, frozen_weights, gradients = (bool(self.values.get(path)) for path in paths)
        for path, is_on in ((_WEIGHTS, weights), (_FROZEN_WEIGHTS, frozen_weights)):
            if is_on and _STAGE not in self.values.unfit and self._stage() < 3:
                reason = f"parameters travel at stage 3 only, and the stage is {self._stage()}"
                hint = "write false, or zero_optimization.stage 3"
                self.problems.add(path, reason=reason, got=True, hint=hint)
        found = WireConfig(
            weights=weights,
            frozen_weights=frozen_weights,
            gradients=gradients,
            ranks_a_node=self._ranks_a_node(ranks),
        )
        beta, reset = (self.values.given(f"{_LOCO}.{name}") for name in ("err_beta", "reset_T"))
        if beta is None and reset is None:
            return found
        if not gradients:
            reason = "error feedback corrects 4-bit gradients, and they are off"
            hint = f"set {_GRADIENTS} to true, or remove this"
            self.problems.add(_LOCO, reason=reason, hint=hint)
        return replace(
            found,
            err_beta=0.8 if beta is None else float(str(beta)),
            reset_steps=reset if isinstance(reset, int) else 1024,
        )

    def _ranks_a_node(self, ranks: Given | None) -> int:
        """How many ranks share parameters out once more; a problem where they cannot."""
        size = 1 if _NODE in self.values.unfit else max(1, self.values.int(_NODE))
        if size == 1:
            return 1
        if _STAGE not in self.values.unfit and self._stage() < 3:
            reason = f"parameters are shared out at stage 3 only, and the stage is {self._stage()}"
            hint = "write 1, or zero_optimization.stage 3"
            self.problems.add(_NODE, reason=reason, got=size, hint=hint)
        elif ranks is not None and ranks.value % size:
            expected = f"a divisor of {ranks.value}, the number of ranks ({ranks.origin})"
            self.problems.add(_NODE, expected=expected, got=size)
        return size

    def _bucket_numel(self) -> int | None:
        given = [self.values.given(path) for path in _BUCKETS]
        sizes = [size for size in given if isinstance(size, int)]
        return min(sizes) if sizes else None

    def _batch(self, ranks: Given) -> BatchSizes | None:
        if self.values.unfit.intersection([*BATCH_KEYS, "data_parallel_size"]):
            return None
        data_parallel = self.values.given("data_parallel_size")
        if data_parallel not in (None, ranks.value):
            expected = f"{ranks.value}, the number of ranks ({ranks.origin})"
            self.problems.add("data_parallel_size", expected=expected, got=data_parallel)
        train, micro, accumulation = (self._given(name) for name in BATCH_KEYS)
        if not self.is_command and train is None and micro is None:
            reason = "nothing says how many samples an update has"
            hint = "write train_batch_size or train_micro_batch_size_per_gpu as a number"
            self.problems.add("train_batch_size", reason=reason, hint=hint)
            return None
        try:
            return plan_batch_sizes(
                ranks=ranks, train=train, micro=micro, accumulation=accumulation
            )
        except BatchSizesError as error:
            self.problems.add("train_batch_size", reason=str(error))
            return None

    def _given(self, path: str) -> Given | None:
        value = self.values.given(path)
        if not isinstance(value, int):
            return None
        return Given(value, self.origins.of(path) or self.source)

    def _typed(self, path: str) -> TypedSection | None:
        """The section to use; None for none of it. For the command a recipe stands in."""
        values = self.values
        if path in values.unfit:
            return None
        section = values.typed.get(path)
        if section is None and self.is_command:
            if path == "scheduler" and (path in values.typed or self._optimizer_is_named()):
                return None
            return TypedSection(None, {})
        if section is not None and section.type is None and not self.is_command:
            reason, hint = "no type is given", "write one, such as " + _EXAMPLES[path]
            self.problems.add(f"{path}.type", reason=reason, hint=hint)
            return None
        return section

    def _optimizer_is_named(self) -> bool:
        if "optimizer" in self.values.unfit:
            return True
        section = self.values.typed.get("optimizer")
        return section is not None and section.type is not None

    def _optimizer(self) -> OptimizerConfig | None:
        section = self._typed("optimizer")
        if section is None:
            return None
        name, params, came_from = complete_section("optimizer", section, self.origins)
        checked = check_optimizer(name, params, came_from)
        self.problems.found += checked.problems
        self.typed_fates["optimizer"] = checked.fates
        return OptimizerConfig(type=name, params=checked.params)

    def _scheduler(self) -> SchedulerConfig | None:
        section = self._typed("scheduler")
        if section is None:
            return None
        name, params, came_from = complete_section("scheduler", section, self.origins)
        checked = check_scheduler(name, params, came_from, num_steps=self.num_steps)
        self.problems.found += checked.problems
        self.typed_fates["scheduler"] = checked.fates
        config = SchedulerConfig(type=name, params=checked.params)
        if self.is_command and not checked.problems:
            self._check_groups(config)
        return config

    def _check_groups(self, config: SchedulerConfig) -> None:
        """`plait train` has one parameter group: a list has one number."""
        for key, value in config.params.items():
            if isinstance(value, tuple) and len(value) != 1:
                expected = "one number, as plait train has one parameter group"
                self.problems.add(f"scheduler.params.{key}", expected=expected, got=list(value))

    def _leave_out(self, path: str, why: str) -> None:
        """Tell of a section that is not used."""
        section = self.values.typed.get(path)
        if section is not None:
            self.typed_fates[path] = (Fate(path, section.type, Became.OFF, why),)

    def _check_momentum(
        self, optimizer: OptimizerConfig | None, scheduler: SchedulerConfig | None
    ) -> None:
        """A momentum that is to be moved needs ``betas`` to be in, and to stay below 1."""
        if self.problems.found or optimizer is None or scheduler is None:
            return
        cls, options = optimizer_class(optimizer.type, optimizer.params)
        section = self.values.typed.get("scheduler")
        if "betas" not in cls([_one_number()], **options).defaults:
            if section is not None and section.params.get("cycle_momentum") is True:
                path = "scheduler.params.cycle_momentum"
                reason = f"{cls.__name__} has no betas to move"
                self.problems.add(path, reason=reason, got=True, hint="write false")
            return
        rate = scheduler_rate(scheduler, num_steps=self.num_steps)
        last = None if rate is None else rate.last_step()
        if last is not None and self.num_steps is not None and last < self.num_steps:
            path = "scheduler.params.decay_mom_rate"
            reason = f"the momentum reaches 1 at update {last + 1} of {self.num_steps} (run.steps)"
            self.problems.add(path, reason=reason, got=scheduler.params["decay_mom_rate"])


_EXAMPLES = {"optimizer": "AdamW", "scheduler": "WarmupLR"}


def _one_number() -> torch.Tensor:
    return torch.zeros(1, requires_grad=True)
