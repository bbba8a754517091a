"""single-node without a GPU: the launcher, what is said of a failure, and the report."""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from conftest import missing
from deepep_ci import paths
from dispatch import causes, launcher, plot, single_node
from dispatch.errors import UsageError
from dispatch.report import Report

H200 = [{"name": "NVIDIA H200"}]
SCHEMA = json.loads((paths.TOP / "tests/dispatch/schemas/report.schema.json").read_text())

#: Stands for a Python with DeepEP: does what BEHAVIOUR (by rank) says
RANK = """#!{python}
import json, os, sys, time
folder, rank = sys.argv[3], int(sys.argv[4])
job = json.load(open(folder + "/job.json"))
log = open(folder + "/rank-%d.jsonl" % rank, "w")
def write(**event):
    print(json.dumps(event), file=log, flush=True)
check = dict(name="combine", ok=True, elements=1000, worst=0.5)
write(event="ready")
{behaviour}
"""

GOOD = """
for case in ("a", "b"):
    write(event="begin", case=case)
    write(event="case", case=case, seed=1, ok=True, seconds=0.1, checks=[check])
write(event="done")
"""


@pytest.fixture
def run_ranks(tmp_path):
    """Function (behaviour of a rank, ranks, seconds) -> Outcome of a job of such ranks."""

    def call(behaviour, ranks=2, seconds=20):
        python = tmp_path / "python"
        python.write_text(RANK.format(python=sys.executable, behaviour=behaviour))
        python.chmod(0o755)
        job = launcher.make_job("intranode", ranks, 1, seconds)
        return launcher.run(job, tmp_path / "logs", python=python)

    return call


def judged(outcome, gpus=H200):
    report = Report("single-node", facts={"jobs": []})
    single_node.judge(report, "intranode", outcome, gpus)
    jsonschema.validate(report.document(), SCHEMA)
    return report


def test_all_right(run_ranks):
    report = judged(run_ranks(GOOD, ranks=4))
    (row,) = report.rows
    assert row.result == "pass" and report.exit_code == 0
    assert row.found.startswith("2 cases, 0.0 million elements right (combine at most 0.50 of its")
    assert "all sharing one NVIDIA H200, by turns" in row.found


def test_wrong_element(run_ranks):
    wrong = (
        'check.update(ok=False, text="3 of 8 elements differ, first at [0, 5]: 1.0, not 2.0")\n'
    )
    report = judged(
        run_ranks(wrong + GOOD.replace("ok=True, sec", "ok=False, sec") + "sys.exit(1)")
    )
    (row,) = report.rows
    assert report.exit_code == 1
    assert "2 of 2 cases wrong" in row.found and "rank 0, combine: 3 of 8 elements" in row.found


def test_rank_that_ran_other_cases(run_ranks):
    report = judged(run_ranks('if rank == 1: write(event="done"); sys.exit()\n' + GOOD))
    assert report.exit_code == 1
    assert "only 1 ranks came to its end" in report.rows[0].found


def test_no_case(run_ranks):
    report = judged(run_ranks('write(event="done")'))
    assert report.exit_code == 1 and "no case of that name" in report.rows[0].found


def test_hang_is_killed_and_told(run_ranks, tmp_path):
    """One rank waits for ever, with a child of its own; nothing of it is left."""
    behaviour = """
write(event="begin", case="entries -1")
print("waiting for rank 1", flush=True)
import subprocess
child = subprocess.Popen(["sleep", "300"])
open(folder + "/child-%d" % rank, "w").write(str(child.pid))
time.sleep(300)
"""
    begin = time.monotonic()
    outcome = run_ranks(behaviour, seconds=3)
    assert time.monotonic() - begin < 10
    assert outcome.hung and [rank.code for rank in outcome.ranks] == [None, None]
    report = judged(outcome)
    (row,) = report.rows
    assert report.exit_code == 1
    assert row.found.startswith("hung: killed after 3 s without a sign, in case 'entries -1'")
    assert "rank 0: waiting for rank 1" in row.evidence
    assert row.why == "none of the known causes fits what the ranks printed"
    children = list((tmp_path / "logs").glob("child-*"))
    assert len(children) == 2
    for path in children:
        pid = int(path.read_text())
        status = Path(f"/proc/{pid}/status")
        assert not status.exists() or "Z (zombie)" in status.read_text()


def test_slow_is_not_hung(run_ranks):
    """Twice as long as the deadline, with a sign now and then."""
    behaviour = """
for case in "abcdef":
    write(event="begin", case=case)
    time.sleep(0.7)
    write(event="case", case=case, seed=1, ok=True, seconds=0.7, checks=[check])
write(event="done")
"""
    outcome = run_ranks(behaviour, seconds=2)
    assert not outcome.hung and outcome.seconds > 4
    assert judged(outcome).exit_code == 0


def test_relative_folder(run_ranks, tmp_path, monkeypatch):
    """Ranks meet by a file's address, which has to be absolute."""
    run_ranks("assert os.path.isabs(folder)\n" + GOOD)
    monkeypatch.chdir(tmp_path)
    job = launcher.make_job("intranode", 2, 1, 20)
    assert launcher.run(job, "here", python=tmp_path / "python").finished


def test_others_do_not_wait_for_one_that_failed(run_ranks, monkeypatch):
    monkeypatch.setattr(launcher, "GRACE", 1)
    behaviour = """
write(event="begin", case="fp8")
if rank == 1:
    print("RuntimeError: CUDA error: an illegal memory access was encountered", flush=True)
    os._exit(3)
time.sleep(300)
"""
    begin = time.monotonic()
    outcome = run_ranks(behaviour)
    assert time.monotonic() - begin < 10
    assert not outcome.hung
    (row,) = judged(outcome).rows
    assert row.found.startswith("ended early (rank 1: 3), in case 'fp8'")
    assert row.evidence.startswith("rank 1: RuntimeError: CUDA error: an illegal memory access")
    assert "DeepEP#564" in row.reference


def test_signal(run_ranks):
    outcome = run_ranks("import signal; os.kill(os.getpid(), signal.SIGSEGV)")
    (row,) = judged(outcome).rows
    assert "rank 0: -11" in row.found


def test_line_cut_off(run_ranks):
    """A killed rank's last line may be half written."""
    outcome = run_ranks(GOOD + 'log.write(\'{"event": "ca\'); log.flush()')
    assert judged(outcome).exit_code == 0


@pytest.mark.parametrize("seconds", [0, 100, 1000])
def test_deadline_is_below_deepeps(seconds):
    with pytest.raises(UsageError, match="below DeepEP's own time-out"):
        launcher.make_job("intranode", 2, 1, seconds)


def test_environment():
    values = launcher.environment({"RANK": "3", "MASTER_ADDR": "n1", "HOME": "/h"})
    assert "RANK" not in values and "MASTER_ADDR" not in values and values["HOME"] == "/h"
    assert values["NVSHMEM_DISABLE_NVLS"] == values["PYTHONUNBUFFERED"] == "1"


#: Lines that people report, and the cause that has to be told
LINES = {
    "deep_ep was built with NVSHMEM 3.6.5, but 3.4.5 is loaded already: /x": "two NVSHMEMs",
    "a.so: undefined symbol: nvshmem_selected_device_transport, version NVSHMEM": "two NVSHMEMs",
    "RuntimeError: DeepEP error: timeout (dispatch CPU)": "DeepEP's time-out",
    "DeepEP timeout for dispatch RDMA receiver": "DeepEP's time-out",
    "CUDA error: no kernel image is available for execution on the device": "another architecture",
    "AssertionError: No NVLink connection between GPU 0 and GPU 1, but allow_": "no NVLink",
    "Assertion failed: ibgda_get_state()->num_rc_per_pe >= num_local_experts": "no IBGDA",
    "init failed for transport: IBGDA": "no IBGDA",
    "sh: 1: /bin/nvcc: not found": "HybridEP's compiler",
    "RuntimeError: TMA 16B alignment error: tma_load_size = 8B": "HybridEP's token count",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate": "out of memory",
    "an illegal memory access was encountered": "illegal access",
    "RuntimeError: Found no NVIDIA driver on your system": "no driver",
    "ModuleNotFoundError: No module named 'deep_ep'": "not installed",
}


@pytest.mark.parametrize("line,name", LINES.items())
def test_known_cause(line, name):
    cause, shown = causes.find(f"starting\n  {line}\nbye\n")
    assert cause["name"] == name and shown == line


def test_unknown_cause():
    assert causes.find("starting\nAll good, 700 tokens, timeout=30\n") == (None, "")


def test_causes_are_whole():
    names = [cause["name"] for cause in causes.known()]
    assert len(names) == len(set(names)) and set(LINES.values()) == set(names)
    for cause in causes.known():
        assert all(re.compile(pattern) for pattern in cause["patterns"])
        assert cause["cause"] and cause["action"], cause["name"]


def test_first_that_says_why():
    """One rank names the cause, the others only that it is gone."""
    job = launcher.make_job("intranode", 2, 1, 10)
    ranks = [
        launcher.RankOutcome(0, 3, [], "RuntimeError: DeepEP error: timeout (dispatch CPU)"),
        launcher.RankOutcome(1, 3, [], "undefined symbol: nvshmem_selected_device_transport"),
    ]
    cause, line = causes.of_outcome(launcher.Outcome(job, ranks, False, 1.0))
    assert cause["name"] == "two NVSHMEMs" and line.startswith("rank 1: ")


EVIDENCE = Path(__file__).parent / "evidence" / "single-node"


def recorded(name, codes):
    """Outcome of a job that ran on an H200."""
    folder = EVIDENCE / name
    ranks = [launcher.read_rank(folder, rank, code) for rank, code in enumerate(codes)]
    return launcher.Outcome(json.loads((folder / "job.json").read_text()), ranks, False, 6.4)


def test_recorded_right():
    report = judged(recorded("right", [0, 0]))
    assert report.exit_code == 0
    found = report.rows[0].found
    assert found.startswith("1 cases, 9.2 million elements right (combine at most 0.99")
    tokens = [row.data["tokens"] for row in report.rows if row.result == "info"]
    assert tokens == [128, 512, 2048, 4096]
    for row in report.rows[1:]:
        assert 0.1 < row.data["dispatch_gbs"] < row.data["copy_gbs"] < 4800, row


def test_recorded_right_but_for_one_element():
    outcome = recorded("right", [0, 1])
    case = next(event for event in outcome.ranks[1].events if event["event"] == "case")
    case["ok"] = case["checks"][-1]["ok"] = False
    case["checks"][-1]["text"] = "1 of 1024 elements differ"
    report = judged(outcome)
    assert report.exit_code == 1 and "rank 1, combine: top-k weights" in report.rows[0].found


def test_recorded_rank_missing():
    """A rank that left before its end, though its exit code is 0."""
    outcome = recorded("right", [0, 0])
    outcome.ranks[1].events = [e for e in outcome.ranks[1].events if e["event"] != "done"]
    assert judged(outcome).exit_code == 1


def test_recorded_fault():
    """HybridEP with one token a rank, on four ranks."""
    report = judged(recorded("misaligned", [3] * 4))
    (row,) = report.rows
    assert report.exit_code == 1
    assert row.found.startswith(
        "ended early (rank 0: 3, rank 1: 3, rank 2: 3, rank 3: 3), in case"
    )
    assert row.evidence == "rank 0: torch.AcceleratorError: CUDA error: misaligned address"
    assert "pad the tokens" in row.action


def bandwidth_event(tokens, milliseconds, size=1e6):
    return {
        "event": "bandwidth", "tokens": tokens, "bytes": size, "dispatch_ms": milliseconds,
        "combine_ms": 2 * milliseconds, "copy_ms": milliseconds / 10,
    }  # fmt: skip


def test_bandwidth_is_the_slowest_ranks():
    job = launcher.make_job("intranode", 2, 1, 10)
    ranks = [
        launcher.RankOutcome(rank, 0, [bandwidth_event(128, ms), bandwidth_event(64, ms)], "")
        for rank, ms in enumerate((1.0, 2.0))
    ]
    rows = single_node.bandwidth(launcher.Outcome(job, ranks, False, 1.0))
    assert [row["tokens"] for row in rows] == [64, 128]
    # 10^6 bytes in 2 ms
    assert rows[0]["dispatch_gbs"] == pytest.approx(0.5)
    assert rows[0]["combine_gbs"] == pytest.approx(0.25)
    assert rows[0]["copy_gbs"] == pytest.approx(5.0)


@pytest.mark.parametrize(
    "gpus,ranks,words",
    [
        (8, 8, "a GPU each, NVIDIA H100"),
        (1, 4, "all sharing one NVIDIA H100, by turns"),
        (2, 8, "sharing 2 GPUs, by turns"),
    ],
)
def test_placement(gpus, ranks, words):
    assert single_node.placement(ranks, [{"name": "NVIDIA H100"}] * gpus, False) == words


@pytest.mark.parametrize("gpus,ranks", [(1, [2, 4, 8]), (2, [2]), (5, [2, 4]), (8, [2, 4, 8])])
def test_default_ranks(gpus, ranks):
    assert single_node.default_ranks(gpus) == ranks


@pytest.fixture
def whole(tmp_path, monkeypatch):
    """Function (behaviour of a rank, arguments) -> (Report, folder of logs) of single-node.run, on
    one GPU that is not there, with processes in place of ranks."""
    logs = tmp_path / "kept"
    monkeypatch.setattr(single_node, "find_gpus", lambda: H200)
    monkeypatch.setattr(single_node.tempfile, "mkdtemp", lambda prefix: (logs.mkdir(), logs)[1])

    def call(behaviour, *arguments):
        python = tmp_path / "python"
        python.write_text(RANK.format(python=sys.executable, behaviour=behaviour))
        python.chmod(0o755)
        parser = argparse.ArgumentParser()
        single_node.add_arguments(parser)
        options = parser.parse_args([*arguments, "--python", str(python)])
        report = single_node.run(options)
        jsonschema.validate(report.document(), SCHEMA)
        return report, logs

    return call


def test_all_of_it(whole, monkeypatch):
    monkeypatch.setattr(single_node, "low_latency_missing", lambda: "not run: no HCA")
    report, logs = whole(GOOD)
    assert [(row.check, row.result) for row in report.rows] == [
        *((f"intranode, {ranks} ranks", "pass") for ranks in (2, 4, 8)),
        *((f"hybrid-ep, {ranks} ranks", "pass") for ranks in (2, 4, 8)),
        ("low-latency", "skip"),
    ]
    assert report.exit_code == 0 and not logs.exists()


def test_logs_of_what_failed_are_kept(whole):
    report, logs = whole("sys.exit(3)", "--kernels", "intranode", "--ranks", "2")
    assert report.exit_code == 1
    assert report.notes == [f"each rank's output: {logs}"]
    assert (logs / "intranode-2-ranks" / "rank-1.log").exists()


def test_only_a_skip_is_no_pass(whole, monkeypatch):
    monkeypatch.setattr(single_node, "low_latency_missing", lambda: "not run: no HCA")
    report, _ = whole(GOOD, "--kernels", "low-latency")
    assert report.exit_code == 2 and report.document()["verdict"] == "not made"


MPS_CONTROL = """#!/bin/sh
echo "$@ $CUDA_MPS_PIPE_DIRECTORY $(cat)" >> {log}
exit {code}
"""


def mps_control(folder, monkeypatch, code):
    """An nvidia-cuda-mps-control on PATH that notes how it is called."""
    program = folder / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text(MPS_CONTROL.format(log=folder / "mps.txt", code=code))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return folder / "mps.txt"


def test_mps_is_started_and_ended(whole, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    log = mps_control(tmp_path, monkeypatch, 0)
    tell = 'assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] and job["mps"]\n'
    report, logs = whole(tell + GOOD, "--kernels", "intranode", "--ranks", "2", "--mps")
    assert "at once by MPS" in report.rows[0].found and report.exit_code == 0
    assert log.read_text().splitlines() == [f"-d {logs}/mps ", f" {logs}/mps quit"]
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_mps_that_does_not_start(whole, tmp_path, monkeypatch):
    mps_control(tmp_path, monkeypatch, 1)
    with pytest.raises(UsageError, match="MPS does not start .*: leave --mps out"):
        whole(GOOD, "--kernels", "intranode", "--ranks", "2", "--mps")


@pytest.fixture
def dispatch():
    """Function: python tests/dispatch ARGUMENTS, without a GPU whatever this machine has."""

    def call(*arguments, **env):
        return subprocess.run(
            [sys.executable, str(paths.TOP / "tests" / "dispatch"), *arguments],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **env},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return call


@pytest.mark.parametrize(
    "arguments,said",
    [
        (["single-node"], "no GPU here"),
        (["single-node", "--kernels", "internode"], "no kernels internode: choose of intranode"),
        (["single-node", "--ranks", "two"], "not a list: 'two'"),
        (["single-node", "--ranks", "2,3"], "--ranks 3: DeepEP's kernels"),
        (["single-node", "--repeats", "0"], "--repeats 0: at least 1"),
        (["single-node", "--case", "fp9"], "no case fp9: choose of bf16; "),
        (["single-node", "--plot", "x.png"], "give both"),
        (["nothing"], "invalid choice"),
        ([], "--help shows the options"),
    ],
)
def test_usage(dispatch, arguments, said):
    done = dispatch(*arguments)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr


#: Not among ci/requirements.in: ci/check and the air-gapped archive would carry it for nothing
MATPLOTLIB = "matplotlib==3.10.7"


@pytest.fixture
def matplotlib(monkeypatch):
    """matplotlib in sys.path, installed by pip into the cache once."""
    target = paths.cache() / "tests" / MATPLOTLIB
    if not target.is_dir():
        fresh = target.with_name(f"{target.name}.new.{os.getpid()}")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(fresh)]
        done = subprocess.run([*pip, MATPLOTLIB], capture_output=True, text=True)
        if done.returncode:
            missing("sources", f"pip cannot install {MATPLOTLIB}: {done.stderr.strip()[-200:]}")
        fresh.rename(target)
    monkeypatch.syspath_prepend(str(target))


def test_plot_needs_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="pip install matplotlib"):
        plot.library()


def test_plot(matplotlib, tmp_path):
    """A picture of recorded figures, and none where nothing was measured."""

    rows = single_node.bandwidth(recorded("right", [0, 0]))
    job = {"kernels": "intranode", "ranks": 2, "placement": "x", "bandwidth": rows}
    plot.draw([job], tmp_path / "plot.png", "NVIDIA H200")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]
    with pytest.raises(UsageError, match="nothing to draw"):
        plot.draw([dict(job, bandwidth=[])], tmp_path / "other.png", "NVIDIA H200")
