"""Specs that must not concretize, each with the sentence the user must read (ci/refusals.json)."""

import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from typing import Any

from . import paths
from .documents import validated
from .environments import error_text
from .spack import Spack

PATH = paths.CI / "refusals.json"

#: Seconds within which every refusal has to answer
DEADLINE = 60.0


@dataclass(frozen=True)
class Refused:
    """How one refusal ended. problem is empty if it was refused for the stated reason."""

    identifier: str
    problem: str
    message: str
    seconds: float


def table() -> list[dict[str, Any]]:
    """The refusals: [{"id", "spec", "because", "packages"?}]."""
    return validated(PATH, "refusals")["refusals"]


@contextmanager
def solver_environment(packages: dict[str, Any] | None = None) -> Iterator[Path]:
    """A folder with a spack.yaml that knows our recipes and takes everything else as external.

    The solver then decides on the recipes alone and answers in seconds. packages is merged over
    ci/solver-packages.yaml (packages.yaml's format).
    """
    parent = paths.cache() / "scratch"
    parent.mkdir(parents=True, exist_ok=True)
    common = paths.ENVIRONMENTS / "common"
    with tempfile.TemporaryDirectory(prefix="solve-", dir=parent) as folder:
        shared = ("repos.yaml", "concretizer.yaml", "external-pytorch.yaml")
        include = [str(common / name) for name in shared]
        include.append(str(paths.CI / "solver-packages.yaml"))
        document = {"spack": {"specs": [], "view": False, "include": include}}
        document["spack"]["packages"] = packages or {}
        # JSON is YAML
        (Path(folder) / "spack.yaml").write_text(json.dumps(document), encoding="utf-8")
        yield Path(folder)


def solve(
    spack: Spack, spec: str, packages: dict[str, Any] | None = None, timeout: float = DEADLINE
) -> CompletedProcess[str]:
    """Runs `spack spec --json SPEC` on our recipes. Raises TimeoutExpired (seconds)."""
    with solver_environment(packages) as folder:
        return spack.run(["-e", str(folder), "spec", "--fresh", "--json", spec], timeout=timeout)


def check(spack: Spack) -> Iterator[Refused]:
    """Asks Spack for every refusal, two at a time, in the table's order."""
    with ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        yield from pool.map(lambda entry: _check_one(spack, entry), table())


def _check_one(spack: Spack, entry: dict[str, Any]) -> Refused:
    begin = time.monotonic()
    try:
        done = solve(spack, entry["spec"], entry.get("packages"))
    except TimeoutExpired:
        problem = f"no answer within {DEADLINE:.0f} s"
        return Refused(entry["id"], problem, "", time.monotonic() - begin)
    seconds = time.monotonic() - begin
    message = _one_line(error_text(done.stderr))
    if done.returncode == 0:
        return Refused(entry["id"], f"was accepted: {entry['spec']}", "", seconds)
    if entry["because"] not in message:
        problem = f"refused, but not because {entry['because']!r}: {message[:300]}"
        return Refused(entry["id"], problem, message, seconds)
    return Refused(entry["id"], "", message, seconds)


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)
