"""The layout of RC queue pairs in every NVSHMEM of the recipe, from NVIDIA's real headers."""

import os
import subprocess

import pytest
from lookup.lookup import header_facts
from spack_repo.deepep import evidence
from support import NVSHMEM_LAYOUT, recipe_wheels

# nvcc, as DeepEP's kernels see the headers: the types, their size, and the field that only v2 has
PROBE = """\
#include <type_traits>
#include <nvshmem.h>
#include <infiniband/mlx5dv.h>
#include <device_host_transport/nvshmem_common_ibgda.h>
template <typename S, typename = void> struct has_default_rc : std::false_type {};
template <typename S>
struct has_default_rc<S, std::void_t<decltype(S::num_default_rc_per_pe)>> : std::true_type {};
using state = nvshmemi_ibgda_device_state_t;
static_assert(sizeof(state) == 8384);
static_assert(std::is_same_v<state, nvshmemi_ibgda_device_state_v1> == IS_V1);
static_assert(has_default_rc<state>::value == !IS_V1);
static_assert(NVSHMEM_VENDOR_VERSION == VERSION);
// What evidence.py reads in device code
static_assert(offsetof(nvshmemi_device_host_state_t, npes) == NPES);
static_assert(offsetof(state, num_rc_per_pe) == NUM_RC_PER_PE);
"""


def number(version: str) -> int:
    """NVSHMEM_VENDOR_VERSION of a version of the recipe."""
    major, minor, patch = (int(part) for part in version.removesuffix("-cu13").split("."))
    return major * 10000 + minor * 100 + patch


def test_every_version_has_a_stated_layout():
    assert set(NVSHMEM_LAYOUT) == set(recipe_wheels())
    for version, layout in NVSHMEM_LAYOUT.items():
        assert evidence.expected_layout(version) == layout


@pytest.mark.sources
@pytest.mark.compile
@pytest.mark.parametrize("version", NVSHMEM_LAYOUT)
def test_layout_by_nvcc(version, nvshmem_include, nvcc, cuda_home, verbs_include, tmp_path):
    source = tmp_path / "probe.cu"
    source.write_text(PROBE)
    is_v1 = NVSHMEM_LAYOUT[version] == "v1"

    def compiles(v1: bool) -> tuple[bool, str]:
        command = [str(nvcc), "-std=c++17", "-arch=sm_90", "-rdc=true", "-c", str(source)]
        command += ["-o", os.devnull, f"-DIS_V1={int(v1)}", f"-DVERSION={number(version)}"]
        command += [f"-DNPES={evidence.NPES}", f"-DNUM_RC_PER_PE={evidence.NUM_RC_PER_PE}"]
        for folder in (nvshmem_include(version), verbs_include, cuda_home / "include" / "cccl"):
            command += ["-isystem", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode == 0, done.stderr

    good, said = compiles(is_v1)
    assert good, said
    # The probe can fail: the other layout does not compile
    assert not compiles(not is_v1)[0]


@pytest.mark.sources
@pytest.mark.compile
@pytest.mark.parametrize("version", NVSHMEM_LAYOUT)
def test_layout_by_host_compiler(version, nvshmem_include, cuda_home, verbs_include):
    facts = header_facts(nvshmem_include(version), cuda_home, verbs_include)
    assert facts.layout == NVSHMEM_LAYOUT[version]
    assert facts.version == number(version)
