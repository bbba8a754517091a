"""Every environment on every tested Spack, and every refusal with its sentence."""

import os
import subprocess
import time
from subprocess import TimeoutExpired

import pytest
from deepep_ci import environments, expect, patches, paths, refusals
from deepep_ci.drift import drift


@pytest.mark.spack
@pytest.mark.slow
@pytest.mark.parametrize("name", paths.environment_names())
def test_environment(any_spack, name):
    environment = environments.Environment(name)
    new, _ = environments.concretize(any_spack, environment)
    assert expect.problems(new, environment.expect(), patches.names_by_digest()) == []
    stale = [change for change in drift(environment.lock(), new) if change.kind == "spec"]
    assert stale == []


@pytest.mark.spack
@pytest.mark.slow
@pytest.mark.parametrize("entry", refusals.table(), ids=lambda entry: entry["id"])
def test_refusal(any_spack, entry):
    begin = time.monotonic()
    try:
        done = refusals.solve(any_spack, entry["spec"], entry.get("packages"))
    except TimeoutExpired:
        pytest.fail(f"no answer within {refusals.DEADLINE:.0f} s")
    assert done.returncode == 1, f"was accepted: {done.stdout[:500]}"
    message = " ".join(environments.error_text(done.stderr).split())
    assert entry["because"] in message
    assert time.monotonic() - begin < refusals.DEADLINE


@pytest.mark.spack
def test_refusal_that_is_none_is_told(pinned_spack):
    """The check of refusals can fail: an accepted spec, and one refused for another reason."""
    good = {"id": "good", "spec": "py-deep-ep cuda_arch=90", "because": "never refused at all"}
    assert "was accepted" in refusals._check_one(pinned_spack, good).problem
    other = {"id": "other", "spec": "py-deep-ep cuda_arch=80", "because": "some other reason"}
    assert "refused, but not because" in refusals._check_one(pinned_spack, other).problem


@pytest.mark.spack
def test_external_pytorch_is_never_built(pinned_spack):
    """environments/common/external-pytorch.yaml names all that PyTorch could depend on."""
    environment = environments.Environment("h100-site")
    new, _ = environments.concretize(pinned_spack, environment)
    built = {name for name, copies in new.packages.items() if not copies[0].external}
    assert built <= {
        "py-deep-ep", "nvshmem", "rdma-core", "ninja", "re2c", "py-nvidia-ml-py", "py-pip",
        "py-setuptools", "py-wheel", "python-venv", "gcc-runtime", "compiler-wrapper",
    }  # fmt: skip


@pytest.mark.spack
@pytest.mark.slow
def test_sites_file_of_its_own(pinned_spack, run, tmp_path):
    """A site's own externals, outside of the clone: told as the site's, not as a stale lock."""
    site = tmp_path / "site.yaml"
    text = (paths.ENVIRONMENTS / "h100-site" / "site.yaml").read_text()
    site.write_text(
        text.replace("cuda@13.0.88", "cuda@13.0.2").replace("/usr/local/cuda-13.0", "/opt/cuda")
    )
    os.environ["DEEPEP_SITE_YAML"] = str(site)
    try:
        environment = environments.Environment("h100-site")
        new, _ = environments.concretize(pinned_spack, environment)
    finally:
        del os.environ["DEEPEP_SITE_YAML"]
    assert new.one("cuda").external == "/opt/cuda"
    changes = drift(environment.lock(), new)
    assert {(c.kind, c.package) for c in changes} == {("site", "cuda")}


@pytest.mark.spack
@pytest.mark.slow
def test_lock_prints_what_changed(pinned_spack, run, clone):
    """ci/lock on a damaged lock writes a good one again and says what changed."""
    path = clone / "environments" / "h100-control" / "spack.lock"
    good = path.read_text()
    path.write_text(good.replace('"version":"3.6.5"', '"version":"3.5.19"'))
    assert path.read_text() != good
    done = run(clone, "lock", "h100-control")
    assert done.returncode == 0, done.stderr
    assert "nvshmem: version 3.5.19 -> 3.6.5" in done.stdout
    assert not list(path.parent.glob("spack.lock.new*"))
    assert run(clone, "check", "--spack", "off", "h100-control").returncode == 0


@pytest.mark.spack
@pytest.mark.slow
def test_lock_without_solution_writes_nothing(pinned_spack, run, clone):
    folder = clone / "environments" / "h100-control"
    before = (folder / "spack.lock").read_bytes()
    text = (folder / "spack.yaml").read_text()
    (folder / "spack.yaml").write_text(text.replace("cuda_arch=90", "cuda_arch=80"))
    done = run(clone, "lock", "h100-control")
    assert done.returncode == 1
    assert "not written" in done.stdout
    assert "need compute capability 9.0 or later" in " ".join(done.stdout.split())
    assert (folder / "spack.lock").read_bytes() == before


@pytest.mark.spack
@pytest.mark.slow
def test_two_checks_at_once(pinned_spack):
    """Two runs share the cache and do not break each other; nothing of theirs stays behind."""
    command = [str(paths.CI / "check"), "h100-site", "h100-control", "--spack", "require"]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert subprocess.run(["git", "status", "--porcelain", "environments"], cwd=paths.TOP,
                          capture_output=True, text=True).stdout == ""  # fmt: skip
