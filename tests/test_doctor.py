"""doctor: every rule on recorded facts, whole and damaged; the collector on what is installed.

evidence/doctor/site.json is `facts` of an h100-site on a machine without GPU, h200.json that of a
bare H200 node, both with paths made short. HCAs are laid out as the kernel documents its sysfs.
"""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from deepep_ci import paths
from dispatch import doctor
from dispatch.diagnosis import child, collect, node, probe, verdict
from dispatch.diagnosis.installation import runs
from spack_repo.deepep import evidence

TESTS = paths.TOP / "tests"
EVIDENCE = TESTS / "evidence" / "doctor"
SCHEMA = json.loads((TESTS / "dispatch" / "schemas" / "report.schema.json").read_text())
SITE = json.loads((EVIDENCE / "site.json").read_text())
H200 = json.loads((EVIDENCE / "h200.json").read_text())

TORCH_NVSHMEM = next(iter(SITE["loaded"]["nvshmem"]))
GIDS = {
    0: ("fe80:0000:0000:0000:0ac0:ebff:fe00:0001", "IB/RoCE v1"),
    3: ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2"),
}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def sysfs(root: Path, link_layer: str) -> None:
    """One mlx5 HCA with one active port, as Documentation/ABI/stable/sysfs-class-infiniband."""
    device = root / "sys/devices/pci0000:15/0000:17:00.0"
    port = "sys/class/infiniband/mlx5_0/ports/1"
    rows = GIDS if link_layer == "Ethernet" else {0: (GIDS[0][0], "IB/RoCE v1")}
    files = {
        f"{port}/state": "4: ACTIVE\n",
        f"{port}/link_layer": f"{link_layer}\n",
        f"{port}/rate": "400 Gb/sec (4X NDR)\n",
        "dev/infiniband/uverbs0": "",
        f"{port}/gids/7": "0000:0000:0000:0000:0000:0000:0000:0000\n",
    }
    for index, (address, kind) in rows.items():
        files[f"{port}/gids/{index}"] = f"{address}\n"
        files[f"{port}/gid_attrs/types/{index}"] = f"{kind}\n"
        files[f"{port}/gid_attrs/ndevs/{index}"] = "ens1np0\n"
    write(root, files)
    (device / "infiniband_verbs" / "uverbs0").mkdir(parents=True)
    (device / "numa_node").write_text("0\n")
    (root / "sys/bus/pci/drivers/mlx5_core").mkdir(parents=True)
    (device / "driver").symlink_to(root / "sys/bus/pci/drivers/mlx5_core")
    (root / "sys/class/infiniband/mlx5_0/device").symlink_to(device)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Function: fresh facts of the site on an H200 node with its driver options and an HCA."""
    root = tmp_path_factory.mktemp("node")
    sysfs(root, "Ethernet")
    hcas = node.hcas(str(root))

    def facts():
        found = copy.deepcopy({**SITE, **H200})
        found["loaded"]["libraries"]["libcuda.so"] = found["gpu"]["library"]
        found["machine"]["driver"]["parameters"].update(
            EnableStreamMemOPs="1", RegistryDwords='"PeerMappingOverride=1;"'
        )
        found["machine"].update(hcas=copy.deepcopy(hcas), may_lock=False)
        return found

    return facts


def results(rows):
    return {row.check: row for row in rows}


def failing(rows):
    return {row.check for row in rows if row.result == "fail" and "can work" not in row.check}


def can(rows):
    return {
        row.check.removeprefix("can work: ")
        for row in rows
        if row.check.startswith("can work") and row.result == "pass"
    }


def test_good_facts(good):
    rows = verdict.rows(good())
    assert failing(rows) == set()
    assert can(rows) == {"intranode", "internode", "low-latency", "hybrid-ep"}
    assert "skip" not in {row.result for row in rows}
    found = results(rows)
    assert found["installation: NVSHMEM releases"].found.endswith("3.6.5: the same")
    assert "mlx5_0:1 Ethernet ACTIVE 400 Gb/sec" in found["node: HCA"].found
    assert found["node: RoCE GID"].found == "RoCE v2 at index: mlx5_0:1 3"
    assert "/dev/infiniband/uverbs0" in found["node: /dev/infiniband"].found


ALL = {"intranode", "internode", "low-latency", "hybrid-ep"}
NETWORK = {"internode", "low-latency"}
OTHER = "/opt/other/libnvshmem_host.so.3"


def put(place, value):
    """A damage: sets facts[a][b]... = value, for place "a/b/..."."""

    def damage(facts):
        *parents, last = place.split("/")
        for name in parents:
            facts = facts[int(name)] if isinstance(facts, list) else facts[name]
        facts[last] = value

    return damage


def hung(name, **more):
    return put(
        name, {"state": "hung", "seconds": 30, "at": "/x/deep_ep/__init__.py:3, in f", **more}
    )


def second_copy(facts):
    facts["loaded"]["nvshmem"][OTHER] = "3.6.5"
    libraries = facts["nvshmem"]["libraries"]
    libraries[OTHER] = libraries[TORCH_NVSHMEM]


def loaded_is(release, soversion):
    """PyTorch's NVSHMEM is another release, whole, and DeepEP was imported onto it."""

    def damage(facts):
        facts["loaded"]["nvshmem"][TORCH_NVSHMEM] = release
        found = facts["nvshmem"]["libraries"][TORCH_NVSHMEM]
        found["transports"] = [t.rpartition(".")[0] + f".{soversion}" for t in found["transports"]]

    return damage


def transports(*names):
    return put_library("transports", list(names))


def put_library(key, value):
    def damage(facts):
        facts["nvshmem"]["libraries"][TORCH_NVSHMEM][key] = value

    return damage


def mlx5(key, value):
    def damage(facts):
        path = facts["loaded"]["later"]["libmlx5.so"]["paths"][0]
        facts["verbs"]["libraries"][path][key] = value

    return damage


def import_error(text):
    def damage(facts):
        facts["loaded"]["errors"]["deep_ep"] = text
        del facts["loaded"]["modules"]["deep_ep"]

    return damage


def preloaded(facts):
    facts["search"]["libraries"] = [["LD_PRELOAD", OTHER, OTHER]]


def other_mlx5(facts):
    """An extension with RUNPATH, and MOFED's libraries in LD_LIBRARY_PATH, mapped."""
    path = "/opt/mofed/libmlx5.so.1"
    facts["search"]["libraries"] = [["LD_LIBRARY_PATH", path, path]]
    facts["loaded"]["libraries"]["libmlx5.so"] = [path]


PORT = "machine/hcas/0/ports/0"
INSTALLATION = "installation: "

#: (name, damage, checks that must fail, capabilities lost, part of what is said)
DAMAGES = [
    ("no-torch", put("packages/found/torch", None), {"Python's packages"}, ALL, "has no torch"),
    ("no-deep-ep", put("packages/found/deep_ep", None), {"Python's packages"}, ALL, "no deep_ep"),
    ("python-hung", hung("packages", found={}), {"Python's packages"}, ALL, "30 s"),
    ("import-hung", hung("loaded", deadline=180), {"import deep_ep"}, ALL, "end in 180 s"),
    (
        "import-crashed",
        put("loaded", {"state": "crashed", "signal": "SIGSEGV", "at": ""}),
        {"import deep_ep"},
        ALL,
        "SIGSEGV",
    ),
    (
        "import-exits",
        put("loaded", {"state": "failed", "error": "bad", "code": 3}),
        {"import deep_ep"},
        ALL,
        "ends the process: bad",
    ),
    (
        "import-fails",
        import_error("ImportError: undefined symbol: nvshmem_selected_device_transport"),
        {"import deep_ep"},
        ALL,
        "undefined symbol",
    ),
    (
        "no-elf",
        put("extension", {"state": "failed", "error": "Not an ELF file", "path": "/x.so"}),
        {"extension"},
        ALL,
        "Not an ELF",
    ),
    (
        "no-nvshmem",
        lambda f: f["extension"].update(
            needed=["libtorch.so"], undefined=[], device_library={}, headers=None
        ),
        {"built with NVSHMEM"},
        NETWORK,
        "uses no NVSHMEM",
    ),
    (
        "mixed-headers",
        put("extension/headers", "3.4.5"),
        {"built with NVSHMEM"},
        NETWORK,
        "device library 3.6.5 (sm_90), headers 3.4.5",
    ),
    (
        "mixed-arches",
        put("extension/device_library", {"sm_90": "3.6.5", "sm_100": "3.5.21"}),
        {"built with NVSHMEM"},
        NETWORK,
        "3.5.21 (sm_100)",
    ),
    ("two-copies", second_copy, {"NVSHMEM loaded"}, NETWORK, "2 copies"),
    ("none-mapped", put("loaded/nvshmem", {}), {"NVSHMEM loaded"}, NETWORK, "none is mapped"),
    (
        "other-layout",
        loaded_is("3.4.5", 3),
        {"NVSHMEM releases", "queue-pair lookup"},
        NETWORK,
        "layout v2 and v1",
    ),
    ("older-host", loaded_is("3.5.21", 4), {"NVSHMEM releases"}, NETWORK, "older"),
    (
        "control",
        put("extension/lookups", {"sm_90": ["v1", True]}),
        {"queue-pair lookup"},
        NETWORK,
        "v1 for sm_90; NVSHMEM 3.6.5 (loaded) lays them out by v2",
    ),
    (
        "no-bound",
        put("extension/lookups", {"sm_90": ["v2", False]}),
        {"queue-pair lookup"},
        NETWORK,
        "leave the table",
    ),
    (
        "one-of-two-arches",
        put("extension/lookups", {"sm_90": ["v2", True], "sm_100": ["v1", True]}),
        {"queue-pair lookup"},
        NETWORK,
        "v1 for sm_100",
    ),
    ("no-plug-ins", transports(), {"transport plug-ins"}, NETWORK, "ibgda.so.5"),
    (
        "old-plug-ins",
        transports("nvshmem_transport_ibgda.so.3"),
        {"transport plug-ins"},
        NETWORK,
        "ibgda.so.3 (NVSHMEM since 3.0, before 3.5)",
    ),
    (
        "mixed-plug-ins",
        transports("nvshmem_transport_ibgda.so.5", "nvshmem_transport_ibrc.so.4"),
        {"transport plug-ins"},
        NETWORK,
        "several releases",
    ),
    (
        "no-mlx5",
        put("loaded/later/libmlx5.so", {"error": "cannot open"}),
        {"rdma-core"},
        NETWORK,
        "cannot be loaded",
    ),
    (
        "two-mlx5",
        put("loaded/later/libmlx5.so", {"paths": ["/a/libmlx5.so.1", "/b/libmlx5.so.1"]}),
        {"rdma-core"},
        NETWORK,
        "2 copies",
    ),
    (
        "split-rdma-core",
        mlx5("real", "/usr/lib/libmlx5.so.1.24.44.0"),
        {"rdma-core"},
        NETWORK,
        "two folders",
    ),
    (
        "old-mlx5",
        mlx5("versions", ["MLX5_1.2", "MLX5_1.3", "MLX5_1.7"]),
        {"rdma-core"},
        NETWORK,
        "MLX5_1.19",
    ),
    ("preload", preloaded, {"copies that LD_ variables bring"}, NETWORK, OTHER),
    ("other-mlx5", other_mlx5, {"copies that LD_ variables bring"}, NETWORK, "mofed"),
    (
        "other-arch",
        put("extension/device_code", {"sm_100": 1}),
        {"device code"},
        ALL,
        "sm_100; this node has sm_90",
    ),
    ("no-code", put("extension/device_code", {}), {"device code"}, ALL, "none in"),
    (
        "module-nvshmem",
        put("environment/LOADEDMODULES", "gcc/12:nvshmem/3.4.5"),
        {"modules"},
        NETWORK,
        "nvshmem/3.4.5 (DeepEP was built with 3.6.5)",
    ),
    (
        "module-nvhpc",
        put("environment/LOADEDMODULES", "nvhpc/26.1"),
        {"modules"},
        NETWORK,
        "nvhpc",
    ),
    (
        "cpu-handler",
        put("environment/NVSHMEM_IBGDA_NIC_HANDLER", "cpu"),
        {"NIC handler"},
        NETWORK,
        "=cpu",
    ),
    ("no-nvcc", put("hybrid/nvcc_there", False), {"HybridEP"}, {"hybrid-ep"}, "no nvcc"),
    (
        "cache",
        put("hybrid/cache_writable", False),
        {"HybridEP"},
        {"hybrid-ep"},
        "cannot be written",
    ),
    (
        "hybrid-not-imported",
        put("loaded/imported", ["deep_ep_cpp"]),
        {"HybridEP"},
        {"hybrid-ep"},
        "does not import hybrid_ep_cpp",
    ),
    (
        "rdma-core-home",
        lambda f: f["hybrid"].update(multinode=True, rdma_core="/gone", rdma_core_there=False),
        {"HybridEP"},
        {"hybrid-ep"},
        "baked in as /gone",
    ),
    ("sysfs-hung", hung("machine"), {"node: facts"}, ALL, "machine hung"),
    (
        "no-libcuda",
        put("gpu", {"state": "ok", "library": None, "error": "not found", "gpus": []}),
        {"node: driver"},
        ALL,
        "no libcuda.so.1",
    ),
    ("libcuda-hung", hung("gpu"), {"node: driver"}, ALL, "does not answer"),
    (
        "libcuda-crashed",
        put("gpu", {"state": "crashed", "signal": "SIGBUS", "at": ""}),
        {"node: driver"},
        ALL,
        "SIGBUS",
    ),
    (
        "cuinit",
        put("gpu/error", "cuInit: no CUDA-capable device is detected (100)"),
        {"node: driver"},
        ALL,
        "cuInit",
    ),
    (
        "stubs",
        put("loaded/libraries/libcuda.so", SITE["loaded"]["libraries"]["libcuda.so"]),
        {"node: driver"},
        ALL,
        "stubs",
    ),
    ("smi-hung", hung("smi"), {"node: nvidia-smi"}, ALL, "30 s"),
    (
        "smi-crashed",
        put("smi", {"state": "crashed", "signal": "SIGSEGV", "at": ""}),
        {"node: nvidia-smi"},
        ALL,
        "SIGSEGV",
    ),
    (
        "smi-failed",
        put("smi", {"state": "failed", "code": 18, "error": "version mismatch"}),
        {"node: nvidia-smi"},
        ALL,
        "mismatch",
    ),
    ("no-gpu", put("gpu/gpus", []), {"node: GPU"}, ALL, "none"),
    ("old-driver", put("gpu/cuda", "12.8"), {"node: CUDA"}, ALL, "up to 12.8"),
    (
        "two-runtimes",
        put("loaded/libraries/libcudart.so", ["/a/libcudart.so.13", "/b/libcudart.so.12"]),
        {"node: CUDA"},
        ALL,
        "2 copies",
    ),
    (
        "no-memops",
        put("machine/driver/parameters/EnableStreamMemOPs", "0"),
        {"node: driver parameters"},
        NETWORK,
        "EnableStreamMemOPs is 0",
    ),
    (
        "no-peer-mapping",
        put("machine/driver/parameters/RegistryDwords", '""'),
        {"node: driver parameters"},
        NETWORK,
        "PeerMappingOverride=1 is not",
    ),
    (
        "no-dma-buf",
        lambda f: f["gpu"]["gpus"][0].update(dma_buf=0),
        {"node: GPU memory for the HCA"},
        NETWORK,
        "neither",
    ),
    (
        "dma-buf-off",
        put("environment/NVSHMEM_IB_DISABLE_DMABUF", "1"),
        {"node: GPU memory for the HCA"},
        NETWORK,
        "turns DMA-BUF off",
    ),
    ("no-hca", put("machine/hcas", []), {"node: HCA"}, NETWORK, "none on this node"),
    ("port-down", put(f"{PORT}/state", "DOWN"), {"node: HCA"}, NETWORK, "DOWN"),
    ("other-hca", put("machine/hcas/0/driver", "bnxt_en"), {"node: HCA"}, NETWORK, "bnxt_en"),
    (
        "no-roce-v2",
        put(f"{PORT}/gids", [[0, GIDS[0][0], "IB/RoCE v1", "ens1np0"]]),
        {"node: RoCE GID"},
        NETWORK,
        "no GID of RoCE v2",
    ),
    (
        "gid-index",
        put("environment/NVSHMEM_IB_GID_INDEX", "0"),
        {"node: RoCE GID"},
        NETWORK,
        "at index 0",
    ),
    (
        "closed-device",
        put("machine/hcas/0/device/0/open", False),
        {"node: /dev/infiniband"},
        NETWORK,
        "cannot be opened",
    ),
    (
        "no-device",
        put("machine/hcas/0/device", []),
        {"node: /dev/infiniband"},
        NETWORK,
        "no uverbs device",
    ),
    ("memlock", put("machine/memlock", 65536), {"node: locked memory"}, NETWORK, "64 KiB"),
]


@pytest.mark.parametrize(
    "damage, checks, lost, said", [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES]
)
def test_each_damage_is_that_finding(good, damage, checks, lost, said):
    facts = good()
    damage(facts)
    rows = verdict.rows(facts)
    checks = {c if c.startswith("node: ") else INSTALLATION + c for c in checks}
    assert failing(rows) == checks
    assert can(rows) == ALL - lost
    found = results(rows)
    assert any(said in found[check].found for check in checks)
    # A finding is worth nothing without what to do
    assert all(found[check].why and found[check].action for check in checks)
    # ... and comes first
    assert {row.check for row in rows[: len(checks)]} == checks


def test_every_rule_that_can_fail_has_a_damage():
    tried = {c if c.startswith("node: ") else INSTALLATION + c for d in DAMAGES for c in d[2]}
    # Those without an action are told, and never fail
    assert {rule.check for rule in verdict.RULES if rule.action} == tried


def test_old_gpu(good):
    """An A100: no code for it, and none of DeepEP's kernels."""
    facts = good()
    facts["gpu"]["gpus"][0].update(name="NVIDIA A100", major=8, minor=0)
    assert failing(verdict.rows(facts)) == {"node: GPU", INSTALLATION + "device code"}


TOLD = [
    (
        {"NVSHMEM_IBGDA_NUM_RC_PER_PE": "64"},
        "NVSHMEM variables",
        "NVSHMEM_IBGDA_NUM_RC_PER_PE=64 does nothing: DeepEP sets it itself (buffer.py:109)",
    ),
    (
        {"NVSHMEM_IB_GIDINDEX": "3"},
        "NVSHMEM variables",
        "does nothing: NVSHMEM 3.6.5 knows no such name; NVSHMEM_IB_GID_INDEX?",
    ),
    ({"NVSHMEM_QP_DEPTH": "2048"}, "NVSHMEM variables", "NVSHMEM_QP_DEPTH=2048"),
    ({"NVSHMEM_VERSION": "3.4.5"}, "NVSHMEM_VERSION", "not believed; loaded is 3.6.5"),
    ({"NVSHMEM_IBGDA_NIC_HANDLER": "gpu"}, "NIC handler", "NVSHMEM_IBGDA_NIC_HANDLER=gpu"),
]


@pytest.mark.parametrize("variables, check, said", TOLD, ids=[next(iter(t[0])) for t in TOLD])
def test_variables_are_told_and_fail_nothing(good, variables, check, said):
    facts = good()
    facts["environment"].update(variables)
    rows = verdict.rows(facts)
    found = results(rows)[INSTALLATION + check]
    assert failing(rows) == set() and found.result == "info"
    assert found.found.endswith(said) if "does nothing" not in said else said in found.found
    assert ("does nothing" in found.found) == ("does nothing" in said)


def test_good_variants(good):
    """What differs from the good facts, and is good too."""
    for damage in (
        loaded_is("3.7.2", 6),  # newer host library, same layout
        put("machine/modules", ["nvidia", "nvidia_peermem"]),
        put("environment/LOADEDMODULES", "nvshmem/3.6.5:py-deep-ep/1.2.1-4214430"),
        put("environment/NVSHMEM_IB_GID_INDEX", "3"),
        put(f"{PORT}/link_layer", "InfiniBand"),
        lambda f: f["machine"].update(memlock=65536, may_lock=True),
        lambda f: f["extension"].update(lookups={"sm_90": ["v2", True]}, headers=None),
        lambda f: (
            put("machine/modules", ["nvidia_peermem"])(f),
            put("environment/NVSHMEM_IB_DISABLE_DMABUF", "1")(f),
        ),
    ):
        facts = good()
        damage(facts)
        rows = verdict.rows(facts)
        assert failing(rows) == set() and can(rows) == ALL


def test_old_nvshmem_with_the_old_lookup_is_right(good):
    facts = good()
    loaded_is("3.4.5", 3)(facts)
    facts["extension"].update(
        lookups={"sm_90": ["v1", True]}, device_library={"sm_90": "3.4.5"}, headers="3.4.5"
    )
    assert failing(verdict.rows(facts)) == set()


def test_one_use_only(good):
    """--for: what that use does not need is told, and fails nothing."""
    facts = good()
    facts["machine"]["hcas"] = []
    rows = verdict.rows(facts, "intranode")
    assert failing(rows) == set() and can(rows) == {"intranode"}
    assert results(rows)["node: HCA"].result == "info"
    assert "of no matter for intranode" in results(rows)["node: HCA"].found
    assert failing(verdict.rows(facts, "low-latency")) == {"node: HCA"}


def test_without_hybridep(good):
    """Left out on purpose is no finding, asked for it is."""
    facts = good()
    facts["hybrid"] = {"state": "absent"}
    assert can(verdict.rows(facts)) == ALL - {"hybrid-ep"}
    assert failing(verdict.rows(facts)) == set()
    last = verdict.rows(facts, "hybrid-ep")[-1]
    assert (last.check, last.result) == ("can work: hybrid-ep", "fail")


def test_without_cuobjdump_nothing_is_passed(good):
    facts = good()
    for name in ("lookups", "device_code", "device_library"):
        del facts["extension"][name]
    facts["extension"]["cuobjdump"] = ""
    rows = verdict.rows(facts)
    found = results(rows)
    for check in ("queue-pair lookup", "device code"):
        assert found[INSTALLATION + check].result == "skip"
        assert "cuda-cuobjdump" in found[INSTALLATION + check].action
    assert can(rows) == set() and found["can work: internode"].result == "skip"
    report = doctor.DoctorReport("doctor", rows)
    assert report.exit_code == 2


def test_without_binutils_nothing_is_passed(good):
    """readelf that is not installed is no fault of the files."""
    facts = good()
    missing = {"state": "failed", "error": "readelf does not run: No such file or directory"}
    facts.update(extension={**missing, "path": "/x.so"}, nvshmem=missing, verbs=missing)
    rows = verdict.rows(facts)
    found = results(rows)
    assert failing(rows) == set() and can(rows) == set()
    for check in ("installation: extension", "node: facts"):
        assert found[check].result == "skip" and "binutils" in found[check].action


def test_this_node_or_the_installation(good):
    facts = good()
    facts["machine"]["hcas"] = []
    assert doctor._summary(verdict.rows(facts)).startswith("The installation has no finding")
    second_copy(facts)
    assert doctor._summary(verdict.rows(facts)).startswith("Findings on both: 1 on the inst")
    assert doctor._summary(verdict.rows(good())).startswith("Neither")


@pytest.mark.parametrize(
    "code, capability, fits",
    [
        ("sm_90", (9, 0), True),
        ("sm_90a", (9, 0), True),
        ("sm_90a", (9, 1), False),
        ("sm_80", (8, 9), True),
        ("sm_90", (10, 0), False),
        ("sm_103", (10, 0), False),
        ("ptx_90", (12, 0), True),
        ("ptx_100", (9, 0), False),
        ("ptx_90a", (10, 0), False),
    ],
)
def test_code_for_a_gpu(code, capability, fits):
    assert runs(code, capability) is fits


# The collector


def test_node_without_anything(tmp_path):
    found = node.facts(str(tmp_path))
    assert found["driver"] is None and found["hcas"] == [] and found["modules"] is None


def test_driver_of_a_recorded_node(tmp_path):
    """The text of an open and of a proprietary driver, as they write it."""
    write(
        tmp_path,
        {
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64"
            "  580.159.04  Release Build\nGCC version:  gcc version 15.3.0 (GCC)\n",
            "proc/driver/nvidia/params": 'EnableStreamMemOPs: 1\nRegistryDwords: "a=1;"\n',
        },
    )
    assert node.driver(str(tmp_path)) == {
        "version": "580.159.04",
        "open": True,
        "parameters": {"EnableStreamMemOPs": "1", "RegistryDwords": '"a=1;"'},
    }
    write(
        tmp_path,
        {
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module"
            "  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
        },
    )
    found = node.driver(str(tmp_path))
    assert (found["version"], found["open"]) == ("535.104.05", False)


def test_hca(tmp_path):
    sysfs(tmp_path, "InfiniBand")
    (hca,) = node.hcas(str(tmp_path))
    assert (hca["name"], hca["driver"], hca["pci"], hca["numa"]) == (
        "mlx5_0",
        "mlx5_core",
        "0000:17:00.0",
        0,
    )
    assert hca["device"] == [{"path": "/dev/infiniband/uverbs0", "there": True, "open": True}]
    (port,) = hca["ports"]
    assert (port["state"], port["link_layer"]) == ("ACTIVE", "InfiniBand")
    # Zeroes are a place without GID
    assert port["gids"] == [[0, GIDS[0][0], "IB/RoCE v1", "ens1np0"]]


@pytest.mark.sources
def test_what_deepep_overwrites(deepep_tree):
    """Read from its Python: QP_DEPTH is honoured, the others are set whatever they are."""
    for version in ("1.2.1-4214430", "1.2.1-567632d"):
        found = probe.overwrites(str(deepep_tree(version) / "deep_ep"))
        assert set(found) == {
            "NVSHMEM_" + name
            for name in (
                "DISABLE_P2P",
                "IB_ENABLE_IBGDA",
                "IBGDA_NUM_RC_PER_PE",
                "MAX_TEAMS",
                "DISABLE_NVLS",
                "CUMEM_GRANULARITY",
                "DISABLE_MNNVL",
            )
        }


def test_hang_is_ended_with_all_it_started(tmp_path):
    """The deadline holds though a grandchild keeps the pipe open."""
    pid = tmp_path / "pid"
    begin = time.monotonic()
    found = child.run(["bash", "-c", f"sleep 300 & echo $! > {pid}; wait"], deadline=1)
    assert found["state"] == "hung" and time.monotonic() - begin < 1 + child.GOING
    assert gone(int(pid.read_text()))


def test_crash_names_the_signal():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGBUS)"
    found = child.run([sys.executable, "-c", code], deadline=20)
    assert (found["state"], found["signal"]) == ("crashed", "SIGBUS")
    assert child.run([sys.executable, "-c", "raise SystemExit('so')"], 20) == {
        "state": "failed",
        "error": "so",
        "code": 1,
    }
    assert child.run(["/nowhere/program"], 20)["code"] == 127


def test_hung_nvidia_smi(tmp_path, monkeypatch):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nsleep 300\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(collect, "SECTION", 1)
    assert collect._smi()["state"] == "hung"
    fake.write_text("#!/bin/sh\necho '0, NVIDIA H200, 9.0, 580.159.04, 00000000:00:06.0'\n")
    monkeypatch.setattr(collect, "SECTION", 20)
    assert collect._smi()["gpus"] == H200["smi"]["gpus"]
    monkeypatch.setenv("PATH", "/nowhere")
    assert collect._smi() == {"state": "absent"}


@pytest.fixture
def run_doctor(tmp_path):
    """Function: python tests/dispatch doctor ... as a user would. Returns (exit code, text, JSON
    or None), the JSON held against the schema."""

    def call(*arguments, python=sys.executable, environment=None, timeout=400):
        report = tmp_path / "report.json"
        report.unlink(missing_ok=True)
        base = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG")}
        done = subprocess.run(
            [str(python), str(TESTS / "dispatch"), "doctor", "--json", str(report), *arguments],
            env=base if environment is None else environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        text = done.stdout + done.stderr
        assert "Traceback" not in text, text
        document = json.loads(report.read_text()) if report.exists() else None
        if document:
            jsonschema.validate(document, SCHEMA)
        return done.returncode, text, document

    return call


def checks_of(document):
    return {row["check"]: row for row in document["rows"]}


@pytest.fixture
def packages(tmp_path):
    """Function (source of deep_ep) -> environment whose Python finds such a torch and deep_ep."""

    def make(source):
        write(
            tmp_path / "lib",
            {
                "torch/__init__.py": "__version__ = '2.0'\nclass version:\n    cuda = '13.0'\n",
                "deep_ep/__init__.py": source,
            },
        )
        return {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path / "lib")}

    return make


def test_hanging_import(run_doctor, packages):
    environment = packages("import time\n\n\ndef wait():\n    time.sleep(600)\n\n\nwait()\n")
    begin = time.monotonic()
    code, text, document = run_doctor("--deadline", "3", environment=environment)
    assert code == 1 and time.monotonic() - begin < 60
    row = checks_of(document)["installation: import deep_ep"]
    assert row["found"] == "import torch, deep_ep does not end in 3.0 s"
    assert "deep_ep/__init__.py:5, in wait" in row["evidence"]
    assert "--deadline" in row["action"]


@pytest.mark.parametrize(
    "source, name, place",
    [
        ("import os\nos.abort()\n", "SIGABRT", "deep_ep/__init__.py:2"),
        ("import ctypes\nctypes.string_at(0)\n", "SIGSEGV", "in string_at"),
    ],
)
def test_crashing_import(run_doctor, packages, source, name, place):
    code, _, document = run_doctor(environment=packages(source))
    row = checks_of(document)["installation: import deep_ep"]
    assert code == 1 and row["found"] == f"import torch, deep_ep crashes: {name}"
    assert place in row["evidence"]


@pytest.fixture
def hanging(packages):
    """A doctor whose import hangs: its process, and the number of the process that imports."""
    environment = packages(
        "import os, time\nopen(os.environ['PID'], 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    pid = Path(environment["PYTHONPATH"]) / "pid"
    running = subprocess.Popen(
        [sys.executable, str(TESTS / "dispatch"), "doctor"],
        env={**environment, "PID": str(pid)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.1)
    yield running, int(pid.read_text())
    running.kill()


def gone(pid: int) -> bool:
    """Whether a process ends within 5 s; a zombie that nobody has reaped has."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(50):
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_interrupted(hanging):
    """Ctrl-C does not wait for what hangs, and leaves nothing behind."""
    running, imports = hanging
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=20)
    assert running.returncode == 130 and "interrupted" in err and "Traceback" not in err
    assert gone(imports)


def test_killed(hanging):
    """A doctor that is killed takes the hanging import with it."""
    running, imports = hanging
    running.kill()
    running.wait(timeout=20)
    assert gone(imports)


def test_failing_and_leaving_imports(run_doctor, packages):
    _, _, document = run_doctor(environment=packages("import no_such_part\n"))
    row = checks_of(document)["installation: import deep_ep"]
    assert "No module named 'no_such_part'" in row["found"] and "again" in row["action"]
    _, _, document = run_doctor(environment=packages("import os\nos._exit(3)\n"))
    assert "ends the process" in checks_of(document)["installation: import deep_ep"]["found"]


def test_no_torch_and_empty_environment(run_doctor):
    """env -i, in the Python of the tests, which has no PyTorch."""
    code, text, document = run_doctor(environment={})
    assert code == 1
    row = checks_of(document)["installation: Python's packages"]
    assert "has no torch and no deep_ep" in row["found"] and "--python" in row["action"]
    assert document["rows"][0]["result"] == "fail"


def test_usage(run_doctor, tmp_path):
    text_file = tmp_path / "text.so"
    text_file.write_text("no library")
    for arguments, said in (
        (["--python", "/nowhere/python"], "no such program"),
        (["--python", "/bin/false"], "no Python that works"),
        (["--extension", str(tmp_path / "no.so")], "no such file"),
        (["--extension", str(text_file)], "readelf: Error"),
        (["--for", "fun"], "invalid choice"),
        (["--deadline", "0"], "0 is no number of seconds from 1 to 86400"),
        (["--deadline", "soon"], "soon is no number of seconds"),
    ):
        code, text, document = run_doctor(*arguments)
        assert code == 2 and said in text and document is None, text


@pytest.mark.sources
@pytest.mark.parametrize("version", ["3.4.5-cu13", "3.5.19", "3.5.21", "3.6.5", "3.7.2", "3.8.0"])
def test_plug_ins_by_release(nvshmem_include, version):
    """The table in evidence.py against NVSHMEM's own headers."""
    text = (nvshmem_include(version) / "non_abi" / "nvshmem_version.h").read_text()
    (line,) = [x for x in text.splitlines() if "NVSHMEM_TRANSPORT_PLUGIN_MAJOR_VERSION" in x]
    assert evidence.expected_transport(version.removesuffix("-cu13")) == int(line.split()[-1])


def test_plug_ins_of_an_unknown_release(good):
    assert evidence.expected_transport("3.9.0") is None
    facts = good()
    loaded_is("3.9.0", 8)(facts)
    assert results(verdict.rows(facts))[INSTALLATION + "transport plug-ins"].result == "info"


# On what is installed: h100-site, and PyTorch with two releases of NVSHMEM


def packages_of(prefix: Path) -> Path:
    return next(prefix.glob("lib/python3.*/site-packages"))


@pytest.fixture
def loaded_site(site, pytorch):
    """Function (NVSHMEM release of PyTorch, variables) -> (its Python, environment)."""

    def make(release="3.6.5", **more):
        platlib = packages_of(site.prefix("py-deep-ep"))
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(platlib),
            "CUDA_HOME": str(site.prefix("cuda")),
            **more,
        }
        return pytorch(release) / "bin" / "python3", environment

    return make


@pytest.mark.build
def test_installed_site(run_doctor, loaded_site, site):
    """Nothing is wrong with the installation; where it runs is another question."""
    python, environment = loaded_site()
    code, text, document = run_doctor(python=python, environment=environment)
    rows = checks_of(document)
    installation = {c: r for c, r in rows.items() if c.startswith(INSTALLATION)}
    assert {r["result"] for r in installation.values()} <= {"pass", "info"}, text
    assert rows[INSTALLATION + "built with NVSHMEM"]["data"] == {
        "device_library": {"sm_90": "3.6.5"},
        "headers": "3.6.5",
    }
    assert rows[INSTALLATION + "queue-pair lookup"]["data"]["lookups"] == {"sm_90": ["v2", True]}
    assert rows[INSTALLATION + "queue-pair lookup"]["result"] == "pass"
    assert str(site.prefix("rdma-core")) in rows[INSTALLATION + "rdma-core"]["found"]
    assert "60.0 in" in rows[INSTALLATION + "rdma-core"]["found"]
    facts = document["facts"]
    assert list(facts["loaded"]["nvshmem"].values()) == ["3.6.5"]
    assert "IBGDA_NIC_HANDLER" in next(iter(facts["nvshmem"]["libraries"].values()))["variables"]
    if not Path("/proc/driver/nvidia").exists():
        assert code == 1 and document["rows"][0]["check"] == "node: driver"
        assert "stubs stand in" in rows["node: driver"]["found"]
        assert "what fails is this node" in text


@pytest.mark.build
def test_installed_site_by_an_old_python(run_doctor, loaded_site):
    """doctor itself in Python 3.9, without PyTorch; --python names the one that has it."""
    old = next(Path.home().glob(".pyenv/versions/3.9.*/bin/python"), None) or shutil.which(
        "python3.9"
    )
    if old is None:
        pytest.skip("no Python 3.9 here")
    python, environment = loaded_site()
    _, _, document = run_doctor("--python", str(python), python=old, environment=environment)
    assert checks_of(document)[INSTALLATION + "import deep_ep"]["result"] == "pass"
    assert checks_of(document)[INSTALLATION + "queue-pair lookup"]["result"] == "pass"


@pytest.mark.build
def test_pytorch_brings_another_nvshmem(run_doctor, loaded_site):
    python, environment = loaded_site("3.4.5")
    code, text, document = run_doctor(python=python, environment=environment)
    rows = checks_of(document)
    assert code == 1
    assert (
        "deep_ep was built with NVSHMEM 3.6.5, but 3.4.5 is loaded"
        in rows[INSTALLATION + "import deep_ep"]["found"]
    )
    releases = rows[INSTALLATION + "NVSHMEM releases"]
    assert releases["found"] == "built with 3.6.5, loaded 3.4.5: queue-pair layout v2 and v1"
    assert "nvidia-nvshmem-cu13==3.6.5" in releases["action"]
    assert ".so.3" in rows[INSTALLATION + "transport plug-ins"]["found"]


@pytest.mark.build
def test_preloaded_copy(run_doctor, loaded_site, site):
    """Ours by LD_PRELOAD before PyTorch's 3.4.5: the import works, with two in the process."""
    ours = site.prefix("nvshmem") / "lib" / "libnvshmem_host.so.3"
    python, environment = loaded_site("3.4.5", LD_PRELOAD=str(ours))
    code, _, document = run_doctor(python=python, environment=environment)
    rows = checks_of(document)
    assert code == 1
    copies = rows[INSTALLATION + "NVSHMEM loaded"]
    assert copies["result"] == "fail" and str(ours) in copies["found"]
    assert rows[INSTALLATION + "copies that LD_ variables bring"]["result"] == "fail"


@pytest.mark.build
def test_cache_that_cannot_be_written(run_doctor, loaded_site, tmp_path):
    """HybridEP alone is affected: by --for intranode it is told, not failed."""
    (tmp_path / "file").write_text("")
    python, environment = loaded_site(HYBRID_EP_CACHE_DIR=str(tmp_path / "file" / "cache"))
    _, _, document = run_doctor(python=python, environment=environment)
    assert "cannot be written" in checks_of(document)[INSTALLATION + "HybridEP"]["found"]
    assert checks_of(document)[INSTALLATION + "HybridEP"]["result"] == "fail"
    _, _, document = run_doctor("--for", "intranode", python=python, environment=environment)
    assert checks_of(document)[INSTALLATION + "HybridEP"]["result"] == "info"


@pytest.mark.build
def test_read_only_home(run_doctor, loaded_site):
    """A home that is mounted read-only: told, and nothing is written into it."""
    home = Path.home()
    python, environment = loaded_site()
    command = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        f"mount --bind '{home}' '{home}' && mount -o remount,ro,bind '{home}' && exec \"$@\"",
        "sh",
    ]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("mounts cannot be made here")
    done = subprocess.run(
        [*command, str(python), str(TESTS / "dispatch"), "doctor", "--for", "hybrid-ep"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert f"{home}/.deepep/hybrid_ep/jit cannot be written" in " ".join(done.stdout.split())
    assert "Traceback" not in done.stderr


@pytest.mark.build
def test_extension_alone(run_doctor, loaded_site, site, tmp_path, cuobjdump):
    (path,) = packages_of(site.prefix("py-deep-ep")).glob("deep_ep_cpp*.so")
    python, environment = loaded_site()
    code, text, document = run_doctor(
        "--extension", str(path), "--python", str(python), environment=environment
    )
    rows = checks_of(document)
    assert code == 0 and rows[INSTALLATION + "queue-pair lookup"]["result"] == "pass", text
    assert str(site.prefix("nvshmem")) in rows[INSTALLATION + "links"]["found"]
    assert "3.6.5: the same" in rows[INSTALLATION + "NVSHMEM releases"]["found"]
    if Path(cuobjdump).parent != Path("/usr/local/cuda/bin"):
        # With no cuobjdump: nothing is passed, and what to install is said
        code, text, document = run_doctor("--extension", str(path))
        rows = checks_of(document)
        assert code == 2 and rows[INSTALLATION + "queue-pair lookup"]["result"] == "skip"
        assert "install the toolkit's cuda-cuobjdump package" in " ".join(text.split())


@pytest.mark.build
@pytest.mark.slow
@pytest.mark.parametrize(
    "headers, library", [("3.4.5", "3.4.5"), ("3.6.5", "3.6.5"), ("3.4.5", "3.6.5")]
)
def test_releases_compiled_in(pytorch, nvcc, cuobjdump, tmp_path, headers, library):
    """Read from a real build, also from one of two releases' parts (Automodel#2614)."""
    source, target = tmp_path / "small.cu", tmp_path / "libsmall.so"
    source.write_text(
        "#include <nvshmem.h>\n#include <nvshmemx.h>\n"
        "__global__ void kernel(int* out) { *out = nvshmem_my_pe(); }\n"
        "int start(nvshmemx_init_attr_t* attributes, int* out) {\n"
        "    int failed = nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, attributes);\n"
        "    kernel<<<1, 1>>>(out);\n    return failed;\n}\n"
    )
    parts = {r: packages_of(pytorch(r)) / "nvidia" / "nvshmem" for r in (headers, library)}
    subprocess.run(
        [
            str(nvcc),
            "-std=c++17",
            "-O2",
            "-rdc=true",
            "-arch=sm_90",
            "-shared",
            "-Xcompiler",
            "-fPIC",
            "-I",
            str(parts[headers] / "include"),
            str(source),
            "-o",
            str(target),
            "-L",
            str(parts[library] / "lib"),
            "-lnvshmem_device",
            "-l:libnvshmem_host.so.3",
        ],
        check=True,
        capture_output=True,
    )
    assert evidence.device_library_releases(str(target), cuobjdump) == {"sm_90": library}
    assert evidence.header_release(str(target)) == headers


def test_path_that_is_baked_in(tmp_path):
    """As HybridEP has RDMA_CORE_HOME: cut into pieces by the compiler, not only in the RPATH."""
    baked, only_rpath = "/opt/software/rdma-core-60.0-czgbavhc7f2i", "/opt/software/rdma-core-59"
    source, target = tmp_path / "baked.cpp", tmp_path / "libbaked.so"
    source.write_text(
        f"#include <string>\nvoid use(std::string&);\n"
        f'void f() {{ std::string home = "{baked}"; use(home); }}\n'
    )
    try:
        subprocess.run(
            [
                "g++",
                "-O3",
                "-shared",
                "-fPIC",
                str(source),
                "-o",
                str(target),
                f"-Wl,-rpath,{baked}/lib:{only_rpath}/lib",
            ],
            check=True,
        )
    except FileNotFoundError:
        pytest.skip("no g++ on PATH")
    assert evidence.has_path(str(target), baked)
    assert not evidence.has_path(str(target), only_rpath)
    assert not evidence.has_path(str(target), "/opt/software/rdma-core-60.0-czgbavhc7f2i-other")
    # Too short to be told from any other text
    assert not evidence.has_path(str(target), "/opt/software")


@pytest.mark.build
def test_no_release_without_nvshmem(site):
    (path,) = packages_of(site.prefix("py-deep-ep")).glob("hybrid_ep_cpp*.so")
    assert evidence.header_release(str(path)) is None
