"""The recipes: lint, Spack's own audits, addresses and checksums, variants others rely on."""

import json
import re
import subprocess
import sys

import pytest
from deepep_ci import paths, refusals
from support import RECIPE, recipe_wheels

PACKAGES = sorted(p.parent.name.replace("_", "-") for p in RECIPE.values())


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=lambda c: c[0])
def test_ruff(command):
    ruff = [str(paths.Path(sys.executable).with_name("ruff")), *command, "--no-cache"]
    done = subprocess.run(ruff, cwd=paths.TOP, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_namespace():
    text = (paths.RECIPES / "repo.yaml").read_text()
    assert "namespace: deepep" in text and "api: v2.2" in text
    index = (paths.TOP / "spack-repo-index.yaml").read_text()
    assert str(paths.RECIPES.relative_to(paths.TOP)) in index


@pytest.mark.parametrize("version", sorted(recipe_wheels()))
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_form_of_wheels(version, machine):
    sha256, folder = recipe_wheels()[version][machine]
    assert re.fullmatch(r"[0-9a-f]{64}", sha256)
    # PyPI's content-addressed folder: a BLAKE2 digest in three parts
    assert re.fullmatch(r"[0-9a-f]{2}/[0-9a-f]{2}/[0-9a-f]{60}", folder)


def test_checksums_are_distinct():
    digests = [pair for machines in recipe_wheels().values() for pair in machines.values()]
    assert len({sha256 for sha256, _ in digests}) == len(digests) == 12
    assert len({folder for _, folder in digests}) == len(digests)


#: Hosts that the project's own files may name; where PyPI keeps its files Spack knows
HOSTS = {"github.com", "json-schema.org", "example"}


def test_no_registry_is_named():
    """Addresses of PyPI come from Spack's own PyPI support, so a proxy can stand in for it."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=paths.TOP, capture_output=True, text=True
    ).stdout.split("\0")
    named = {}
    for name in filter(None, tracked):
        path = paths.TOP / name
        if path.is_file() and not name.startswith("LICENSE"):
            text = path.read_text(errors="replace")
            named.update(dict.fromkeys(re.findall(r"https?://([\w.-]+)", text), name))
    assert set(named) <= HOSTS, named


#: Commits of upstream's tags
COMMITS = {
    "rdma_core": {"60.0": "5321d809e095d6dd32a1355a5d4aa2ebbda4ba74"},
    "nccl": {"2.30.7-1": "73cf112295c33aee2b895f329f592f2a9b4b0f97"},
}


@pytest.mark.sources
@pytest.mark.parametrize(
    "url, tag, commit",
    [
        ("https://github.com/linux-rdma/rdma-core.git", "v60.0", COMMITS["rdma_core"]["60.0"]),
        ("https://github.com/NVIDIA/nccl.git", "v2.30.7-1", COMMITS["nccl"]["2.30.7-1"]),
        (
            "https://github.com/deepseek-ai/DeepEP.git",
            "v1.2.1",
            "9af0e0d0e74f3577af1979c9b9e1ac2cad0104ee",
        ),
    ],
)
def test_tags_are_at_their_commits(url, tag, commit):
    command = ["git", "ls-remote", url, f"refs/tags/{tag}", f"refs/tags/{tag}^{{}}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip(f"{url} cannot be reached: {done.stderr.strip()[-150:]}")
    assert commit in done.stdout
    assert any(commit in recipe.read_text() for recipe in RECIPE.values())


@pytest.fixture(scope="module")
def spack_here(any_spack):
    """Function: runs Spack on our recipes alone."""

    def call(*arguments):
        with refusals.solver_environment() as folder:
            return any_spack.run(["-e", str(folder), *arguments], timeout=300)

    return call


@pytest.mark.spack
@pytest.mark.slow
@pytest.mark.parametrize("what", [["packages", *PACKAGES], ["configs"]], ids=lambda w: w[0])
def test_audit(spack_here, what):
    done = spack_here("audit", *what)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "issue found" not in done.stdout.replace("0 issues found", "")


@pytest.mark.spack
def test_urls_and_defaults(spack_here, tmp_path):
    """What Spack itself makes of the recipe: default version, address and checksum of each."""
    script = tmp_path / "versions.py"
    script.write_text(
        "import json, platform, spack.repo, spack.spec\n"
        "cls = spack.repo.PATH.get_pkg_class('deepep.nvshmem')\n"
        "pkg = cls(spack.spec.Spec('nvshmem'))\n"
        "rows = {str(v): [d.get('url'), d.get('sha256'), bool(d.get('preferred'))]\n"
        "        for v, d in cls.versions.items()}\n"
        "print('rows:' + json.dumps([platform.machine(), rows]))\n"
    )
    done = spack_here("python", str(script))
    assert done.returncode == 0, done.stderr
    machine, rows = json.loads(done.stdout.split("rows:")[1])
    for version, machines in recipe_wheels().items():
        url, sha256, preferred = rows[version]
        release = version.removesuffix("-cu13")
        assert sha256 == machines[machine][0]
        assert re.fullmatch(
            rf"https://[^/]+/packages/{machines[machine][1]}/nvidia_nvshmem_cu13-{release}-py3-none-"
            rf"manylinux2014_{machine}\.manylinux_2_17_{machine}\.whl",
            url,
        )
        assert preferred == (version == "3.6.5")
    # builtin's source releases are still there, under their own checksums
    assert rows["3.4.5"][1] == "40c1d4c255dd7395e04df41b181c4afdf2e0724c06b6fabde58bf2f8f532b0e5"
    assert "2.7.0-6" in rows and "3.2.5-1" in rows


@pytest.mark.spack
@pytest.mark.slow
@pytest.mark.parametrize(
    "spec, version, build_system",
    [
        # As dihydrogen asks
        ("nvshmem +nccl ~ucx ~mpi ^nccl cuda_arch=90", "3.4.5", "cmake"),
        # As cublasmp and cufftmp ask
        ("nvshmem@3.1: cuda_arch=90", "3.6.5", "generic"),
        ("nvshmem@3.3.24 ~nccl ~mpi", "3.3.24", "cmake"),
        ("nvshmem@2.7.0-6 build_system=makefile ~nccl ~mpi", "2.7.0-6", "makefile"),
    ],
)
def test_builtin_variants_keep_working(pinned_spack, tmp_path, spec, version, build_system):
    common = paths.ENVIRONMENTS / "common"
    document = {
        "specs": [],
        "view": False,
        "include": [str(common / "repos.yaml"), str(common / "concretizer.yaml")],
        "packages": {"all": {"require": "target=x86_64_v3"}},
    }
    (tmp_path / "spack.yaml").write_text(json.dumps({"spack": document}))
    done = pinned_spack.run(["-e", str(tmp_path), "spec", "--fresh", "--json", spec], timeout=300)
    assert done.returncode == 0, done.stderr
    node = json.loads(done.stdout)["spec"]["nodes"][0]
    assert node["version"] == version
    assert node["parameters"]["build_system"] == build_system
