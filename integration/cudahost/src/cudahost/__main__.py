"""`python -m cudahost PACKAGE...`: compile all kernels of packages for three GPUs; no spills.

A package lists its kernels in `_cuda.all_builds()` and gives their text by `_cuda.source_of(name)`.
"""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor

from cudahost._compiler import ARCHITECTURES, Compiled, compile_cubin


def main(packages: list[str]) -> int:
    """Print a line a kernel and GPU; give 1 if one of them spills."""
    jobs = [(*job, architecture) for job in _jobs(packages) for architecture in ARCHITECTURES]
    with ProcessPoolExecutor() as pool:
        compiled = list(pool.map(_compile, jobs, chunksize=8))
    groups: dict[tuple[str, str], list[Compiled]] = defaultdict(list)
    spilling = []
    for (name, _, options, architecture), each in zip(jobs, compiled, strict=True):
        groups[name, architecture].append(each)
        if each.spill_bytes:
            spilling.append(f"{name} {architecture} {' '.join(options)}: {each.spill_bytes} bytes")
    print(f"{'kernel':<40} {'GPU':<8} {'builds':>6} {'registers':>9} {'spills':>7}")
    for (name, architecture), found in groups.items():
        most = max(each.num_registers for each in found)
        spills = max(each.spill_bytes for each in found)
        print(f"{name:<40} {architecture:<8} {len(found):>6} {most:>9} {spills:>7}")
    for line in spilling:
        print(f"spills registers: {line}", file=sys.stderr)
    return 1 if spilling or not jobs else 0


def _jobs(packages: list[str]) -> list[tuple[str, str, tuple[str, ...]]]:
    jobs = []
    for package in packages:
        cuda = importlib.import_module(f"{package}._cuda")
        for build in cuda.all_builds():
            name = f"{package}.{build.kernel}"
            jobs.append((name, cuda.source_of(build.source), build.options))
    return jobs


def _compile(job: tuple[str, str, tuple[str, ...], str]) -> Compiled:
    _, source, options, architecture = job
    return compile_cubin(source, architecture=architecture, options=options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
