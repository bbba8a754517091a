"""The environments: their files, and what a real Spack makes of them."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from . import paths
from .documents import load_json, validated
from .errors import DocumentError, SetupError
from .lockfile import Lock, lock_from, read_lock
from .spack import Spack

#: Seconds one concretization may take. Cold it also clones spack-packages and builds indexes
TIMEOUT = 900


@dataclass(frozen=True)
class Environment:
    """An environment by name; its files are read on demand and may raise DocumentError."""

    name: str

    @property
    def folder(self) -> Path:
        return paths.ENVIRONMENTS / self.name

    def spack_yaml(self) -> dict[str, Any]:
        return validated(self.folder / "spack.yaml", "environment")

    def expect(self) -> dict[str, Any]:
        return validated(self.folder / "expect.json", "expect")

    def lock(self) -> Lock:
        return read_lock(self.folder / "spack.lock")


def select(names: list[str]) -> list[Environment]:
    """The environments of these names or paths, all if there are none. Raises SetupError."""
    known = paths.environment_names()
    chosen = []
    for name in names or known:
        short = Path(name.rstrip("/")).name
        if short not in known:
            raise SetupError(f"no environment {name}; there are: {', '.join(known)}")
        chosen.append(Environment(short))
    return chosen


@contextmanager
def scratch() -> Iterator[Path]:
    """A copy of environments/ beside links to the recipes: Spack can write there as it likes."""
    parent = paths.cache() / "scratch"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="env-", dir=parent) as folder:
        top = Path(folder)
        shutil.copytree(
            paths.ENVIRONMENTS,
            top / "environments",
            ignore=shutil.ignore_patterns(".spack-env", "spack.lock"),
        )
        os.symlink(paths.TOP / "spack-repo", top / "spack-repo")
        yield top / "environments"


def concretize(spack: Spack, environment: Environment) -> tuple[Lock, str]:
    """Concretizes a copy of the environment from nothing.

    Returns the new lock's facts and its text. Raises DocumentError with Spack's own words if there
    is no solution, and for a solver that does not answer.
    """
    with scratch() as environments:
        folder = environments / environment.name
        arguments = ["-e", str(folder), "concretize", "--force", "--fresh"]
        try:
            done = spack.run(arguments, timeout=TIMEOUT)
        except TimeoutExpired:
            raise DocumentError(f"{environment.name}: no solution within {TIMEOUT} s") from None
        path = folder / "spack.lock"
        if done.returncode or not path.is_file():
            raise DocumentError(f"{environment.name}: {error_text(done.stderr)}")
        document = load_json(path)
        # Messages about the new lock should name the environment, not the scratch folder
        name = environment.folder / "spack.lock (new)"
        return lock_from(document, name), path.read_text(encoding="utf-8")


def error_text(stderr: str) -> str:
    """Spack's error, without the progress that git and warnings write to the same stream."""
    lines = stderr.replace("\r", "\n").splitlines()
    for number, line in enumerate(lines):
        if line.startswith("==> Error:"):
            return "\n".join(lines[number:]).removeprefix("==> Error:").strip()
    return "\n".join(lines[-5:]).strip() or "Spack failed without a word"
