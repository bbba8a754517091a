"""What the kernel tells of a node, read from /proc, /sys and /dev; nothing is written.

Formats: Documentation/ABI/stable/sysfs-class-infiniband of the kernel, proc(5), and NVIDIA's
driver. Standard library only, Python 3.6 syntax.
"""

import glob
import os
import re
import resource

#: Capability to lock memory without limit, a bit of CapEff (capabilities(7))
CAP_IPC_LOCK = 14


def _read(*parts):
    """Text of a file without the newline at its end, None if it cannot be read."""
    try:
        with open(os.path.join(*parts), errors="replace") as stream:
            return stream.read().rstrip("\n")
    except OSError:
        return None


def facts(root):
    """All of it, below a root folder ("/")."""
    status = _read(root, "proc/self/status") or ""
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    modules = _read(root, "proc/modules")
    return {
        "kernel": _read(root, "proc/sys/kernel/osrelease"),
        "driver": driver(root),
        # Without this file modules are not known; a container sees the host's
        "modules": None
        if modules is None
        else sorted(
            {line.split()[0] for line in modules.splitlines()}
            & {
                "nvidia",
                "nvidia_peermem",
                "nv_peer_mem",
                "mlx5_core",
                "mlx5_ib",
                "ib_uverbs",
                "gdrdrv",
            }
        ),
        "memlock": None if soft == resource.RLIM_INFINITY else soft,
        "may_lock": bool(capabilities and int(capabilities.group(1), 16) >> CAP_IPC_LOCK & 1),
        "hcas": hcas(root),
    }


def driver(root):
    """{"version", "open" kernel modules, "parameters"} of NVIDIA's kernel driver, None without."""
    text = _read(root, "proc/driver/nvidia/version")
    if text is None:
        return None
    version = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+\.\d+[.\d]*)", text)
    parameters = _read(root, "proc/driver/nvidia/params")
    return {
        "version": version.group(1) if version else text.splitlines()[0],
        "open": "Open Kernel Module" in text,
        "parameters": None
        if parameters is None
        else dict(re.findall(r"^(\w+): *(.*)$", parameters, re.MULTILINE)),
    }


def numa_of(address, root="/"):
    """NUMA node of a PCI device ("0000:17:00.0"), None where the kernel does not tell."""
    text = _read(root, "sys/bus/pci/devices", address, "numa_node")
    return None if text in (None, "-1") else int(text)


def hcas(root):
    """The HCAs, each {"name", "driver", "pci", "numa", "device", "ports"}."""
    found = []
    for path in sorted(glob.glob(os.path.join(root, "sys/class/infiniband/*"))):
        device = os.path.realpath(os.path.join(path, "device"))
        verbs = sorted(
            os.listdir(os.path.join(device, "infiniband_verbs"))
            if os.path.isdir(os.path.join(device, "infiniband_verbs"))
            else ()
        )
        nodes = [os.path.join(root, "dev/infiniband", name) for name in verbs]
        numa = _read(device, "numa_node")
        found.append(
            {
                "name": os.path.basename(path),
                "driver": _driver_of(device),
                "pci": os.path.basename(device),
                "numa": None if numa in (None, "-1") else int(numa),
                "device": [
                    {
                        "path": "/" + os.path.relpath(node, root),
                        "there": os.path.exists(node),
                        "open": os.access(node, os.R_OK | os.W_OK),
                    }
                    for node in nodes
                ],
                "ports": [_port(port) for port in sorted(glob.glob(path + "/ports/*"))],
            }
        )
    return found


def _driver_of(device):
    """Name of a device's kernel driver ("mlx5_core"), "" for one without (software RDMA)."""
    link = os.path.join(device, "driver")
    return os.path.basename(os.path.realpath(link)) if os.path.exists(link) else ""


def _port(path):
    """One port; "gids" are those in use: [index, address, type, network device]."""
    gids = []
    for file in glob.glob(path + "/gids/*"):
        index, address = os.path.basename(file), _read(file)
        if address and set(address) != {"0", ":"}:
            kind = _read(path, "gid_attrs/types", index) or ""
            device = _read(path, "gid_attrs/ndevs", index) or ""
            gids.append([int(index), address, kind, device])
    return {
        "port": int(os.path.basename(path)),
        # "4: ACTIVE"
        "state": (_read(path, "state") or "?").split(": ")[-1],
        "link_layer": _read(path, "link_layer") or "?",
        "rate": _read(path, "rate") or "?",
        "gids": sorted(gids),
    }
