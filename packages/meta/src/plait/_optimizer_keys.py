"""``optimizer.params`` of DeepSpeed's that mean something beyond torch's own options."""

from __future__ import annotations

from plait._key import Key, Use
from plait._kinds import Anything, Flag, Kind, Number, NumberList

__all__ = ["OPTIMIZER_KEYS"]

_RATE = Number(at_least=0.0)
_BETAS = NumberList(2, Number(at_least=0.0, below=1.0))
_ONE_BIT = """
    freeze_step cuda_aware comm_backend_name var_freeze_step var_update_scaler local_step_scaler
    local_step_clipper max_coeff min_coeff coeff_beta factor_max factor_min factor_threshold
    muon_lr adam_lr ns_method
"""


def _option(name: str, kind: Kind, default: object, meaning: str, said: str = "") -> Key:
    path = f"optimizer.params.{name}"
    return Key(path=path, kind=kind, default=default, meaning=meaning, default_said=said)


def _asks(name: str, kind: Kind, off: tuple[object, ...], meaning: str, instead: str) -> Key:
    return Key(
        path=f"optimizer.params.{name}",
        kind=kind,
        default=off[0],
        off=off,
        meaning=meaning,
        use=Use.ASKS,
        instead=instead,
    )


OPTIMIZER_KEYS: tuple[Key, ...] = (
    _option("lr", _RATE, None, "learning rate", "the class's own"),
    _option("betas", _BETAS, [0.9, 0.999], "decay of the moments"),
    _option("eps", _RATE, 1e-8, "added to the denominator"),
    _option(
        "weight_decay",
        _RATE,
        None,
        "weight decay",
        "`0.0` for Adam and AdamW, as in DeepSpeed; else the class's own",
    ),
    _option("adam_w_mode", Flag(), True, "Adam with decoupled weight decay, which is AdamW"),  # noqa: FBT003  its default
    Key(
        path="optimizer.params.torch_adam",
        kind=Flag(),
        default=False,
        meaning="the optimizer is torch's anyway; with it, so is the default of `weight_decay`",
        use=Use.DECIDED,
    ),
    _asks(
        "bias_correction", Flag(), (True,), "moments as they are", "torch's Adam always corrects"
    ),
    _asks(
        "fp32_optimizer_states",
        Flag(),
        (True,),
        "moments in 16 bits",
        "moments are fp32; remove it",
    ),
    _asks(
        "max_grad_norm", Number(), (0.0,), "clipping by the optimizer", "write gradient_clipping"
    ),
    *(
        _asks(name, Anything(), (None,), "an option of DeepSpeed's own optimizers", "remove it")
        for name in _ONE_BIT.split()
    ),
)
