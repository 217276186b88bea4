"""The CUDA kernels of the packages, compiled for this machine's CPU once a run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import pytest

from comm_quant._cuda import NUM_THREADS, Build, Launch, source_of
from cudahost import Emulator, Order

Run: TypeAlias = Callable[[Launch], None]

SANITIZER = ["-fsanitize=address", "-g"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--sanitize` compiles with the address sanitizer, whose library must be preloaded."""
    parser.addoption("--sanitize", action="store_true", help="look for reads and writes outside")


@pytest.fixture(scope="session")
def emulator_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Build], Emulator]:
    """Compile a build when it is first asked for."""
    more = SANITIZER if request.config.getoption("--sanitize") else []
    folder = tmp_path_factory.mktemp("emulators")

    @functools.cache
    def compiled(build: Build) -> Emulator:
        options = [*build.options, *more]
        return Emulator(source_of(build.source), options=options, folder=folder)

    return compiled


@pytest.fixture(params=["forward", "shuffled"])
def run(request: pytest.FixtureRequest, emulator_of: Callable[[Build], Emulator]) -> Run:
    """Run a launch with its threads in one of two orders."""
    order: Order = request.param

    def on_the_cpu(launch: Launch) -> None:
        emulator_of(launch.build).launch(
            launch.build.kernel,
            grid=[launch.num_thread_blocks],
            block=[NUM_THREADS],
            arguments=launch.arguments,
            order=order,
        )

    return on_the_cpu
