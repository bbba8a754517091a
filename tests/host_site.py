"""A site file for the machine the tests run on, and `h100-site` really installed with it.

The build tier: everything below one folder of the cache (environment, install tree, stage), kept
between runs, since Spack installs again only what changed.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from deepep_ci import paths
from deepep_ci.documents import load_json, load_yaml
from deepep_ci.spack import Spack

#: Seconds a full install may take on two cores; rdma-core and DeepEP are compiled
INSTALL_TIMEOUT = 3000


class Unavailable(Exception):
    """This machine cannot build the site environment; the text says why."""


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} does not run: {error}") from None
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip()[-200:]}")
    return done.stdout


def _tool(name: str, pattern: str = r"(\d+(?:\.\d+)+)") -> tuple[str, str]:
    """(version, prefix) of a program on PATH."""
    path = shutil.which(name)
    if path is None:
        raise Unavailable(f"{name} is not installed")
    match = re.search(pattern, _output(path, "--version"))
    if match is None:
        raise Unavailable(f"{path} --version names no version")
    return match.group(1), str(Path(path).resolve().parent.parent)


def pytorch_prefix() -> Path:
    """Prefix of a CUDA 13 PyTorch: $DEEPEP_TEST_PYTORCH, or the one site.yaml names."""
    named = os.environ.get("DEEPEP_TEST_PYTORCH")
    if named:
        return Path(named)
    document = load_yaml(paths.ENVIRONMENTS / "h100-site" / "site.yaml")
    return Path(document["packages"]["py-torch"]["externals"][0]["prefix"])


def python_of(pytorch: Path) -> Path:
    """Interpreter of a PyTorch's prefix. Raises Unavailable."""
    python = pytorch / "bin" / "python3"
    if not python.is_file():
        raise Unavailable(f"no PyTorch in {pytorch}: set DEEPEP_TEST_PYTORCH to a prefix of one")
    return python


def nvshmem_of(pytorch: Path) -> str | None:
    """Version of the NVSHMEM wheel in a PyTorch's prefix, None without one."""
    code = (
        "from importlib import metadata\n"
        "found = [d.version for d in metadata.distributions()\n"
        "         if (d.metadata['Name'] or '').startswith('nvidia-nvshmem-cu')]\n"
        "print(found[0] if found else '')"
    )
    return _output(str(python_of(pytorch)), "-c", code).strip() or None


def pytorch_with_nvshmem(release: str) -> Path:
    """Prefix of this machine's PyTorch with NVSHMEM's wheel of a release; a copy of it, made once,
    if it has another. Raises Unavailable."""
    base = pytorch_prefix()
    if nvshmem_of(base) == release:
        return base
    target = paths.cache() / "tests" / f"pytorch-nvshmem-{release}"
    if target.is_dir() and nvshmem_of(target) == release:
        return target
    shutil.rmtree(target, ignore_errors=True)
    fresh = target.with_name(f"{target.name}.new.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.parent.mkdir(parents=True, exist_ok=True)
    # Hard links: gigabytes in a second; pip replaces files, it does not write into them
    try:
        _output("cp", "-al", str(base), str(fresh))
    except Unavailable:
        shutil.rmtree(fresh, ignore_errors=True)
        _output("cp", "-as", str(base), str(fresh))
    pip = [str(python_of(fresh)), "-m", "pip", "install", "--quiet", "--no-deps"]
    _output(*pip, "--disable-pip-version-check", f"nvidia-nvshmem-cu13=={release}")
    fresh.rename(target)
    return target


def site_document(cuda_home: Path, pytorch: Path) -> dict[str, Any]:
    """site.yaml's content for this machine: its versions and prefixes. Raises Unavailable."""
    document = load_yaml(paths.ENVIRONMENTS / "h100-site" / "site.yaml")
    python = python_of(pytorch)
    code = (
        "import platform, torch\n"
        "print(platform.python_version(), torch.__version__, torch.version.cuda)"
    )
    python_version, torch_version, torch_cuda = _output(str(python), "-c", code).split()
    if not torch_cuda.startswith("13"):
        raise Unavailable(f"the PyTorch in {pytorch} is for CUDA {torch_cuda}, not for 13")
    nvcc = _output(str(cuda_home / "bin" / "nvcc"), "--version")
    found = {
        "cmake": _tool("cmake"),
        "cuda": (re.search(r"V(\d+\.\d+\.\d+)", nvcc).group(1), str(cuda_home)),  # type: ignore[union-attr]
        "gmake": _tool("make"),
        "libnl": (
            _output("pkg-config", "--modversion", "libnl-route-3.0").strip(),
            _output("pkg-config", "--variable=prefix", "libnl-route-3.0").strip(),
        ),
        "ninja": _tool("ninja"),
        "patchelf": _tool("patchelf"),
        "pkgconf": _tool("pkg-config"),
        "python": (python_version, str(pytorch)),
        "py-torch": (torch_version.split("+")[0], str(pytorch)),
    }
    packages = document["packages"]
    for name, (version, prefix) in found.items():
        external = packages[name]["externals"][0]
        external["spec"] = re.sub(r"@[\w.]+", f"@{version}", external["spec"])
        external["prefix"] = prefix
    return document


class Site:
    """An environment with a site file for this machine, concretized, and installed on demand.

    folder/ holds environments/, and store/, the install tree, unless the site file names one;
    name is the environment's.
    """

    def __init__(self, spack: Spack, folder: Path, document: dict[str, Any], name: str) -> None:
        self.spack = spack
        self.folder = folder
        self.environment = folder / "environments" / name
        tree = document.get("config", {}).get("install_tree", {})
        self.store = Path(tree.get("root", folder / "store"))
        self._document = document

    def prepare(self) -> None:
        """Writes the environment anew, and concretizes it if anything of it changed."""
        document = json.loads(json.dumps(self._document))
        config = document.setdefault("config", {})
        config.setdefault("install_tree", {"root": str(self.store)})
        config.setdefault("build_stage", str(self.folder / "stage"))
        site = json.dumps(document, indent=1)
        digest = hashlib.sha256(site.encode() + self.spack.version.encode())
        for top in (paths.ENVIRONMENTS, paths.RECIPES, paths.PATCHES):
            for path in sorted(top.rglob("*")):
                # Locks are the result of these
                kinds = (".yaml", ".py", ".patch", ".lua", ".tcl", ".txt", ".sh")
                if path.suffix in kinds and "__pycache__" not in path.parts:
                    digest.update(path.name.encode() + path.read_bytes())
        stamp, lock = self.folder / "inputs.sha256", self.environment / "spack.lock"
        current = stamp.read_text() if stamp.is_file() else ""
        if current == digest.hexdigest() and lock.is_file():
            return
        environments = self.folder / "environments"
        shutil.rmtree(environments, ignore_errors=True)
        shutil.copytree(
            paths.ENVIRONMENTS,
            environments,
            ignore=shutil.ignore_patterns(".spack-env", "spack.lock"),
        )
        (environments / "h100-site" / "site.yaml").write_text(site)
        recipes = self.folder / "spack-repo"
        if not recipes.is_symlink():
            recipes.symlink_to(paths.TOP / "spack-repo")
        done = self.run("concretize", "--force", "--fresh", timeout=900)
        assert done.returncode == 0, done.stderr[-3000:]
        stamp.write_text(digest.hexdigest())

    def run(
        self, *arguments: str, timeout: float = 600, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """spack -e <this environment> ARGUMENTS."""
        done = self.spack.run(["-e", str(self.environment), *arguments], timeout=timeout)
        if check:
            assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done

    def command(self, *arguments: str) -> list[str]:
        """The command line of run(), for a process of the test's own."""
        return self.spack.command(["-e", str(self.environment), *arguments])

    def install(self, *arguments: str) -> float:
        """spack install; returns seconds. The log stays in folder/install.log."""
        begin = time.monotonic()
        done = self.run("install", *arguments, timeout=INSTALL_TIMEOUT)
        (self.folder / "install.log").write_text(done.stdout + done.stderr)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return time.monotonic() - begin

    def nodes(self) -> dict[str, dict[str, Any]]:
        """{package name: its node of spack.lock, with "hash"}."""
        concrete = load_json(self.environment / "spack.lock")["concrete_specs"]
        return {node["name"]: node for node in concrete.values()}

    def prefix(self, name: str) -> Path:
        """Where a package of the lock is (or is going to be) installed."""
        node = self.nodes()[name]
        if "external" in node:
            return Path(node["external"]["path"])
        architecture = f"{node['arch']['platform']}-{node['arch']['target']}"
        leaf = f"{node['name']}-{node['version']}-{node['hash']}"
        return self.store / architecture / leaf
