# Copyright DeepEP-on-Spack developers. See LICENSE-APACHE and LICENSE-MIT for details.
#
# SPDX-License-Identifier: (Apache-2.0 OR MIT)
"""Facts read from built files and from a running process, without a GPU.

One place for the recipe, its stand-alone tests and tests/dispatch. Standard library only, and
Python 3.6 syntax, since it runs in Spack's Python and in the site's; the reading itself is done by
binutils' readelf and CUDA's cuobjdump. As a script it prints, as JSON, what importing the modules
named on its command line has loaded.
"""

import collections
import contextlib
import ctypes
import importlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile

#: First NVSHMEM release whose RC queue pairs lie in layout v2
FIRST_V2 = (3, 5, 19)

#: Byte offsets in NVSHMEM's device states, the same from 3.4.5 to 3.8.0 (tests/test_headers.py)
NPES = 0x8  # nvshmemi_device_host_state_t::npes
NUM_RC_PER_PE = 0x1C  # nvshmemi_ibgda_device_state_t::num_rc_per_pe

#: Symbols of the two states, in constant bank 3
STATE, IBGDA_STATE = "nvshmemi_device_state_d", "nvshmemi_ibgda_device_state_d"

#: Symbol there of NVSHMEM's device library: its release, as three integers of 32 bits
DEVICE_LIBRARY = "nvshmemi_device_lib_version_d"

#: SOVERSION of NVSHMEM's transport plug-ins, from the release on (tests/test_doctor.py)
TRANSPORT_SOVERSION = {(3, 0): 3, (3, 5): 4, (3, 6): 5, (3, 7): 6, (3, 8): 7}

#: Seconds that reading a file may take; cuobjdump needs a few for DeepEP
READING = 300

#: What a shared library needs and where it looks: SONAMEs, and folders in order
Dynamic = collections.namedtuple("Dynamic", "needed rpath")


class Lookup(collections.namedtuple("Lookup", "layout bounded")):
    """DeepEP's queue-pair lookup as compiled: layout "v1" or "v2" (the index of NVSHMEM before
    and since 3.5.19), and whether ids beyond the last queue pair stay in the table."""

    @property
    def words(self):
        return self.layout + ("" if self.bounded else " without bound")


class EvidenceError(Exception):
    """The evidence cannot be read; the text says what to do."""


def _output(command):
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
            timeout=READING,
        )
    except OSError as error:
        raise EvidenceError("{} does not run: {}".format(command[0], error.strerror)) from None
    except subprocess.TimeoutExpired:
        raise EvidenceError("{} does not end in {} s".format(command[0], READING)) from None
    if done.returncode:
        text = (done.stderr or done.stdout).strip().splitlines()
        said = text[-1] if text else "exit code {}".format(done.returncode)
        name = os.path.basename(command[0])
        raise EvidenceError(said if said.startswith(name + ":") else "{}: {}".format(name, said))
    return done.stdout


def find_cuobjdump(folders):
    """Path of cuobjdump: in a folder, else on PATH. Raises EvidenceError."""
    for folder in folders:
        path = os.path.join(folder, "cuobjdump")
        if os.access(path, os.X_OK):
            return path
    path = shutil.which("cuobjdump")
    if path is None:
        raise EvidenceError(
            "cuobjdump, which reads the device code, is neither on PATH nor in {}: install the "
            "toolkit's cuda-cuobjdump package".format(" or ".join(folders))
        )
    return path


def dynamic(path):
    """Dynamic(needed SONAMEs, folders of RUNPATH or RPATH) of a shared library."""
    text = _output(["readelf", "-dW", path])
    needed = re.findall(r"\(NEEDED\)\s+Shared library: \[(.*?)\]", text)
    folders = re.findall(r"\((?:RUNPATH|RPATH)\)\s+Library r(?:un)?path: \[(.*?)\]", text)
    return Dynamic(needed, [f for line in folders for f in line.split(":") if f])


def undefined(path, pattern):
    """Undefined dynamic symbols of a shared library that match a pattern, sorted."""
    text = _output(["readelf", "-W", "--dyn-syms", path])
    names = re.findall(r"\sUND\s+([^\s@]+)", text)
    return sorted({name for name in names if re.match(pattern, name)})


def version_names(path):
    """Names of the symbol versions that a shared library defines, as {"MLX5_1.19", ...}."""
    text = _output(["readelf", "-VW", path]).split("Version needs section")[0]
    return set(re.findall(r"Name: (\S+)", text))


def needed_versions(path):
    """Names of the symbol versions that a shared library needs, by SONAME:
    {"libmlx5.so.1": {"MLX5_1.19", ...}}."""
    found, names = {}, None
    text = _output(["readelf", "-VW", path]).partition("Version needs section")[2]
    for kind, name in re.findall(r"(File|Name): (\S+)", text):
        if kind == "File":
            names = found.setdefault(name, set())
        else:
            names.add(name)
    return found


def texts(path):
    """Texts of three characters or more in a file, each a whole string of its own as C ends it."""
    with open(path, "rb") as stream:
        parts = stream.read().split(b"\0")
    return {p.decode("ascii") for p in parts if re.match(rb"[\x20-\x7e]{3,}\Z", p)}


def has_path(path, folder):
    """Whether a file's code holds a folder's path: compilers write a long text as pieces of 16
    bytes, of which the last may overlap the one before. For paths of 16 characters or more; where
    the file has it as part of a list (its RPATH) does not count."""
    name = folder.encode()
    with open(path, "rb") as stream:
        elsewhere = stream.read().replace(name + b"/", b"")
    start = name[: len(name) // 16 * 16]
    return bool(start) and start in elsewhere and name[-16:] in elsewhere


def _sections(path):
    """[(name, address, offset in the file, size)] of an ELF file."""
    pattern = r"\[ *\d+\] (\.\S+)\s+\S+\s+([0-9a-f]+) ([0-9a-f]+) ([0-9a-f]+) "
    rows = re.findall(pattern, _output(["readelf", "-SW", path]))
    return [(name, int(a, 16), int(o, 16), int(s, 16)) for name, a, o, s in rows]


def _integers(path, offset, number):
    """Integers of 32 bits at an offset in a file of this machine's byte order."""
    with open(path, "rb") as stream:
        stream.seek(offset)
        return struct.unpack("<{}i".format(number), stream.read(4 * number))


def device_code(path, cuobjdump):
    """What a library's fat binaries hold: {"sm_90": number of cubins, "ptx_90": ...}."""
    found = collections.Counter()
    for kind in ("elf", "ptx"):
        try:
            text = _output([cuobjdump, "-l" + kind, path])
        except EvidenceError as error:
            # No file of a kind is an error to cuobjdump, on some releases
            if "No " + kind.upper() in str(error):
                continue
            raise
        for name in re.findall(r"file\s+\d+:\s*(\S+)", text):
            arch = re.search(r"\.(sm_\w+)\.", name)
            if arch is None:
                raise EvidenceError("cuobjdump names no architecture for {}".format(name))
            found[arch.group(1) if kind == "elf" else arch.group(1).replace("sm_", "ptx_")] += 1
    return dict(found)


def rc_lookups(path, cuobjdump):
    """{"sm_90": Lookup} of an extension deep_ep_cpp, one for each architecture.

    The kernel cached_notify of internode.cu has the lookup and nothing else that would read the
    number of PEs: it reads it with layout v2, not with v1. The combine kernels read the number of
    queue pairs to keep the id in the table (and layout v1 to find the peer's), else not at all.
    Anything else is no lookup that we know: EvidenceError.
    """
    lookups = {}
    with _cubins(path, cuobjdump) as cubins:
        for cubin, arch in cubins:
            lookup = _lookup_of(cubin, cuobjdump, path)
            if lookup is not None:
                lookups[arch] = lookup
    if not lookups:
        raise EvidenceError(
            "{} has no internode kernels: built without NVSHMEM (DISABLE_NVSHMEM)?".format(path)
        )
    return lookups


@contextlib.contextmanager
def _cubins(path, cuobjdump):
    """[(file of machine code, "sm_90")] of a library, in a folder for the while."""
    with tempfile.TemporaryDirectory() as folder:
        # cuobjdump writes into the working directory
        try:
            done = subprocess.run(
                [cuobjdump, "-xelf", "all", os.path.abspath(path)],
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=READING,
            )
        except OSError as error:
            raise EvidenceError("{} does not run: {}".format(cuobjdump, error.strerror)) from None
        except subprocess.TimeoutExpired:
            raise EvidenceError("{} does not end in {} s".format(cuobjdump, READING)) from None
        names = sorted(os.listdir(folder))
        if done.returncode or not names:
            raise EvidenceError("{} holds no device code".format(path))
        arches = [re.search(r"\.(sm_\w+)\.", name).group(1) for name in names]
        yield [(os.path.join(folder, name), arch) for name, arch in zip(names, arches)]


def device_library_releases(path, cuobjdump):
    """{"sm_90": release of NVSHMEM's device library that is linked into it, as "3.6.5"}; an
    architecture without NVSHMEM is left out."""
    found = {}
    with _cubins(path, cuobjdump) as cubins:
        for cubin, arch in cubins:
            line = re.search(
                r"^ *\d+: ([0-9a-f]+) .* {}$".format(DEVICE_LIBRARY),
                _output(["readelf", "-sW", cubin]),
                re.MULTILINE,
            )
            if line:
                bank = [s for s in _sections(cubin) if s[0] == ".nv.constant3"]
                numbers = _integers(cubin, bank[0][2] + int(line.group(1), 16), 3)
                found[arch] = ".".join(str(number) for number in numbers)
    return found


def header_release(path):
    """Release of NVSHMEM's headers that a library's host code was compiled with, as "3.6.5".

    The headers' nvshmemx_init_attr is inline, and hands it to nvshmemi_init_thread by value: in
    registers r8 and r9, followed here back to their constants. None where the code does not tell
    (no such call, a stripped name, another machine than x86-64, code of another kind).
    """
    lines = []
    for line in _output(["objdump", "-d", "--no-show-raw-insn", path]).splitlines():
        lines.append(line)
        if line.endswith(":"):
            lines = []
        elif re.search(r"\tcall\s.*nvshmemi_init_thread", line):
            pair, patch = _constant(path, lines, "r8", 8), _constant(path, lines, "r9", 4)
            if pair is not None and patch is not None:
                return "{}.{}.{}".format(pair & 0xFFFFFFFF, pair >> 32, patch)
    return None


def _constant(path, lines, place, size):
    """Constant that the last instruction of lines which writes a register ("r8") or a place on the
    stack ("0x290(%rsp)") puts there, None if it is none."""
    register = place if "(" in place else r"%[er]?{}[dlx]?".format(place.lstrip("er").rstrip("x"))
    target = re.compile(
        r"\t(mov\w*|xor)\s+(\S+?),({})(\s|$)".format(
            re.escape(place) if "(" in place else register
        )
    )
    for number in range(len(lines) - 1, -1, -1):
        match = target.search(lines[number])
        if match is None:
            continue
        source = match.group(2)
        if match.group(1) == "xor":
            return 0 if source == match.group(3) else None
        if source.startswith("$"):
            return int(source[1:], 16)
        if source.endswith("(%rip)"):
            address = int(lines[number].split("#")[1].split()[0], 16)
            for _, start, offset, length in _sections(path):
                if start and start <= address < start + length:
                    low, high = _integers(path, address - start + offset, 2)
                    return (high << 32 | low) if size == 8 else low
            return None
        if source.endswith("(%rsp)"):
            return _constant(path, lines[:number], source, size)
        if source.startswith("%"):
            return _constant(path, lines[:number], source[1:], size)
        return None
    return None


def cubin_lookup(cubin, cuobjdump):
    """Lookup of a linked cubin with DeepEP's internode kernels, None without them."""
    return _lookup_of(cubin, cuobjdump, cubin)


def _lookup_of(cubin, cuobjdump, path):
    symbols = {}
    for line in _output(["readelf", "-sW", cubin]).splitlines():
        fields = line.split()
        # Num Value Size Type Bind Vis ... Name; Visibility may be followed by [<other>: n]
        if len(fields) > 7 and fields[3] in ("FUNC", "OBJECT"):
            symbols[fields[-1]] = (int(fields[1], 16), int(fields[2], 0), fields[3])
    notify = sorted(name for name in symbols if re.search(r"9internode13cached_notifyI", name))
    combine = sorted(name for name in symbols if re.search(r"9internode7combineI", name))
    if not notify or not combine:
        return None
    if STATE not in symbols or IBGDA_STATE not in symbols:
        raise EvidenceError("{} does not hold NVSHMEM's device states".format(path))
    # Two of the combine kernels are enough: all are of one template
    chosen = [combine[0], combine[-1]]
    loads = _constants(cubin, cuobjdump, notify + chosen)
    state = range(symbols[STATE][0], symbols[STATE][0] + symbols[STATE][1])
    lookup = classify(
        [loads[kernel] for kernel in notify],
        [loads[kernel] for kernel in chosen],
        state,
        symbols[IBGDA_STATE][0],
    )
    if lookup is None:
        raise EvidenceError(
            "{}: the queue-pair lookup in its device code is none that is known (kernels "
            "cached_notify and combine of internode.cu); a new DeepEP or compiler needs a look at "
            "evidence.py".format(path)
        )
    return lookup


def classify(notify, combine, state, ibgda):
    """Lookup from what kernels read, None if it is none that is known.

    notify, combine: for each kernel cached_notify and combine, the set of offsets it reads in
    constant bank 3. state: range of offsets of NVSHMEM's device state there; ibgda: offset of its
    IBGDA state.
    """
    num_rc, npes = ibgda + NUM_RC_PER_PE, state.start + NPES
    # With any other field, an inlined NVSHMEM function could be what reads the number of PEs
    if not all(num_rc in reads and {o for o in reads if o in state} <= {npes} for reads in notify):
        return None
    v2 = {npes in reads for reads in notify}
    bounded = {num_rc in reads for reads in combine}
    if len(v2) != 1 or len(bounded) != 1 or not (True in v2 or True in bounded):
        return None
    return Lookup("v2" if True in v2 else "v1", True in bounded)


def _constants(cubin, cuobjdump, kernels):
    """{kernel: offsets that it reads in constant bank 3}."""
    found, current = {}, None
    text = _output([cuobjdump, "-sass", "-fun", ",".join(kernels), cubin])
    for line in text.splitlines():
        start = re.match(r"\s*Function : (\S+)", line)
        if start:
            current = found.setdefault(start.group(1), set())
        elif current is not None:
            current.update(int(o, 16) for o in re.findall(r"c\[0x3\]\[(0x[0-9a-f]+)\]", line))
    missing = [kernel for kernel in kernels if kernel not in found]
    if missing:
        raise EvidenceError("cuobjdump does not show kernel {}".format(missing[0]))
    return found


def expected_layout(release):
    """Layout of an NVSHMEM release's RC queue pairs, from its version as "3.6.5"."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", release)[:3])
    return "v2" if numbers >= FIRST_V2 else "v1"


def expected_transport(release):
    """SOVERSION of the transport plug-ins that belong to an NVSHMEM release, as "3.6.5"; None for
    one that is newer than what is known."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", release)[:2])
    if numbers > max(TRANSPORT_SOVERSION):
        return None
    return TRANSPORT_SOVERSION[max(first for first in TRANSPORT_SOVERSION if first <= numbers)]


def mapped(library):
    """Paths of this process's libraries whose file name starts so, sorted."""
    with open("/proc/self/maps") as maps:
        paths = [line.rstrip("\n").split(None, 5)[-1] for line in maps if "/" in line]
    return sorted({p for p in paths if os.path.basename(p).startswith(library)})


def nvshmem_release(path):
    """Release of an NVSHMEM host library, asked of itself, as "3.6.5"."""
    parts = [ctypes.c_int() for _ in range(3)]
    ctypes.CDLL(path).nvshmemx_vendor_get_version_info(*[ctypes.byref(p) for p in parts])
    return ".".join(str(part.value) for part in parts)


def loaded(modules):
    """What importing modules (or, for a path, loading a library) in this process has loaded:
    {"modules": {name: [file, version]}} and what snapshot() tells.
    """
    result = {"modules": {}}
    for name in modules:
        if os.sep in name:
            ctypes.CDLL(name)
            continue
        module = importlib.import_module(name)
        version = getattr(module, "__version__", None)
        result["modules"][name] = [getattr(module, "__file__", None), version and str(version)]
        if name == "torch":
            result["torch_cuda"] = module.version.cuda
    result.update(snapshot())
    return result


def snapshot():
    """What this process has mapped: {"nvshmem": {path: release}, "libraries": {name: paths}}."""
    libraries = ("libcuda.so", "libcudart.so", "libibverbs.so", "libmlx5.so")
    return {
        "nvshmem": {path: nvshmem_release(path) for path in mapped("libnvshmem_host.so")},
        "libraries": {library: mapped(library) for library in libraries},
    }


def loaded_by(python, names):
    """loaded() in a process of its own; python is the command that runs it, a list."""
    done = subprocess.run(
        list(python) + [os.path.abspath(__file__)] + list(names),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise EvidenceError(lines[-1] if lines else "exit code {}".format(done.returncode))
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    # Not from this folder: the recipes are no modules of the site's Python
    sys.path.pop(0)
    print(json.dumps(loaded(sys.argv[1:])))
