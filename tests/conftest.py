"""Fixtures: where Spack, upstream trees and NVSHMEM's headers come from, or why they do not."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from deepep_ci import paths, sources, spack
from deepep_ci.errors import SetupError
from host_site import Site, Unavailable, pytorch_with_nvshmem, site_document
from spack_repo.deepep import evidence
from support import DEEPEP_COMMITS, PYPI_FILE, recipe_wheels

#: Set in CI that has to have Spack: a tier that cannot run is then an error, not a skip
REQUIRED = os.environ.get("DEEPEP_REQUIRE", "")


def missing(tier: str, reason: str) -> None:
    """Skips the test for a reason, or fails it where the tier is required."""
    if tier in REQUIRED.split(","):
        pytest.fail(f"{tier} is required here: {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def pins():
    return spack.pins()["spack"]


@pytest.fixture(scope="session")
def pinned_spack(pins):
    """The Spack that ci/check takes by default."""
    try:
        root = spack.pinned_clone(pins["git"], pins["default"])
    except SetupError as error:
        missing("spack", str(error))
    return spack.Spack(root, spack.version_of(root), "pinned clone")


@pytest.fixture(
    scope="session",
    params=sorted(spack.pins()["spack"]["tested"].items()),
    ids=lambda p: p[1].split()[0],
)
def any_spack(request, pins):
    """Each Spack that README names as tested."""
    commit, version = request.param
    try:
        root = spack.pinned_clone(pins["git"], commit)
    except SetupError as error:
        missing("spack", str(error))
    assert spack.version_of(root) == version.split()[0]
    return spack.Spack(root, spack.version_of(root), "pinned clone")


def _git_tree(url: str, commit: str, target: Path) -> Path:
    """A checkout of a commit below the cache, made once."""
    try:
        return spack.checkout(url, commit, target)
    except SetupError as error:
        missing("sources", f"{url} cannot be fetched: {error}")


@pytest.fixture(scope="session")
def deepep_tree():
    """Function: version of the recipe -> pristine checkout of DeepEP (do not write into it)."""

    def tree(version: str) -> Path:
        commit = DEEPEP_COMMITS[version]
        target = paths.cache() / "tests" / f"DeepEP-{commit[:12]}"
        return _git_tree("https://github.com/deepseek-ai/DeepEP.git", commit, target)

    return tree


@pytest.fixture(scope="session")
def nvshmem_include():
    """Function: version of the recipe -> include/ of NVIDIA's real wheel (x86_64), unpacked."""

    def include(version: str) -> Path:
        sha256, _ = recipe_wheels()[version]["x86_64"]
        mirror = paths.cache() / "tests" / "mirror"
        target = paths.cache() / "tests" / f"nvshmem-{version}-{sha256[:8]}"
        if target.is_dir():
            return target / "nvidia" / "nvshmem" / "include"
        release = version.removesuffix("-cu13")
        source = sources.Source(
            package=f"nvshmem@{version}",
            hash="",
            path=f"_source-cache/archive/{sha256[:2]}/{sha256}",
            url=PYPI_FILE.format(release=release, machine="x86_64"),
            sha256=sha256,
            commit=None,
            pypi=True,
        )
        if source.state(mirror) != "ok":
            mirror.mkdir(parents=True, exist_ok=True)
            reason = sources.fetch_by_pip(source, mirror)
            if reason:
                missing("sources", f"pip cannot fetch {source.file_name}: {reason[-200:]}")
        fresh = target.with_name(f"{target.name}.new.{os.getpid()}")
        with zipfile.ZipFile(mirror / source.path) as wheel:
            headers = [n for n in wheel.namelist() if n.startswith("nvidia/nvshmem/include/")]
            wheel.extractall(fresh, headers)
        if not target.is_dir():
            fresh.rename(target)
        # The headers are all the tests need of 60 to 180 MB
        (mirror / source.path).unlink(missing_ok=True)
        return target / "nvidia" / "nvshmem" / "include"

    return include


@pytest.fixture(scope="session")
def cuda_home():
    """A CUDA toolkit's prefix: $CUDA_HOME, or the one nvcc on PATH belongs to."""
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home and (Path(home) / "include" / "cuda_runtime.h").is_file():
            return Path(home)
    missing("compile", "no CUDA headers: set CUDA_HOME to a toolkit's prefix")


@pytest.fixture(scope="session")
def nvcc(cuda_home):
    compiler = cuda_home / "bin" / "nvcc"
    if not compiler.is_file():
        missing("compile", f"no nvcc in {cuda_home}/bin")
    return compiler


@pytest.fixture(scope="session")
def verbs_include():
    """include/ with infiniband/mlx5dv.h, laid out from rdma-core's source (no build needed)."""
    tree = _git_tree(
        "https://github.com/linux-rdma/rdma-core.git",
        "5321d809e095d6dd32a1355a5d4aa2ebbda4ba74",
        paths.cache() / "tests" / "rdma-core-60.0",
    )
    target = paths.cache() / "tests" / "verbs-include-60.0"
    if not target.is_dir():
        fresh = target.with_name(f"{target.name}.new.{os.getpid()}")
        for folder in ("infiniband", "rdma"):
            (fresh / folder).mkdir(parents=True)
        headers = [*(tree / "libibverbs").glob("*.h"), *(tree / "providers/mlx5").glob("mlx5*.h")]
        # As its install does: these two of the kernel's are part of the public API
        headers += (tree / "kernel-headers" / "rdma").glob("*_user_ioctl_verbs.h")
        for header in headers:
            shutil.copy(header, fresh / "infiniband")
        shutil.copytree(tree / "kernel-headers" / "rdma", fresh / "rdma", dirs_exist_ok=True)
        if not target.is_dir():
            fresh.rename(target)
    return target


@pytest.fixture(scope="session")
def pytorch():
    """Function: NVSHMEM release -> prefix of a real CUDA 13 PyTorch that brings that release."""

    def prefix(release: str) -> Path:
        try:
            return pytorch_with_nvshmem(release)
        except Unavailable as error:
            missing("build", str(error))

    return prefix


@pytest.fixture(scope="session")
def make_site(pinned_spack, cuda_home, nvcc):
    """Function (folder's name, PyTorch's prefix, environment) -> a Site, not yet installed."""

    def make(name: str, pytorch: Path, environment: str = "h100-site", **more) -> Site:
        try:
            document = site_document(cuda_home, pytorch)
        except Unavailable as error:
            missing("build", str(error))
        document.update(more)
        site = Site(pinned_spack, paths.cache() / "tests" / name, document, environment)
        site.prepare()
        return site

    return make


@pytest.fixture(scope="session")
def site(make_site, pytorch, deepep_tree):
    """h100-site, really installed with this machine's CUDA and PyTorch; minutes the first time."""
    deepep_tree("1.2.1-4214430")  # says why the sources cannot be had before Spack is asked
    site = make_site("site", pytorch("3.6.5"))
    site.install()
    return site


@pytest.fixture(scope="session")
def cuobjdump(site):
    """cuobjdump as the recipe finds it: the toolkit's, or the one of PyTorch's Triton."""
    packages = next(site.prefix("py-torch").glob("lib/python3.*/site-packages"))
    triton = packages / "triton" / "backends" / "nvidia" / "bin"
    return evidence.find_cuobjdump([str(site.prefix("cuda") / "bin"), str(triton)])


@pytest.fixture
def clone(tmp_path):
    """A copy of this repository's files to damage: function (relative path) -> path in it."""
    top = tmp_path / "clone"
    for name in ("ci", "environments", "patches", "spack-repo"):
        shutil.copytree(
            paths.TOP / name,
            top / name,
            symlinks=True,
            ignore=shutil.ignore_patterns(".spack-env", "__pycache__"),
        )
    return top


@pytest.fixture
def run():
    """Function: runs a command of ci/ in a repository, as a user would."""

    def call(top: Path, command: str, *arguments: str, timeout: float = 300, **env: str):
        environment = {k: v for k, v in os.environ.items() if k not in ("SPACK_ROOT",)}
        return subprocess.run(
            [str(top / "ci" / command), *arguments],
            env={**environment, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return call


@pytest.fixture
def offline(run, clone):
    """Function: ci/check --spack off on the copy. Returns (exit code, {(env, check): result})."""

    def call(*arguments: str):
        report = clone / "report.json"
        done = run(clone, "check", "--spack", "off", "--json", str(report), *arguments)
        assert "Traceback" not in done.stdout + done.stderr
        assert done.returncode in (0, 1), done.stdout + done.stderr
        results = json.loads(report.read_text())["results"]
        table: dict = {}
        for result in results:
            table.setdefault((result["environment"], result["check"]), result)
        return done.returncode, table

    return call


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    # One store and two cores: builds go after each other, in one worker
    for item in items:
        if item.get_closest_marker("build"):
            item.add_marker(pytest.mark.xdist_group("build"))


def pytest_report_header():
    cache = os.environ.get("DEEPEP_CACHE", "not set (ci/test sets it up)")
    return f"cache: {cache}; python {sys.version.split()[0]}"
