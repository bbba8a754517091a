"""Which peer owns the queue pair that DeepEP picks? Both lookups asked on one GPU, no fabric.

DeepEP's header is compiled whole, against the NVSHMEM in use, and NVSHMEM's own lookup says which
PE owns each slot of the table. No formula of ours takes part. Addresses are computed and compared;
nothing is read through one.
"""

import contextlib
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from lookup import lookup
from spack_repo.deepep import evidence

from . import qp_build
from .errors import UsageError
from .report import Report

#: Numbers of PEs: with the low-latency kernels every rank is one, else every node
NPES = (2, 4, 8, 16, 20, 32, 64, 128, 160)
SHAPES = lookup.shapes_of(NPES)

LAYOUT, BOUND = "deep-ep-564-rc-layout.patch", "deep-ep-rc-bound.patch"

#: Arms of --arms: name, patches, and what is expected of it: all right, some answers another
#: peer's, or none of those but some outside the table
ARMS = (
    ("control", (), "wrong peer"),
    ("#564 alone", (LAYOUT,), "out of bounds"),
    ("treatment", (LAYOUT, BOUND), "right"),
)
#: The same on an NVSHMEM of layout v1
V1_ARMS = (("control", (), "right"), ("treatment", (LAYOUT, BOUND), "right"))

WHY = {
    "wrong peer": "messages for one peer go to another's queue pair, and the first internode "
    "dispatch times out",
    "out of bounds": "memory behind the table is taken for a queue pair: illegal accesses, "
    "depending on the traffic",
}
ACTION = (
    "build DeepEP with patches/{} and patches/{}, as the recipe does, or use an NVSHMEM before "
    "3.5.19".format(LAYOUT, BOUND)
)


def add_arguments(parser):
    """Options of qp-layout."""
    add = parser.add_argument
    add(
        "--deepep",
        metavar="PATH",
        help="DeepEP source tree, or its csrc/kernels/ibgda_device.cuh; without it, the recipe's "
        "revision is fetched by git and patched as the recipe does",
    )
    add("--nvshmem", metavar="PREFIX", help="default: $NVSHMEM_DIR, else this Python's wheel")
    add("--cuda", metavar="PREFIX", help="default: $CUDA_HOME, nvcc on PATH, /usr/local/cuda")
    add("--verbs", metavar="PREFIX", help="rdma-core; default: NVSHMEM's, else the system's")
    add(
        "--arms",
        action="store_true",
        help="control, #564 alone and treatment side by side; PATH is then an unpatched tree",
    )
    add(
        "--nvshmem-v1",
        metavar="PREFIX",
        help="with --arms: also control and treatment on this NVSHMEM before 3.5.19",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--cpu", action="store_true", help="judge on the CPU (g++), no GPU needed")
    where.add_argument("--build-only", type=Path, metavar="DIR", help="compile into DIR, no GPU")
    where.add_argument("--prebuilt", type=Path, metavar="DIR", help="run what is in DIR")
    add("--arch", metavar="SM", help="architecture to compile for; default: this GPU's, or sm_90")


def run(options):
    """Judges. Returns the Report: passes if every lookup is right, and with --arms if the
    treatment's are and the faults of the others are seen."""
    report = Report("qp-layout")
    report.facts["arms"] = []
    if options.prebuilt:
        given = ("deepep", "nvshmem", "nvshmem_v1", "cuda", "verbs", "arms", "arch")
        if any(getattr(options, name) for name in given):
            raise UsageError("--prebuilt takes what --build-only compiled, and no option of it")
        qp_build.gpu_arch()
        _run_programs(report, qp_build.read_programs(options.prebuilt), options.prebuilt)
        return report
    if options.nvshmem_v1 and not options.arms:
        raise UsageError("--nvshmem-v1 is for --arms; one NVSHMEM alone is named by --nvshmem")
    # A missing GPU is the first thing to say
    arch = options.arch
    if not (options.cpu or options.build_only):
        arch = arch or qp_build.gpu_arch()
    cuda = qp_build.find_cuda(options.cuda, compiler=not options.cpu)
    arms = _arms(options)
    verbs = qp_build.find_verbs(options.verbs, arms[0]["nvshmem"])
    if options.cpu:
        _run_on_cpu(report, arms, cuda, verbs)
        return report
    with contextlib.ExitStack() as stack:
        folder = options.build_only or stack.enter_context(
            tempfile.TemporaryDirectory(prefix="qp-layout-")
        )
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            begin = time.monotonic()
            made = qp_build.make_programs(arms, folder, cuda, verbs, arch or "sm_90")
        except OSError as error:
            raise UsageError("cannot write {}: {}".format(folder, error.strerror)) from None
        report.facts["compile_seconds"] = round(time.monotonic() - begin, 1)
        if options.build_only:
            _tell_built(report, made)
        else:
            _run_programs(report, made, folder)
    return report


def _arms(options):
    """Arms to judge, as make_programs takes them, with "expect"."""
    include = qp_build.find_nvshmem(options.nvshmem)
    release = qp_build.nvshmem_release(include)
    header = qp_build.given_header(options.deepep) if options.deepep else qp_build.pinned_header()

    def arm(name, patches, expect, nvshmem):
        return {
            "name": name,
            "header": header,
            "patches": list(patches),
            "nvshmem": nvshmem,
            "expect": expect,
        }

    if not options.arms:
        # The recipe patches by what NVSHMEM's release makes necessary
        needed = () if options.deepep or release < evidence.FIRST_V2 else (LAYOUT, BOUND)
        return [arm("pair", needed, "right", include)]
    if release < evidence.FIRST_V2:
        raise UsageError(
            "--arms shows a fault that NVSHMEM {} does not have: name one since {} by "
            "--nvshmem".format(_dotted(release), _dotted(evidence.FIRST_V2))
        )
    arms = [arm(*entry, nvshmem=include) for entry in ARMS]
    if options.nvshmem_v1:
        old = qp_build.nvshmem_include(options.nvshmem_v1)
        number = qp_build.nvshmem_release(old)
        if number >= evidence.FIRST_V2:
            raise UsageError(
                "--nvshmem-v1 names NVSHMEM {}, which is not before {}".format(
                    _dotted(number), _dotted(evidence.FIRST_V2)
                )
            )
        arms += [
            arm("{} on {}".format(name, _dotted(number)), patches, expect, old)
            for name, patches, expect in V1_ARMS
        ]
    return arms


def _dotted(release):
    return ".".join(map(str, release))


def _run_on_cpu(report, arms, cuda, verbs):
    if not shutil.which("g++"):
        raise UsageError("--cpu compiles the lookups by g++, which is not on PATH")
    with tempfile.TemporaryDirectory(prefix="qp-layout-") as work:
        for i, arm in enumerate(arms):
            tree = Path(work) / "tree-{}".format(i)
            qp_build.patched(arm["header"], arm["patches"], tree)
            begin = time.monotonic()
            try:
                verdict = lookup.judge(
                    tree, arm["nvshmem"], cuda, verbs, workdir=Path(work), shapes=SHAPES
                )
            except lookup.LookupError_ as error:
                _tell_failed(report, arm, str(error))
                continue
            seconds = round(time.monotonic() - begin, 1)
            _tell(report, arm, verdict, {"run_seconds": seconds})
    report.facts["judged_on"] = {"name": "the CPU"}
    report.add("cost of a lookup", "skip", "its instructions and time are those of a GPU")
    _tell_grid(report)


def _run_programs(report, made, folder):
    """Runs the program of each arm; an arm that fails leaves the others' results."""
    costs = []
    for arm in made:
        if "error" in arm:
            _tell_failed(report, arm, "does not compile\n" + arm["error"])
            continue
        begin = time.monotonic()
        program = (Path(folder) / arm["program"]).absolute()
        try:
            output = qp_build.command([program], qp_build.RUN_DEADLINE, lookup.jobs(SHAPES))
            verdict, gpu, times = read_output(output, SHAPES)
        except qp_build.Failed as error:
            if error.code == 2:
                raise UsageError(str(error)) from None
            _tell_failed(report, arm, str(error))
            continue
        except lookup.LookupError_ as error:
            _tell_failed(report, arm, str(error))
            continue
        report.facts["judged_on"] = gpu
        cost = {
            "compile_seconds": arm["seconds"],
            "run_seconds": round(time.monotonic() - begin, 1),
            "instructions": arm.get("instructions"),
            "lookup": times,
        }
        _tell(report, arm, verdict, cost)
        costs.append((arm, times))
    for arm, times in costs:
        _tell_cost(report, arm, times)
    _tell_grid(report)
    report.notes.append(
        "Time: a chain of lookups by one thread, each waiting for the one before, beyond the "
        "same chain of an empty function; 16 PEs, 24 QPs; median, and least to most. "
        "Instructions: of a function that does one lookup, without its return."
    )


def read_output(output, shapes):
    """Reads what the program printed: (Verdict, {"name", "capability",
    "highest_mhz"}, times).

    times: of a lookup beyond an empty function, {"ns": {"median", "min", "max"}, "clocks": ...,
    "mhz": SM clock while measured, "repeats"}. Raises LookupError_ if it is not all there.
    """
    lines = {"header": [], "gpu": [], "shape": [], "time": []}
    for line in output.splitlines():
        word, _, rest = line.partition(" ")
        if word not in lines:
            raise lookup.LookupError_("unexpected line of the program: {}".format(line))
        lines[word].append(rest)
    if [len(lines[word]) for word in ("header", "gpu", "time")] != [1, 1, 2]:
        raise lookup.LookupError_("the program's answer is cut short")
    facts = lookup.read_facts(lines["header"][0], "the program")
    verdict = lookup.Verdict(facts, *lookup.read_answers(shapes, lines["shape"]))
    capability, khz, name = lines["gpu"][0].split(None, 2)
    gpu = {"name": name, "capability": capability, "highest_mhz": int(khz) // 1000}
    return verdict, gpu, _times(lines["time"])


def _times(lines):
    series = {}
    try:
        for line in lines:
            name, *numbers = line.split()
            values = [float(number) for number in numbers]
            series[name] = list(zip(values[::2], values[1::2]))
        pairs = list(zip(series["lookup"], series["nothing"]))
        mhz = statistics.median(1000 * clocks / ns for (ns, clocks), _ in pairs)
        if {len(times) for times in series.values()} != {len(pairs)}:
            raise ValueError
    except (ValueError, KeyError, ZeroDivisionError):
        raise lookup.LookupError_("the program's times are not complete") from None
    result = {"mhz": round(mhz), "repeats": len(pairs)}
    for i, name in enumerate(("ns", "clocks")):
        values = [with_lookup[i] - without[i] for with_lookup, without in pairs]
        result[name] = {
            "median": round(statistics.median(values), 2),
            "min": round(min(values), 2),
            "max": round(max(values), 2),
        }
    return result


def met(expect, totals):
    """Whether counts are what is expected of an arm (see ARMS)."""
    if expect == "right":
        return totals.ok
    if expect == "wrong peer":
        return totals.wrong_peer > 0
    return totals.out_of_bounds > 0 and totals.wrong_peer == 0


def _tell(report, arm, verdict, cost):
    """Rows of one arm: one for each caller's queue pairs and SMs, and the total."""
    callers = {}
    for shape, counts in verdict.counts.items():
        key = (shape.qps, shape.sms)
        callers[key] = callers.get(key, lookup.Counts()) + counts
    alone = arm["name"] == "pair"
    pair = "{}; NVSHMEM {} ({}, layout {})".format(
        _deepep(arm), _dotted_number(verdict.facts.version), arm["nvshmem"], verdict.layout
    )
    if alone:
        report.add("pair", "info", pair)
    for (qps, sms), counts in callers.items():
        result = ("pass" if counts.ok else "fail") if alone else "info"
        report.add(_row(arm, "{} QPs, {} SMs".format(qps, sms)), result, _words(counts))
    totals = verdict.totals
    good = met(arm["expect"], totals)
    found = _words(totals)
    if not alone:
        expected = "all right" if arm["expect"] == "right" else "some " + arm["expect"]
        found += ", as expected" if good else ": expected " + expected
    misses = ["{}: {}".format(_shape(shape), miss) for shape, miss in verdict.misses.items()]
    seen = "; ".join([pair] + misses[:1])
    finding = {}
    if not good and arm["expect"] == "right":
        kinds = [kind for kind in WHY if getattr(totals, kind.replace(" ", "_"))]
        finding = {
            "why": "; ".join(WHY[kind] for kind in kinds),
            "reference": "DeepEP#564, DeepEP#696",
            "action": ACTION,
        }
    report.add(
        _row(arm, "all"),
        "pass" if good else "fail",
        found,
        evidence=seen,
        data=dict(vars(totals)),
        **finding,
    )
    report.facts["arms"].append(
        dict(
            {key: str(arm[key]) for key in ("name", "header", "nvshmem", "expect")},
            patches=list(arm["patches"]),
            release=_dotted_number(verdict.facts.version),
            layout=verdict.layout,
            totals=dict(vars(totals)),
            shapes=[
                dict(vars(shape), first_miss=verdict.misses.get(shape, ""), **vars(counts))
                for shape, counts in verdict.counts.items()
            ],
            **cost,
        )
    )


def _tell_failed(report, arm, text):
    first, _, rest = text.partition("\n")
    report.add(
        _row(arm, "all"),
        "fail",
        "no verdict: {}".format(first),
        evidence="{}; NVSHMEM in {}; {}".format(_deepep(arm), arm["nvshmem"], rest),
    )


def _tell_cost(report, arm, times):
    ns, clocks = times["ns"], times["clocks"]
    report.add(
        _row(arm, "time"),
        "info",
        "{:.1f} ns a lookup ({:.1f} to {:.1f}), {:.0f} clocks at {} MHz".format(
            ns["median"], ns["min"], ns["max"], clocks["median"], times["mhz"]
        ),
    )
    _tell_instructions(report, arm)


def _tell_instructions(report, arm):
    if arm.get("instructions") is None:
        report.add(
            _row(arm, "instructions"), "skip", arm.get("instructions_missing", "not counted")
        )
    else:
        report.add(
            _row(arm, "instructions"), "info", "{} a lookup (SASS)".format(arm["instructions"])
        )


def _tell_built(report, made):
    for arm in made:
        if "error" in arm:
            first, _, rest = arm["error"].partition("\n")
            report.add(_row(arm, "program"), "fail", "does not compile: " + first, evidence=rest)
            continue
        found = "{}, NVSHMEM {}, {:.0f} s of compiler time".format(
            arm["program"], arm["release"], arm["seconds"]
        )
        data = {"instructions": arm.get("instructions")}
        report.add(_row(arm, "program"), "pass", found, data=data)
        _tell_instructions(report, arm)
    report.notes.append(
        "Compiled in {} s. To judge, run --prebuilt on a machine with a GPU.".format(
            report.facts["compile_seconds"]
        )
    )


def _tell_grid(report):
    if "judged_on" not in report.facts:
        return
    report.notes.append(
        "Judged on {}: {} shapes of {} to {} PEs, with one NIC and two; for every rank, every "
        "peer and every id that DeepEP's kernels pass.".format(
            report.facts["judged_on"]["name"], len(SHAPES), NPES[0], NPES[-1]
        )
    )


def _row(arm, name):
    """Name of a row: arms of --arms have theirs in front."""
    return name if arm["name"] == "pair" else "{}: {}".format(arm["name"], name)


def _words(counts):
    return "{:,} right, {:,} wrong peer, {:,} out of bounds".format(
        counts.right, counts.wrong_peer, counts.out_of_bounds
    )


def _deepep(arm):
    patches = " + ".join(arm["patches"])
    return "{}{}".format(arm["header"], " with " + patches if patches else "")


def _shape(shape):
    return "{} PEs, {} NIC{}, {} QPs, {} SMs".format(
        shape.npes, shape.devices, "s" * (shape.devices > 1), shape.qps, shape.sms
    )


def _dotted_number(version):
    return _dotted((version // 10000, version // 100 % 100, version % 100))
