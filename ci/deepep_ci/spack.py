"""Finds Spack and runs it isolated from the user's own configuration and caches."""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from . import paths
from .documents import load_yaml, validated
from .errors import SetupError
from .progress import step

#: Seconds a clone of Spack may take before the network counts as absent
CLONE_TIMEOUT = 300


@dataclass(frozen=True)
class Spack:
    """A Spack to run: its root, its version, and how it was found."""

    root: Path
    version: str
    origin: str

    @property
    def executable(self) -> Path:
        return self.root / "bin" / "spack"

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line for spack ARGUMENTS in our configuration scope."""
        return [str(self.executable), "-C", str(_scope(self)), *arguments]

    def run(
        self, arguments: Sequence[str], timeout: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs spack ARGUMENTS. Raises subprocess.TimeoutExpired after timeout seconds."""
        process = subprocess.Popen(
            self.command(arguments),
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            # The solver may be a child: end the whole group, leave nothing running
            os.killpg(process.pid, 9)
            process.wait()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def environment() -> dict[str, str]:
    """Environment variables of an isolated Spack: nothing of ~/.spack, /etc/spack or a shell."""
    kept = {
        name: value
        for name, value in os.environ.items()
        # The keyring of build caches is the user's choice, not configuration
        if (not name.startswith("SPACK_") or name == "SPACK_GNUPGHOME")
        and name not in ("PYTHONPATH", "PYTHONHOME")
    }
    kept["SPACK_DISABLE_LOCAL_CONFIG"] = "1"
    kept["SPACK_USER_CACHE_PATH"] = str(paths.cache() / "user")
    # The interpreter with clingo: Spack then bootstraps nothing
    kept["SPACK_PYTHON"] = sys.executable
    kept.update(_git_environment())
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    site = kept.get("DEEPEP_SITE_YAML")
    if site:
        # Spack resolves it against the environment's folder, people mean their own
        kept["DEEPEP_SITE_YAML"] = str(Path(site).resolve())
    return kept


def pins() -> dict[str, Any]:
    """ci/pins.json."""
    return validated(paths.CI / "pins.json", "pins")


def find() -> Spack:
    """$SPACK_ROOT if it is new enough, else the pinned clone. Raises SetupError without any."""
    pin = pins()["spack"]
    root, note = os.environ.get("SPACK_ROOT"), ""
    if root:
        version = version_of(Path(root))
        if version is None:
            note = f"SPACK_ROOT={root} holds no Spack"
        elif _numbers(version) < _numbers(pin["minimum"]):
            note = f"SPACK_ROOT={root} is Spack {version}, {pin['minimum']} is needed"
        else:
            return Spack(Path(root).resolve(), version, "SPACK_ROOT")
        print(f"ci: {note}; using the pinned clone", file=sys.stderr)
    clone = pinned_clone(pin["git"], pin["default"])
    version = version_of(clone)
    if version is None:
        raise SetupError(f"{clone} is damaged: remove it and run again")
    return Spack(clone, version, "pinned clone")


def version_of(root: Path) -> str | None:
    """Version of the Spack in a folder, None if there is none."""
    try:
        text = (root / "lib" / "spack" / "spack" / "__init__.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    return match.group(1) if match and (root / "bin" / "spack").is_file() else None


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]


def pinned_clone(url: str, commit: str) -> Path:
    """The clone of Spack at a commit in the cache, made on first use. Raises SetupError."""
    target = paths.cache() / f"spack-{commit[:12]}"
    if target.is_dir():
        return target
    with _lock("spack.lock"), step(f"cloning Spack {commit[:12]}"):
        try:
            return checkout(url, commit, target)
        except SetupError as error:
            raise SetupError(f"Spack cannot be cloned: {error}") from None


def checkout(url: str, commit: str, target: Path) -> Path:
    """A shallow checkout of a commit in a folder, made on first use. Raises SetupError."""
    if target.is_dir():
        return target
    fresh = target.with_name(f"{target.name}.new.{os.getpid()}")
    fresh.parent.mkdir(parents=True, exist_ok=True)
    detached = ["-c", "advice.detachedHead=false"]
    try:
        _git("init", "--quiet", str(fresh))
        _git("-C", str(fresh), "fetch", "--quiet", "--depth", "1", url, commit)
        _git("-C", str(fresh), *detached, "checkout", "--quiet", commit)
        # Another process may have been quicker; its checkout is as good
        if not target.is_dir():
            fresh.rename(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def bare(url: str, commit: str, target: Path) -> None:
    """A new bare repository that serves one commit, without its history. Raises SetupError."""
    # No template: nothing of this machine's hooks
    _git("init", "--quiet", "--bare", "--template=", str(target))
    here = ["-C", str(target), "-c", "gc.auto=0", "-c", "maintenance.auto=false"]
    _git(*here, "fetch", "--quiet", "--depth", "1", "--no-tags", url, commit)
    _git(*here, "update-ref", "refs/heads/pinned", commit)
    _git(*here, "symbolic-ref", "HEAD", "refs/heads/pinned")
    # An old git asks for a branch's tip only
    _git(*here, "config", "uploadpack.allowAnySHA1InWant", "true")
    (target / "FETCH_HEAD").unlink()


def airgap() -> Path | None:
    """What an unpacked archive of ci/airgap brings (git/, mirror/, wheels/), None elsewhere."""
    folder = paths.TOP / "airgap"
    return folder if (folder / "MANIFEST.json").is_file() else None


def _git_environment() -> dict[str, str]:
    """Environment variables of every git: in an unpacked archive its repositories serve the pins.

    A configuration file and not GIT_CONFIG_COUNT, which git keeps from the process that serves a
    local repository: that one then refuses what another user has unpacked. The user's own
    configuration is included; the first of two entries for an address holds, which is ours.
    """
    folder = airgap()
    if not folder:
        return {"GIT_TERMINAL_PROMPT": "0"}
    _check_git()
    lines = []
    served = {"spack.git": pins()["spack"]["git"], "spack-packages.git": builtin()["git"]}
    for name, url in served.items():
        path = _quoted(str(folder.resolve() / "git" / name))
        lines += ["[safe]", f"\tdirectory = {path}"]
        lines += [f"[url {path}]", f"\tinsteadOf = {_quoted(url)}"]
    home = Path(os.environ.get("HOME") or "/")
    users = [Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "git" / "config"]
    users += [home / ".gitconfig"]
    caller = Path(os.environ.get("GIT_CONFIG_GLOBAL") or "/").absolute()
    # A command within one of ours comes with our own, which must not include itself
    if caller != Path("/") and caller.suffixes != [".airgap", ".gitconfig"]:
        users = [caller]
    for user in users:
        lines += ["[include]", f"\tpath = {_quoted(str(user))}"]
    text = "\n".join(lines) + "\n"
    target = paths.cache() / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.airgap.gitconfig"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(f"{target.name}.{os.getpid()}")
        fresh.write_text(text, encoding="utf-8")
        fresh.rename(target)
    return {"GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_GLOBAL": str(target)}


def _quoted(text: str) -> str:
    """A text as git's configuration quotes it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@cache
def _check_git() -> None:
    """Raises SetupError for a git that does not know GIT_CONFIG_GLOBAL."""
    git = shutil.which("git")
    if not git:
        raise SetupError("git is not installed")
    done = subprocess.run([git, "--version"], capture_output=True, text=True, check=False)
    if _numbers(done.stdout) < [2, 32]:
        raise SetupError(
            f"{git} is {done.stdout.strip() or 'broken'}: an unpacked archive of ci/airgap needs "
            "2.32 or later; put one first on PATH"
        )


def _git(*arguments: str) -> None:
    # Give up on a connection that says nothing for 20 s
    slow = ["-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=20"]
    try:
        done = subprocess.run(
            ["git", *slow, *arguments],
            env={**os.environ, **_git_environment()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CLONE_TIMEOUT,
        )
    except FileNotFoundError:
        raise SetupError("git is not installed") from None
    except subprocess.TimeoutExpired:
        raise SetupError(f"git {arguments[0]} took longer than {CLONE_TIMEOUT} s") from None
    if done.returncode:
        reason = done.stderr.strip().splitlines() or ["no reason given"]
        raise SetupError(reason[-1])


@contextmanager
def _lock(name: str) -> Iterator[None]:
    """Holds a lock of the cache; another process waits."""
    paths.cache().mkdir(parents=True, exist_ok=True)
    with open(paths.cache() / name, "w", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _scope(spack: Spack) -> Path:
    """Our configuration scope, written when it does not say what it should."""
    content = {
        "config": {"config": {"misc_cache": str(_misc_cache())}},
        # The solver comes from our virtual environment, gpg and patchelf from PATH: nothing is
        # fetched. Disabled, Spack would not even look for the gpg that signs build caches
        "bootstrap": {
            "bootstrap:": {
                "enable": True,
                "root": str(paths.cache() / "state" / "bootstrap"),
                "sources": [],
                "trusted": {},
            }
        },
        "packages": {"packages": _compilers()},
    }
    folder = airgap()
    if folder:
        mirror = {"url": (folder.resolve() / "mirror").as_uri(), "source": True, "binary": False}
        content["mirrors"] = {"mirrors": {"airgap": mirror}}
    if _has_compilers(spack.root / "etc" / "spack"):
        del content["packages"]
    text = json.dumps(content, sort_keys=True)
    folder = paths.cache() / f"scope-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        with _lock("scope.lock"):
            if not folder.is_dir():
                fresh = folder.with_name(f"{folder.name}.new.{os.getpid()}")
                fresh.mkdir(parents=True)
                for section, document in content.items():
                    # JSON is YAML
                    target = fresh / f"{section}.yaml"
                    target.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
                fresh.rename(folder)
    return folder


def builtin() -> dict[str, str]:
    """The pin of spack-packages: git (its address) and commit."""
    path = paths.ENVIRONMENTS / "common" / "repos.yaml"
    try:
        repository = load_yaml(path)["repos"]["builtin"]
        return {"git": repository["git"], "commit": repository["commit"]}
    except (KeyError, TypeError):
        raise SetupError(
            f"{path} has no repos: builtin: git: and commit:, the pin of spack-packages"
        ) from None


def _misc_cache() -> Path:
    """Spack's indexes and solver cache for these recipes and this pin, and for no others.

    Spack names an index by namespace, and looks at package.py's time only: with another clone's
    recipes, or an edited patch, it answers from the wrong one ("Couldn't find patch ...").
    """
    digest = hashlib.sha256()
    for path in sorted([*paths.RECIPES.rglob("*"), *paths.PATCHES.glob("*.patch")]):
        if path.is_file() and path.suffix in (".py", ".patch", ".cmake"):
            digest.update(path.name.encode() + path.read_bytes())
    state = paths.cache() / "state"
    pin = builtin()["commit"][:12]
    target = state / f"index-{pin}-{digest.hexdigest()[:12]}"
    if target.is_dir():
        return target
    with _lock("index.lock"):
        if not target.is_dir():
            fresh = target.with_name(f"{target.name}.new.{os.getpid()}")
            fresh.mkdir(parents=True)
            # The indexes of spack-packages are the same, and take the longest to make
            for index in state.glob(f"index-{pin}-????????????/*/builtin-*"):
                copy = fresh / index.parent.name / index.name
                copy.parent.mkdir(exist_ok=True)
                shutil.copy2(index, copy)
            fresh.rename(target)
    return target


def _has_compilers(config: Path) -> bool:
    """Whether a Spack's own configuration (etc/spack, site) names compilers."""
    for path in (config / "packages.yaml", config / "site" / "packages.yaml"):
        if path.is_file() and "compilers:" in path.read_text(encoding="utf-8", errors="replace"):
            return True
    return False


def _compilers() -> dict[str, Any]:
    """packages.yaml's entry for the gcc on PATH.

    Written here, since Spack would detect it into the environment's own spack.yaml. The Fortran
    compiler is named even where it is absent: recipes ask for one when they concretize, and a lock
    must not depend on whether the machine at hand has it.
    """
    cc, cxx = shutil.which("gcc"), shutil.which("g++")
    if not cc or not cxx:
        raise SetupError(
            "no gcc and g++ on PATH: install them, or load the site's compiler module"
        )
    version = subprocess.run(
        [cc, "-dumpfullversion"], capture_output=True, text=True, check=False
    ).stdout.strip()
    folder = Path(cc).parent
    return {
        "gcc": {
            "externals": [
                {
                    "spec": f"gcc@{version} languages:='c,c++,fortran'",
                    "prefix": str(folder.parent),
                    "extra_attributes": {
                        "compilers": {
                            "c": cc,
                            "cxx": cxx,
                            "fortran": shutil.which("gfortran") or str(folder / "gfortran"),
                        }
                    },
                }
            ]
        }
    }


def main(arguments: list[str]) -> int:
    """ci/spack ARGS...: becomes the isolated Spack."""
    if not arguments:
        print("usage: ci/spack ARGS...   (for instance: ci/spack -e environments/h100 find -c)")
        return 2
    spack = find()
    command = spack.command(arguments)
    os.execve(command[0], command, environment())
