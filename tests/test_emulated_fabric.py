"""The emulated fabric without a GPU: what NVSHMEM asks of it, by the same entry points."""

import ctypes
import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
from deepep_ci import paths
from dispatch.emulated_fabric import build as fabric
from dispatch.emulated_fabric.environment import HOST, environment

pytestmark = pytest.mark.compile

SOURCES = Path(__file__).resolve().parent / "emulated_fabric"
FLAVOURS = ("plain", *fabric.SANITIZERS)
REFUSED, CUDA_ERROR = 70, 71

#: Cases that the self test has (cases.cpp); sleeper is ended from outside
CASES = [n for n in re.findall(r'^    {"(\w+)"', (SOURCES / "cases.cpp").read_text(), re.M)]

#: Defect -> cases that have to turn red
SEEN_BY = {
    "opcode_size": ["masked_compare_swap", "ring_wrap"],
    "ignored_rkey": ["remote_keys", "two_nics"],
    "swapped_peers": ["write", "many_peers"],
    "lost_atomic": ["atomics", "masked_fetch_add", "masked_compare_swap", "many_threads"],
    "flag_before_data": ["flag_after_data"],
    "no_ring_wrap": ["ring_wrap"],
    "wrong_cqe_index": ["write", "completion"],
    "ignored_byte_count": ["inline_write"],
    "dropped_split_tail": ["split_write"],
    "wrong_endian_add": ["atomics", "masked_fetch_add"],
}

#: What is asked for (refusals.cpp) -> words of the sentence
REFUSALS = {
    "general_command": "DevX command 0x102 is not emulated",
    "capability": "capability type 4 (op_mod 0x9) is not emulated",
    "create": "DevX command 0x904 creates an object that is not emulated",
    "plain_cq": "only a collapsed CQ that may overrun",
    "service_type": "service type 0x3 is not emulated",
    "short_mailbox": "too short",
    "state": "RTR2RTS_QP of queue pair 0x100, which is not in state RTR",
    "remote_qpn": "to 0x9999, which nobody made",
    "remote_lid": "at LID 2, but that is at LID 1",
    "dmabuf_umem": "set NVSHMEM_IB_DISABLE_DMABUF=1",
    "dmabuf_mr": "set NVSHMEM_IB_DISABLE_DMABUF=1",
    "verbs_qp": "set NVSHMEM_REMOTE_TRANSPORT=none",
    "init_obj": "mlx5dv_init_obj of type 0x10 is not emulated",
    "send_opcode": "opcode 0xa of WQE 0 of queue pair 0x100 is not emulated",
    "masked_opmod": "opmod 0xa of the masked atomic 0x15 is not emulated",
    "empty_data": "byte count 0, which means 2^31 bytes, is not emulated",
    "overrun": "17 WQEBBs ahead of a ring of 16",
    "dci_doorbell": "is a DCI: data on DCIs is not emulated",
}

#: Variables of the emulator that are wrong -> words of the sentence
WRONG = [
    ({"EMULATED_FABRIC_SEGMENT": ""}, "EMULATED_FABRIC_SEGMENT has to name the file"),
    ({"EMULATED_FABRIC_SEGMENT": "/no/such/folder/file"}, "cannot open /no/such/folder/file"),
    ({"EMULATED_FABRIC_RANK": "1"}, 'EMULATED_FABRIC_RANK is "1", expected a number from 0 to 0'),
    ({"EMULATED_FABRIC_NICS": "9"}, "expected a number from 1 to 8"),
    ({"EMULATED_FABRIC_PROCESSES": "two"}, 'is "two", expected a number'),
    ({"EMULATED_FABRIC_COPY": "dma"}, "expected cuda or memcpy"),
    ({"EMULATED_FABRIC_FAULT": "gremlin=3"}, 'there is no fault "gremlin"'),
    ({"EMULATED_FABRIC_FAULT": "delay"}, "lacks a number"),
    ({"EMULATED_FABRIC_FAULT": "delay=5x"}, "goes on where it should end"),
    ({"EMULATED_FABRIC_FAULT": "kill-peer=5"}, "has to say which rank"),
    ({"EMULATED_FABRIC_FAULT": "kill-peer=1@5"}, "a rank beyond the 1 processes"),
    ({"EMULATED_FABRIC_FAULT": "flap-port=0@5"}, '":MS" goes with flap-port'),
    ({"EMULATED_FABRIC_FAULT": "delay=5:5"}, '":MS" goes with flap-port'),
    ({"EMULATED_FABRIC_FAULT": "drop-completion=0"}, "counts from 1"),
]


@pytest.fixture(scope="session")
def fabric_cache():
    folder = paths.cache() / "tests" / "emulated-fabric"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def built(fabric_cache, verbs_include, cuda_home):
    """Function (flavour, defect) -> (folder of the libraries, the self test's program)."""

    def compiler_has(sanitizer: str) -> bool:
        command = ["g++", f"-fsanitize={sanitizer}", "-x", "c++", "-", "-o", "/dev/null"]
        return subprocess.run(command, input=b"int main(){}", capture_output=True).returncode == 0

    @cache
    def make(flavour: str = "plain", defect: str = "") -> tuple[Path, Path]:
        sanitizer = "" if flavour == "plain" else flavour
        if sanitizer and not compiler_has(sanitizer):
            pytest.skip(f"g++ has no runtime for -fsanitize={sanitizer} here")
        # A defect is in the libraries; before the lock, which does not nest
        same_program = make()[1] if defect else None
        # Two workers share the processors: they would only compile the same
        with open(fabric_cache / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            libraries = fabric.build(
                fabric_cache,
                verbs_include,
                cuda_home / "include",
                defect=defect,
                sanitizer=sanitizer,
            )
            return libraries, same_program or program(libraries, sanitizer)

    def program(libraries: Path, sanitizer: str) -> Path:
        sources = [s for s in sorted(SOURCES.glob("*.cpp")) if s.name not in ALONE]
        flags = ["-std=c++17", "-O0", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread"]
        flags += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"] if sanitizer else []
        content = hashlib.sha256(" ".join(flags).encode())
        for source in sorted(SOURCES.iterdir()):
            content.update(source.read_bytes())
        target = fabric_cache / f"self-test-{content.hexdigest()[:16]}"
        if not target.is_file():
            fresh = target.with_suffix(f".new.{os.getpid()}")
            compile_program(sources, fresh, libraries, flags, verbs_include, cuda_home)
            fresh.rename(target)
        return target

    return make


#: Sources that are not the self test's program
ALONE = ("fake_driver.cpp", "preload_probe.cpp")


def compile_program(sources, target, libraries, flags, verbs_include, cuda_home):
    include = ["-isystem", verbs_include, "-isystem", cuda_home / "include"]
    # One process a source, as many at once as there are processors
    objects = [target.with_name(f"{target.name}.{s.stem}.o") for s in sources]
    jobs = [
        subprocess.Popen(["g++", *flags, *include, "-c", source, "-o", each])
        for source, each in zip(sources, objects)
    ]
    assert [job.wait() for job in jobs] == [0] * len(jobs)
    command = ["g++", *flags, *objects, "-o", target, f"-L{libraries}", "-lmlx5", "-ldl"]
    subprocess.run(command, check=True)
    for each in objects:
        each.unlink()


def run(built, *arguments, flavour="plain", defect="", seconds=60, **variables):
    """The self test's program with the build's libraries."""
    libraries, program = built(flavour, defect)
    variables = {
        "LD_LIBRARY_PATH": str(libraries),
        # A leak is of no matter to a process that ends by _exit
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "halt_on_error=1",
        **variables,
    }
    return subprocess.run(
        [program, *arguments],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def reports(folder: Path) -> dict[int, dict]:
    """{rank: its table of queue pairs}"""
    tables = [json.loads(path.read_text()) for path in folder.glob("queue-pairs-rank-*.json")]
    assert all(table["format"] == "emulated-fabric-queue-pairs/1" for table in tables)
    return {table["rank"]: table for table in tables}


@pytest.mark.parametrize("case", [c for c in CASES if c != "sleeper"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_case(built, flavour, case):
    done = run(built, case, flavour=flavour)
    assert done.returncode == 0, done.stderr


def test_the_program_has_the_cases(built):
    assert run(built, "--list").stdout.split() == CASES


def test_every_defect_is_looked_for():
    assert set(SEEN_BY) == set(fabric.defects())
    assert len(SEEN_BY) >= 10


@pytest.mark.parametrize("defect", SEEN_BY)
def test_defect_turns_the_self_test_red(built, defect):
    for case in SEEN_BY[defect]:
        done = run(built, case, defect=defect, SELF_TEST_SECONDS="3")
        # By its own assertion, not by a crash or by a case that cannot start
        assert done.returncode == 1, f"{case} is green with {defect}"
        assert "self test: rank" in done.stderr, done.stderr


@pytest.mark.parametrize("what", REFUSALS)
def test_refused(built, what):
    done = run(built, "--refused", what)
    assert done.returncode == REFUSED, done.stderr
    assert REFUSALS[what] in done.stderr


def test_refusals_are_told_from_their_absence(built):
    """The program of test_refused, where nothing is asked for."""
    done = run(built, "--refused", "nothing")
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("variables, words", WRONG, ids=[words for _, words in WRONG])
def test_wrong_variable(built, variables, words):
    done = run(built, "--refused", "nothing", **variables)
    assert done.returncode == REFUSED, done.stderr
    assert words in done.stderr


def test_no_cuda_driver(built):
    """Where there is no driver, the NIC says so and leaves with its own status."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        done = run(built, "--refused", "state", EMULATED_FABRIC_COPY="cuda")
        assert done.returncode == CUDA_ERROR
        assert "the CUDA driver cannot be opened" in done.stderr
    else:
        pytest.skip("this machine has a CUDA driver")


def test_a_rank_is_taken_once(built, tmp_path):
    segment = tmp_path / "segment"
    first = run(built, "start_as_nvshmem", EMULATED_FABRIC_SEGMENT=str(segment))
    assert first.returncode == 0, first.stderr
    # The program removes the file only if it chose its name
    second = run(built, "start_as_nvshmem", EMULATED_FABRIC_SEGMENT=str(segment))
    assert second.returncode == 1
    assert f"rank 0 of {segment} is taken by process" in second.stderr


def test_report_names_who_carried_what(built, tmp_path):
    done = run(built, "many_peers", EMULATED_FABRIC_REPORT_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    tables = reports(tmp_path)
    assert sorted(tables) == list(range(6))
    for rank, table in tables.items():
        assert table["finished"] and table["fatal"] is None
        pairs = table["queue_pairs"]
        assert sorted(p["user_index"] for p in pairs) == [
            slot for slot in range(12) if slot % 6 != rank
        ]
        for pair in pairs:
            # As NVSHMEM numbers them, and as they were connected and used
            assert pair["made_for_pe"] == pair["user_index"] % 6 == pair["peer_rank"]
            assert pair["id"] == pair["user_index"] // 6
            assert pair["aimed_at_rank"] == {str(pair["peer_rank"]): 1}
            assert (pair["writes"], pair["nops"], pair["bytes"]) == (1, 2, 25000)
            assert pair["rung"] and pair["errors"] == {} and pair["state"] == "RTS"
            assert (pair["pending_wqebbs"], pair["outstanding"]) == (0, 0)


def test_report_shows_wrong_use(built, tmp_path):
    done = run(built, "remote_keys", EMULATED_FABRIC_REPORT_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    used, never_rung = reports(tmp_path)[0]["queue_pairs"], reports(tmp_path)[1]["queue_pairs"]
    for pair in used:
        assert pair["errors"] == {"remote access error": 1, "work request flushed": 1}
        assert pair["first_error"].startswith("remote access error at WQE 0")
        assert pair["state"] == "ERR"
    # The key of this rank's own memory, on a queue pair made for the other
    assert used[2]["aimed_at_rank"] == {"0": 1}
    assert "the key belongs to another rank" in used[2]["first_error"]
    assert {p["rung"] for p in never_rung} == {False}


def test_report_counts_foreign_doorbells_and_wqes(built, tmp_path):
    done = run(built, "foreign", EMULATED_FABRIC_REPORT_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    first, second = reports(tmp_path)[0]["queue_pairs"]
    assert (first["foreign_doorbells"], first["foreign_wqes"]) == (1, 0)
    assert (second["foreign_doorbells"], second["foreign_wqes"]) == (0, 1)
    assert f"rung for queue pair 0x{second['qpn']:x}: ignored" in done.stderr


def test_report_counts_each_operation(built, tmp_path):
    for case, counts in {
        "atomics": {"fetch_adds": 1, "compare_swaps": 2, "nops": 3, "bytes": 0},
        "read": {"reads": 3, "bytes": 10 + 8 + 100001},
        "nothing": {"nops": 80, "dumps": 40},
        "inline_write": {"inline_writes": 8, "bytes": 4 + 8 + 12 + 28 + 29 + 44 + 256 + 900},
        "dropped_completion": {"completions": 2, "dropped_completions": 2},
        "exhausted_queue": {"inline_writes": 2, "pending_wqebbs": 1},
    }.items():
        done = run(built, case, EMULATED_FABRIC_REPORT_DIR=str(tmp_path))
        assert done.returncode == 0, done.stderr
        pair = reports(tmp_path)[0]["queue_pairs"][0]
        assert {name: pair[name] for name in counts} == counts


def test_report_of_a_killed_peer(built, tmp_path):
    done = run(built, "killed_peer", EMULATED_FABRIC_REPORT_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    tables = reports(tmp_path)
    assert tables[1]["fatal"] == "killed on purpose"
    assert tables[0]["fault"] == "kill-peer=1@2"
    assert "the peer's process is gone" in tables[0]["queue_pairs"][0]["first_error"]


@pytest.mark.parametrize("number, fatal", [(signal.SIGTERM, "SIGTERM"), (signal.SIGKILL, None)])
def test_report_of_a_hung_process(built, tmp_path, number, fatal):
    """A launcher ends it; the table is there, at most a second old."""
    libraries, program = built()
    segment = tmp_path / "segment"
    variables = {
        "LD_LIBRARY_PATH": str(libraries),
        "EMULATED_FABRIC_REPORT_DIR": str(tmp_path),
        "EMULATED_FABRIC_SEGMENT": str(segment),
    }
    process = subprocess.Popen(
        [program, "sleeper"],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert process.stdout.readline() == b"asleep\n"
        time.sleep(1.3)
        table = reports(tmp_path)[0]
        assert (table["finished"], table["queue_pairs"][0]["writes"]) == (False, 1)
        assert not table["queue_pairs"][1]["rung"]
        os.kill(table["pid"], number)
        os.kill(reports(tmp_path)[1]["pid"], number)
        process.wait(10)
        assert reports(tmp_path)[0]["fatal"] == fatal
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="session")
def fake_driver(cuda_home, tmp_path_factory):
    """libcuda.so.1 without a GPU, in a folder of its own."""
    target = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    command += ["-isystem", cuda_home / "include", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, SOURCES / "fake_driver.cpp", "-o", target], check=True)
    return target


@pytest.fixture
def on_cuda_path(built, fake_driver):
    """Variables of a run whose NIC copies by the CUDA driver's calls."""
    return {
        "LD_LIBRARY_PATH": f"{built()[0]}:{fake_driver.parent}",
        "EMULATED_FABRIC_COPY": "cuda",
        "FAKE_CUDA_DEVICE": "all",
    }


@pytest.mark.parametrize("case", [c for c in CASES if c != "sleeper"])
@pytest.mark.parametrize("memory", ["heap", "all"], ids=["hostmem", "gpumem"])
def test_case_on_cuda_path(built, on_cuda_path, memory, case):
    """The CUDA engine's calls, and NIC buffers of both memory types, on a driver that copies."""
    done = run(built, case, **{**on_cuda_path, "FAKE_CUDA_DEVICE": memory})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "variables, status, words",
    [
        ({"FAKE_CUDA_FAIL_AT": "3"}, CUDA_ERROR, "CUDA error 700 (the fake driver's error)"),
        ({"FAKE_CUDA_DEVICE": "managed"}, REFUSED, "managed memory at"),
    ],
    ids=["error 700", "managed memory"],
)
def test_failure_on_cuda_path(built, on_cuda_path, variables, status, words):
    done = run(built, "write", **{**on_cuda_path, "SELF_TEST_SECONDS": "3", **variables})
    assert done.returncode == 1
    assert words in done.stderr
    assert f"ended with exit status {status}" in done.stderr


@pytest.fixture(scope="session")
def preload_probe(built, verbs_include, cuda_home, tmp_path_factory):
    libraries, _ = built()
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    sources = [SOURCES / f"{name}.cpp" for name in ("preload_probe", "producer", "support")]
    program = tmp_path_factory.mktemp("preload") / "probe"
    compile_program(sources, program, libraries, flags, verbs_include, cuda_home)
    return program


def test_preload(built, preload_probe, fake_driver, tmp_path):
    libraries, _ = built()
    variables = environment(libraries, tmp_path / "segment", 0, 1, host="node-a", inherited={})
    variables["EMULATED_FABRIC_COPY"] = "memcpy"
    variables["EMULATED_FABRIC_GPU_PCI"] = ""
    done = subprocess.run(
        [preload_probe, fake_driver],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    seen = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert seen == {
        "host": "node-a",
        "short": "-1",
        "peermem": "0",
        "missing": "-1",
        "real": "/usr",
        "nic": "/sys/bus/pci/devices",
        # The preload library's function comes first; what dlsym says depends on its caller
        "next": fabric.PRELOAD,
        "unknown": "0",
        # I/O memory is what the driver cannot take; nothing else is touched
        "uar": "3",
        "other": "7",
    }


def nvshmem_transport() -> Path:
    """NVSHMEM 3.6.5's own IBGDA transport, or a skip with the reason."""
    given = os.environ.get("DEEPEP_TEST_NVSHMEM_LIB")
    name = "nvshmem_transport_ibgda.so.5"
    if given:
        transport = Path(given) / name
        assert transport.is_file(), f"DEEPEP_TEST_NVSHMEM_LIB: {transport} does not exist"
        return transport
    found = sorted((paths.cache() / "tests").glob(f"site/store/*/nvshmem-3.6.5-*/lib/{name}"))
    if not found:
        pytest.skip("no NVSHMEM 3.6.5: set DEEPEP_TEST_NVSHMEM_LIB, or run a test of tier build")
    return found[0]


LOAD = """
import ctypes, os, sys
library = ctypes.CDLL(sys.argv[1], os.RTLD_NOW)
assert library.nvshmemt_init
verbs = ctypes.CDLL("libibverbs.so.1")
for name in sys.argv[2:]:
    getattr(verbs, name)
mapped = {line.split()[-1] for line in open("/proc/self/maps")}
print(*sorted(m for m in mapped if "libmlx5" in m or "libibverbs" in m), sep="\\n")
"""


def test_nvshmem_transport_loads(built, tmp_path):
    """Each versioned import of the real transport resolves, and to nothing but the emulator."""
    transport = nvshmem_transport()
    libraries, _ = built()
    found_by_name = sorted(set(re.findall(rb"\0(ibv_[a-z_]+)(?=\0)", transport.read_bytes())))
    assert b"ibv_get_device_list" in found_by_name and len(found_by_name) > 15
    variables = environment(libraries, tmp_path / "segment", 0, 1, inherited={})
    done = subprocess.run(
        [sys.executable, "-c", LOAD, transport, *(n.decode() for n in found_by_name)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(libraries / n) for n in (fabric.VERBS, fabric.MLX5)]


def test_nvshmem_transport_needs_these_versions(built):
    """By the symbol tables, since a loader that has no versions at all would only warn."""
    transport = nvshmem_transport()
    imports = subprocess.run(["nm", "-D", transport], capture_output=True, text=True, check=True)
    exports = subprocess.run(
        ["nm", "-D", built()[0] / fabric.MLX5], capture_output=True, text=True, check=True
    )
    symbol = re.compile(r"mlx5dv_\w+@+MLX5_[\d.]+")
    wanted = set(symbol.findall(imports.stdout))
    assert len(wanted) > 10
    assert wanted <= {name.replace("@@", "@") for name in symbol.findall(exports.stdout)}


def test_build_is_cached(built, fabric_cache, verbs_include, cuda_home):
    folder, _ = built()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = fabric.build(fabric_cache, verbs_include, cuda_home / "include")
    assert again == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert not list(fabric_cache.glob("*.new.*"))


def test_build_says_what_is_missing(tmp_path, verbs_include, cuda_home):
    cuda = cuda_home / "include"
    for arguments, options, words in (
        ((tmp_path, tmp_path, cuda), {}, f"{tmp_path} has no infiniband/mlx5dv.h"),
        ((tmp_path, verbs_include, tmp_path), {}, f"{tmp_path} has no cuda.h"),
        ((tmp_path, verbs_include, cuda), {"compiler": "no-g++"}, "no-g++ is not on PATH"),
        ((tmp_path, verbs_include, cuda), {"compiler": "false"}, "exit status 1 of false"),
        ((tmp_path, verbs_include, cuda), {"defect": "no_such"}, "no_such is no defect"),
        ((tmp_path, verbs_include, cuda), {"sanitizer": "memory"}, "memory is no sanitizer"),
    ):
        with pytest.raises(fabric.BuildError, match=re.escape(words)):
            fabric.build(*arguments, **options)


def test_build_leaves_nothing_half_done(tmp_path, verbs_include, cuda_home):
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *--version) echo 1;; *) echo "no such luck" >&2; exit 3;; esac\n'
    )
    compiler.chmod(0o755)
    target = tmp_path / "cache"
    with pytest.raises(fabric.BuildError, match="no such luck"):
        fabric.build(target, verbs_include, cuda_home / "include", compiler=str(compiler))
    assert not list(target.glob("build-*"))


def test_environment():
    variables = environment(
        "/b",
        "/dev/shm/x",
        3,
        16,
        npes=2,
        nics=2,
        memory="gpumem",
        fault="delay=5",
        report_dir="/r",
        library_path=["/nvshmem/lib"],
        inherited={"LD_PRELOAD": "/old.so", "LD_LIBRARY_PATH": "/old"},
    )
    assert variables["LD_LIBRARY_PATH"] == "/b:/nvshmem/lib:/old"
    assert variables["LD_PRELOAD"].split(":") == [
        *(f"/b/{name}" for name in (fabric.PRELOAD, fabric.MLX5, fabric.VERBS)),
        "/old.so",
    ]
    assert variables["NVSHMEM_IBGDA_FORCE_NIC_BUF_MEMTYPE"] == "gpumem"
    assert variables["NVSHMEM_REMOTE_TRANSPORT"] == "none"
    ours = {name: value for name, value in variables.items() if name.startswith("EMULATED_")}
    assert ours == {
        "EMULATED_FABRIC_SEGMENT": "/dev/shm/x",
        "EMULATED_FABRIC_RANK": "3",
        "EMULATED_FABRIC_PROCESSES": "16",
        "EMULATED_FABRIC_NPES": "2",
        "EMULATED_FABRIC_NICS": "2",
        "EMULATED_FABRIC_COPY": "cuda",
        "EMULATED_FABRIC_FAULT": "delay=5",
        "EMULATED_FABRIC_REPORT_DIR": "/r",
    }
    assert HOST not in variables
    assert environment("/b", "/s", 0, 1, host="a", inherited={})[HOST] == "a"
    with pytest.raises(ValueError, match="rank 16 is not among 16"):
        environment("/b", "/s", 16, 16)
    with pytest.raises(ValueError, match="vram is none of"):
        environment("/b", "/s", 0, 1, memory="vram")
