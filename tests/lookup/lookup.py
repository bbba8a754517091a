"""Does DeepEP's RC lookup name the queue pairs that NVSHMEM made? A verdict without a GPU.

DeepEP's ``ibgda_get_rc(pe, id)`` (csrc/kernels/ibgda_device.cuh) picks a queue pair out of a
table that NVSHMEM fills, in an order that changed with NVSHMEM's device state: in layout v1 all
queue pairs of one peer lie together, in layout v2 (3.5.19 and later) those of one id do. Both
that function and NVSHMEM's own ``ibgda_get_rc`` (non_abi/device/pt-to-pt/ibgda_device.cuh) are
plain C++ to g++, so this module cuts them out verbatim, compiles them against NVSHMEM's real
headers, and runs them on the CPU over one table. NVSHMEM's lookup says which peer owns each
slot; no formula of ours does. DeepEP's has to agree.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
DEEPEP_HEADER = Path("csrc/kernels/ibgda_device.cuh")
NVSHMEM_HEADER = Path("non_abi/device/pt-to-pt/ibgda_device.cuh")
STATE_HEADER = Path("device_host_transport/nvshmem_common_ibgda.h")

STATE_BYTES = 8384
RC_OFFSET = 28

COMPILE_SECONDS = 120
RUN_SECONDS = 60
ERROR_LINES = 15


class LookupError_(Exception):
    """No verdict: a missing header, an unknown layout, a failed cut, compilation or run."""


@dataclass(frozen=True)
class HeaderFacts:
    """What an NVSHMEM header tree says of its IBGDA device state.

    layout: "v1" or "v2". state_bytes: size of the state. rc_offset: offset of num_rc_per_pe in
    it, in bytes. version: NVSHMEM_VENDOR_VERSION (major * 10000 + minor * 100 + patch).
    """

    layout: str
    state_bytes: int
    rc_offset: int
    version: int


@dataclass(frozen=True)
class Shape:
    """One job: npes PEs, NICs in use and RC queue pairs per peer and NIC, and DeepEP's SMs."""

    npes: int
    devices: int
    qps: int
    sms: int

    def __post_init__(self) -> None:
        if self.npes < 2 or self.devices < 1 or self.qps < 1 or self.sms < 2 or self.sms % 2:
            raise ValueError(f"not a shape that DeepEP runs: {self}")

    @property
    def slots(self) -> int:
        """Size of the table of queue pairs."""
        return self.npes * self.devices * self.qps

    @property
    def ids(self) -> int:
        """How many ids, from 0 on, DeepEP's kernels pass for each peer.

        At revision 567632d (csrc/kernels), with SMs / 2 channels (internode.cu:488 and 1746),
        the kernels pass a channel (internode.cu:616, 822, 838, 2122 and 2135) or a channel plus
        the number of channels (internode.cu:1048 and 2253), so 0 to SMs - 1; zero
        (internode.cu:177 and 194, internode_ll.cu:49); to quiet, every queue pair of a peer over
        all NICs (internode.cu:134-138 and 1341-1345, internode_ll.cu:27-32), so 0 to
        qps * devices - 1; and a local expert (internode_ll.cu:267, 337, 912 and 926), of which
        internode_ll.cu:285 admits at most qps. internode.cu:492 admits SMs above qps only where
        qps is the number of channels. At 4214430, 7febc6e, 17cfb81 and 94a9f8f there is also
        pcie.cu, which passes a channel (pcie.cu:362, 534, 544, 694, 1011 and 1021), a channel
        plus their number (pcie.cu:1102) or zero (pcie.cu:76 and 87), and admits any qps from
        the number of channels up (pcie.cu:295).
        """
        return max(self.sms, self.qps * self.devices)


@dataclass(frozen=True)
class Counts:
    """Answers of DeepEP's lookup, one for each rank, each peer but itself and each id.

    right: a slot of that peer. wrong_peer: a slot of another PE, or of the rank itself, which
    NVSHMEM asserts it never looks up. out_of_bounds: an index outside the table.
    """

    right: int = 0
    wrong_peer: int = 0
    out_of_bounds: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.right + other.right,
            self.wrong_peer + other.wrong_peer,
            self.out_of_bounds + other.out_of_bounds,
        )

    @property
    def ok(self) -> bool:
        """True if there were answers and every one was right."""
        return self.right > 0 and self.wrong_peer == 0 and self.out_of_bounds == 0


@dataclass(frozen=True)
class Verdict:
    """What judge() found: the headers, the counts by shape, the first miss of each bad shape."""

    facts: HeaderFacts
    counts: Mapping[Shape, Counts]
    misses: Mapping[Shape, str]

    @property
    def layout(self) -> str:
        """Layout of the NVSHMEM headers, "v1" or "v2"."""
        return self.facts.layout

    @property
    def totals(self) -> Counts:
        """Counts over all shapes."""
        return sum(self.counts.values(), Counts())

    @property
    def ok(self) -> bool:
        """True if every answer in every shape was right."""
        return bool(self.counts) and all(counts.ok for counts in self.counts.values())

    def __str__(self) -> str:
        lines = [f"NVSHMEM {self.facts.version}, layout {self.layout}: {self.totals}"]
        return "\n".join(lines + [f"{shape}: {miss}" for shape, miss in self.misses.items()])


#: (queue pairs, SMs) that callers use: Automodel's default and its dispatcher_num_sms=48, and
#: buffers with half as many queue pairs as SMs
CALLERS = ((24, 20), (24, 48), (10, 20), (12, 24))


def shapes_of(npes: Sequence[int]) -> tuple[Shape, ...]:
    """Shapes of all CALLERS with one NIC and with two, for these numbers of PEs."""
    return tuple(
        Shape(pes, devices, qps, sms)
        for (qps, sms), devices, pes in product(CALLERS, (1, 2), npes)
    )


SHAPES = shapes_of((2, 4, 8, 16, 20))

_NOT_CODE = re.compile(
    r"""(?P<directive>^[ \t]*\#(?:\\\n|[^\n])*)
      | //[^\n]*
      | /\*.*?\*/
      | "(?:\\.|[^"\\\n])*"
      | '(?:\\[^'\n]+|[^'\\\n])'""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)


def _mask(text: str) -> str:
    """Text of the same length without comments, literals and preprocessor lines.

    A ``;`` ends each preprocessor line, so that it bounds a declaration as code would.
    """

    def blank(match: re.Match[str]) -> str:
        spaces = re.sub(r"[^\n]", " ", match.group())
        return spaces[:-1] + ";" if match["directive"] else spaces

    return _NOT_CODE.sub(blank, text)


def _closing(masked: str, start: int) -> int:
    """Offset past the bracket that closes the one at start; -1 if none does."""
    opening = masked[start]
    closing = {"(": ")", "{": "}"}[opening]
    depth = 0
    for match in re.compile(f"[{re.escape(opening + closing)}]").finditer(masked, start):
        depth += 1 if match.group() == opening else -1
        if depth == 0:
            return match.end()
    return -1


def _declaration_start(masked: str, offset: int) -> int:
    """Offset of the first character of the declaration that the code at offset belongs to."""
    start = max(masked.rfind(mark, 0, offset) for mark in ";{}") + 1
    return offset - len(masked[start:offset].lstrip())


def cut_function(text: str, name: str, source: str, *, optional: bool = False) -> str:
    """The one definition of function name in C++ text, verbatim, under a #line of its source.

    Calls and declarations do not count. With optional, "" stands for no definition. Raises
    LookupError_ for none (unless optional), several, or brackets that do not match.
    """
    masked = _mask(text)
    cuts = []
    for match in re.finditer(rf"\b{re.escape(name)}\s*\(", masked):
        after = _closing(masked, match.end() - 1)
        body = re.compile(r"\s*\{").match(masked, after) if after >= 0 else None
        if body is None:
            continue
        end = _closing(masked, body.end() - 1)
        if end < 0:
            raise LookupError_(f"{source}: the braces of {name} do not match")
        cuts.append((_declaration_start(masked, match.start()), end))
    if optional and not cuts:
        return ""
    if len(cuts) != 1:
        raise LookupError_(f"{source}: {len(cuts)} definitions of {name}, expected one")
    return _with_line(text, *cuts[0], source)


def cut_preamble(text: str, source: str) -> str:
    """What stands in namespace deep_ep before its first function: static assertions, constants.

    Verbatim, preprocessor lines included. Raises LookupError_ unless the namespace is opened once
    and a device function follows.
    """
    masked = _mask(text)
    opened = list(re.finditer(r"\bnamespace\s+deep_ep\s*\{", masked))
    function = masked.find("__device__", opened[0].end()) if len(opened) == 1 else -1
    if function < 0:
        raise LookupError_(f"{source}: no single namespace deep_ep with a device function")
    return _with_line(text, opened[0].end(), _declaration_start(masked, function), source)


def _with_line(text: str, start: int, end: int, source: str) -> str:
    line = text.count("\n", 0, start) + 1
    return f'#line {line} "{source}"\n{text[start:end]}\n'


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise LookupError_(f"cannot read {path}: {error.strerror}") from error


def _include_flags(nvshmem_include: Path, cuda_home: Path, verbs_include: Path) -> list[str]:
    """g++'s -I flags; raises LookupError_ if a directory lacks the header it is there for."""
    folders = {
        nvshmem_include: STATE_HEADER,
        verbs_include: Path("infiniband/mlx5dv.h"),
        cuda_home / "include": Path("cuda_runtime_api.h"),
    }
    for folder, header in folders.items():
        if not (folder / header).is_file():
            raise LookupError_(f"no {header} in {folder}")
    return [f"-I{folder.resolve()}" for folder in folders]


def _command(command: Sequence[str], what: str, folder: Path, seconds: int, stdin: str) -> str:
    """Standard output of a command run in folder; LookupError_ has the last lines it printed."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LookupError_(f"{what}: {error}") from error
    if done.returncode != 0:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-ERROR_LINES:])
        raise LookupError_(f"{what}: exit status {done.returncode}\n{last}")
    return done.stdout


def _build_and_run(
    sources: Sequence[str], flags: Sequence[str], what: str, folder: Path, stdin: str = ""
) -> str:
    """Output of the program that g++ makes of our sources and the cuts in folder."""
    compiler = [
        "g++",
        "-std=c++17",
        # NVSHMEM's assertions are part of its lookup
        "-UNDEBUG",
        # Else NVSHMEM 3.5.19 and 3.5.21 define the device state in every translation unit
        "-D__CUDACC_RDC__",
        # Warnings about NVIDIA's headers would crowd out an error
        "-w",
        f"-I{folder}",
        *flags,
        *(str(SOURCES / source) for source in sources),
        "-o",
        str(folder / "program"),
    ]
    _command(compiler, f"cannot compile {what}", folder, COMPILE_SECONDS, "")
    return _command([str(folder / "program")], f"cannot run {what}", folder, RUN_SECONDS, stdin)


def header_facts(nvshmem_include: Path, cuda_home: Path, verbs_include: Path) -> HeaderFacts:
    """Facts of an NVSHMEM header tree, from a program compiled against it.

    nvshmem_include: NVSHMEM's include directory. cuda_home: CUDA, with include/ in it.
    verbs_include: a directory with infiniband/mlx5dv.h. Raises LookupError_ if a header is missing
    or does not compile, if the device state is neither v1 nor v2, or if its size or the offset of
    num_rc_per_pe is not the one of both.
    """
    flags = _include_flags(Path(nvshmem_include), Path(cuda_home), Path(verbs_include))
    with tempfile.TemporaryDirectory(prefix="lookup-") as folder:
        what = f"the probe of {nvshmem_include}"
        output = _build_and_run(["header_probe.cpp"], flags, what, Path(folder))
    return read_facts(output, str(nvshmem_include))


def read_facts(line: str, source: str) -> HeaderFacts:
    """Facts from the line that compare.h prints of a header tree; errors as header_facts."""
    name, is_v1, state_bytes, rc_offset, version = line.split()
    # The mangled name has its length in front
    layout = {"nvshmemi_ibgda_device_state_v1": "v1", "nvshmemi_ibgda_device_state_v2": "v2"}.get(
        name.lstrip("0123456789"), ""
    )
    if not layout or (layout == "v1") != (is_v1 == "1"):
        raise LookupError_(f"{source}: the device state is {name}, neither v1 nor v2")
    facts = HeaderFacts(layout, int(state_bytes), int(rc_offset), int(version))
    if (facts.state_bytes, facts.rc_offset) != (STATE_BYTES, RC_OFFSET):
        raise LookupError_(
            f"{source}: {facts}, expected a state of {STATE_BYTES} bytes with "
            f"num_rc_per_pe at {RC_OFFSET}"
        )
    return facts


def header_layout(nvshmem_include: Path, cuda_home: Path, verbs_include: Path) -> str:
    """Layout of an NVSHMEM header tree, "v1" or "v2"; arguments and errors of header_facts."""
    return header_facts(nvshmem_include, cuda_home, verbs_include).layout


def judge(
    deepep_tree: Path,
    nvshmem_include: Path,
    cuda_home: Path,
    verbs_include: Path,
    *,
    workdir: Path,
    shapes: Sequence[Shape] = SHAPES,
) -> Verdict:
    """Run DeepEP's lookup against NVSHMEM's on the CPU, over every shape.

    deepep_tree: root of a DeepEP source tree, patched or not. workdir: where to leave the cuts and
    the program, in a new folder for each call; made if missing. The other paths are those of
    header_facts. Takes some seconds of one core, nearly all in g++. Only the peer is judged, not
    how evenly the ids spread over that peer's queue pairs.

    Raises LookupError_ as header_facts does; if a function is not defined exactly once; with g++'s
    last lines if DeepEP's lookup, its static assertions or NVSHMEM's lookup do not compile; and if
    NVSHMEM's lookup leaves the table, gives one slot to two PEs or never reaches a slot, for then
    it cannot be the judge.
    """
    deepep_tree, nvshmem_include = Path(deepep_tree), Path(nvshmem_include)
    facts = header_facts(nvshmem_include, cuda_home, verbs_include)
    flags = _include_flags(nvshmem_include, Path(cuda_home), Path(verbs_include))

    deepep, nvshmem = _read(deepep_tree / DEEPEP_HEADER), _read(nvshmem_include / NVSHMEM_HEADER)
    deepep_name, nvshmem_name = f"DeepEP/{DEEPEP_HEADER}", f"NVSHMEM/{NVSHMEM_HEADER}"
    Path(workdir).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="judge-", dir=workdir)).resolve()
    (folder / "deepep_cut.inc").write_text(
        cut_preamble(deepep, deepep_name)
        + cut_function(deepep, "ibgda_get_state", deepep_name)
        + cut_function(deepep, "ibgda_get_rc_impl", deepep_name, optional=True)
        + cut_function(deepep, "ibgda_get_rc", deepep_name),
        encoding="utf-8",
    )
    (folder / "nvshmem_cut.inc").write_text(
        cut_function(nvshmem, "ibgda_get_state", nvshmem_name)
        + cut_function(nvshmem, "ibgda_get_rc", nvshmem_name),
        encoding="utf-8",
    )

    output = _build_and_run(
        ["judge.cpp", "deepep_lookup.cpp", "nvshmem_lookup.cpp"],
        flags,
        f"{deepep_tree} against {nvshmem_include}",
        folder,
        jobs(shapes),
    )
    return Verdict(facts, *read_answers(shapes, output.splitlines()))


def jobs(shapes: Sequence[Shape]) -> str:
    """What compare.h reads of the shapes, one a line."""
    return "".join(f"{s.npes} {s.devices} {s.qps} {s.ids}\n" for s in shapes)


def read_answers(
    shapes: Sequence[Shape], lines: Sequence[str]
) -> tuple[Mapping[Shape, Counts], Mapping[Shape, str]]:
    """Counts and first misses by shape, from the lines that compare.h prints of jobs(shapes).

    Raises LookupError_ unless there is one line of numbers for each shape, with an answer for
    each rank, each peer but itself and each id.
    """
    if len(lines) != len(shapes):
        raise LookupError_(f"{len(lines)} answers for {len(shapes)} shapes: {lines[-3:]}")
    counts, misses = {}, {}
    for shape, line in zip(shapes, lines):
        try:
            right, wrong_peer, out_of_bounds, *miss = map(int, line.split())
        except ValueError:
            raise LookupError_(f"no answer for {shape}: {line}") from None
        counts[shape] = Counts(right, wrong_peer, out_of_bounds)
        asked = shape.npes * (shape.npes - 1) * shape.ids
        if right + wrong_peer + out_of_bounds != asked or (right == asked) != (not miss):
            raise LookupError_(f"not {asked} answers for {shape}: {line}")
        if miss:
            rank, pe, id_, index, owner = miss
            where = f"of PE {owner}" if owner >= 0 else f"outside the {shape.slots} slots"
            misses[shape] = f"rank {rank} asks for PE {pe}, id {id_}: index {index}, {where}"
    return counts, misses
