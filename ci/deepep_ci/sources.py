"""ci/sources DIR: a Spack source mirror of every file the locks need."""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from .environments import Environment, error_text, scratch, select
from .errors import SetupError
from .patches import sha256
from .progress import step
from .spack import Spack, find

#: As in spack_sources.py, which runs in Spack's process
MARKER = "deepep-source:"


@dataclass(frozen=True)
class Source:
    """One file of the mirror, as Spack names it."""

    package: str
    hash: str
    #: Relative to the mirror's folder
    path: str
    url: str
    #: SHA-256 of the file; None for a git tree, which Spack packs from the pinned commit
    sha256: str | None
    commit: str | None
    pypi: bool

    @property
    def file_name(self) -> str:
        return self.url.rsplit("/", 1)[-1]

    def state(self, mirror: Path) -> str:
        """ "ok", "missing" or "damaged"."""
        target = mirror / self.path
        if not target.is_file():
            return "missing"
        if self.sha256:
            return "ok" if sha256(target) == self.sha256 else "damaged"
        return "ok" if _ends_well(target) else "damaged"


def _ends_well(archive: Path) -> bool:
    """Whether a packed git tree is whole. It has no known checksum, but its compression has."""
    try:
        with gzip.open(archive) as stream:
            while stream.read(1 << 20):
                pass
    except (OSError, EOFError, zlib.error):
        return False
    return True


def main(arguments: list[str]) -> int:
    """Exit code: 0 all files are there, 1 some could not be fetched or are damaged, 2 set-up."""
    parser = argparse.ArgumentParser(
        prog="ci/sources",
        description="Fill a Spack source mirror with every file that locks need: PyPI's files "
        "through pip and its index, the rest through Spack (git and https). Add it with: "
        "ci/spack mirror add NAME file://DIR",
    )
    parser.add_argument("mirror", metavar="DIR", type=Path)
    parser.add_argument("environments", metavar="ENV", nargs="*", help="default: all")
    options = parser.parse_args(arguments)
    chosen = select(options.environments)
    mirror = options.mirror.resolve()
    try:
        mirror.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"cannot make {mirror}: {error.strerror}") from None
    spack = find()
    problems = []
    for environment in chosen:
        sources = needed(spack, environment)
        found = fill(spack, environment, mirror, sources)
        good = sum(source.state(mirror) == "ok" for source in sources)
        print(f"{environment.name}: {good} of {len(sources)} files in {mirror}")
        for problem in found:
            print(f"  {problem}")
        problems += found
    return int(bool(problems))


def needed(spack: Spack, environment: Environment) -> list[Source]:
    """Every file the environment's committed lock has to fetch. Raises SetupError."""
    with _locked_copy(environment) as folder:
        script = Path(__file__).with_name("spack_sources.py")
        done = spack.run(["-e", str(folder), "python", str(script)])
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARKER)]
    if done.returncode or not lines:
        raise SetupError(f"Spack cannot read {environment.name}: {error_text(done.stderr)}")
    return [Source(**json.loads(line[len(MARKER) :])) for line in lines]


class _locked_copy:
    """A scratch copy of an environment with its committed lock."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.scratch = scratch()

    def __enter__(self) -> Path:
        lock = self.environment.folder / "spack.lock"
        if not lock.is_file():
            raise SetupError(f"{lock} is missing: run ci/lock {self.environment.name}")
        folder = self.scratch.__enter__() / self.environment.name
        (folder / "spack.lock").write_bytes(lock.read_bytes())
        return folder

    def __exit__(self, *exception: object) -> None:
        self.scratch.__exit__(*exception)  # type: ignore[arg-type]


def fill(spack: Spack, environment: Environment, mirror: Path, sources: list[Source]) -> list[str]:
    """Fetches into the mirror what is missing there. Returns a line or more for each file that
    cannot be had or is damaged."""
    missing = [source for source in sources if source.state(mirror) == "missing"]
    reasons: dict[str, str] = {}
    for source in missing:
        if source.pypi:
            with step(f"pip download {source.file_name}"):
                reasons[source.path] = fetch_by_pip(source, mirror)
    # What pip cannot get may be in a mirror of Spack's configuration
    others = sorted({source.hash for source in missing if source.state(mirror) == "missing"})
    if others:
        with step(f"fetching {len(others)} packages of {environment.name} through Spack"):
            _mirror_create(spack, environment, mirror, others)
    problems = []
    for source in sources:
        state = source.state(mirror)
        if state == "missing":
            problems.append(f"{source.package}: not fetched: {source.url}")
            reason = reasons.get(source.path, "").splitlines()
            problems += [f"  {line}" for line in reason[-1:]]
        elif state == "damaged":
            problems.append(
                f"{source.package}: {mirror / source.path} does not have sha256 "
                f"{source.sha256}: remove it and run again"
                if source.sha256
                else f"{source.package}: {mirror / source.path} is cut or damaged: remove it and "
                "run again"
            )
    return problems


def fetch_by_pip(source: Source, mirror: Path) -> str:
    """Fetches a file of PyPI with pip, by name, version and checksum. Returns why not, or ""."""
    from packaging.utils import parse_sdist_filename, parse_wheel_filename

    wheel = source.file_name.endswith(".whl")
    if wheel:
        name, version, _, tags = parse_wheel_filename(source.file_name)
        platforms = sorted({tag.platform for tag in tags})
        only = ["--only-binary", ":all:", *(f"--platform={p}" for p in platforms if p != "any")]
    else:
        name, version = parse_sdist_filename(source.file_name)
        only = ["--no-binary", ":all:"]
    target = mirror / source.path
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pip-", dir=mirror) as folder:
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text(f"{name}=={version} --hash=sha256:{source.sha256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--require-hashes", "-r", str(wanted)]
        done = subprocess.run(
            [*command, "--dest", folder, *only],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        fetched = [p for p in Path(folder).iterdir() if p != wanted]
        if done.returncode or len(fetched) != 1:
            return done.stderr.strip() or "pip fetched nothing"
        os.replace(fetched[0], target)
    return ""


def _mirror_create(spack: Spack, environment: Environment, mirror: Path, hashes: list[str]) -> str:
    """Lets Spack fetch packages into the mirror. Returns its words."""
    with _locked_copy(environment) as folder:
        specs = [f"/{digest}" for digest in hashes]
        spack.run(["-e", str(folder), "mirror", "create", "-d", str(mirror), *specs])
