"""accept: the report's passing run is accepted, and each single flaw of it is not."""

import json
import subprocess
import sys

import jsonschema
import pytest
from deepep_ci import paths

SCHEMA = json.loads((paths.TOP / "tests/dispatch/schemas/report.schema.json").read_text())

#: Figures of the treatment in NVIDIA-NeMo/Automodel#3967; keys as its benchmark writes them
SUMMARY = {
    "total_steps": 30,
    "warmup_steps": 10,
    "training_steps": 20,
    "setup_time_seconds": 35.43,
    "warmup_time_seconds": 414.97,
    "training_time_seconds": 742.27,
    "avg_iter_time_seconds": 37.114,
    "avg_mfu_percent": 15.5268,
    "tflops_per_gpu": 153.56,
    "peak_tflops": 989,
    "world_size": 128,
    "global_batch_size": 512,
    "local_batch_size": 4,
    "seq_len": 4096,
}
NODES = 16
LOSS = "12.2530"

#: What the control of the report printed
CONTROL = """\
num_recv_tokens: -1
num_rdma_recv_tokens: -1
moe_recv_expert_counter[0]: -1
RuntimeError: DeepEP error: timeout (dispatch CPU)
"""


def rank_0(iterations):
    lines = ["NVSHMEM v3.6.5", "num_recv_tokens: 4096"]
    for number in range(iterations):
        lines.append(f"INFO Rank 0 | Iteration {number}")
        lines.append(
            f"INFO Rank 0 | Iteration {number} | num_label_tokens=2097152 | "
            f"Max Memory Allocated: 46.48 GB | loss={LOSS}"
        )
    lines += ["Max iter time: 37.9 seconds", "MFU: 15.5268%"]
    lines += ["Average iteration time: 37.114 seconds"]
    return "\n".join(lines) + "\n"


class Run:
    """A finished run's files, to be changed before it is judged."""

    def __init__(self, folder):
        self.folder = folder
        self.summary = dict(SUMMARY)
        self.logs = {node: "NVSHMEM v3.6.5\n" for node in range(NODES)}
        self.logs[0] = rank_0(30)
        self.codes = {f"node-{node}": 0 for node in range(NODES)}
        self.arguments = ["--exit-codes", str(folder / "codes.txt")]

    def judge(self):
        """(exit code, {check: row}, output, errors)."""
        if self.summary is not None:
            (self.folder / "summary.json").write_text(
                self.summary if isinstance(self.summary, str) else json.dumps(self.summary)
            )
        for node, text in self.logs.items():
            (self.folder / f"node-{node}.log").write_text(text)
        lines = [f"{node} {code}\n" for node, code in self.codes.items()]
        (self.folder / "codes.txt").write_text("".join(lines))
        report = self.folder / "report.json"
        command = [
            sys.executable, str(paths.TOP / "tests" / "dispatch"), "accept",
            "--summary", str(self.folder / "summary.json"),
            "--logs", str(self.folder / "node-*.log"), "--json", str(report), *self.arguments,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert "Traceback" not in done.stderr
        rows = {}
        if report.exists():
            document = json.loads(report.read_text())
            jsonschema.validate(document, SCHEMA)
            rows = {row["check"]: row for row in document["rows"]}
        return done.returncode, rows, done.stdout, done.stderr


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_accepted(run):
    code, rows, out, _ = run.judge()
    assert code == 0, out
    assert {row["result"] for row in rows.values()} == {"pass"}
    assert rows["iterations"]["found"] == "30 of 30"
    assert rows["exit codes"]["found"] == "0 on all 16 nodes"
    assert rows["loss"]["found"] == "finite; 12.2530 in iteration 29"
    assert "30 iterations (10 warm-up, 20 measured), 37.114 s each" in rows["summary"]["found"]


def append(node, text):
    def change(run):
        run.logs[node] += text

    return change


def put(**values):
    def change(run):
        run.summary.update(values)

    return change


def assign(name, value):
    return lambda run: setattr(run, name, value)


def of_node(name, code):
    return lambda run: run.codes.__setitem__(name, code)


def logs_of_rank_0(text):
    return lambda run: run.logs.__setitem__(0, text)


#: Flaw -> (change, checks that fail for it)
FLAWS = {
    "29 iterations": (logs_of_rank_0(rank_0(29)), {"iterations"}),
    "an iteration in the middle": (
        logs_of_rank_0(rank_0(30).replace("Iteration 17 |", "Iteration 16 |")),
        {"iterations"},
    ),
    "only begun": (
        logs_of_rank_0(rank_0(0) + "Rank 0 | Iteration 0\n"),
        {"iterations"},
    ),
    "node exit 1": (of_node("node-11", 1), {"exit codes"}),
    "node killed": (of_node("node-11", -9), {"exit codes"}),
    "node missing": (lambda run: run.codes.popitem(), {"exit codes"}),
    "no node": (assign("codes", {}), {"exit codes"}),
    "the control": (
        lambda run: logs_of_rank_0(rank_0(0) + "Rank 0 | Iteration 0\n" + CONTROL)(run),
        {"iterations", "no DeepEP error", "no counter stuck at -1"},
    ),
    "a stuck counter": (append(7, "moe_recv_expert_counter[3]: -1\n"), {"no counter stuck at -1"}),
    "a device's time-out": (
        append(3, "DeepEP timeout for dispatch RDMA receiver (forwarder), channel: 3\n"),
        {"no DeepEP error"},
    ),
    "illegal access at teardown": (
        append(15, "terminate called: CUDA error: an illegal memory access was encountered\n"),
        {"no illegal access"},
    ),
    "loss is not a number": (
        lambda run: logs_of_rank_0(run.logs[0].replace(LOSS, "nan"))(run),
        {"loss"},
    ),
    "no summary": (assign("summary", None), {"summary", "iterations"}),
    "summary cut off": (assign("summary", '{"total_steps": 30,'), {"summary", "iterations"}),
    "summary of something else": (assign("summary", "[1]"), {"summary", "iterations"}),
    "steps do not add up": (put(training_steps=19), {"summary", "iterations"}),
    "average of other steps": (put(avg_iter_time_seconds=30.0), {"summary", "iterations"}),
    "time is NaN": (put(setup_time_seconds=float("nan")), {"summary", "iterations"}),
    "steps as text": (put(total_steps="30"), {"summary", "iterations"}),
}


@pytest.mark.parametrize("name", FLAWS)
def test_flaw(run, name):
    change, failing = FLAWS[name]
    change(run)
    code, rows, out, _ = run.judge()
    assert code == 1, out
    assert {check for check, row in rows.items() if row["result"] == "fail"} == failing, out


def test_where_it_stands(run):
    append(7, "ok\nmoe_recv_expert_counter[3]: -1\n")(run)
    _, rows, _, _ = run.judge()
    assert rows["no counter stuck at -1"]["evidence"].endswith("node-7.log:3")


def test_counts_of_zero_and_more_are_no_flaw(run):
    append(7, "num_recv_tokens: 0\nmoe_recv_expert_counter[0]: 17\nexit code -1 is unused\n")(run)
    code, _, out, _ = run.judge()
    assert code == 0, out


def test_exit_codes_are_said_to_be_unchecked(run):
    run.arguments = []
    code, rows, out, _ = run.judge()
    assert code == 0
    assert rows["exit codes"]["result"] == "skip"
    assert "not checked: no --exit-codes" in out


def test_bad_line_of_exit_codes(run):
    run.codes = {"node-0": "zero"}
    code, _, _, errors = run.judge()
    assert code == 2 and "codes.txt:1: not `NODE CODE`: node-0 zero" in errors


def test_no_logs(run):
    run.logs = {}
    code, _, _, errors = run.judge()
    assert code == 2 and "no such file" in errors
