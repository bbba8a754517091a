"""ci/airgap pack: gathers everything one environment needs, and writes it as one archive."""

import datetime
import hashlib
import io
import json
import os
import posixpath
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import airgap_unpack, paths, sources
from .airgap_unpack import FORMAT, MANIFEST, MANIFEST_SHA256, TREE, UNPACKER
from .documents import load_json
from .environments import Environment, select
from .errors import SetupError
from .progress import step
from .spack import airgap, bare, builtin, find, pins

#: CPythons that the wheels are for: what a host may have as python3
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
#: As environments/common/packages.yaml: hosts with H100s
MACHINE = "x86_64"
#: Oldest to newest, as pip does not take one for all of them; 2.28 is RHEL 8
PLATFORMS = [f"manylinux_2_{minor}_{MACHINE}" for minor in range(28, 16, -1)]
PLATFORMS += [f"manylinux2014_{MACHINE}"]

#: Folders that tools make among the project's files
LEAVINGS = {".git", ".venv", ".spack-env", ".pytest_cache", ".ruff_cache", "__pycache__"}
#: Where files that nobody has added to git yet still belong to the project: a site's environment
ROOMS = ("ci", "environments", "patches", "spack-repo", "tests")


@dataclass(frozen=True)
class Member:
    """A file of the archive: its path there, and where its content is."""

    path: str
    source: Path

    @property
    def link(self) -> str | None:
        return os.readlink(self.source) if self.source.is_symlink() else None


class Incomplete(Exception):
    """Something the archive needs cannot be had. The text says what. Exit code 1."""


def pack(name: str, file: Path) -> int:
    """Exit code: 0 done, 1 something is missing or damaged: there is no FILE then, 2 set-up."""
    environment = select([name])[0]
    file = file.absolute()
    _check_target(file)
    try:
        digest = _pack(environment, file)
    except Incomplete as error:
        print(f"ci/airgap: {error}", file=sys.stderr)
        print(f"ci/airgap: not packed: {file} was not written", file=sys.stderr)
        return 1
    except OSError as error:
        # A full disk above all; the temporary file is gone
        raise SetupError(f"cannot write {file}: {error.strerror or error}") from None
    print(f"{file}: {environment.name}, {file.stat().st_size / 1e6:.0f} MB, sha256 {digest}")
    print(f"Carry {file.name} and {file.name}.sha256; how to unpack: ci/airgap --help")
    return 0


def _check_target(file: Path) -> None:
    if not file.parent.is_dir():
        raise SetupError(f"{file.parent} is no folder: make it, or name another FILE")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise SetupError(f"cannot write to {file.parent}: name another FILE")
    if os.path.lexists(file) and not airgap_unpack.is_archive(file):
        raise SetupError(
            f"{file} exists and is no archive of ci/airgap: name another FILE, or remove it"
        )


def _pack(environment: Environment, file: Path) -> str:
    spack = find()
    scratch = paths.cache() / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="airgap-", dir=scratch) as folder:
        stage = Path(folder)
        needed = sources.needed(spack, environment)
        problems = sources.fill(spack, environment, stage / "mirror", needed)
        if problems:
            raise Incomplete("\n  ".join(["not every source can be had:", *problems]))
        pinned = {"spack": pins()["spack"], "spack-packages": builtin()}
        commits = {
            "spack": pinned["spack"]["default"],
            "spack-packages": pinned["spack-packages"]["commit"],
        }
        for name, commit in commits.items():
            with step(f"fetching {name} {commit[:12]}"):
                try:
                    bare(pinned[name]["git"], commit, stage / "git" / f"{name}.git")
                except SetupError as error:
                    raise Incomplete(f"{pinned[name]['git']} {commit}: {error}") from None
        with step(f"pip download of ci/requirements.txt for Python {', '.join(PYTHONS)}"):
            _wheels(stage / "wheels")
        members = _project(environment, file)
        # Spack writes // into some; two packages may need the same file
        for path in {posixpath.normpath(source.path) for source in needed}:
            members.append(Member(f"{TREE}/airgap/mirror/{path}", stage / "mirror" / path))
        for name in ("git", "wheels"):
            members += [
                Member(f"{TREE}/airgap/{path.relative_to(stage)}", path)
                for path in sorted((stage / name).rglob("*"))
                if path.is_file()
            ]
        head = {
            "format": FORMAT,
            "environment": environment.name,
            "created": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "project": _state(),
            "spack": {"git": pinned["spack"]["git"], "commit": commits["spack"]},
            "spack_packages": {
                "git": pinned["spack-packages"]["git"],
                "commit": commits["spack-packages"],
            },
            "wheels": {"python": list(PYTHONS), "machine": MACHINE},
        }
        with step(f"writing {file.name}"):
            return write(file, head, members)


def write(file: Path, head: dict[str, Any], members: list[Member]) -> str:
    """Writes an archive and FILE.sha256, and verifies it as unpack does. Returns its sha256."""
    # First of all, so that tar finds it at once
    members = [
        Member(UNPACKER, Path(airgap_unpack.__file__)),
        *sorted(members, key=lambda member: member.path),
    ]
    manifest = {**head, "files": [_entry(member) for member in members]}
    text = (json.dumps(manifest, indent=1) + "\n").encode()
    problem = airgap_unpack.problem_of(manifest)
    if problem:
        raise Incomplete(f"{file} would not unpack: {problem}")
    created = datetime.datetime.strptime(head["created"] + "+0000", "%Y-%m-%dT%H:%M:%SZ%z")
    fresh = file.with_name(f".{file.name}.new.{os.getpid()}")
    try:
        with open(fresh, "w+b") as stream:
            with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                contents = {MANIFEST: text, MANIFEST_SHA256: airgap_unpack.checksum_line(text)}
                for name, content in contents.items():
                    info = _header(name, created, len(content))
                    tar.addfile(info, io.BytesIO(content))
                for member, entry in zip(members, manifest["files"]):
                    _add(tar, created, member, entry)
            stream.flush()
            os.fsync(stream.fileno())
            # Also tells of a file that somebody changed meanwhile
            airgap_unpack.verify(stream, file)
            digest = _digest(stream)
        checksum = file.with_name(f"{file.name}.sha256")
        # Never beside an archive that it is not of
        checksum.unlink(missing_ok=True)
        fresh.rename(file)
        line = fresh.with_name(f"{fresh.name}.sha256")
        line.write_text(f"{digest}  {file.name}\n", encoding="utf-8")
        line.rename(checksum)
        return digest
    except (airgap_unpack.Refused, ValueError) as error:
        # ValueError is tar's, for a name or a size beyond its format
        raise Incomplete(f"{file} would not unpack: {error}") from None
    finally:
        fresh.unlink(missing_ok=True)


def _entry(member: Member) -> dict[str, Any]:
    if member.link is not None:
        return {"path": member.path, "link": member.link}
    status = member.source.stat()
    with open(member.source, "rb") as stream:
        digest = _digest(stream)
    return {
        "path": member.path,
        "size": status.st_size,
        "sha256": digest,
        "executable": bool(status.st_mode & 0o100),
    }


def _digest(stream: Any) -> str:
    digest = hashlib.sha256()
    stream.seek(0)
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _header(name: str, created: datetime.datetime, size: int) -> tarfile.TarInfo:
    """A header that says nothing of the machine that packs."""
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size, int(created.timestamp()), 0o644
    return info


def _add(
    tar: tarfile.TarFile, created: datetime.datetime, member: Member, entry: dict[str, Any]
) -> None:
    info = _header(member.path, created, entry.get("size", 0))
    if "link" in entry:
        info.type, info.linkname = tarfile.SYMTYPE, entry["link"]
        tar.addfile(info)
        return
    info.mode = 0o755 if entry["executable"] else 0o644
    with open(member.source, "rb") as stream:
        tar.addfile(info, stream)


def _project(environment: Environment, file: Path) -> list[Member]:
    """The repository's files as they are now, and the site file in use in its place."""
    own = {file, file.with_name(f"{file.name}.sha256")}
    members = {
        path: Member(f"{TREE}/{path}", paths.TOP / path)
        for path in _names()
        if os.path.lexists(paths.TOP / path) and paths.TOP / path not in own
    }
    site = os.environ.get("DEEPEP_SITE_YAML")
    if site:
        path = f"environments/{environment.name}/site.yaml"
        if path in members:
            members[path] = Member(f"{TREE}/{path}", Path(site).resolve())
            print(f"{site} is packed as {path}: no DEEPEP_SITE_YAML is needed there")
    return list(members.values())


def _names() -> Iterator[str]:
    """Paths of the repository's files: those of git, or of the archive it was unpacked from, with
    what a site added to the rooms."""
    if (paths.TOP / ".git").exists():
        yield from _git_lines("ls-files", "-z")
        yield from _git_lines("ls-files", "-z", "--others", "--exclude-standard", "--", *ROOMS)
    elif airgap():
        for entry in load_json(paths.TOP / airgap_unpack.KEPT_MANIFEST)["files"]:
            path = entry["path"].removeprefix(f"{TREE}/")
            if path != UNPACKER and not path.startswith("airgap/"):
                yield path
        for room in ROOMS:
            yield from _walk(paths.TOP / room)
    else:
        yield from _walk(paths.TOP)


def _walk(top: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(top):
        folders[:] = sorted(set(folders) - LEAVINGS)
        for name in sorted(files):
            yield str((Path(folder) / name).relative_to(paths.TOP))


def _state() -> dict[str, Any]:
    """The repository's commit, and whether files differ from it."""
    if (paths.TOP / ".git").exists():
        commit = next(_git_lines("rev-parse", "HEAD")).strip()
        return {"commit": commit, "dirty": any(_git_lines("status", "--porcelain", "-z"))}
    if airgap():
        unpacked = load_json(paths.TOP / airgap_unpack.KEPT_MANIFEST)
        return {"commit": unpacked["project"]["commit"], "dirty": None}
    return {"commit": None, "dirty": None}


def _git_lines(*arguments: str) -> Iterator[str]:
    done = subprocess.run(
        ["git", "-C", str(paths.TOP), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines() or ["no reason given"]
        raise SetupError(f"git cannot list this repository's files: {reason[0]}")
    yield from filter(None, done.stdout.split("\0"))


def _wheels(folder: Path) -> None:
    """Downloads the wheels of ci/requirements.txt for every Python of PYTHONS."""
    folder.mkdir()
    for python in PYTHONS:
        lines = _without_wheel(folder, python)
        if not lines:
            continue
        wanted = folder.with_name("requirements.txt")
        wanted.write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--only-binary", ":all:", "--require-hashes"]
        command += ["--python-version", python, "--implementation", "cp"]
        command += [f"--platform={platform}" for platform in PLATFORMS]
        command += ["--dest", str(folder), "-r", str(wanted)]
        brought = airgap()
        if brought:
            command += ["--no-index", "--find-links", str(brought / "wheels")]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        left = _without_wheel(folder, python)
        if done.returncode or left:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            names = [line.split(" ")[0] for line in left]
            raise Incomplete(
                f"no wheels of {', '.join(names)} for Python {python} on {MACHINE}: pip needs a "
                "package index, or a folder of wheels: PIP_NO_INDEX=1 PIP_FIND_LINKS=/path\n  "
                + "\n  ".join(errors[-2:])
            )

    for path in folder.glob("*.whl"):
        # A name in a plain tar has 100 bytes: the oldest of its platforms is enough
        if len(path.name) > 100:
            head, platforms = path.name.removesuffix(".whl").rsplit("-", 1)
            oldest = next(p for p in reversed(PLATFORMS) if p in platforms.split("."))
            path.rename(folder / f"{head}-{oldest}.whl")


def _without_wheel(folder: Path, python: str) -> list[str]:
    """Lines of ci/requirements.txt that no wheel in the folder satisfies for a Python."""
    from packaging.tags import compatible_tags, cpython_tags
    from packaging.utils import parse_wheel_filename

    version = [int(part) for part in python.split(".")]
    interpreter = f"cp{python.replace('.', '')}"
    usable = {
        *cpython_tags(version, platforms=PLATFORMS),
        *compatible_tags(version, interpreter, PLATFORMS),
    }
    there = set()
    for path in folder.glob("*.whl"):
        name, release, _, tags = parse_wheel_filename(path.name)
        if tags & usable:
            there.add(f"{name}=={release}")
    return [line for line in _requirements(python) if line.split(" ")[0] not in there]


def _requirements(python: str) -> list[str]:
    """Lines of ci/requirements.txt that hold for a Python; pip asks its own Python's markers."""
    from packaging.requirements import Requirement

    values = {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": MACHINE,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }
    text = (paths.CI / "requirements.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    kept = []
    for line in text.splitlines():
        if line.strip().startswith("#") or not line.strip():
            continue
        specification, *hashes = line.split(" --hash=")
        requirement = Requirement(specification)
        if requirement.marker is None or requirement.marker.evaluate(values):
            pinned = f"{requirement.name}{requirement.specifier}"
            kept.append(" --hash=".join([pinned, *(h.strip() for h in hashes)]))
    return kept
