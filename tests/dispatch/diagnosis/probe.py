"""One section of facts, printed as JSON: python probe.py DEADLINE SECTION ARGUMENTS.

A script in a process of its own, since what it does may hang or crash; for some sections in the
Python that has PyTorch. Standard library only, Python 3.6 syntax.
"""

import ctypes
import faulthandler
import glob
import importlib
import importlib.util
import json
import os
import pwd
import re
import signal
import sys

if __name__ == "__main__":
    TESTS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    # Not from this folder, and behind the modules of the site
    sys.path.pop(0)
    sys.path += [TESTS, os.path.join(os.path.dirname(TESTS), "spack-repo")]

from spack_repo.deepep import evidence  # noqa: E402

from dispatch.diagnosis import node  # noqa: E402

#: Attributes of a device in cuda.h
ATTRIBUTES = {
    "pci_domain": 50,
    "pci_bus": 33,
    "pci_device": 34,
    "major": 75,
    "minor": 76,
    "gpu_direct_rdma": 116,
    "dma_buf": 124,
}


def packages():
    """Where this Python has the modules, without importing one."""
    found = {}
    for name in ("torch", "deep_ep", "deep_ep_cpp", "hybrid_ep_cpp", "triton"):
        spec = importlib.util.find_spec(name)
        # A folder without __init__.py is a package too, with no file
        found[name] = spec.origin if spec else None
    result = {"executable": sys.executable, "version": "%d.%d.%d" % sys.version_info[:3]}
    result.update(prefix=sys.prefix, found=found, extension=found["deep_ep_cpp"], release=None)
    if found["deep_ep"]:
        folder = os.path.dirname(found["deep_ep"])
        # Where DeepEP 2 keeps its extension
        inside = sorted(glob.glob(os.path.join(folder, "_C.*.so")))
        result["extension"] = result["extension"] or (inside[0] if inside else None)
        result["overwrites"] = overwrites(folder)
    try:
        from importlib import metadata

        result["release"] = metadata.version("deep_ep")
    except ImportError:  # PackageNotFoundError is one too
        pass
    return result


def overwrites(folder):
    """{variable of NVSHMEM: [file:line, ...]} that a package's Python sets whatever it is."""
    found, honoured = {}, set()
    for path in sorted(glob.glob(os.path.join(folder, "**", "*.py"), recursive=True)):
        with open(path, encoding="utf-8", errors="replace") as stream:
            for number, line in enumerate(stream, 1):
                for name in re.findall(r"environ\[['\"](NVSHMEM_\w+)['\"]\]\s*=[^=]", line):
                    place = "{}:{}".format(os.path.relpath(path, folder), number)
                    found.setdefault(name, []).append(place)
                honoured.update(re.findall(r"(?:environ\.get|getenv)\(['\"](NVSHMEM_\w+)", line))
    return {name: places for name, places in found.items() if name not in honoured}


def loaded(*names):
    """What importing modules has loaded, and the errors of imports that fail."""
    result = {"modules": {}, "errors": {}}
    for name in names:
        try:
            module = importlib.import_module(name)
        except Exception as error:
            result["errors"][name] = "{}: {}".format(type(error).__name__, error)
        else:
            version = getattr(module, "__version__", None)
            result["modules"][name] = [getattr(module, "__file__", None), version and str(version)]
            if name == "torch":
                result["torch_cuda"] = module.version.cuda
    result["imported"] = sorted(n for n in sys.modules if n.endswith("_ep_cpp"))
    result.update(evidence.snapshot())
    result["runtime"] = [
        _cuda_number(path, "cudaRuntimeGetVersion") for path in result["libraries"]["libcudart.so"]
    ]
    # What NVSHMEM's transports, which are loaded later, get
    result["later"] = {}
    for library in ("libibverbs.so", "libmlx5.so"):
        try:
            ctypes.CDLL(library + ".1")
        except OSError as error:
            result["later"][library] = {"error": str(error)}
        else:
            result["later"][library] = {"paths": evidence.mapped(library)}
    return result


def _cuda_number(library, function):
    """A version of CUDA as "13.0", from a function that writes 13000; None if it fails."""
    number = ctypes.c_int()
    try:
        failed = getattr(ctypes.CDLL(library), function)(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed else "{}.{}".format(number.value // 1000, number.value % 1000 // 10)


def _told(section, name, function, *arguments):
    try:
        section[name] = function(*arguments)
    except evidence.EvidenceError as error:
        section["errors"][name] = str(error)


def extension(path, cuobjdump):
    """Links and device code of an extension, which is not loaded. cuobjdump "" is none."""
    found = {"path": path, "errors": {}}
    needed, folders = evidence.dynamic(path)
    found.update(needed=needed, rpath=folders, links={})
    for library in ("libnvshmem_host.so.3", "libibverbs.so.1", "libmlx5.so.1"):
        if library in needed:
            paths = [os.path.join(folder, library) for folder in folders]
            found["links"][library] = next((p for p in paths if os.path.exists(p)), None)
    _told(found, "undefined", evidence.undefined, path, "nvshmem")
    _told(found, "headers", evidence.header_release, path)
    if cuobjdump:
        _told(found, "device_code", evidence.device_code, path, cuobjdump)
        _told(found, "device_library", evidence.device_library_releases, path, cuobjdump)
        try:
            lookups = evidence.rc_lookups(path, cuobjdump)
            found["lookups"] = {arch: list(lookup) for arch, lookup in lookups.items()}
        except evidence.EvidenceError as error:
            found["errors"]["lookups"] = str(error)
    return found


def nvshmem(*paths):
    """What lies beside NVSHMEM's host libraries, and the variables they know."""
    libraries = {}
    for path in paths:
        folder = os.path.dirname(os.path.realpath(path))
        plugins = sorted(glob.glob(os.path.join(folder, "nvshmem_transport_*.so.[0-9]*")))
        known = evidence.texts(path)
        for plugin in plugins:
            known |= evidence.texts(plugin)
        ibgda = [p for p in plugins if "_ibgda." in p]
        libraries[path] = {
            # nvshmem_transport_ibgda.so.5 may also lie there as .so.5.0.0
            "transports": sorted(
                {re.sub(r"(\.so\.\d+).*", r"\1", os.path.basename(p)) for p in plugins}
            ),
            "variables": sorted(t for t in known if re.match(r"[A-Z][A-Z0-9_]+\Z", t)),
            "needs_mlx5": sorted(evidence.needed_versions(ibgda[0]).get("libmlx5.so.1", ()))
            if ibgda
            else [],
        }
    return {"libraries": libraries}


def releases(*paths):
    """Releases of NVSHMEM's host libraries, asked of themselves: {path: release}."""
    return {"nvshmem": {path: evidence.nvshmem_release(path) for path in paths}}


def verbs(*paths):
    """Real names and symbol versions of rdma-core's libraries."""
    return {
        "libraries": {
            path: {
                "real": os.path.realpath(path),
                "versions": sorted(evidence.version_names(path)),
            }
            for path in paths
        }
    }


def hybrid(path):
    """What HybridEP's extension is built for, and what it needs at run time."""
    needed, folders = evidence.dynamic(path)
    texts = evidence.texts(path)
    found = {
        "path": path,
        "multinode": any("DHYBRID_EP_BUILD_MULTINODE_ENABLE" in text for text in texts),
        "nixl": any("DUSE_NIXL" in text for text in texts),
    }
    parents = [
        os.path.dirname(folder)
        for folder in folders
        if os.path.exists(os.path.join(folder, "libibverbs.so.1"))
    ]
    parents += [p for p in (os.environ.get("RDMA_CORE_HOME"), "/usr/local/rdma-core") if p]
    baked = [p for p in parents if evidence.has_path(path, p)]
    found["rdma_core"] = baked[0] if baked else None
    found["rdma_core_there"] = bool(baked) and os.path.exists(
        os.path.join(baked[0], "include", "infiniband", "verbs.h")
    )
    home = os.environ.get("CUDA_HOME", "")
    found["nvcc"] = home + "/bin/nvcc"
    found["nvcc_there"] = os.access(found["nvcc"], os.X_OK)
    folder = (
        os.environ.get("HYBRID_EP_CACHE_DIR", "") or pwd.getpwuid(os.getuid()).pw_dir or "/tmp"
    )
    found["cache"] = folder + "/.deepep/hybrid_ep/jit"
    there = found["cache"]
    while not os.path.lexists(there) and there not in ("", "/"):
        there = os.path.dirname(there)
    found["cache_writable"] = os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)
    found["cache_there"] = there
    return found


def gpu():
    """What the driver's library tells of the GPUs that this process sees."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"library": None, "error": str(error), "gpus": []}
    found = {"library": evidence.mapped("libcuda.so"), "error": None, "gpus": []}
    found["cuda"] = _cuda_number("libcuda.so.1", "cuDriverGetVersion")
    code = cuda.cuInit(0)
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        found["error"] = "cuInit: {} ({})".format((text.value or b"unknown").decode(), code)
        return found
    number = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(number))
    for index in range(number.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(100)
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, 100, device)
        values = {}
        for key, attribute in ATTRIBUTES.items():
            value = ctypes.c_int(-1)
            cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            values[key] = value.value
        address = "{:04x}:{:02x}:{:02x}.0".format(
            values.pop("pci_domain"), values.pop("pci_bus"), values.pop("pci_device")
        )
        values.update(name=name.value.decode(), pci=address)
        values["numa"] = node.numa_of(address)
        found["gpus"].append(values)
    return found


def machine():
    """What the kernel tells of this node."""
    return node.facts("/")


def search():
    """Libraries that LD_PRELOAD and LD_LIBRARY_PATH bring: [[variable, path, real path]]."""
    found = []
    for path in re.split(r"[:\s]+", os.environ.get("LD_PRELOAD", "")):
        if re.match(r"lib(nvshmem_host|mlx5|ibverbs)\.so", os.path.basename(path)):
            found.append(["LD_PRELOAD", path, os.path.realpath(path)])
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        for library in ("libnvshmem_host.so.3", "libmlx5.so.1", "libibverbs.so.1"):
            path = os.path.join(folder, library)
            if folder and os.path.exists(path):
                found.append(["LD_LIBRARY_PATH", path, os.path.realpath(path)])
    return {"libraries": found}


SECTIONS = {
    function.__name__: function
    for function in (
        packages,
        loaded,
        extension,
        releases,
        nvshmem,
        verbs,
        hybrid,
        gpu,
        machine,
        search,
    )
}


def main(deadline, section, *arguments):
    # PR_SET_PDEATHSIG of prctl(2): not to outlive a doctor that was killed
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    faulthandler.enable(all_threads=False)
    faulthandler.dump_traceback_later(0.9 * float(deadline))
    try:
        found = SECTIONS[section](*arguments)
    except evidence.EvidenceError as error:
        sys.exit(str(error))
    print("\n" + json.dumps(found), flush=True)
    # What was imported may crash on its way out, which is not the question
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
