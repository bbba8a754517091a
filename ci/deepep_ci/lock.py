"""ci/lock ENV...: concretizes environments anew and writes their spack.lock."""

import argparse
import os

from .documents import shown
from .drift import Drift, drift
from .environments import Environment, concretize, select
from .errors import DocumentError
from .progress import step
from .spack import Spack, find


def main(arguments: list[str]) -> int:
    """Exit code: 0 written (or nothing changed), 1 an environment has no solution, 2 set-up."""
    parser = argparse.ArgumentParser(
        prog="ci/lock", description="Concretize environments anew and rewrite their spack.lock."
    )
    parser.add_argument("environments", metavar="ENV", nargs="+")
    options = parser.parse_args(arguments)
    chosen = select(options.environments)
    spack = find()
    failed = False
    for environment in chosen:
        try:
            _relock(spack, environment)
        except DocumentError as error:
            print(f"{environment.name}: not written: {error}")
            failed = True
    return int(failed)


def _relock(spack: Spack, environment: Environment) -> None:
    environment.spack_yaml()
    with step(f"concretizing {environment.name} with Spack {spack.version}"):
        new, text = concretize(spack, environment)
    target = environment.folder / "spack.lock"
    changes: list[Drift] = []
    if target.exists():
        try:
            changes = drift(environment.lock(), new)
        except DocumentError as error:
            print(f"{environment.name}: the old lock was unreadable: {error}")
    fresh = target.with_name(f"spack.lock.new.{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    fresh.rename(target)
    print(f"{environment.name}: {len(new)} packages, {len(changes)} changes -> {shown(target)}")
    for change in changes:
        print(f"  {change.kind:5} {change.package}: {change.text}")
