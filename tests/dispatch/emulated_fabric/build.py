"""Compiles the emulated fabric on demand: g++ only, cached by what goes into it.

Runs in the site's Python (3.9 or later) with the standard library.
"""

import concurrent.futures
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "src"

#: Libraries of a build, in its folder (names without ".1" link to the first two)
VERBS, MLX5, PRELOAD = "libibverbs.so.1", "libmlx5.so.1", "libemulated_fabric_preload.so"

#: Sanitizers that a build for the self test may have
SANITIZERS = ("address", "undefined", "thread")

COMPILE_SECONDS = 300
ERROR_LINES = 15


class BuildError(Exception):
    """It cannot be built: a missing header or compiler, or what the compiler says."""


def defects():
    """Names of the defects that a build may have on purpose, from src/defects.h."""
    enumeration = re.search(
        r"enum class Defect {(.*?)};", (SOURCES / "defects.h").read_text(), re.S
    )
    return [n for n in re.findall(r"^ *(\w+),", enumeration.group(1), re.M) if n != "none"]


def _run(command, folder):
    try:
        done = subprocess.run(
            [str(word) for word in command],
            cwd=str(folder),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMPILE_SECONDS,
        )
    except FileNotFoundError:
        raise BuildError("no compiler: {} is not on PATH".format(command[0])) from None
    except subprocess.TimeoutExpired:
        raise BuildError("{} took over {} s".format(command[0], COMPILE_SECONDS)) from None
    if done.returncode:
        lines = "\n".join((done.stdout + done.stderr).splitlines()[:ERROR_LINES])
        raise BuildError("exit status {} of {}:\n{}".format(done.returncode, command[0], lines))
    return done.stdout


def _flags(verbs_include, cuda_include, sanitizer):
    flags = ["-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Werror", "-pthread", "-g1"]
    flags += ["-isystem", str(verbs_include), "-isystem", str(cuda_include)]
    if sanitizer:
        flags += ["-O1", "-fsanitize={}".format(sanitizer), "-fno-sanitize-recover=all"]
        flags.append("-fno-omit-frame-pointer")
    else:
        # A site's other libstdc++ may come first in a process where these are preloaded
        flags += ["-O2", "-static-libstdc++", "-static-libgcc"]
    return flags


def _hash(*parts):
    content = hashlib.sha256()
    for part in parts:
        content.update(part if isinstance(part, bytes) else part.encode())
        content.update(b"\0")
    return content.hexdigest()[:16]


def _object(command, source, headers, defect, cache):
    """The object of a source, from the cache or compiled into it."""
    text = source.read_bytes()
    # A defect's build differs in the files that name it: the other objects are shared
    if defect and "Defect::{}".format(defect).encode() in text:
        command = [*command, "-DFABRIC_DEFECT={}".format(defect)]
    name = "{}-{}.o".format(source.stem, _hash(*command, headers, text))
    target = cache / name
    if not target.is_file():
        with tempfile.TemporaryDirectory(dir=str(cache)) as folder:
            fresh = Path(folder) / name
            _run([*command, "-c", source, "-o", fresh], folder)
            os.replace(fresh, target)
    return target


def _link(command, objects, folder):
    def shared(name, *more):
        _run([*command, "-shared", "-Wl,-soname,{}".format(name), "-o", name, *more], folder)

    preload = [o for o in objects if o.name.startswith("preload-")]
    version_script = "-Wl,--version-script,{}".format(SOURCES / "libmlx5.map")
    shared(MLX5, *(o for o in objects if o not in preload), version_script, "-ldl")
    # Everything is in libmlx5: dlsym on a handle searches what the library needs as well
    shared(VERBS, "-Wl,--no-as-needed", MLX5)
    shared(PRELOAD, *preload, "-ldl")
    for name in (MLX5, VERBS):
        (folder / name[: -len(".1")]).symlink_to(name)


def build(cache, verbs_include, cuda_include, *, compiler="g++", defect="", sanitizer=""):
    """The folder with the three libraries, built if the cache has none of this content.

    cache: folder for builds, made if missing. verbs_include: rdma-core's headers
    (infiniband/mlx5dv.h). cuda_include: CUDA's headers (cuda.h). defect, sanitizer: for the self
    test, one of src/defects.h and one of SANITIZERS. Raises BuildError. Takes some 10 s of one
    core the first time.
    """
    for folder, header in ((verbs_include, "infiniband/mlx5dv.h"), (cuda_include, "cuda.h")):
        if not (Path(folder) / header).is_file():
            raise BuildError("{} has no {}".format(folder, header))
    if sanitizer and sanitizer not in SANITIZERS:
        raise BuildError("{} is no sanitizer of {}".format(sanitizer, ", ".join(SANITIZERS)))
    if defect and defect not in defects():
        raise BuildError("{} is no defect of {}".format(defect, SOURCES / "defects.h"))
    flags = _flags(verbs_include, cuda_include, sanitizer)
    version = _run([compiler, "--version"], SOURCES)
    headers = b"".join(h.read_bytes() for h in sorted(SOURCES.glob("*.h")))
    rest = [p.read_bytes() for p in (*sorted(SOURCES.glob("*.cpp")), SOURCES / "libmlx5.map")]
    target = Path(cache) / "build-{}".format(_hash(version, *flags, defect, headers, *rest))
    if target.is_dir():
        return target
    objects_cache = Path(cache) / "objects-{}".format(_hash(version))
    try:
        objects_cache.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=target.name + ".new.", dir=str(cache)))
    except OSError as error:
        raise BuildError("cannot write to {}: {}".format(cache, error.strerror)) from None
    command = [compiler, *flags]
    try:
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            jobs = [
                pool.submit(_object, command, source, headers, defect, objects_cache)
                for source in sorted(SOURCES.glob("*.cpp"))
            ]
            objects = [job.result() for job in jobs]
        _link(command, objects, fresh)
        try:
            fresh.rename(target)
        except OSError:
            # Another process was faster; its build is the same
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(str(fresh), ignore_errors=True)
    return target
