"""h100-hybridep, really installed: HybridEP between nodes, three architectures.

Twenty minutes on two cores, so only where DEEPEP_TEST_HYBRIDEP is set, or where it is installed
already by an earlier run.
"""

import json
import os
import subprocess

import pytest
from host_site import python_of
from spack_repo.deepep import evidence

pytestmark = [pytest.mark.build, pytest.mark.slow]

ARCHITECTURES = {"sm_90", "sm_100", "sm_120"}


@pytest.fixture(scope="module")
def hybridep(site, make_site, pytorch):
    config = {"install_tree": {"root": str(site.store)}}
    hybridep = make_site("hybridep", pytorch("3.6.5"), "h100-hybridep", config=config)
    if not (hybridep.prefix("py-deep-ep") / ".spack").is_dir():
        if not os.environ.get("DEEPEP_TEST_HYBRIDEP"):
            pytest.skip("not installed; set DEEPEP_TEST_HYBRIDEP=1 to build it (20 minutes)")
        hybridep.install()
    return hybridep


@pytest.fixture(scope="module")
def platlib(hybridep):
    return next(hybridep.prefix("py-deep-ep").glob("lib/python3.*/site-packages"))


def test_device_code(platlib, cuobjdump):
    deep_ep_cpp, hybrid_ep_cpp = (
        str(next(platlib.glob(f"{name}.*.so"))) for name in ("deep_ep_cpp", "hybrid_ep_cpp")
    )
    assert evidence.device_code(deep_ep_cpp, cuobjdump) == dict.fromkeys(ARCHITECTURES, 1)
    assert set(evidence.device_code(hybrid_ep_cpp, cuobjdump)) == ARCHITECTURES
    lookups = evidence.rc_lookups(deep_ep_cpp, cuobjdump)
    assert lookups == dict.fromkeys(ARCHITECTURES, evidence.Lookup("v2", bounded=True))


def test_multinode_is_built_in(platlib):
    """DOCA's objects are linked, and stay for the kernels that are compiled at run time."""
    hybrid_ep_cpp = str(next(platlib.glob("hybrid_ep_cpp.*.so")))
    needed = evidence.dynamic(hybrid_ep_cpp).needed
    assert {"libmlx5.so.1", "libibverbs.so.1", "libnvidia-ml.so.1", "libcuda.so.1"} <= set(needed)
    backend = platlib / "deep_ep" / "backend"
    assert len(list((backend / "nccl" / "obj").rglob("doca_*.o"))) == 13
    assert not list(backend.rglob("*.d"))
    assert (backend / "nccl" / "include").is_dir() and list(backend.glob("*.cuh"))


def test_import(pytorch, platlib):
    code = (
        "import json, torch, deep_ep\n"
        "maps = {line.split()[-1] for line in open('/proc/self/maps') if '/' in line}\n"
        "print(json.dumps([m for m in maps if 'libnvshmem_host' in m]))"
    )
    done = subprocess.run(
        [str(python_of(pytorch("3.6.5"))), "-c", code],
        env={"PATH": "/usr/bin:/bin", "HOME": os.environ["HOME"], "PYTHONPATH": str(platlib)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[-1])) == 1
