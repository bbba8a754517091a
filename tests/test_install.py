"""h100-site, really installed: what is in the prefixes, what a process loads, what is refused."""

import json
import os
import shutil
import stat
import subprocess

import pytest
from deepep_ci import spack
from host_site import python_of
from spack_repo.deepep import evidence

pytestmark = [pytest.mark.build, pytest.mark.slow]

OURS = ("py-deep-ep", "nvshmem", "rdma-core")


def files(prefix):
    """Files of a prefix without Spack's own records."""
    for folder, folders, names in os.walk(prefix):
        if ".spack" in folders:
            folders.remove(".spack")
        for name in names:
            yield os.path.join(folder, name)


@pytest.fixture(scope="module")
def platlib(site):
    return next(site.prefix("py-deep-ep").glob("lib/python3.*/site-packages"))


@pytest.fixture(scope="module")
def deep_ep_cpp(platlib):
    return next(platlib.glob("deep_ep_cpp.*.so"))


def run_python(pytorch, platlib, code):
    """Python of a PyTorch with deep_ep added, and nothing else of this process's environment."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": os.environ["HOME"], "PYTHONPATH": str(platlib)}
    return subprocess.run(
        [str(python_of(pytorch)), "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


IMPORT = """
import json, warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import torch, deep_ep
maps = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
print(json.dumps({
    "nvshmem": [m for m in maps if "libnvshmem_host" in m],
    "driver": [m for m in maps if "libcuda.so" in m],
    "said": [str(w.message) for w in said],
    "available": torch.cuda.is_available(),
    "buffer": deep_ep.Buffer.__name__,
    "hybrid": deep_ep.HybridEPBuffer.__name__,
}))
"""


def test_import_without_ld_library_path(site, pytorch, platlib):
    """With one NVSHMEM; and without a driver it says so, and PyTorch sees no GPU."""
    done = run_python(pytorch("3.6.5"), platlib, IMPORT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["nvshmem"]) == 1
    assert found["buffer"] == "Buffer" and found["hybrid"] == "HybridEPBuffer"
    if any("driver_stubs" in path for path in found["driver"]):
        assert any("no libcuda.so.1 here" in text for text in found["said"])
        assert found["available"] is False
    else:
        assert len(found["driver"]) == 1 and found["said"] == []


def test_pytorch_with_another_nvshmem_is_refused_at_import(pytorch, platlib):
    """PyTorch upgraded after the install: no cryptic undefined symbol, and no silent import."""
    done = run_python(pytorch("3.4.5"), platlib, "import torch, deep_ep")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "ImportError: deep_ep was built with NVSHMEM 3.6.5, but 3.4.5 is loaded already: "
    )
    assert "pip install --no-deps nvidia-nvshmem-cu13==3.6.5" in last


def test_pytorch_with_another_nvshmem_is_refused_at_install(site, make_site, pytorch):
    """The real wheel as PyTorch pins it; nothing is compiled, and nothing installed."""
    other = make_site(
        "site-3.4.5", pytorch("3.4.5"), config={"install_tree": {"root": str(site.store)}}
    )
    assert other.prefix("nvshmem") == site.prefix("nvshmem")
    assert other.prefix("py-deep-ep") != site.prefix("py-deep-ep")
    done = other.run("install", timeout=600)
    assert done.returncode != 0
    said = " ".join((done.stdout + done.stderr).split())
    assert f"the PyTorch in {pytorch('3.4.5')} brings NVSHMEM 3.4.5 (" in said, said[-3000:]
    assert "which would be loaded in place of 3.6.5: give it the same release" in said
    assert "-m pip install --no-deps nvidia-nvshmem-cu13==3.6.5), or name another PyTorch" in said
    assert not other.prefix("py-deep-ep").exists()


def test_pytorch_of_another_version_is_refused(site, make_site, pytorch):
    """site.yaml says one version, the prefix holds another."""
    other = make_site(
        "site-wrong", pytorch("3.6.5"), config={"install_tree": {"root": str(site.store)}}
    )
    text = (other.environment / "site.yaml").read_text()
    wrong = text.replace("py-torch@", "py-torch@2.1")
    (other.environment / "site.yaml").write_text(wrong)
    try:
        done = other.run("concretize", "--force", "--fresh", timeout=900)
        assert done.returncode == 0, done.stderr
        done = other.run("install", timeout=600)
    finally:
        # The next run starts anew
        (other.folder / "inputs.sha256").unlink()
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0
    assert "correct the entry in site.yaml and concretize again (ci/lock)" in said, said[-3000:]


def test_device_code_and_lookup(deep_ep_cpp, platlib, cuobjdump):
    hybrid_ep_cpp = next(platlib.glob("hybrid_ep_cpp.*.so"))
    assert evidence.device_code(str(deep_ep_cpp), cuobjdump) == {"sm_90": 1}
    assert set(evidence.device_code(str(hybrid_ep_cpp), cuobjdump)) == {"sm_90"}
    found = evidence.rc_lookups(str(deep_ep_cpp), cuobjdump)
    assert found == {"sm_90": evidence.Lookup("v2", bounded=True)}


@pytest.mark.parametrize("package", OURS)
def test_permissions(site, package):
    """Nothing that others than the owner may write."""
    for path in files(site.prefix(package)):
        mode = os.lstat(path).st_mode
        assert stat.S_ISLNK(mode) or not mode & 0o022, path


@pytest.mark.parametrize("package", OURS)
def test_no_trace_of_the_build(site, package):
    """No path of the stage anywhere, and nothing of a build in the prefix."""
    stage = str(site.folder / "stage").encode()
    for path in files(site.prefix(package)):
        if os.path.islink(path):
            continue
        with open(path, "rb") as stream:
            assert stage not in stream.read(), path
        assert not path.endswith((".o", ".cu", ".cpp", ".d")) and "/.git" not in path, path


def test_no_path_of_the_host_but_rpaths(site, platlib, cuobjdump, tmp_path):
    """Extensions without their RPATH, and their device code, name no folder of this machine."""
    # The device linker notes where it found NVSHMEM: where it is installed, as the RPATH says too
    linked = f"-L {site.prefix('nvshmem')}/lib".encode()
    here = [str(site.folder).encode(), os.environ["HOME"].encode() + b"/"]
    for path in platlib.glob("*_ep_cpp.*.so"):
        rpath = ":".join(evidence.dynamic(str(path)).rpath).encode()
        data = path.read_bytes()
        assert data.count(rpath) == 1
        (tmp_path / path.name).write_bytes(data.replace(rpath, b""))
        command = [cuobjdump, "-xelf", "all", str(path)]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    checked = list(tmp_path.iterdir())
    assert any(path.suffix == ".cubin" for path in checked)
    for path in checked:
        data = path.read_bytes().replace(linked, b"")
        assert not any(folder in data for folder in here), path


def test_size(site, record_property):
    """Prefix sizes, recorded; the sum of all three is what a site pays."""
    total = 0
    for package in OURS:
        size = sum(os.lstat(path).st_size for path in files(site.prefix(package)))
        record_property(f"{package}_bytes", size)
        total += size
    assert 50e6 < total < 200e6


def test_install_again_does_nothing(site):
    before = {path: os.stat(path).st_mtime_ns for path in files(site.prefix("py-deep-ep"))}
    seconds = site.install()
    assert seconds < 60
    assert before == {path: os.stat(path).st_mtime_ns for path in files(site.prefix("py-deep-ep"))}


@pytest.fixture
def stand_alone(site):
    """Function: runs `spack test run` of our packages; returns (exit code, output)."""

    def call(alias, *packages):
        hashes = [f"/{site.nodes()[package]['hash']}" for package in packages]
        done = site.run("test", "run", "--alias", alias, *hashes)
        results = site.run("test", "results", "-l", alias)
        site.run("test", "remove", "-y", alias)
        return done.returncode, done.stdout + done.stderr + results.stdout

    return call


def test_stand_alone_tests(stand_alone):
    code, said = stand_alone("deepep-good", *OURS)
    assert code == 0, said[-5000:]
    for part in ("test_links", "test_device_code", "test_import", "test_transports"):
        assert f"::{part} .. PASSED" in said, said[-5000:]
    assert "::test_libraries .. PASSED" in said and "::test_host_library .. PASSED" in said


def test_stand_alone_tests_can_fail(stand_alone, platlib):
    module = platlib / "deep_ep" / "utils.py"
    module.rename(module.with_suffix(".away"))
    shutil.rmtree(platlib / "deep_ep" / "__pycache__", ignore_errors=True)
    try:
        code, said = stand_alone("deepep-bad", "py-deep-ep")
    finally:
        module.with_suffix(".away").rename(module)
    assert code != 0
    assert "import deep_ep fails: ModuleNotFoundError: No module named 'deep_ep.utils'" in said


def test_spack_of_the_users_own_needs_no_ci(site):
    """The environment stands alone: plain spack find, without our scope."""
    command = [str(site.spack.executable), "-e", str(site.environment), "find", "--json"]
    done = subprocess.run(
        [*command, "py-deep-ep"], env=spack.environment(), capture_output=True, text=True
    )
    assert json.loads(done.stdout)[0]["hash"] == site.nodes()["py-deep-ep"]["hash"]
