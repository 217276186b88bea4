"""1-bit Adam: Adam at first; then its variance stands still and its momentum travels as signs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from comm_quant._codec import BlockQuant
from comm_quant._counter import Payload
from comm_quant._gather import gather
from comm_quant._message import Run, new_messages
from comm_quant._quantize import FLOATS, dequantize, dequantize_sum, quantize
from comm_quant._ranks import Mesh, exchange_texts
from comm_quant._reduce import reduce_exactly
from comm_quant._transfer import Hop, Transfer, swap


class OneBitAdam(torch.optim.Optimizer):
    """AdamW whose ranks exchange one bit an element once the variance is frozen.

    Give each rank the gradients of its own part of the batch: the optimizer is what averages them,
    so leave out DDP. With g_r the gradient of rank r; up to ``freeze_step`` it is torch's AdamW::

        warm-up   g = mean_r(g_r);  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        after     h_r = b1 m + (1 - b1) g_r + e_r           e_r = h_r - signs(h_r)
                  H   = mean_r(signs(h_r)) + E              E   = H - signs(H)
                  m   = signs(H)                            v stands still

        p = p - lr weight_decay p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^T)) + eps)

    where ``signs`` keeps a block's signs and the mean of its magnitudes, E lies with the rank that
    averages a slice, and T is the last step of the warm-up. All ranks get the same bits. An element
    whose variance is zero at the freeze has had no gradient; it stays where it is from then on,
    since any momentum over no variance is a leap.

    Args:
        params: As for torch's optimizers; float32, the same on every rank. Frozen parameters are
            passed over.
        lr: Learning rate; schedulers may change it between steps.
        betas: Weights of the past of momentum and variance.
        eps: Added to the root of the variance.
        weight_decay: Decoupled, as in AdamW.
        freeze_step: Steps of the warm-up, at least 1; 15 to 20 % of the training is usual.
        block_numel: Elements that share a scale.
        warmup_dtype: What gradients travel in before the freeze: float32, bfloat16 or float16; sums
            are taken in float32.
        group: The ranks; default all.
        payload: Counts the bytes.

    Raises:
        ValueError: An option is out of range, nothing is trainable, or the ranks' settings differ.
        TypeError: A parameter is not float32.

    Cost:
        5 numbers a parameter: 2 for Adam, the gradient in one piece, e, and a slice's E. Messages
        take ``2 (1 + 32 / block_numel)`` bits a parameter, to and fro, instead of 32 of an
        all-reduce in bfloat16.

    Source:
        Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
        Convergence Speed", ICML 2021, algorithm 1; bias correction as in Adam.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int = 100_000,
        block_numel: int = 2048,
        warmup_dtype: torch.dtype = torch.float32,
        group: dist.ProcessGroup | None = None,
        payload: Payload | None = None,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"OneBitAdam: {name} must be at least 0, got {value!r}")
        _check_options(betas, freeze_step, warmup_dtype)
        self._is_built = False
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)
        self._is_built = True
        chosen = dist.group.WORLD if group is None else group
        if chosen is None:
            raise ValueError("OneBitAdam: torch.distributed is not initialised in this process")
        self._group: dist.ProcessGroup = chosen
        self._freeze_step, self._warmup_dtype = freeze_step, warmup_dtype
        self._signs = BlockQuant(bits=1, block_numel=block_numel)
        self.payload = Payload() if payload is None else payload
        self._num_steps = 0
        trained = [p for each in self.param_groups for p in each["params"] if p.requires_grad]
        _check_parameters(trained)
        self._numel, device = sum(p.numel() for p in trained), trained[0].device
        self._agree(device)
        self._num_ranks, self._rank = dist.get_world_size(chosen), dist.get_rank(chosen)
        num_blocks = -(-self._signs.num_blocks(self._numel) // self._num_ranks)
        self._run = Run(self._signs, num_blocks * block_numel)  # a rank's slice of all
        whole = self._num_ranks * self._run.numel
        self._gradient, self._momentum, self._variance, self._worker_error = torch.zeros(
            4, whole, device=device
        )
        self._server_error = torch.zeros(self._run.numel, device=device)
        self._moving: Tensor | None = None  # which elements have a variance, from the freeze on

    @property
    def is_frozen(self) -> bool:
        """Whether the next step sends signs."""
        return self._num_steps >= self._freeze_step

    @property
    def state_bytes(self) -> int:
        """Bytes of everything that this rank keeps."""
        kept = [self._gradient, self._momentum, self._variance, self._worker_error]
        return sum(each.nbytes for each in [*kept, self._server_error])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, while the optimizer is being built.

        Raises:
            ValueError: It has been built: the ranks have settled what they send.
        """
        if self._is_built:
            raise ValueError("OneBitAdam: give all parameter groups at once, when it is made")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: object = None) -> bool:  # type: ignore[override]  # says if it stepped
        """Average over the ranks and step; a parameter without a gradient counts as zero.

        Returns:
            Whether it stepped: False, on every rank, where some rank's gradients are not finite.
            Then nothing has changed.

        Raises:
            TypeError: A closure was passed.
        """
        if closure is not None:
            raise TypeError("OneBitAdam.step: call step() without a closure, after backward()")
        for parameter, gradient in self._views(self._gradient):
            if parameter.grad is None:
                gradient.zero_()
            else:
                gradient.copy_(parameter.grad)
        if not (self._share_momentum() if self.is_frozen else self._share_gradient()):
            return False
        self._num_steps += 1
        if self._num_steps == self._freeze_step:
            self._moving = self._variance > 0
        self._apply()
        return True

    def _share_gradient(self) -> bool:
        """Step both moments with the mean of the gradients."""
        mean = torch.empty(len(self._gradient), dtype=self._warmup_dtype, device=self._device)
        Transfer(self._average(mean)).wait()
        if not mean.isfinite().all():
            return False
        exact = mean.float()
        for (beta1, beta2), part in self._spans():
            gradient = exact[part]
            self._momentum[part].lerp_(gradient, 1 - beta1)
            self._variance[part].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        return True

    def _average(self, mean: Tensor) -> Iterator[Hop]:
        sent = self._gradient.to(self._warmup_dtype)
        total = torch.empty(self._run.numel, device=self._device)
        yield from reduce_exactly(total, sent, group=self._group, payload=self.payload)
        total /= self._num_ranks
        shard, mesh = total.to(mean.dtype), Mesh(self._num_ranks, 1)
        yield from gather(mean, shard, None, group=self._group, mesh=mesh, payload=self.payload)

    def _share_momentum(self) -> bool:
        """Step the momentum with this rank's gradient, and average it as signs."""
        assert self._moving is not None  # set at the freeze
        given = self._gradient
        for (beta1, _), part in self._spans():
            torch.lerp(self._momentum[part], given[part], 1 - beta1, out=given[part])
        given += self._worker_error
        given *= self._moving
        sent = new_messages(self._num_ranks, self._run.run_bytes, device=self._device)
        whole, mean = torch.empty_like(given), torch.empty_like(self._server_error)
        own = slice(self._rank * self._run.numel, (self._rank + 1) * self._run.numel)
        Transfer(self._average_signs(whole, mean, given, sent, self._moving[own])).wait()
        if not whole.isfinite().all():
            return False
        torch.sub(mean, whole[own], out=self._server_error)
        self._server_error *= self._moving[own]
        rows = zip(sent, given.split(self._run.numel), strict=True)
        errors = self._worker_error.split(self._run.numel)
        for (message, row), error in zip(rows, errors, strict=True):
            codes, scales = self._run.codes(message), self._run.scales(message)
            dequantize(codes, scales, self._signs, numel=len(row), out=error)
            torch.sub(row, error, out=error)
        self._worker_error *= self._moving
        torch.mul(whole, self._moving, out=self._momentum)
        return True

    def _average_signs(
        self, whole: Tensor, mean: Tensor, given: Tensor, sent: Tensor, moving: Tensor
    ) -> Iterator[Hop]:
        """Fill `whole` with everyone's average; `mean` is this rank's slice before its signs."""
        run, num_ranks = self._run, self._num_ranks
        for message, row in zip(sent, given.split(run.numel), strict=True):
            quantize(row, run.spec, out=(run.codes(message), run.scales(message)))
        arrived = torch.empty_like(sent)
        self.payload.count("reduce", "all", message_bytes=run.run_bytes, num_peers=num_ranks - 1)
        yield swap(arrived, sent, group=self._group)
        arrived[self._rank] = sent[self._rank]
        codes, scales = run.codes(arrived), run.scales(arrived)
        dequantize_sum(codes, scales, run.spec, numel=run.numel, out=mean)
        mean /= num_ranks
        mean *= moving  # which have signs, but no momentum
        mean += self._server_error
        mesh = Mesh(num_ranks, 1)
        yield from gather(whole, mean, run.spec, group=self._group, mesh=mesh, payload=self.payload)

    def _apply(self) -> None:
        """Move the parameters; torch's AdamW, operation by operation."""
        step, frozen_at = self._num_steps, min(self._num_steps, self._freeze_step)
        momenta, variances = self._views(self._momentum), self._views(self._variance)
        grouped = [each for each in self.param_groups for p in each["params"] if p.requires_grad]
        for group, (parameter, momentum), (_, variance) in zip(
            grouped, momenta, variances, strict=True
        ):
            beta1, beta2 = group["betas"]
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            root = (variance.sqrt() / math.sqrt(1 - beta2**frozen_at)).add_(group["eps"])
            parameter.addcdiv_(momentum, root, value=-group["lr"] / (1 - beta1**step))

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._gradient.device
        return device

    def _views(self, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each trainable parameter with its part of a buffer, in its shape."""
        start = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    end = start + parameter.numel()
                    yield parameter, whole[start:end].view(parameter.shape)
                    start = end

    def _spans(self) -> Iterator[tuple[Sequence[float], slice]]:
        """The groups' betas, each with its part of a buffer; the last takes the padding."""
        start = 0
        for index, group in enumerate(self.param_groups):
            end = start + sum(p.numel() for p in group["params"] if p.requires_grad)
            if index == len(self.param_groups) - 1:
                end = len(self._gradient)
            yield group["betas"], slice(start, end)
            start = end

    def _agree(self, device: torch.device) -> None:
        mine = (
            f"{self._numel} parameters, freeze_step={self._freeze_step}, "
            f"block_numel={self._signs.block_numel}, warmup_dtype={self._warmup_dtype}"
        )
        texts = exchange_texts(mine, self._group, device)
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise ValueError(
                    f"OneBitAdam: all ranks need the same settings; rank 0 has {texts[0]}, rank "
                    f"{rank} has {text}"
                )

    def state_dict(self) -> dict[str, Any]:
        """torch's, and under "one_bit" the moments, common to all, and this rank's errors."""
        saved: dict[str, Any] = super().state_dict()
        saved["one_bit"] = {
            "num_steps": self._num_steps,
            "num_ranks": self._num_ranks,
            "momentum": self._momentum[: self._numel].clone(),
            "variance": self._variance[: self._numel].clone(),
            "worker_error": self._worker_error.clone(),
            "server_error": self._server_error.clone(),
        }
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`; errors of another number of ranks begin at zero, and it is said.

        Raises:
            ValueError: It is not this optimizer's, or that of other parameters.
        """
        saved = state_dict.get("one_bit")
        if saved is None:
            raise ValueError('OneBitAdam: the state has no "one_bit"; it is another optimizer\'s')
        if len(saved["momentum"]) != self._numel:
            raise ValueError(
                f"OneBitAdam: the state is that of {len(saved['momentum'])} parameters, here are "
                f"{self._numel}"
            )
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "one_bit"})
        self._num_steps = saved["num_steps"]
        for name, mine in (("momentum", self._momentum), ("variance", self._variance)):
            mine.zero_()
            mine[: self._numel] = saved[name]
        self._moving = self._variance > 0 if self.is_frozen else None
        errors = {"worker_error": self._worker_error, "server_error": self._server_error}
        fits = saved["num_ranks"] == self._num_ranks
        fits = fits and all(saved[name].shape == mine.shape for name, mine in errors.items())
        for name, mine in errors.items():
            mine.zero_() if not fits else mine.copy_(saved[name])
        if not fits and self._num_steps > self._freeze_step:
            warnings.warn(
                f"OneBitAdam: the saved errors are those of {saved['num_ranks']} ranks or other "
                f"blocks, this group has {self._num_ranks}; they begin at zero again",
                RuntimeWarning,
                stacklevel=2,
            )


def _check_options(betas: Sequence[float], freeze_step: int, warmup_dtype: torch.dtype) -> None:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"OneBitAdam: betas must be two numbers from 0 to below 1, got {betas!r}")
    if isinstance(freeze_step, bool | float) or freeze_step < 1:
        raise ValueError(
            f"OneBitAdam: freeze_step must be a whole number from 1 on, got {freeze_step!r}"
        )
    if warmup_dtype not in FLOATS:
        raise ValueError(
            f"OneBitAdam: warmup_dtype must be float32, bfloat16 or float16, got {warmup_dtype}"
        )


def _check_parameters(trained: list[Tensor]) -> None:
    if not trained:
        raise ValueError("OneBitAdam: no parameter is trainable")
    for parameter in trained:
        if parameter.dtype != torch.float32:
            raise TypeError(
                f"OneBitAdam: parameters must be float32, got {parameter.dtype} of shape "
                f"{tuple(parameter.shape)}; train in bfloat16 under torch.autocast"
            )
        if parameter.device != trained[0].device:
            raise ValueError(
                f"OneBitAdam: parameters must be on one device, got {trained[0].device} and "
                f"{parameter.device}"
            )
