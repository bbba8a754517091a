"""Facts for `doctor`: a plain dict, section by section, each from a process with a deadline."""

import concurrent.futures
import os
import sys

from spack_repo.deepep import evidence

from ..errors import UsageError
from . import child

#: Seconds for one section of facts; the import of PyTorch has a deadline of its own
SECTION = 30

#: Variables that matter, by the start of their name
VARIABLES = (
    "NVSHMEM",
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "LOADEDMODULES",
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "HYBRID_EP_",
    "RDMA_CORE_HOME",
)


def variables(environment):
    """The variables of an environment that matter."""
    return {k: v for k, v in sorted(environment.items()) if k.startswith(VARIABLES)}


def _packages(python):
    found = child.probe("packages", python=python, deadline=SECTION)
    if found["state"] == "hung":
        return found
    if found["state"] != "ok":
        raise UsageError(
            "{} is no Python that works ({}): name one with --python".format(
                python, found.get("error") or found["signal"]
            )
        )
    return found


def find_cuobjdump(packages):
    """Path of cuobjdump: CUDA_HOME's, that of the Python's Triton, on PATH; "" where none is."""
    folders = [os.path.join(h, "bin") for h in (os.environ.get("CUDA_HOME"),) if h]
    triton = packages.get("found", {}).get("triton")
    if triton:
        folders.append(os.path.join(os.path.dirname(triton), "backends", "nvidia", "bin"))
    folders.append("/usr/local/cuda/bin")
    try:
        return evidence.find_cuobjdump(folders)
    except evidence.EvidenceError:
        return ""


def _smi():
    query = "index,name,compute_cap,driver_version,pci.bus_id"
    answer = child.run(
        ["nvidia-smi", "--query-gpu=" + query, "--format=csv,noheader"], deadline=SECTION
    )
    if answer.get("code") == 127:
        return {"state": "absent"}
    if answer["state"] == "ok":
        rows = [line.split(", ") for line in answer.pop("text").splitlines() if line.strip()]
        answer["gpus"] = [dict(zip(query.split(","), row)) for row in rows]
    return answer


def of_file(path, python=None):
    """Facts of one extension, which is not loaded, and of this node's GPUs."""
    python = python or sys.executable
    packages = _packages(python)
    facts = {
        "environment": variables(os.environ),
        "packages": packages,
        "extension": extension(path, find_cuobjdump(packages)),
        "gpu": child.probe("gpu", deadline=SECTION),
    }
    if facts["extension"]["state"] == "failed":
        raise UsageError("--extension {}: {}".format(path, facts["extension"]["error"]))
    linked = facts["extension"].get("links", {}).get("libnvshmem_host.so.3")
    facts["loaded"] = {"state": "absent"}
    if linked:
        # Asked, not loaded with the extension: what it would get
        answer = child.probe("releases", linked, deadline=SECTION)
        facts["loaded"]["nvshmem"] = answer.get("nvshmem", {})
    return facts


def extension(path, cuobjdump):
    """The section of an extension."""
    found = child.probe("extension", path, cuobjdump, deadline=evidence.READING)
    return dict(found, path=str(path), cuobjdump=cuobjdump)


def of_process(python, import_deadline):
    """Facts of this node, of a Python's packages, and of a process that imports them."""
    python = python or sys.executable
    facts = {"environment": variables(os.environ), "packages": _packages(python)}
    packages = facts["packages"]
    places = packages.get("found", {})
    absent = {"state": "absent"}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = {
            "loaded": pool.submit(
                child.probe, "loaded", "torch", "deep_ep", python=python, deadline=import_deadline
            ),
            "gpu": pool.submit(child.probe, "gpu", deadline=SECTION),
            "smi": pool.submit(_smi),
            "machine": pool.submit(child.probe, "machine", deadline=SECTION),
            "search": pool.submit(child.probe, "search", deadline=SECTION),
        }
        if packages.get("extension"):
            cuobjdump = find_cuobjdump(packages)
            jobs["extension"] = pool.submit(extension, packages["extension"], cuobjdump)
        if places.get("hybrid_ep_cpp"):
            jobs["hybrid"] = pool.submit(
                child.probe, "hybrid", places["hybrid_ep_cpp"], deadline=SECTION
            )
        try:
            facts.update({name: job.result() for name, job in jobs.items()})
        except BaseException:
            child.end_all()
            raise
    facts["loaded"]["deadline"] = import_deadline
    loaded = facts["loaded"]
    hosts = sorted(loaded.get("nvshmem", ()))
    rdma = sorted(
        {p for found in loaded.get("later", {}).values() for p in found.get("paths", ())}
    )
    for name, paths in (("nvshmem", hosts), ("verbs", rdma)):
        facts[name] = child.probe(name, *paths, deadline=SECTION) if paths else absent
    for name in ("extension", "hybrid"):
        facts.setdefault(name, absent)
    return facts
