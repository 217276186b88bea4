"""Everything that is run on this repository; `nox -l` lists it.

All environments see one torch, installed once below `.nox`: it takes longer to install than the
rest together. Everything else that a session needs is installed into the session's own
environment, the packages as the wheels that users get.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import nox

nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_external_run = True
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "layers", "tests", "kernels", "integration", "build"]

ROOT = Path(__file__).parent
SHARED = ROOT / ".nox"
CONSTRAINTS = ROOT / "constraints.txt"
TEST_KIT = ROOT / "integration" / "ranktest"
CUDA_KIT = ROOT / "integration" / "cudahost"
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
ALL = [*PACKAGES, TEST_KIT, CUDA_KIT]
NAMES = [folder.name for folder in PACKAGES]
BACKENDS = ["hatchling", "scikit-build-core", "cmake", "ninja"]  # what builds the wheels
MAX_LINES = 400


def read_project(folder: Path) -> dict[str, Any]:
    """Read a project's `pyproject.toml`."""
    return tomllib.loads((folder / "pyproject.toml").read_text())


OURS = {read_project(folder)["project"]["name"]: folder for folder in PACKAGES}


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, types and the length of files."""
    install(session, "mypy", "nox", "ruff", *third_party(ALL, tested=ALL))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    # The packages' tests are left to ruff: torch types what a module holds as Tensor or Module.
    parts = [[folder / "src"] for folder in PACKAGES]
    parts += [[ROOT / "noxfile.py", ROOT / "conftest.py"], [TEST_KIT / "src", TEST_KIT / "tests"]]
    parts += [[CUDA_KIT / "src", CUDA_KIT / "tests"], [ROOT / "integration" / "kernels"]]
    parts += [sorted((ROOT / "integration" / "tests").glob("*.py"))]
    parts += [sorted(folder.glob("*.py")) for folder in ROOT.glob("benchmarks/**/")]
    paths = [str(folder) for folder in [*(each / "src" for each in ALL), ROOT / "benchmarks"]]
    for part in filter(None, parts):  # one by one: file names recur
        session.run("mypy", *map(str, part), env={"MYPYPATH": os.pathsep.join(paths)})
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        num_lines = len(path.read_text().splitlines())
        if num_lines > MAX_LINES:
            session.error(f"{path.relative_to(ROOT)} has {num_lines} lines, more than {MAX_LINES}")


@nox.session
def layers(session: nox.Session) -> None:
    """Check who imports whom."""
    session.install("-c", str(CONSTRAINTS), "import-linter")
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    listed = contracts["importlinter"]["root_packages"].split()
    if missing := {import_name(folder) for folder in PACKAGES} - set(listed):
        session.error(f".importlinter: add {', '.join(missing)} to root_packages")
    sources = [str(folder / "src") for folder in PACKAGES]
    session.run("lint-imports", env={"PYTHONPATH": os.pathsep.join(sources)})


@nox.session
@nox.parametrize("package", NAMES, ids=NAMES)
def tests(session: nox.Session, package: str) -> None:
    """Test each package where only it, and what it needs, is installed."""
    folder = ROOT / "packages" / package
    install_ours(session, [folder, TEST_KIT], tested=[folder])
    examples = ["--doctest-modules", "--pyargs", import_name(folder), str(folder / "README.md")]
    session.run("pytest", str(folder / "tests"), *examples, *session.posargs)


@nox.session
def kernels(session: nox.Session) -> None:
    """Compile every CUDA kernel for three GPUs and run it on the CPU; no GPU is needed."""
    folders = [folder for folder in PACKAGES if any(folder.glob("src/*/_kernels/*.cu"))]
    install_ours(session, [*folders, CUDA_KIT], tested=[*folders, CUDA_KIT])
    session.run("python", "-m", "cudahost", *map(import_name, folders))
    tests = str(ROOT / "integration" / "kernels")
    session.run("pytest", str(CUDA_KIT), tests, *session.posargs)
    # Once more with the address sanitizer, on part of the builds.
    part = ["--sanitize", "-k", "forward and not INT2 and not E4M3 and not E5M2"]
    find = ["g++", "-print-file-name=libasan.so"]
    library = str(session.run(*find, silent=True, external=True)).strip()
    sanitizer = {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0"}
    session.run("pytest", tests, *part, env=sanitizer)


@nox.session
def integration(session: nox.Session) -> None:
    """Test the packages together, the test kit, and the examples in the documents."""
    parts = [*PACKAGES, TEST_KIT]
    install_ours(session, parts, tested=parts)
    folders = [TEST_KIT / "tests", ROOT / "integration" / "tests", ROOT / "docs"]
    existing = [str(folder) for folder in folders if folder.exists()]
    session.run("pytest", *existing, str(ROOT / "README.md"), *session.posargs)


@nox.session
def train(session: nox.Session) -> None:
    """Train the default model; its held-out loss must be below that of the bigram counts."""
    install_ours(session, PACKAGES)
    folder = Path(session.create_tmp()) / "train"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with session.chdir(folder):
        output = str(session.run("plait", "train", *session.posargs, silent=True))
    session.log(f"plait train:\n{output}")
    (metrics,) = folder.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    val_loss = [row["val_loss"] for row in rows if row.get("val_loss") is not None][-1]
    bigram_loss = float(re.findall(r"bigram\D*(\d+\.\d+)", output)[-1])
    if not val_loss < bigram_loss:
        session.error(f"val_loss {val_loss:.3f} is not below the bigram counts' {bigram_loss:.3f}")
    session.log(f"val_loss {val_loss:.3f} is below the bigram counts' {bigram_loss:.3f}")


@nox.session
def bench(session: nox.Session) -> None:
    """Run every benchmark with --quick, or one: nox -s bench -- FILE [OPTION...]."""
    install_ours(session, PACKAGES)
    if session.posargs:
        session.run("python", *session.posargs)
        return
    for path in sorted(ROOT.glob("benchmarks/*/bench_*.py")):
        session.run("python", str(path), "--quick")


@nox.session
def build(session: nox.Session) -> None:
    """Build every wheel into `dist`; install and import each in a fresh environment."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for folder in PACKAGES:
        name = import_name(folder)
        if (folder / "LICENSE").read_bytes() != (ROOT / "LICENSE").read_bytes():
            session.error(f"{folder.relative_to(ROOT)}/LICENSE is not a copy of LICENSE")
        wheels = build_wheels(session, with_siblings([folder]), ROOT / "dist")
        python = new_environment(session, Path(session.create_tmp()) / folder.name)
        share_torch(session, python)
        for command in [["install", "-c", str(CONSTRAINTS), *wheels], ["check"]]:
            session.run(python, "-m", "pip", "--quiet", *command, external=True)
        session.run(
            python,
            "-I",  # nothing of this repository but the wheel
            "-c",
            f"import {name}, importlib.resources as r; print('{name}', {name}.__version__); "
            f"assert r.files({name}).joinpath('py.typed').is_file()",
            external=True,
        )


def install(session: nox.Session, *requirements: str) -> None:
    """Install what is not ours."""
    share_torch(session, str(Path(session.bin) / "python"))
    session.install("-c", str(CONSTRAINTS), *requirements)


def install_ours(
    session: nox.Session, folders: Sequence[Path], *, tested: Sequence[Path] = ()
) -> None:
    """Install projects of this repository as wheels, with what they and the tests of some need."""
    needed = with_siblings(folders)
    install(session, *third_party(needed, tested=tested))
    wheels = build_wheels(session, needed, SHARED / "wheels")
    session.install("--force-reinstall", "--no-deps", *wheels)  # the version is often the same


def build_wheels(session: nox.Session, folders: Iterable[Path], target: Path) -> list[str]:
    """Build one wheel a project into `target`."""
    python = shared_environment(session, "backend", *BACKENDS)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target)]
    wheels = []
    for folder in folders:
        pattern = f"{read_project(folder)['project']['name'].replace('-', '_')}-*.whl"
        for path in target.glob(pattern):
            path.unlink()
        session.run(python, "-m", "pip", "wheel", *options, str(folder), external=True)
        wheels += [str(path) for path in target.glob(pattern)]
    return wheels


def share_torch(session: nox.Session, python: str) -> None:
    """Let an environment see the torch that is installed once for all of them."""
    find = "import site; print(site.getsitepackages()[0])"
    ours, shared = (
        str(session.run(each, "-c", find, silent=True, log=False, external=True)).strip()
        for each in (python, shared_environment(session, "torch", "torch"))
    )
    Path(ours, "shared_torch.pth").write_text(f"{shared}\n")


def shared_environment(session: nox.Session, name: str, *requirements: str) -> str:
    """Make an environment below `.nox`, once for each pin of its parts; give its Python."""
    folder = SHARED / name
    pins = [line for line in CONSTRAINTS.read_text().splitlines() if line.startswith(requirements)]
    made_for = folder / "made-for.txt"
    wanted = f"{sys.version} {pins}"
    if made_for.exists() and made_for.read_text() == wanted:
        return str(folder / "bin" / "python")
    python = new_environment(session, folder)
    pip = [python, "-m", "pip", "--quiet", "install"]
    session.run(*pip, "-c", str(CONSTRAINTS), *requirements, external=True)
    made_for.write_text(wanted)
    return python


def new_environment(session: nox.Session, folder: Path) -> str:
    """Make an empty environment; give its Python."""
    make = [sys.executable, "-m", "virtualenv", "--quiet", "--clear", str(folder)]
    session.run(*make, external=True)
    return str(folder / "bin" / "python")


def third_party(folders: Iterable[Path], *, tested: Iterable[Path] = ()) -> list[str]:
    """Requirements of projects, and of the tests of some, that are not ours."""
    found = {each for folder in folders for each in read_project(folder)["project"]["dependencies"]}
    for folder in tested:
        found |= set(read_project(folder)["dependency-groups"]["test"])
    return sorted(found - set(OURS))


def with_siblings(folders: Iterable[Path]) -> list[Path]:
    """Projects and those of ours that they depend on."""
    found: list[Path] = []
    waiting = list(folders)
    while waiting:
        folder = waiting.pop()
        if folder not in found:
            found.append(folder)
            names = read_project(folder)["project"]["dependencies"]
            waiting += [OURS[name] for name in names if name in OURS]
    return found


def import_name(folder: Path) -> str:
    """Give the name that a project is imported by: that of the one folder in `src`."""
    (package,) = (path.parent for path in folder.glob("src/*/__init__.py"))
    return package.name
