"""Rules on what is installed and loaded."""

import difflib
import os
import re

from spack_repo.deepep import evidence

from .rule import (
    ALL,
    HYBRID,
    NO_READELF,
    NVSHMEM,
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


def numbers(release):
    return tuple(int(n) for n in re.findall(r"\d+", release)[:3])


def built_with(facts):
    """NVSHMEM release of the device library linked into the extension, None if not known."""
    found = section(facts, "extension") or {}
    releases = sorted(set(found.get("device_library", {}).values()), key=numbers)
    return releases[0] if releases else found.get("headers")


def in_use(facts):
    """(release, path) of the NVSHMEM that the process has mapped, None without or with several
    releases of it."""
    found = facts.get("loaded", {}).get("nvshmem") or {}
    if len(set(found.values())) != 1:
        return None
    return sorted((release, path) for path, release in found.items())[0]


def _how(facts):
    """How the NVSHMEM of in_use() was found."""
    return "loaded" if section(facts, "loaded") else "linked"


def has_nvshmem(facts):
    """Whether the extension was built with NVSHMEM, None if not known."""
    found = section(facts, "extension")
    if not found:
        return None
    return any("nvshmem" in name for name in found["needed"]) or bool(
        found.get("undefined") or found.get("device_library")
    )


@rule(
    "installation: Python's packages",
    ALL,
    "doctor looks at the Python it runs in, which may not be that of the jobs.",
    "load the module or activate the environment that the job uses, or name its interpreter: "
    "--python EXE",
)
def packages(facts):
    found = facts["packages"]
    if found["state"] == "hung":
        return fails("the Python does not answer in {seconds} s".format(**found), found["at"])
    missing = [n for n in ("torch", "deep_ep") if not found["found"].get(n)]
    place = "{executable} ({version})".format(**found)
    if missing:
        return fails("{} has no {}".format(place, " and no ".join(missing)), found["prefix"])
    return holds(
        "{}: deep_ep {}".format(place, found["release"] or "of unknown version"),
        found["found"]["deep_ep"],
    )


#: What to do, by the error of an import
IMPORT_ERRORS = (
    (
        "undefined symbol: nvshmem|built with NVSHMEM",
        "an NVSHMEM of another release was mapped first, usually PyTorch's: see NVSHMEM releases",
    ),
    ("undefined symbol", "the extension was built for another PyTorch or CUDA: build it anew"),
    (
        r"libcuda\.so|libnvidia-ml\.so",
        "import it on a node with a driver, or install it by the recipe, which brings stubs",
    ),
    (r"\.so[.\d]*: cannot open", "install that library, or build with its folder in the RPATH"),
    ("No module named", "the installation is not whole: install it again"),
)


@rule(
    "installation: import deep_ep",
    ALL,
    "no rank of a job gets further than this.",
    "run it by hand: python -X faulthandler -c 'import torch, deep_ep'",
    "sglang#12949",
)
def imports(facts):
    found = facts.get("loaded", {})
    names = facts["packages"].get("found", {})
    if found.get("state") == "hung":
        return fails(
            "import torch, deep_ep does not end in {} s".format(found["deadline"]),
            found["at"] and "it is at {}".format(found["at"]),
            "see what that line waits for (a file system, a lock, the driver); a slow file system "
            "may only need a larger --deadline",
        )
    if found.get("state") == "crashed":
        return fails(
            "import torch, deep_ep crashes: {}".format(found["signal"]),
            found["at"] and "at {}".format(found["at"]),
            "an extension was built for another PyTorch, CUDA or compiler: build it anew",
        )
    if found.get("state") == "failed":
        return fails("import torch, deep_ep ends the process: {}".format(found["error"]))
    if not found or not all(names.get(n) for n in ("torch", "deep_ep")):
        return None
    if found["errors"]:
        name, error = sorted(found["errors"].items(), key=lambda item: item[0] != "torch")[0]
        action = next((text for pattern, text in IMPORT_ERRORS if re.search(pattern, error)), "")
        return fails("import {} fails: {}".format(name, error), names[name], action)
    torch = found["modules"]["torch"]
    return holds("torch {} (CUDA {}) and deep_ep".format(torch[1], found["torch_cuda"]), torch[0])


@rule(
    "installation: extension",
    ALL,
    "without it nothing of DeepEP runs.",
    "build DeepEP again",
)
def readable(facts):
    found = facts["extension"]
    if found["state"] in ("ok", "absent"):
        return None
    if lacks_readelf(found):
        return untold("not read: {}".format(found["error"]), NO_READELF, found["path"])
    said = {
        "failed": "cannot be read: {}".format(found.get("error")),
        "hung": "cannot be read in {} s".format(found.get("seconds")),
        "crashed": "cannot be read: its reader ended by {}".format(found.get("signal")),
    }
    return fails(
        "{} {}".format(os.path.basename(found["path"]), said[found["state"]]),
        found["path"],
        "binutils' readelf has to run on it: is it a shared library?",
    )


@rule(
    "installation: built with NVSHMEM",
    NVSHMEM,
    "DeepEP's setup.py drops the kernels between nodes, silently, where it finds no NVSHMEM.",
    "build again with NVSHMEM_DIR set",
    "DeepEP setup.py, DISABLE_NVSHMEM",
)
def compiled(facts):
    found = section(facts, "extension")
    if not found:
        return None
    if not has_nvshmem(facts):
        return fails("{} uses no NVSHMEM".format(os.path.basename(found["path"])), found["path"])
    releases = found.get("device_library")
    headers = found.get("headers")
    seen = {}
    for arch, release in sorted((releases or {}).items()):
        seen.setdefault(release, []).append(arch)
    shown = listed("device library {} ({})".format(r, " ".join(a)) for r, a in seen.items())
    shown = listed(filter(None, (shown, headers and "headers {}".format(headers))))
    if len({r for r in (*seen, headers) if r}) > 1:
        return fails(
            "parts of different releases: {}".format(shown),
            "{}: {}, and the call of nvshmemi_init_thread".format(
                found["path"], evidence.DEVICE_LIBRARY
            ),
            "build again with one NVSHMEM: NVSHMEM_DIR set, and no other on CPATH or LIBRARY_PATH",
        )
    if not shown:
        return untold(
            "which NVSHMEM release is compiled in is not told by {}".format(
                os.path.basename(found["path"])
            ),
            "" if found["cuobjdump"] else NO_CUOBJDUMP,
        )
    return holds(
        shown,
        "{}: {}".format(found["path"], evidence.DEVICE_LIBRARY),
        device_library=releases or {},
        headers=headers,
    )


#: What to do where device code cannot be read
NO_CUOBJDUMP = (
    "install the toolkit's cuda-cuobjdump package, or pip install nvidia-cuda-cuobjdump and put "
    "its bin on PATH"
)


@rule("installation: links", NVSHMEM, "", "")
def links(facts):
    found = section(facts, "extension")
    if not found:
        return None
    shown = []
    for library, path in sorted(found["links"].items()):
        release = (facts.get("loaded", {}).get("nvshmem") or {}).get(path)
        shown.append(
            "{}: {}".format(library, os.path.dirname(path) if path else "no folder of its RPATH")
            + (" (release {})".format(release) if release else "")
        )
    return told("; ".join(shown) or "neither with NVSHMEM nor with rdma-core", found["path"])


@rule(
    "installation: NVSHMEM loaded",
    NVSHMEM,
    "with two copies in one process, each has its own state: what one initializes the other does "
    "not know; preloading a copy hides the error of the import, and causes this.",
    "leave one: give PyTorch's wheel the release DeepEP was built with, and take LD_PRELOAD away",
    "Automodel#2614, sglang#12949",
)
def one_copy(facts):
    found = section(facts, "loaded")
    if not found or "torch" in found["errors"]:
        return None
    copies = found["nvshmem"]
    shown = listed("{} ({})".format(release, path) for path, release in sorted(copies.items()))
    if len(copies) > 1:
        return fails("{} copies: {}".format(len(copies), shown), "/proc/self/maps")
    if not copies:
        if has_nvshmem(facts) and not found["errors"]:
            return fails(
                "none is mapped after the import",
                "/proc/self/maps",
                "is libnvshmem_host linked statically? doctor cannot ask it then",
            )
        return None
    return holds(shown, "/proc/self/maps, nvshmemx_vendor_get_version_info")


@rule(
    "installation: NVSHMEM releases",
    NVSHMEM,
    "the loaded library lays out the queue pairs, the compiled-in code looks them up. Between "
    "3.4 and 3.5.19 the layout changed, and NVSHMEM's own check of versions lets that pass.",
    "have the release in the process that DeepEP was built with",
    "DeepEP#696, DeepEP#623",
)
def releases(facts):
    built, loaded = built_with(facts), in_use(facts)
    if built is None or loaded is None:
        return None
    release, path = loaded
    shown = "built with {}, {} {}".format(built, _how(facts), release)
    action = (
        "give that PyTorch the release DeepEP was built with (python3 -m pip install --no-deps "
        "nvidia-nvshmem-cu13=={}), or build DeepEP for the one that is loaded".format(built)
    )
    layouts = [evidence.expected_layout(r) for r in (built, release)]
    if layouts[0] != layouts[1]:
        return fails("{}: queue-pair layout {} and {}".format(shown, *layouts), path, action)
    if numbers(release) < numbers(built):
        return fails("{}, which is older".format(shown), path, action)
    if release != built:
        return told(
            "{}: same queue-pair layout {}, host libraries stay compatible with older "
            "device code".format(shown, layouts[0]),
            path,
        )
    return holds("{}: the same".format(shown), path)


@rule(
    "installation: queue-pair lookup",
    NVSHMEM,
    "dispatch between nodes then rings another peer's queue pair, or one outside the table: it "
    "hangs (timeout (dispatch CPU)) or ends in an illegal memory access.",
    "build DeepEP with #564 and its bound (py-deep-ep of this repository has both)",
    "Automodel#3967, DeepEP#564, DeepEP#696",
)
def lookup(facts):
    found = section(facts, "extension")
    if not found or not has_nvshmem(facts):
        return None
    if "lookups" not in found:
        said = found["errors"].get("lookups")
        if said:
            return untold("not known: {}".format(said), evidence=found["path"])
        return untold("not read: there is no cuobjdump", NO_CUOBJDUMP, found["path"])
    loaded = in_use(facts)
    release = loaded[0] if loaded else built_with(facts)
    seen = {arch: evidence.Lookup(*found["lookups"][arch]) for arch in found["lookups"]}
    by_words = {}
    for arch in sorted(seen):
        by_words.setdefault(seen[arch].words, []).append(arch)
    words = listed("{} for {}".format(w, " ".join(a)) for w, a in by_words.items())
    if release is None:
        return untold("{}, of an unknown NVSHMEM".format(words), evidence=found["path"])
    source = "NVSHMEM {} ({})".format(release, _how(facts) if loaded else "compiled in")
    expected = evidence.Lookup(evidence.expected_layout(release), True)
    place = "{}: cached_notify and combine in its device code".format(found["path"])
    if any(value.layout != expected.layout for value in seen.values()):
        built = built_with(facts)
        own = built and evidence.expected_layout(built)
        fits = all(value.layout == own for value in seen.values())
        return fails(
            "{}; {} lays them out by {}".format(words, source, expected.layout),
            place,
            "load the NVSHMEM {} it was built with, whose layout it has".format(built)
            if fits
            else "",
            lookups=found["lookups"],
        )
    if any(value != expected for value in seen.values()):
        return fails(
            "{}: ids beyond the last queue pair leave the table, as with 10 QPs and 20 SMs".format(
                words
            ),
            place,
            "add the bound of DeepEP#696",
            lookups=found["lookups"],
        )
    return holds("{}, as {} has it".format(words, source), place, lookups=found["lookups"])


def _owner(plugin):
    """A plug-in's name with the releases it belongs to: "... (NVSHMEM since 3.5, before 3.6)"."""
    known = sorted(evidence.TRANSPORT_SOVERSION.items())
    for (first, number), after in zip(known, known[1:] + [None]):
        if plugin.endswith(".so.{}".format(number)):
            end = ", before {}.{}".format(*after[0]) if after else ""
            return "{} (NVSHMEM since {}.{}{})".format(plugin, first[0], first[1], end)
    return "{} (of an unknown NVSHMEM)".format(plugin)


@rule(
    "installation: transport plug-ins",
    NVSHMEM,
    "NVSHMEM loads the plug-in of its own SOVERSION from beside its host library; without IBGDA's "
    "there is no GPU-initiated RDMA.",
    "install NVSHMEM's package again, whole, and nothing else into its folder",
    "DeepEP#55",
)
def transports(facts):
    found = section(facts, "nvshmem")
    loaded = in_use(facts)
    if not found or not loaded:
        return None
    release, path = loaded
    names = found["libraries"][path]["transports"]
    expected = evidence.expected_transport(release)
    versions = sorted({int(name.rpartition(".")[2]) for name in names})
    shown = listed(_owner(name) for name in names) or "none"
    folder = os.path.dirname(path)
    if expected is None:
        return told(
            "{}; which SOVERSION NVSHMEM {} loads is not known here".format(shown, release), folder
        )
    wanted = "nvshmem_transport_ibgda.so.{}".format(expected)
    if wanted not in names:
        return fails("no {} beside NVSHMEM {}: {}".format(wanted, release, shown), folder)
    if versions != [expected]:
        return fails(
            "of several releases: {}; NVSHMEM {} loads .so.{}".format(shown, release, expected),
            folder,
        )
    return holds(
        "{} of .so.{}, as NVSHMEM {} loads".format(
            listed(name.split("_")[2].split(".")[0] for name in names), expected, release
        ),
        folder,
    )


@rule(
    "installation: rdma-core",
    NVSHMEM,
    "NVSHMEM's IBGDA drives the HCA by libmlx5's direct verbs; libmlx5 and libibverbs of two "
    "rdma-cores do not fit, and one before 35 lacks what IBGDA calls.",
    "have one rdma-core (35 or later) in the process: that of the environment, or the system's",
    "sglang#7060",
)
def rdma_core(facts):
    loaded = section(facts, "loaded")
    # Without the extension, which brings it by its RPATH, nothing can be said
    if not loaded or "deep_ep" not in loaded["modules"]:
        return None
    later = loaded["later"]
    paths = {}
    for name, found in sorted(later.items()):
        if "error" in found:
            return fails("{}.1 cannot be loaded".format(name), found["error"])
        if len(found["paths"]) != 1:
            return fails(
                "{} copies of {}: {}".format(len(found["paths"]), name, listed(found["paths"])),
                "/proc/self/maps",
            )
        paths[name] = found["paths"][0]
    details = section(facts, "verbs")
    if not details:
        return None
    real = {name: details["libraries"][path]["real"] for name, path in paths.items()}
    if len({os.path.dirname(path) for path in real.values()}) != 1:
        return fails("from two folders: {}".format(listed(real.values())), "/proc/self/maps")
    host = in_use(facts)
    plugins = section(facts, "nvshmem")
    needs = set(plugins["libraries"][host[1]]["needs_mlx5"]) if host and plugins else set()
    lacking = sorted(needs - set(details["libraries"][paths["libmlx5.so"]]["versions"]))
    if lacking:
        return fails(
            "{} has no {}, which NVSHMEM's IBGDA plug-in needs".format(
                real["libmlx5.so"], listed(lacking)
            ),
            "readelf -V",
        )
    # rdma-core writes its release into the names: libmlx5.so.1.25.60.0
    release = re.search(r"\.so\.\d+\.\d+\.(\d+\.\d+)$", real["libmlx5.so"])
    mapped = loaded["libraries"]["libmlx5.so"]
    return holds(
        "{}{} in {}".format(
            release.group(1) if release else "release not told",
            "" if mapped else " (not mapped by the import, but what NVSHMEM would get)",
            os.path.dirname(real["libmlx5.so"]),
        ),
        "/proc/self/maps",
        needs=sorted(needs),
    )


@rule(
    "installation: copies that LD_ variables bring",
    NVSHMEM,
    "LD_PRELOAD and, for extensions with RUNPATH, LD_LIBRARY_PATH go before what DeepEP was "
    "linked with.",
    "take them out of the environment: nothing here needs LD_LIBRARY_PATH",
    "sglang#12949",
)
def brought(facts):
    found = section(facts, "search")
    loaded = section(facts, "loaded") or {}
    if not found or not found["libraries"]:
        return None
    mapped = {os.path.realpath(p) for p in loaded.get("nvshmem", ())}
    for paths in loaded.get("libraries", {}).values():
        mapped |= set(paths)
    linked = {
        os.path.realpath(p)
        for p in (section(facts, "extension") or {}).get("links", {}).values()
        if p
    }
    bad, harmless = [], []
    for variable, path, real in found["libraries"]:
        # Where DeepEP has no place of its own for it, what a variable brings is what there is
        other = (
            any(
                os.path.basename(p).split(".so")[0] == os.path.basename(real).split(".so")[0]
                for p in linked
            )
            and real not in linked
        )
        preload = variable == "LD_PRELOAD" and "nvshmem" in path
        taken = real in mapped and other
        (bad if preload or taken else harmless).append("{}: {}".format(variable, path))
    if bad:
        return fails(listed(bad), "/proc/self/maps")
    return told("{} (as linked, or not used)".format(listed(harmless)))


@rule(
    "installation: device code",
    ALL,
    "a GPU runs machine code of its own architecture only: 'no kernel image is available'.",
    "build with cuda_arch (TORCH_CUDA_ARCH_LIST) of this node's GPUs",
)
def device_code(facts):
    found = section(facts, "extension")
    if not found:
        return None
    if "device_code" not in found:
        said = found["errors"].get("device_code")
        if said:
            return fails("no device code can be read: {}".format(said), found["path"])
        return untold("not read: there is no cuobjdump", NO_CUOBJDUMP, found["path"])
    codes = sorted(found["device_code"])
    if not codes:
        return fails("none in {}".format(os.path.basename(found["path"])), found["path"])
    gpus = (section(facts, "gpu") or {}).get("gpus", ())
    capabilities = sorted({(gpu["major"], gpu["minor"]) for gpu in gpus})
    bad = ["sm_{}{}".format(*c) for c in capabilities if not any(runs(code, c) for code in codes)]
    if bad:
        return fails("{}; this node has {}".format(listed(codes), listed(bad)), found["path"])
    if not capabilities:
        return told("{}; no GPU here to compare with".format(listed(codes)), found["path"])
    return holds(
        "{}, and this node has {}".format(
            listed(codes), listed("sm_{}{}".format(*c) for c in capabilities)
        ),
        found["path"],
    )


def runs(code, capability):
    """Whether code ("sm_90", "sm_90a", "ptx_90") runs on a GPU of a compute capability (9, 0):
    machine code within a major, PTX from its own on, suffix a on exactly its own."""
    kind, number, suffix = re.match(r"(sm|ptx)_(\d+)([a-z]?)$", code).groups()
    own = divmod(int(number), 10)
    if suffix == "a":
        return own == tuple(capability)
    if kind == "ptx" and not suffix:
        return own <= tuple(capability)
    return own[0] == capability[0] and own[1] <= capability[1]


@rule(
    "installation: modules",
    NVSHMEM,
    "another NVSHMEM's module changes what later builds and jobs find; nvhpc brings an NVSHMEM "
    "and a CUDA of its own.",
    "module unload it, and load py-deep-ep again",
)
def modules(facts):
    loaded = [m for m in facts["environment"].get("LOADEDMODULES", "").split(":") if m]
    if not loaded:
        return None
    built = built_with(facts)
    bad = [m for m in loaded if m.split("/")[0].startswith("nvhpc")]
    for module in loaded:
        release = re.match(r"(?:lib)?nvshmem/v?(\d+(?:\.\d+)+)", module)
        if release and built and numbers(release.group(1)) != numbers(built):
            bad.append("{} (DeepEP was built with {})".format(module, built))
    if bad:
        return fails(listed(bad), "LOADEDMODULES")
    return holds(
        "{} loaded, none that brings another NVSHMEM".format(len(loaded)), "LOADEDMODULES"
    )


#: Variables that configure builds, not NVSHMEM itself
BUILD_VARIABLES = {"NVSHMEM_DIR", "NVSHMEM_HOME", "NVSHMEM_PREFIX", "NVSHMEM_VERSION"}


@rule(
    "installation: NIC handler",
    NVSHMEM,
    "with the CPU handler a proxy thread rings the doorbells: dispatch is reported to hang.",
    "unset NVSHMEM_IBGDA_NIC_HANDLER, or set it to gpu",
    "DeepEP#509, DeepEP#677",
)
def nic_handler(facts):
    value = facts["environment"].get("NVSHMEM_IBGDA_NIC_HANDLER")
    if value is None:
        return told("not set: NVSHMEM takes the GPU where the driver lets it")
    if value.lower() == "cpu":
        return fails("NVSHMEM_IBGDA_NIC_HANDLER={}".format(value))
    return told("NVSHMEM_IBGDA_NIC_HANDLER={}".format(value))


@rule("installation: NVSHMEM variables", NVSHMEM, "", "")
def nvshmem_variables(facts):
    given = {
        k: v
        for k, v in facts["environment"].items()
        if k.startswith("NVSHMEM_") and k not in BUILD_VARIABLES
    }
    if not given:
        return None
    overwritten = facts["packages"].get("overwrites", {})
    plugins, host = section(facts, "nvshmem"), in_use(facts)
    known = set(plugins["libraries"][host[1]]["variables"]) if plugins and host else None
    said = []
    for name, value in sorted(given.items()):
        text = "{}={}".format(name, value)
        if name in overwritten:
            text += " does nothing: DeepEP sets it itself ({})".format(listed(overwritten[name]))
        elif known is not None and not {name, name[len("NVSHMEM_") :]} & known:
            text += " does nothing: NVSHMEM {} knows no such name".format(host[0])
            near = difflib.get_close_matches(name[len("NVSHMEM_") :], known, 1, 0.8)
            text += near and "; NVSHMEM_{}?".format(near[0]) or ""
        said.append(text)
    return told("; ".join(said), host[1] if host else "", variables=given)


@rule("installation: NVSHMEM_VERSION", NVSHMEM, "", "")
def nvshmem_version(facts):
    value = facts["environment"].get("NVSHMEM_VERSION")
    if value is None:
        return None
    host = in_use(facts)
    return told(
        "NVSHMEM_VERSION={} tells what an image's author set, and is not believed; {}".format(
            value, "loaded is {}".format(host[0]) if host else "none is loaded"
        )
    )


@rule(
    "installation: HybridEP",
    HYBRID,
    "HybridEP compiles its kernels at run time, with $CUDA_HOME/bin/nvcc (an empty CUDA_HOME "
    "becomes '/bin/nvcc: not found'), into its cache folder.",
    "set CUDA_HOME to a toolkit with nvcc, and HYBRID_EP_CACHE_DIR to a folder you can write",
    "NeMo-RL#4038",
)
def hybrid(facts):
    found, loaded = section(facts, "hybrid"), section(facts, "loaded")
    if not found:
        return None
    wrong = []
    if loaded and not loaded["errors"] and "hybrid_ep_cpp" not in loaded["imported"]:
        wrong.append("import deep_ep does not import hybrid_ep_cpp")
    if not found["nvcc_there"]:
        wrong.append("no nvcc to run at {}".format(found["nvcc"]))
    if not found["cache_writable"]:
        wrong.append("{} cannot be written ({})".format(found["cache"], found["cache_there"]))
    if (
        found["multinode"]
        and not found["nixl"]
        and found["rdma_core"]
        and not found["rdma_core_there"]
    ):
        wrong.append(
            "RDMA_CORE_HOME is baked in as {}, which has no headers".format(found["rdma_core"])
        )
    if wrong:
        return fails("; ".join(wrong), found["path"])
    reach = "within a node only (built without HYBRID_EP_MULTINODE)"
    if found["multinode"]:
        reach = "between nodes too, {}; RDMA_CORE_HOME baked in: {}".format(
            "by NIXL" if found["nixl"] else "by DOCA", found["rdma_core"] or "none of its RPATH"
        )
    return holds(
        "{}; compiles by {} into {}".format(reach, found["nvcc"], found["cache"]),
        found["path"],
        multinode=found["multinode"],
    )
