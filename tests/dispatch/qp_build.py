"""Programs that ask both queue-pair lookups on a GPU: sources, compilers, runs."""

import concurrent.futures
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lookup.lookup import DEEPEP_HEADER, NVSHMEM_HEADER, SOURCES
from spack_repo.deepep import evidence

from .errors import UsageError

TOP = Path(__file__).resolve().parents[2]
PATCHES = TOP / "patches"
RECIPE = TOP / "spack-repo" / "spack_repo" / "deepep" / "packages" / "py_deep_ep" / "package.py"
CUDA_SOURCES = Path(__file__).resolve().with_name("qp_layout_cuda")

#: Format of a build folder's manifest
FORMAT = "deepep-qp-layout-build/1"

#: Seconds. A translation unit takes 3 to 10, and a run of the program a few
COMPILE_DEADLINE, RUN_DEADLINE, FETCH_DEADLINE, PROBE_DEADLINE = 300, 120, 300, 60

#: Where make_programs keeps the header with the lookup, and what a patch is applied to
KERNELS = DEEPEP_HEADER.parent

#: Function of the program that does one lookup and nothing else
FUNCTION = "qp_lookup"

_DRIVER = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
numbers = [ctypes.c_int() for _ in range(2)]
code = cuda.cuInit(0)
for number, attribute in zip(numbers, (75, 76)):
    code = code or cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, 0)
print(code, *[number.value for number in numbers])
"""


class Failed(Exception):
    """A command failed or did not end. The text says which, with the last lines it printed."""

    def __init__(self, text, code=None):
        super().__init__(text)
        self.code = code


def command(arguments, deadline, text="", cwd=None):
    """Standard output of a command that gets text as input. Raises Failed.

    After deadline seconds the command and all it started are killed.
    """
    name = os.path.basename(str(arguments[0]))
    try:
        child = subprocess.Popen(
            [str(argument) for argument in arguments],
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise Failed("{} does not run: {}".format(name, error.strerror)) from None
    try:
        out, err = child.communicate(text, timeout=deadline)
    except BaseException as error:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise Failed("{} did not end in {} s and was killed".format(name, deadline)) from None
    if child.returncode:
        lines = [line for line in (out + err).splitlines() if line.strip()][-15:]
        said = "\n".join(lines) or "exit code {}".format(child.returncode)
        raise Failed("{}: {}".format(name, said), child.returncode)
    return out


def gpu_arch():
    """Architecture of the first GPU, as "sm_90". Raises UsageError where there is none."""
    try:
        code, major, minor = command([sys.executable, "-c", _DRIVER], PROBE_DEADLINE).split()
    except Failed as error:
        found = str(error).splitlines()[-1]
    else:
        if code == "0":
            return "sm_{}{}".format(major, minor)
        found = "the driver answers with error {}".format(code)
    raise UsageError(
        "no GPU to ask here ({}): --cpu judges the lookups without one, --build-only DIR compiles "
        "the programs to run elsewhere (--prebuilt DIR)".format(found)
    )


def find_cuda(given, *, compiler=True):
    """CUDA's prefix: the given one, $CUDA_HOME, that of nvcc on PATH, or /usr/local/cuda.

    compiler: whether its nvcc is needed, not its headers alone. Raises UsageError.
    """
    needed = ["include/cuda_runtime.h"] + ["bin/nvcc"] * compiler
    # nvcc on PATH may be a wrapper's script, with no toolkit around it
    nvcc = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parent.parent]
    places = [given] if given else [p for p in [*places, "/usr/local/cuda"] if p]
    for place in places:
        if all((Path(place) / name).is_file() for name in needed):
            return Path(place).absolute()
    raise UsageError(
        "no {} in {}: name CUDA's prefix by --cuda".format(
            " and ".join(needed), " or ".join(map(str, places))
        )
    )


def nvshmem_include(prefix):
    """include/ of NVSHMEM's prefix, which may be named itself. Raises UsageError."""
    for folder in (Path(prefix) / "include", Path(prefix)):
        if (folder / NVSHMEM_HEADER).is_file():
            return folder.absolute()
    raise UsageError("no {} in {} or its include folder".format(NVSHMEM_HEADER, prefix))


def find_nvshmem(given):
    """include/ of NVSHMEM: of the given prefix, of $NVSHMEM_DIR, or of this Python's wheel."""
    place = given or os.environ.get("NVSHMEM_DIR")
    if not place:
        try:
            wheel = importlib.util.find_spec("nvidia.nvshmem")
        except ImportError:
            wheel = None
        place = wheel and list(wheel.submodule_search_locations)[0]
    if not place:
        raise UsageError(
            "no NVSHMEM: $NVSHMEM_DIR is not set and this Python has no nvidia-nvshmem-cu13: name "
            "NVSHMEM's prefix by --nvshmem"
        )
    return nvshmem_include(place)


def nvshmem_release(include):
    """Release of an include folder as a tuple, (3, 6, 5). Raises UsageError."""
    header = Path(include) / "non_abi" / "nvshmem_version.h"
    try:
        text = header.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError("cannot read {}: {}".format(header, error.strerror)) from None
    found = dict(re.findall(r"#define NVSHMEM_VENDOR_(\w+)_VERSION (\d+)", text))
    try:
        return tuple(int(found[part]) for part in ("MAJOR", "MINOR", "PATCH"))
    except KeyError:
        raise UsageError("{} names no release of NVSHMEM".format(header)) from None


def find_verbs(given, include):
    """Folder with infiniband/mlx5dv.h: the given one or its include/, $RDMA_CORE_HOME's, that of
    the rdma-core which the NVSHMEM of this include folder was installed with, or the system's."""
    if given:
        places = [Path(given) / "include", Path(given)]
    else:
        places = [Path(p) / "include" for p in (os.environ.get("RDMA_CORE_HOME"),) if p]
        plugins = sorted((Path(include).parent / "lib").glob("nvshmem_transport_ibgda.so*"))
        try:
            folders = evidence.dynamic(str(plugins[0])).rpath if plugins else []
        except evidence.EvidenceError:
            folders = []
        places += [Path(f).parent / "include" for f in folders if os.path.isabs(f)]
        places.append(Path("/usr/include"))
    for place in places:
        if (place / "infiniband" / "mlx5dv.h").is_file():
            return place.absolute()
    raise UsageError(
        "no infiniband/mlx5dv.h in {}: name rdma-core's prefix by --verbs, or install its headers "
        "(rdma-core-devel, libibverbs-dev)".format(" or ".join(map(str, places)))
    )


def find_cuobjdump(cuda):
    """Path of cuobjdump: CUDA's, that of this Python's Triton, on PATH. Raises EvidenceError."""
    folders = [str(Path(cuda) / "bin")] if cuda else []
    triton = importlib.util.find_spec("triton")
    if triton and triton.origin:
        folders.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    return evidence.find_cuobjdump(folders)


def given_header(path):
    """The header with the lookup of a DeepEP source tree, or the one named. Raises UsageError."""
    path = Path(path)
    header = path / DEEPEP_HEADER if path.is_dir() else path
    if header.name != DEEPEP_HEADER.name or not header.is_file():
        raise UsageError(
            "{} is neither a DeepEP source tree with {} nor that header (EPv2, main since 2026, "
            "has no such lookup)".format(path, DEEPEP_HEADER)
        )
    return header.absolute()


def pinned_revision():
    """(git address, commit) of the DeepEP that the recipe prefers."""
    text = RECIPE.read_text(encoding="utf-8")
    commit = re.search(r'commit="([0-9a-f]{40})", preferred=True', text)
    return re.search(r'git = "([^"]+)"', text).group(1), commit.group(1)


def pinned_header():
    """The header of that revision, fetched by git into the cache once. Raises UsageError."""
    url, commit = pinned_revision()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = Path(os.environ.get("DEEPEP_CACHE") or Path(home) / "deepep-spack")
    # The folder of the test suite, if it was there first
    tree = cache / "tests" / "DeepEP-{}".format(commit[:12])
    if not (tree / DEEPEP_HEADER).is_file():
        fresh = tree.with_name("{}.new.{}".format(tree.name, os.getpid()))
        try:
            fresh.parent.mkdir(parents=True, exist_ok=True)
            command(["git", "init", "--quiet", fresh], FETCH_DEADLINE)
            fetch = ["git", "-C", fresh, "fetch", "--quiet", "--depth", "1", url, commit]
            command(fetch, FETCH_DEADLINE)
            command(["git", "-C", fresh, "checkout", "--quiet", commit], FETCH_DEADLINE)
            if not tree.is_dir():
                fresh.rename(tree)
        except (Failed, OSError) as error:
            raise UsageError(
                "DeepEP {} cannot be fetched from {} ({}): name a source tree of it by "
                "--deepep".format(commit[:7], url, str(error).splitlines()[-1])
            ) from None
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return given_header(tree)


def patched(header, patches, tree):
    """Copies the kernels beside a header into a new tree and patches them. Returns the header.

    patches: names of files of patches/. Raises UsageError if one does not apply.
    """
    folder = Path(tree) / KERNELS
    folder.mkdir(parents=True)
    for source in sorted(header.parent.glob("*.cu*")):
        shutil.copy(source, folder)
    for name in patches:
        arguments = ["patch", "-s", "-p1", "--fuzz=0", "-d", tree, "-i", PATCHES / name]
        try:
            command(arguments, PROBE_DEADLINE)
        except Failed as error:
            raise UsageError(
                "{} does not apply to {}: is that tree an unpatched revision without DeepEP#564? "
                "({})".format(name, header, str(error).splitlines()[-1])
            ) from None
    return folder / header.name


def _workers():
    return max(1, min(8, len(os.sched_getaffinity(0))))


def make_programs(arms, folder, cuda, verbs, arch):
    """Compiles the program of each arm into a folder, in parallel, and counts its instructions.

    arms: dicts with "name", "header", "patches" (see patched), "nvshmem" (an include folder) and
    what the caller wants back of them. arch: as "sm_90". Returns the arms with "program" (relative
    to folder) or, if it does not compile, "error"; "release", "seconds" of compiler time, and
    "instructions" or "instructions_missing". Writes them as manifest.json. Raises UsageError, also
    if none compiles.
    """
    nvcc = Path(cuda) / "bin" / "nvcc"
    try:
        cuobjdump, missing = find_cuobjdump(cuda), ""
    except evidence.EvidenceError as error:
        cuobjdump, missing = None, str(error)
    flags = [
        "-std=c++17",
        "-O3",
        "-arch=" + arch,
        # The lookups lie in two translation units
        "-rdc=true",
        "--expt-relaxed-constexpr",
        "-Werror=all-warnings",
        "-Xcompiler=-Wall,-Werror",
        "-I" + str(SOURCES),
        "-I" + str(CUDA_SOURCES),
    ]
    folder = Path(folder).absolute()

    def compiled(source, output, *includes):
        begin = time.monotonic()
        # Not -I: warnings about headers of others are not ours to mend
        system = [part for path in includes for part in ("-isystem", path)]
        arguments = [nvcc, *flags, *system, "-c", CUDA_SOURCES / source, "-o", output]
        try:
            command(arguments, COMPILE_DEADLINE)
        except Failed as error:
            return output, time.monotonic() - begin, str(error)
        return output, time.monotonic() - begin, None

    with tempfile.TemporaryDirectory(prefix="qp-layout-") as work:
        work = Path(work)
        headers = [
            patched(arm["header"], arm["patches"], work / "tree-{}".format(i))
            for i, arm in enumerate(arms)
        ]
        includes = sorted({str(arm["nvshmem"]) for arm in arms})
        with concurrent.futures.ThreadPoolExecutor(_workers()) as pool:
            # Those of DeepEP take longest
            deepep = [
                pool.submit(
                    compiled,
                    "deepep_lookup.cu",
                    work / "deepep-{}.o".format(i),
                    arm["nvshmem"],
                    verbs,
                    header.parent,
                )
                for i, (arm, header) in enumerate(zip(arms, headers))
            ]
            others = {
                include: [
                    pool.submit(
                        compiled, source, work / "{}-{}.o".format(source, i), include, verbs
                    )
                    for source in ("nvshmem_lookup.cu", "main.cu")
                ]
                for i, include in enumerate(includes)
            }
        made = []
        for arm, future in zip(arms, deepep):
            parts = [future.result()] + [f.result() for f in others[str(arm["nvshmem"])]]
            errors = [error for _, _, error in parts if error]
            release = ".".join(map(str, nvshmem_release(arm["nvshmem"])))
            entry = dict(arm, release=release, seconds=round(sum(s for _, s, _ in parts), 1))
            entry["header"], entry["nvshmem"] = str(arm["header"]), str(arm["nvshmem"])
            made.append(entry)
            program = folder / _file_name(arm["name"]) / "qp-layout"
            if not errors:
                program.parent.mkdir(parents=True, exist_ok=True)
                link = [nvcc, "-arch=" + arch, "-rdc=true", "-cudart=static"]
                link += [output for output, _, _ in parts]
                try:
                    command([*link, "-o", program], COMPILE_DEADLINE)
                except Failed as error:
                    errors.append(str(error))
            if errors:
                entry["error"] = errors[0]
                continue
            entry["program"] = str(program.relative_to(folder))
            try:
                if not cuobjdump:
                    raise Failed(missing)
                entry["instructions"] = instructions_of(program, cuobjdump)
            except Failed as error:
                entry["instructions_missing"] = str(error)
    if all("error" in arm for arm in made):
        raise UsageError("nothing compiles: " + made[0]["error"])
    manifest = {"format": FORMAT, "arch": arch, "arms": made}
    text = json.dumps(manifest, indent=1) + "\n"
    (folder / "manifest.json").write_text(text, encoding="utf-8")
    return made


def _file_name(name):
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def read_programs(folder):
    """Arms of a folder that make_programs filled. Raises UsageError."""
    path = Path(folder) / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT or not manifest["arms"]:
            raise ValueError
        needed = {"name", "header", "patches", "nvshmem", "expect", "seconds"}
        for arm in manifest["arms"]:
            if not needed <= set(arm) or not {"program", "error"} & set(arm):
                raise ValueError
        return manifest["arms"]
    except OSError as error:
        raise UsageError("cannot read {}: {}".format(path, error.strerror)) from None
    except (ValueError, KeyError, TypeError):
        raise UsageError("{} was not written by --build-only".format(path)) from None


def count_instructions(sass):
    """Instructions of FUNCTION in cuobjdump's text, without its return, None if it is not there.

    The device's code after the return (a branch to itself, padding) is not executed.
    """
    parts = re.split(r"Function : (\S+)", sass)
    bodies = dict(zip(parts[1::2], parts[2::2]))
    if FUNCTION not in bodies:
        return None
    code = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", bodies[FUNCTION])
    returns = [i for i, name in enumerate(code) if name.startswith("RET")]
    if not returns:
        return None
    return sum(name != "NOP" and not name.startswith("RET") for name in code[: returns[-1]])


def instructions_of(program, cuobjdump):
    """Instructions of one lookup in a program's device code. Raises Failed."""
    sass = command([cuobjdump, "-sass", "-fun", FUNCTION, program], PROBE_DEADLINE)
    count = count_instructions(sass)
    if count is None:
        raise Failed("cuobjdump shows no function {} in {}".format(FUNCTION, program))
    return count
