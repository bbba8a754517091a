"""Rules on this node: driver, GPUs, HCAs, limits."""

import re

from .rule import (
    ALL,
    NETWORK,
    NO_READELF,
    Rules,
    fails,
    holds,
    lacks_readelf,
    listed,
    section,
    told,
    untold,
)

RULES = Rules()
rule = RULES.rule

#: Least compute capability of DeepEP's kernels
LEAST_CAPABILITY = (9, 0)

#: First kernel with the DMA-BUF calls that GPUDirect RDMA uses
DMA_BUF_KERNEL = (5, 12)


def _driver(facts):
    return (section(facts, "machine") or {}).get("driver")


def _hcas(facts):
    return (section(facts, "machine") or {}).get("hcas", [])


@rule(
    "node: facts",
    ALL,
    "something on this node does not answer; a job would wait for it in the same place.",
    "look at the kernel's log (dmesg), and drain the node",
)
def collected(facts):
    wrong = []
    for name in ("machine", "search", "nvshmem", "verbs", "hybrid"):
        found = facts.get(name, {"state": "absent"})
        if found["state"] not in ("ok", "absent"):
            more = (
                found.get("error")
                or found.get("signal")
                or "after {} s".format(found.get("seconds"))
            )
            if lacks_readelf(found):
                return untold("{} not read: {}".format(name, more), NO_READELF)
            at = found.get("at")
            wrong.append(
                "{} {}: {}{}".format(name, found["state"], more, at and " at " + at or "")
            )
    return fails("; ".join(wrong)) if wrong else None


@rule(
    "node: driver",
    ALL,
    "there is nothing here to run on: a login node, a container started without GPUs, or a "
    "driver that is not loaded.",
    "run doctor on a compute node (srun python tests/dispatch doctor); start a container with "
    "its GPUs",
)
def driver(facts):
    gpu, kernel = facts["gpu"], _driver(facts)
    stubs = [
        p
        for p in (section(facts, "loaded") or {}).get("libraries", {}).get("libcuda.so", ())
        if "driver_stubs" in p
    ]
    if gpu["state"] == "hung":
        return fails(
            "libcuda.so.1 does not answer in {} s".format(gpu["seconds"]),
            gpu["at"],
            "dmesg shows what the driver waits for (Xid); drain the node",
        )
    if gpu["state"] != "ok":
        return fails(
            "libcuda.so.1 cannot be asked: {}".format(gpu.get("signal") or gpu.get("error"))
        )
    if gpu["library"] is None and kernel is None:
        return fails(
            "no NVIDIA driver: no libcuda.so.1, no /proc/driver/nvidia{}".format(
                "; stubs stand in for it" if stubs else ""
            ),
            listed(stubs) or gpu["error"],
        )
    if gpu["library"] is None:
        return fails(
            "kernel driver {}, but no libcuda.so.1".format(kernel["version"]),
            gpu["error"],
            "install the driver's user-space part (container toolkit)",
        )
    if gpu["error"]:
        return fails("the driver gives no GPU: {}".format(gpu["error"]), listed(gpu["library"]))
    if stubs:
        return fails(
            "a driver is here, but the process of DeepEP has stubs",
            listed(stubs),
            "take LD_LIBRARY_PATH and LD_PRELOAD away, and see ldconfig -p",
        )
    return holds(
        "{}, for CUDA up to {}".format(
            kernel["version"] if kernel else "version not told", gpu["cuda"]
        ),
        listed(gpu["library"]),
        open=bool(kernel and kernel["open"]),
    )


@rule(
    "node: nvidia-smi",
    ALL,
    "where nvidia-smi hangs, so does a job.",
    "dmesg shows what the driver waits for (Xid); drain the node",
)
def smi(facts):
    found = facts["smi"]
    if found["state"] == "hung":
        return fails("does not end in {seconds} s".format(**found), "nvidia-smi")
    if found["state"] == "crashed":
        return fails("crashes: {signal}".format(**found), "nvidia-smi")
    if found["state"] == "failed" and _driver(facts):
        return fails(found["error"], "nvidia-smi")
    return None


@rule(
    "node: GPU",
    ALL,
    "DeepEP's kernels are for Hopper and later.",
    "run on nodes with H100, H200 or later GPUs; CUDA_VISIBLE_DEVICES must not hide them",
)
def gpus(facts):
    found = section(facts, "gpu")
    if not found or found["error"]:
        return None
    if not found["gpus"]:
        value = facts["environment"].get("CUDA_VISIBLE_DEVICES")
        return fails("none that this process may use", "CUDA_VISIBLE_DEVICES={}".format(value))
    shown = listed(
        "{} (sm_{}{}, {})".format(g["name"], g["major"], g["minor"], g["pci"])
        for g in found["gpus"]
    )
    old = [g for g in found["gpus"] if (g["major"], g["minor"]) < LEAST_CAPABILITY]
    if old:
        return fails("{} of {} below 9.0: {}".format(len(old), len(found["gpus"]), shown))
    return holds("{}: {}".format(len(found["gpus"]), shown), "libcuda")


@rule(
    "node: CUDA",
    ALL,
    "a runtime of a later major than the driver's does not start: 'CUDA driver version is "
    "insufficient'.",
    "update the driver, or install its forward compatibility package (cuda-compat)",
)
def cuda(facts):
    gpu, loaded = section(facts, "gpu"), section(facts, "loaded")
    runtimes = sorted({v for v in (loaded or {}).get("runtime", ()) if v})
    if not runtimes:
        return None
    shown = "runtime {} in the process".format(listed(runtimes))
    paths = listed(loaded["libraries"]["libcudart.so"])
    if len(loaded["libraries"]["libcudart.so"]) > 1:
        return fails(
            "{} copies of libcudart: {}".format(len(loaded["libraries"]["libcudart.so"]), paths),
            "/proc/self/maps",
            "have one CUDA runtime in the process",
        )
    if not gpu or not gpu.get("cuda"):
        return told("{}, no driver to compare with".format(shown), paths)
    major = max(int(v.split(".")[0]) for v in runtimes)
    if int(gpu["cuda"].split(".")[0]) < major:
        return fails("{}, the driver is for CUDA up to {}".format(shown, gpu["cuda"]), paths)
    return holds("{}, driver for up to {}".format(shown, gpu["cuda"]), paths)


@rule(
    "node: driver parameters",
    NETWORK,
    "IBGDA lets the GPU ring the HCA's doorbell, which the driver allows with these two only: "
    "otherwise 'init failed for transport: IBGDA', or the CPU handler.",
    "in /etc/modprobe.d: options nvidia NVreg_EnableStreamMemOPs=1 "
    'NVreg_RegistryDwords="PeerMappingOverride=1;", then load the driver anew',
    "DeepEP#55, DeepEP#128, nvshmem#34",
)
def parameters(facts):
    found = _driver(facts)
    if not found:
        return None
    values = found["parameters"]
    if values is None:
        return untold("/proc/driver/nvidia/params cannot be read")
    wrong = []
    if values.get("EnableStreamMemOPs") != "1":
        wrong.append(
            "EnableStreamMemOPs is {}".format(values.get("EnableStreamMemOPs", "unknown"))
        )
    if "PeerMappingOverride=1" not in values.get("RegistryDwords", "").replace(" ", ""):
        wrong.append(
            "PeerMappingOverride=1 is not in RegistryDwords ({})".format(
                values.get("RegistryDwords", "unknown")
            )
        )
    if wrong:
        return fails("; ".join(wrong), "/proc/driver/nvidia/params")
    return holds("EnableStreamMemOPs=1, PeerMappingOverride=1", "/proc/driver/nvidia/params")


@rule(
    "node: GPU memory for the HCA",
    NETWORK,
    "the HCA reads and writes GPU memory through nvidia_peermem or DMA-BUF; without both, "
    "registering NVSHMEM's heap fails.",
    "modprobe nvidia_peermem, or use the open kernel modules on Linux 5.12 or later",
    "DeepEP#223, sglang#6017",
)
def peer_memory(facts):
    found = section(facts, "machine")
    kernel = _driver(facts)
    if not found or not kernel:
        return None
    loaded = set(found["modules"] or ())
    peermem = sorted(loaded & {"nvidia_peermem", "nv_peer_mem"})
    gpus = (section(facts, "gpu") or {}).get("gpus", ())
    numbers = tuple(int(n) for n in re.findall(r"\d+", found["kernel"] or "")[:2])
    # The driver knows; where it cannot be asked, what it needs
    possible = (
        all(g["dma_buf"] == 1 for g in gpus)
        if gpus
        else (kernel["open"] and numbers >= DMA_BUF_KERNEL)
    )
    off = facts["environment"].get("NVSHMEM_IB_DISABLE_DMABUF", "0").lower() not in (
        "0",
        "false",
        "no",
        "off",
        "",
    )
    seen = "Linux {}, {} kernel modules".format(
        found["kernel"], "open" if kernel["open"] else "proprietary"
    )
    if peermem or (possible and not off):
        ways = peermem + ["DMA-BUF"] * bool(possible and not off)
        return holds(" and ".join(ways), seen)
    if possible:
        return fails(
            "no nvidia_peermem, and NVSHMEM_IB_DISABLE_DMABUF turns DMA-BUF off",
            seen,
            "unset NVSHMEM_IB_DISABLE_DMABUF, or modprobe nvidia_peermem",
        )
    return fails("neither nvidia_peermem nor DMA-BUF", seen)


def _name(hca, port):
    return "{}:{}".format(hca["name"], port["port"])


def usable(facts):
    """[(HCA, port)] that IBGDA can use: mlx5, active."""
    return [
        (hca, port)
        for hca in _hcas(facts)
        if hca["driver"].startswith("mlx5")
        for port in hca["ports"]
        if port["state"] == "ACTIVE"
    ]


@rule(
    "node: HCA",
    NETWORK,
    "IBGDA needs an mlx5 HCA with an active port; since NVSHMEM 3.6 the low-latency kernels need "
    "it within one node too.",
    "run on nodes with ConnectX HCAs; ibstat shows why a port is down; in a container, give it "
    "/dev/infiniband and /sys/class/infiniband",
    "DeepEP#695",
)
def hca(facts):
    if not section(facts, "machine"):
        return None
    found = _hcas(facts)
    if not found:
        return fails("none on this node", "/sys/class/infiniband")
    shown = listed(
        "{} {} {} {}".format(_name(h, p), p["link_layer"], p["state"], p["rate"])
        for h in found
        for p in h["ports"]
    )
    if not usable(facts):
        kinds = listed(sorted({h["driver"] or "no driver" for h in found}))
        return fails(
            "none that IBGDA can use ({}): {}".format(kinds, shown), "/sys/class/infiniband"
        )
    return holds(
        "{} of {}: {}".format(len(usable(facts)), len(found), shown), "/sys/class/infiniband"
    )


@rule("node: HCA ports that are down", frozenset(), "", "")
def down(facts):
    ports = [
        _name(h, p)
        for h in _hcas(facts)
        if h["driver"].startswith("mlx5")
        for p in h["ports"]
        if p["state"] != "ACTIVE"
    ]
    return told(listed(ports), "/sys/class/infiniband") if ports and usable(facts) else None


@rule(
    "node: RoCE GID",
    NETWORK,
    "over RoCE, connections are made by the GID; at another index than one of RoCE v2 they fail "
    "or do not cross routers.",
    "give the port's network device an IP address; unset NVSHMEM_IB_GID_INDEX, or set it to an "
    "index of type RoCE v2 (show_gids)",
    "DeepEP#623",
)
def gid(facts):
    ports = [(h, p) for h, p in usable(facts) if p["link_layer"] == "Ethernet"]
    if not ports:
        return None
    index = facts["environment"].get("NVSHMEM_IB_GID_INDEX")
    index = int(index) if index and index.lstrip("-").isdigit() else None
    wrong, right = [], []
    for h, p in ports:
        v2 = [number for number, _, kind, _ in p["gids"] if kind.strip() == "RoCE v2"]
        right.append("{} {}".format(_name(h, p), " ".join(map(str, v2))))
        if not v2:
            wrong.append("{} has no GID of RoCE v2".format(_name(h, p)))
        elif index is not None and index >= 0 and index not in v2:
            wrong.append(
                "{} has none of RoCE v2 at index {} (NVSHMEM_IB_GID_INDEX), but at {}".format(
                    _name(h, p), index, " ".join(map(str, v2))
                )
            )
    if wrong:
        return fails("; ".join(wrong), "/sys/class/infiniband/*/ports/*/gid_attrs/types")
    return holds(
        "RoCE v2 at index: {}".format(listed(right)),
        "/sys/class/infiniband/*/ports/*/gid_attrs/types",
    )


@rule(
    "node: /dev/infiniband",
    NETWORK,
    "verbs open the HCA's device file; in a container it is missing, for a user it may be closed: "
    "'devx uar denied', no device found.",
    "containers: --device=/dev/infiniband; else mode 0666 (udev rule of rdma-core)",
    "DeepEP#55",
)
def devices(facts):
    files = [d for h, _ in usable(facts) for d in h["device"]]
    if not usable(facts):
        return None
    wrong = [
        "{} {}".format(d["path"], "cannot be opened" if d["there"] else "is missing")
        for d in files
        if not d["open"]
    ]
    wrong += [
        "{} has no uverbs device".format(h["name"]) for h, _ in usable(facts) if not h["device"]
    ]
    if wrong:
        return fails(listed(wrong), "/sys/class/infiniband/*/device/infiniband_verbs")
    return holds("{} can be opened".format(listed(d["path"] for d in files)))


@rule(
    "node: locked memory",
    NETWORK,
    "registered memory is locked memory: with a limit, registration fails with 'Cannot allocate "
    "memory'.",
    "ulimit -l unlimited: memlock in /etc/security/limits.d, LimitMEMLOCK of slurmd, "
    "--ulimit memlock=-1 of a container",
    "DeepEP#55",
)
def memlock(facts):
    found = section(facts, "machine")
    if not found:
        return None
    if found["memlock"] is None:
        return holds("no limit", "RLIMIT_MEMLOCK")
    limit = "{} KiB".format(found["memlock"] // 1024)
    if found["may_lock"]:
        return holds("{}, which CAP_IPC_LOCK lifts".format(limit), "RLIMIT_MEMLOCK, CapEff")
    if not usable(facts):
        return told("{} (of no matter without an HCA)".format(limit), "RLIMIT_MEMLOCK")
    return fails(limit, "RLIMIT_MEMLOCK")


@rule("node: NUMA nodes", frozenset(), "", "")
def numa(facts):
    gpus = (section(facts, "gpu") or {}).get("gpus", ())
    if not gpus or not usable(facts):
        return None
    shown = ["GPU {} {}".format(g["pci"], g["numa"]) for g in gpus]
    shown += ["{} {}".format(h["name"], h["numa"]) for h, _ in usable(facts)]
    return told(listed(shown), "/sys/bus/pci/devices/*/numa_node")
