"""Importing has no effect, and half-made objects go quietly."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import zero_partition


def run_alone(code: str) -> dict[str, object]:
    """Run code in a fresh interpreter; its last line prints JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", done.stderr
    found: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_import_sets_no_variable_starts_nothing_and_is_quick() -> None:
    seen = run_alone(
        """
        import json, os, sys, threading, time
        import torch, torch.distributed as dist
        environment, threads = dict(os.environ), threading.active_count()
        handles = sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else []
        random, deterministic = torch.get_rng_state(), torch.are_deterministic_algorithms_enabled()
        limit, dtype = torch.get_num_threads(), torch.get_default_dtype()
        start = time.perf_counter()
        import zero_partition
        seconds = time.perf_counter() - start
        after = sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else []
        print(json.dumps({
            "environment": dict(os.environ) == environment,
            "threads": threading.active_count() == threads,
            "handles": handles == after,
            "group": not dist.is_initialized(),
            "device": not torch.cuda.is_initialized(),
            "random": torch.equal(random, torch.get_rng_state()),
            "settings": (limit, dtype, deterministic) == (
                torch.get_num_threads(), torch.get_default_dtype(),
                torch.are_deterministic_algorithms_enabled(),
            ),
            "seconds": seconds,
        }))
        """
    )
    seconds = seen.pop("seconds")
    assert all(seen.values()), seen
    assert isinstance(seconds, float)
    assert seconds < 0.3


def test_import_needs_no_sibling_compiler_or_optional_package() -> None:
    siblings = ["comm_quant", "offload_io", "moe_router", "sparse_attn", "pipe_sched"]
    absent = [*siblings, "step_profiler", "plait", "triton", "cupy", "safetensors", "numpy"]
    seen = run_alone(
        f"""
        import json, os, sys
        for name in {absent!r}:
            sys.modules[name] = None
        os.environ["PATH"] = ""
        import warnings; warnings.simplefilter("ignore")  # torch's own word about numpy
        import torch
        warnings.simplefilter("error")
        import zero_partition
        model = torch.nn.Linear(3, 2)
        zero = zero_partition.partition(model, stage=3)
        optimizer = zero.optimizer(torch.optim.AdamW)
        model(torch.ones(3)).sum().backward()
        print(json.dumps({{"stepped": optimizer.step()}}))
        """
    )
    assert seen == {"stepped": True}


def test_half_made_objects_are_deleted_quietly() -> None:
    seen = run_alone(
        """
        import gc, json, torch, zero_partition
        for name in zero_partition.__all__:
            kind = getattr(zero_partition, name)
            if isinstance(kind, type) and not getattr(kind, "_is_protocol", False):
                try:
                    made = kind.__new__(kind)
                except TypeError:
                    continue
                del made
        try:
            zero_partition.partition(torch.nn.Linear(3, 2), stage=7)
        except ValueError:
            pass
        gc.collect()
        print(json.dumps({}))
        """
    )
    assert seen == {}


def test_the_public_names_are_few_and_documented() -> None:
    assert zero_partition.__version__
    for name in zero_partition.__all__:
        value = getattr(zero_partition, name)
        assert isinstance(value, str) or value.__doc__, name
    assert {"partition", "Precision", "Zero", "Wire", "TorchWire"} <= set(zero_partition.__all__)
