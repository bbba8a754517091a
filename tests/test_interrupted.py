"""An install killed at any phase registers nothing, and the next run succeeds."""

import json
import os
import signal
import subprocess
import time

import pytest
from deepep_ci import spack

pytestmark = [pytest.mark.build, pytest.mark.slow]


@pytest.fixture(scope="module")
def tree(site, make_site, pytorch, tmp_path_factory):
    """h100-site with an empty install tree and stage of its own."""
    folder = tmp_path_factory.mktemp("interrupted")
    config = {
        "install_tree": {"root": str(folder / "store")},
        "build_stage": str(folder / "stage"),
    }
    tree = make_site("site-interrupted", pytorch("3.6.5"), config=config)
    tree.stage = folder / "stage"
    # What comes before: installed without being disturbed
    tree.run("install", "--only", "dependencies", "rdma-core", timeout=600, check=True)
    return tree


def kill_when(tree, package, reached, timeout=400):
    """Starts an install of a package and kills all of it (SIGKILL) as soon as reached() holds."""
    process = subprocess.Popen(
        tree.command("install", package),
        env=spack.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + timeout
    while not reached():
        assert process.poll() is None, f"the install of {package} ended before it could be killed"
        assert time.monotonic() < deadline, f"{package} did not get that far"
        time.sleep(0.005)
    # Builds have sessions of their own: every process of the tree, as a node's power would
    subprocess.run(["pkill", "-KILL", "-f", str(tree.stage)], check=False)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def registered(tree):
    """Names of what Spack says is installed in the tree."""
    done = tree.run("find", "--json", check=True)
    return {record["name"] for record in json.loads(done.stdout)}


def files_below(folder, pattern):
    def found():
        try:
            return next(folder.rglob(pattern), None) is not None
        except FileNotFoundError:
            # A folder was removed while it was read
            return False

    return found


def test_killed_while_fetching(tree):
    kill_when(tree, "rdma-core", files_below(tree.stage, "spack-stage-rdma-core*"))
    assert "rdma-core" not in registered(tree)


def test_killed_while_building(tree):
    kill_when(tree, "rdma-core", files_below(tree.stage, "*.o"))
    assert "rdma-core" not in registered(tree)
    assert not tree.prefix("rdma-core").exists() or not list(tree.prefix("rdma-core").glob("lib"))


def test_next_run_succeeds(tree):
    tree.run("install", "rdma-core", timeout=1200, check=True)
    assert (tree.prefix("rdma-core") / "lib" / "libmlx5.so").exists()
    assert "rdma-core" in registered(tree)


def contents(prefix):
    """Names in a prefix, without Spack's own records."""
    names = {path.relative_to(prefix) for path in prefix.rglob("*")}
    return {name for name in names if name.parts[0] != ".spack"}


def test_killed_while_installing(tree, site):
    """The prefix is half full at that moment; nothing of it counts, and the next run redoes it."""
    prefix = tree.prefix("nvshmem")
    kill_when(tree, "nvshmem", files_below(prefix, "*.h"))
    assert prefix.is_dir()
    assert not (prefix / "lib" / "libnvshmem_host.so").is_symlink(), "too late: it had finished"
    assert "nvshmem" not in registered(tree)
    tree.run("install", "nvshmem", timeout=600, check=True)
    assert (prefix / "lib" / "libnvshmem_host.so").is_symlink()
    assert "nvshmem" in registered(tree)
    assert contents(prefix) == contents(site.prefix("nvshmem"))
