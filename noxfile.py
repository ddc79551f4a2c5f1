"""The project's commands: what a person types is what continuous integration runs.

``nox -s quickstart`` trains a potential, ``nox -s tests`` runs the tests, ``nox -l`` lists the rest. Every session
installs the versions of constraints.txt. Sessions that need PyTorch share one environment, so that it is installed
once; ``dist`` has its own, because it shows that the wheel needs nothing but what it declares.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
CONSTRAINTS = str(ROOT / "constraints.txt")
SHARED = ROOT / ".nox" / "shared"
# The models of tests and examples are small: more threads than one make them slower.
ENV = {"OMP_NUM_THREADS": "1"}

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "tests"]


def install(session: nox.Session, *extras: str) -> str:
    """Install the package in development mode into the shared environment and return its Python."""
    binaries = SHARED / ("Scripts" if sys.platform == "win32" else "bin")
    python = str(binaries / "python")
    if not binaries.is_dir():
        session.run(sys.executable, "-m", "virtualenv", "-q", str(SHARED), external=True)
    target = f"{ROOT}[{','.join(extras)}]"
    session.run(python, "-m", "pip", "install", "-q", "-c", CONSTRAINTS, "-e", target, external=True)
    return python


def run(session: nox.Session, python: str, *arguments: str) -> None:
    """Run the shared environment's Python."""
    session.run(python, *arguments, env=ENV, external=True)


@nox.session(venv_backend="none")
def quickstart(session: nox.Session) -> None:
    """Train a potential on small molecules and print how good it is."""
    python = install(session, "ase")
    run(session, python, str(ROOT / "examples" / "quickstart.py"), *session.posargs)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run the tests and report coverage; arguments after ``--`` go to pytest, then without coverage."""
    python = install(session, "ase", "dev")
    if session.posargs:
        run(session, python, "-m", "pytest", *session.posargs)
        return
    run(session, python, "-m", "coverage", "erase")
    run(session, python, "-m", "coverage", "run", "-m", "pytest")
    run(session, python, "-m", "coverage", "combine", "-q")
    run(session, python, "-m", "coverage", "report")


@nox.session(venv_backend="none")
def crash(session: nox.Session) -> None:
    """Kill a thousand writers of checkpoints at random moments; the tests kill two hundred."""
    python = install(session, "ase", "dev")
    writers = str(ROOT / "tests" / "checkpoint" / "test_checkpoint_writers.py")
    session.run(python, "-m", "pytest", "-q", writers, env={**ENV, "NVALCHEMI_KILLS": "1000"}, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    session.install("-q", "-c", CONSTRAINTS, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Check the types of the package."""
    python = install(session, "ase", "dev")
    run(session, python, "-m", "mypy")


@nox.session
def dist(session: nox.Session) -> None:
    """Build sdist and wheel, install the wheel with nothing but its own requirements, import every module."""
    folder = Path(session.create_tmp())
    for old in folder.glob("nvalchemi_lightning-*"):
        old.unlink()
    session.install("-q", "-c", CONSTRAINTS, "build", "hatchling")
    session.run("python", "-m", "build", "-q", "--no-isolation", "--outdir", str(folder), str(ROOT), silent=True)
    (wheel,) = folder.glob("*.whl")
    session.install("-q", "-c", CONSTRAINTS, str(wheel))
    session.install("-q", "--no-deps", "--force-reinstall", str(wheel))
    session.chdir(folder)
    session.run("python", str(ROOT / ".ci" / "check_dist.py"), ".", env=ENV)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the documentation with warnings as errors and run the code on its pages."""
    python = install(session, "ase", "dev", "docs")
    output = str(ROOT / "docs" / "_build" / "html")
    run(session, python, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(ROOT / "docs"), output)
    run(session, python, "-m", "pytest", "-q", str(ROOT / "tests" / "project" / "test_docs.py"))


@nox.session
def interop(session: nox.Session) -> None:
    """Train, store and checkpoint together with nvalchemi-toolkit and MACE; their environment takes about 2 GB."""
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    session.install("-q", torch, "nvalchemi-toolkit==0.3.0", "mace-torch", "pytest", "-e", f"{ROOT}[ase]")
    # It comes with a torchvision that does not load beside the CPU build of torch, and nothing here needs one.
    session.run("python", "-m", "pip", "uninstall", "-q", "-y", "torchvision")
    session.run("python", "-m", "pytest", "-q", str(ROOT / "tests" / "interop"), *session.posargs, env=ENV)


@nox.session(venv_backend="none")
def examples(session: nox.Session) -> None:
    """Run every example."""
    python = install(session, "ase")
    for script in sorted((ROOT / "examples").glob("*.py")):
        run(session, python, str(script))


BENCHMARKS = ("ladder", "policies", "step", "averaging", "memory", "checkpoints", "data", "conversion")


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Measure what steps and data cost, and that memory does not grow; with arguments, the ladder alone."""
    python = install(session, "ase")
    for script in BENCHMARKS[:1] if session.posargs else BENCHMARKS:
        run(session, python, str(ROOT / "benchmarks" / f"{script}.py"), *session.posargs)


@nox.session(venv_backend="none")
def learning(session: nox.Session) -> None:
    """Measure how well and how fast the reference potential learns."""
    python = install(session, "ase")
    run(session, python, str(ROOT / "benchmarks" / "learning.py"), *session.posargs)
