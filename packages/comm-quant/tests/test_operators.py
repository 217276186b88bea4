"""The operators as torch sees them, and the package without its compiled kernels."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import comm_quant
from comm_quant import BlockQuant, quantize
from comm_quant._cuda import all_builds, run, source_of
from comm_quant._kernels.quantize import plan_quantize
from comm_quant._native import NAME, native_library

ROOT = Path(comm_quant.__file__).parent
WITHOUT_KERNELS = """
import warnings, torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import comm_quant
    assert not caught, "importing says nothing"
    spec = comm_quant.BlockQuant(bits=4, block_numel=3)
    x = torch.arange(-4.0, 4.0)
    for _ in range(2):
        codes, scales = comm_quant.quantize(x, spec)
        y = comm_quant.dequantize(codes, scales, spec, numel=8)
        comm_quant.dequantize_sum_requantize(codes[None], scales[None], spec, numel=8, to=spec)
print(codes.flatten().tolist(), len(caught), str(caught[0].message)[:50])
"""


def test_the_compiled_kernels_are_installed() -> None:
    """Or the other tests would compare the reference with itself."""
    assert native_library() is not None


def test_without_its_kernels_the_package_runs_its_reference_and_says_so_once(
    tmp_path: Path,
) -> None:
    copy = tmp_path / "comm_quant"
    for path in ROOT.rglob("*.py"):
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    assert not (copy / "_kernels" / NAME).exists()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_KERNELS],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    codes, _ = quantize(torch.arange(-4.0, 4.0), BlockQuant(bits=4, block_numel=3))
    expected = f"{codes.flatten().tolist()} 1 comm_quant: installed without its compiled kernels"
    assert done.stdout.startswith(expected[:60])


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_without_cupy_a_tensor_on_cuda_is_refused_with_the_extra_to_install() -> None:
    x = torch.zeros(8)
    launch = plan_quantize(x, torch.zeros(2, 4, dtype=torch.uint8), x[:2], 8, 4, False, 0)
    with pytest.raises(ImportError, match=r"need CuPy; pip install 'comm-quant\[cuda1[23]\]'"):
        run(launch, torch.device("cuda"))


def test_every_build_has_its_source_whole() -> None:
    for build in all_builds():
        source = source_of(build.source)
        assert f" {build.kernel}(" in source
        assert "#include" not in source.replace("#include <cstdint>", "").replace(
            "#include <cstring>", ""
        )


def test_the_operators_keep_torchs_rules() -> None:
    x = torch.randn(10)
    codes, scales = torch.zeros(3, 4, dtype=torch.uint8), torch.zeros(3)
    torch.library.opcheck(torch.ops.comm_quant.quantize.default, (x, codes, scales, 8, 4, False, 0))
    out = torch.zeros(10)
    torch.library.opcheck(torch.ops.comm_quant.dequantize.default, (codes, scales, out, 8, 4))
    rows, row_scales = codes[None].contiguous(), scales[None].contiguous()
    torch.library.opcheck(
        torch.ops.comm_quant.dequantize_sum.default,
        (rows, row_scales, None, 0, out, 8, 4),
    )
    torch.library.opcheck(
        torch.ops.comm_quant.dequantize_sum_requantize.default,
        (rows, row_scales, x, 0, 10, 8, 4, codes.clone(), scales.clone(), 8, 4, False, 0),
    )


def test_quantizing_compiles_in_one_graph() -> None:
    def traced(x: torch.Tensor) -> torch.Tensor:
        codes, scales = quantize(x, BlockQuant(bits=8, block_numel=4))
        return codes.sum() + scales.sum()

    x = torch.randn(10)
    compiled = torch.compile(traced, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), traced(x))
