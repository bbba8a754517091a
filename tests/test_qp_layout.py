"""qp-layout: every arm compiles, the reproducer sees the fault and the cure, and says so."""

import json
import os
import subprocess
import sys
import time

import pytest
from deepep_ci import paths
from dispatch import qp_build, qp_layout
from dispatch.errors import UsageError
from host_site import pytorch_prefix
from jsonschema import Draft202012Validator
from lookup.lookup import Counts, LookupError_, Shape, judge
from support import DEEPEP_COMMITS

DISPATCH = paths.TOP / "tests" / "dispatch"
V2 = ["control", "#564 alone", "treatment"]
V1 = ["control on 3.4.5", "treatment on 3.4.5"]


def qp(*arguments, code, timeout=400, **env):
    """Runs qp-layout as a user does. Returns its output and errors."""
    done = subprocess.run(
        [sys.executable, str(DISPATCH), "qp-layout", *map(str, arguments)],
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, " ".join(done.stderr.split())


@pytest.fixture(scope="module")
def sources(deepep_tree, nvshmem_include, cuda_home, verbs_include):
    """Options that name everything: of one pair, and what --arms takes beside them."""
    # A prefix as well as an include folder may be named
    pair = ["--nvshmem", nvshmem_include("3.6.5").parent, "--cuda", cuda_home]
    pair += ["--verbs", verbs_include, "--deepep", deepep_tree("1.2.1-4214430")]
    return pair, ["--arms", "--nvshmem-v1", nvshmem_include("3.4.5-cu13")]


@pytest.fixture(scope="module")
def no_gpu():
    """Why there is no GPU to ask here; skips where there is one."""
    with pytest.raises(UsageError) as error:
        pytest.skip(f"there is a GPU here, of {qp_build.gpu_arch()}")
    return str(error.value)


@pytest.fixture(scope="module")
def programs(sources, nvcc, tmp_path_factory):
    """The folder of --build-only for sm_90, and the report of that run."""
    pair, arms = sources
    folder = tmp_path_factory.mktemp("programs")
    triton = pytorch_prefix().glob("lib/python3.*/site-packages/triton/backends/nvidia/bin")
    path = os.pathsep.join([os.environ["PATH"], *map(str, triton)])
    report = folder / "report.json"
    build = ["--build-only", folder / "built", "--arch", "sm_90", "--json", report]
    qp(*pair, *arms, *build, code=0, PATH=path)
    return folder / "built", json.loads(report.read_text())


# Compiled by nvcc, for the GPU


@pytest.mark.sources
@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.xdist_group("qp-layout")
def test_every_arm_compiles(programs):
    folder, report = programs
    assert valid(report)["verdict"] == "pass"
    made = {arm["name"]: arm for arm in qp_build.read_programs(folder)}
    assert list(made) == V2 + V1
    assert {made[name]["release"] for name in V2} == {"3.6.5"}
    assert {made[name]["release"] for name in V1} == {"3.4.5"}
    for arm in made.values():
        assert os.access(folder / arm["program"], os.X_OK)


@pytest.mark.sources
@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.xdist_group("qp-layout")
def test_cost_in_instructions(programs):
    """The modulo is most of a lookup: it costs what the lookup cost before, without it a few."""
    made = {arm["name"]: arm for arm in qp_build.read_programs(programs[0])}
    missing = [arm["instructions_missing"] for arm in made.values() if "instructions" not in arm]
    if missing:
        pytest.skip(missing[0])
    counts = {name: arm["instructions"] for name, arm in made.items()}
    assert 2 <= counts["#564 alone"] <= counts["control"] // 3
    assert abs(counts["treatment"] - counts["control"]) <= 3
    assert counts["control"] == counts["control on 3.4.5"] == counts["treatment on 3.4.5"]


@pytest.mark.sources
@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.xdist_group("qp-layout")
def test_programs_say_that_there_is_no_gpu(programs, no_gpu):
    folder, _ = programs
    arm = qp_build.read_programs(folder)[0]
    with pytest.raises(qp_build.Failed, match="no GPU: ") as error:
        qp_build.command([folder / arm["program"]], 60, "")
    assert error.value.code == 2
    assert "no GPU to ask here" in qp("--prebuilt", folder, code=2)[1]


@pytest.mark.gpu
@pytest.mark.sources
@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.xdist_group("qp-layout")
def test_on_the_gpu(sources, nvcc, tmp_path):
    try:
        qp_build.gpu_arch()
    except UsageError as error:
        pytest.skip(str(error))
    pair, arms = sources
    qp(*pair, *arms, "--json", tmp_path / "report.json", code=0)
    report = valid(json.loads((tmp_path / "report.json").read_text()))
    judged(report)
    for arm in report["facts"]["arms"]:
        assert arm["lookup"]["ns"]["median"] > 0, arm


# Compiled by g++, for the CPU


@pytest.mark.sources
@pytest.mark.compile
@pytest.mark.slow
def test_on_the_cpu(sources, tmp_path):
    pair, arms = sources
    out, _ = qp(*pair, *arms, "--cpu", "--json", tmp_path / "report.json", code=0)
    report = valid(json.loads((tmp_path / "report.json").read_text()))
    judged(report)
    assert "5 passed, 0 failed, 1 skipped" in out


def judged(report):
    """Asserts what the five arms have to show, over all shapes."""
    arms = {arm["name"]: arm for arm in report["facts"]["arms"]}
    assert list(arms) == V2 + V1
    assert [arms[name]["layout"] for name in V2 + V1] == ["v2"] * 3 + ["v1"] * 2
    asked = sum(shape.npes * (shape.npes - 1) * shape.ids for shape in qp_layout.SHAPES)
    for name in ["treatment", *V1]:
        assert arms[name]["totals"] == {"right": asked, "wrong_peer": 0, "out_of_bounds": 0}
    control, alone = arms["control"]["totals"], arms["#564 alone"]
    # Nearly all, and never by an index outside of the table: it hangs, it does not crash
    assert control["wrong_peer"] > 100 * control["right"] > 0 == control["out_of_bounds"]
    assert alone["totals"]["wrong_peer"] == 0
    outside = {(s["qps"], s["sms"], s["devices"]) for s in alone["shapes"] if s["out_of_bounds"]}
    assert outside == {(24, 48, 1), (10, 20, 1), (12, 24, 1)}


@pytest.mark.sources
@pytest.mark.compile
def test_a_pair_with_the_fault_fails(sources):
    out, _ = qp(*sources[0], "--cpu", code=1)
    assert "FAIL" in out and "patches/deep-ep-564-rc-layout.patch" in out
    assert "rank 0 asks for PE 1, id 0: index 24, of PE 0" in " ".join(out.split())


@pytest.mark.sources
@pytest.mark.compile
def test_without_a_tree_it_is_the_recipes(sources):
    """The pinned revision, from the cache, patched as the recipe does: all right."""
    pair = sources[0][: sources[0].index("--deepep")]
    out, _ = qp(*pair, "--cpu", code=0)
    assert "5 passed, 0 failed" in out
    assert "patches/deep-ep-rc-bound.patch" not in out and "deep-ep-rc-bound.patch" in out


@pytest.mark.sources
@pytest.mark.compile
@pytest.mark.parametrize("change, said", [
    (("% rc_modulo;", "% (rc_modulo - 1);"), "never reached a slot"),
    (("idx = id * npes + pe;", "idx = id * npes;"), "gives a slot to two PEs"),
    (("idx = id * npes + pe;", "idx = id * npes + pe + 1;"), "leaves the table"),
])  # fmt: skip
def test_an_oracle_that_cannot_judge_is_no_oracle(
    deepep_tree, nvshmem_include, cuda_home, verbs_include, tmp_path, change, said
):
    """A lookup of NVSHMEM's that leaves slots out, shares them or leaves the table."""
    include = tmp_path / "include"
    source = nvshmem_include("3.6.5")
    for path in source.rglob("*"):
        if path.is_file():
            target = include / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path)
    header = include / "non_abi/device/pt-to-pt/ibgda_device.cuh"
    text = header.read_text()
    assert change[0] in text
    header.unlink()
    header.write_text(text.replace(*change))
    with pytest.raises(LookupError_, match=said):
        judge(
            deepep_tree("1.2.1-4214430"), include, cuda_home, verbs_include,
            workdir=tmp_path, shapes=[Shape(4, 1, 24, 20)],
        )  # fmt: skip


# Set-up and usage


@pytest.mark.sources
def test_arms_need_an_unpatched_tree(sources, deepep_tree, tmp_path):
    pair, arms = sources
    qp_build.patched(
        qp_build.given_header(deepep_tree("1.2.1-4214430")), [qp_layout.LAYOUT], tmp_path / "tree"
    )
    _, said = qp(*pair, *arms, "--cpu", "--deepep", tmp_path / "tree", code=2)
    assert "deep-ep-564-rc-layout.patch does not apply to" in said
    assert "is that tree an unpatched revision" in said


@pytest.mark.sources
def test_arms_need_both_layouts(sources, nvshmem_include):
    pair, arms = sources
    old, new = nvshmem_include("3.4.5-cu13"), nvshmem_include("3.6.5")
    _, said = qp(*pair, "--arms", "--cpu", "--nvshmem", old, code=2)
    assert "a fault that NVSHMEM 3.4.5 does not have" in said
    _, said = qp(*pair, "--arms", "--cpu", "--nvshmem-v1", new, code=2)
    assert "names NVSHMEM 3.6.5, which is not before 3.5.19" in said


def test_no_gpu_is_the_first_thing_said(no_gpu):
    _, said = qp("--deepep", "/nonexistent", code=2)
    assert said.startswith("dispatch: no GPU to ask here") and "--cpu" in said


@pytest.mark.sources
@pytest.mark.parametrize("change, said", [
    (["--deepep", "/nonexistent"], "is neither a DeepEP source tree"),
    (["--nvshmem", "/nonexistent"], "no non_abi/device/pt-to-pt/ibgda_device.cuh in /nonexistent"),
    (["--cuda", "/nonexistent"], "no include/cuda_runtime.h in /nonexistent"),
    (["--verbs", "/nonexistent"], "no infiniband/mlx5dv.h in /nonexistent"),
    (["--nvshmem-v1", "/nonexistent"], "--nvshmem-v1 is for --arms"),
    (["--build-only", "/nonexistent"], "not allowed with"),
])  # fmt: skip
def test_what_is_missing_is_named(sources, change, said):
    assert said in qp(*sources[0], "--cpu", *change, code=2)[1]


@pytest.mark.sources
def test_no_tree_and_no_network(sources, tmp_path):
    pair = sources[0][: sources[0].index("--deepep")]
    config = tmp_path / "gitconfig"
    config.write_text('[url "file:///nonexistent/"]\n  insteadOf = https://github.com/\n')
    cache = tmp_path / "cache"
    where = {"DEEPEP_CACHE": str(cache), "GIT_CONFIG_GLOBAL": str(config)}
    _, said = qp(*pair, "--cpu", code=2, **where)
    assert "DeepEP 4214430 cannot be fetched from https://github.com" in said
    assert "name a source tree of it by --deepep" in said
    assert list((cache / "tests").iterdir()) == []


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "deepep-qp-layout-build/1"}',
    '{"format": "deepep-qp-layout-build/1", "arms": [{"name": "control"}]}'])  # fmt: skip
def test_damaged_build_folder(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UsageError, match="was not written by --build-only"):
        qp_build.read_programs(tmp_path)


def test_a_hang_is_killed_with_all_it_started(tmp_path):
    script = f"sleep 300 & echo $! > {tmp_path}/pid; wait"
    begin = time.monotonic()
    with pytest.raises(qp_build.Failed, match="sh did not end in 1 s and was killed"):
        qp_build.command(["sh", "-c", script], 1)
    assert time.monotonic() - begin < 30
    state = paths.Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


# What the program prints, and what is made of it

SHAPES = (Shape(2, 1, 24, 20), Shape(4, 1, 24, 48))
PRINTED = """\
header 30nvshmemi_ibgda_device_state_v2 0 8384 28 30605
gpu 9.0 1980000 NVIDIA H200
shape 48 0 0
shape 288 0 288 0 1 24 97 -1
time lookup 60.0 118.8 61.0 120.8 62.0 122.8
time nothing 20.0 39.6 20.0 39.6 20.5 40.6
"""


def test_output_is_read():
    verdict, gpu, times = qp_layout.read_output(PRINTED, SHAPES)
    assert verdict.layout == "v2" and not verdict.ok
    assert verdict.totals == Counts(336, 0, 288)
    assert verdict.misses == {
        SHAPES[1]: "rank 0 asks for PE 1, id 24: index 97, outside the 96 slots"
    }
    assert gpu == {"name": "NVIDIA H200", "capability": "9.0", "highest_mhz": 1980}
    assert times["ns"] == {"median": 41.0, "min": 40.0, "max": 41.5}
    assert times["mhz"] == 1980 and times["repeats"] == 3


@pytest.mark.parametrize("old, new", [
    ("header 30", "30"),
    ("_v2 0", "_v2 1"),
    ("8384", "8400"),
    ("gpu 9.0 1980000 NVIDIA H200\n", ""),
    ("shape 48 0 0\n", ""),
    ("shape 48 0 0", "shape 47 0 0"),
    ("shape 48 0 0", "shape 48 0 x"),
    ("shape 48 0 0", "shape 0 48 0"),
    ("shape 288 0 288 0 1 24 97 -1", "shape 288 0 288"),
    ("time nothing 20.0 39.6 20.0 39.6 20.5 40.6\n", ""),
    ("20.5 40.6", ""),
    ("60.0", "0"),
])  # fmt: skip
def test_incomplete_output_is_no_verdict(old, new):
    assert old in PRINTED
    with pytest.raises(LookupError_):
        qp_layout.read_output(PRINTED.replace(old, new), SHAPES)


@pytest.mark.parametrize("expect, good, bad", [
    ("right", [(5, 0, 0)], [(5, 1, 0), (5, 0, 1), (0, 0, 0)]),
    ("wrong peer", [(1, 5, 0), (0, 5, 1)], [(6, 0, 0), (3, 0, 3)]),
    ("out of bounds", [(3, 0, 3)], [(6, 0, 0), (3, 1, 3), (3, 3, 0)]),
])  # fmt: skip
def test_expectations(expect, good, bad):
    assert all(qp_layout.met(expect, Counts(*counts)) for counts in good)
    assert not any(qp_layout.met(expect, Counts(*counts)) for counts in bad)


@pytest.fixture
def answers(monkeypatch, tmp_path):
    """Function: {arm: what its program does, a line of sh} -> the report of running them."""

    def run(scripts: dict[str, str], **expectations):
        arms = []
        for name, script in scripts.items():
            program = tmp_path / qp_build._file_name(name)
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)
            arms.append({
                "name": name, "header": "H", "patches": [], "nvshmem": "N", "seconds": 1.0,
                "expect": expectations.get(name, "right"), "program": program.name,
                "instructions": 24,
            })  # fmt: skip
        report = qp_layout.Report("qp-layout")
        report.facts["arms"] = []
        monkeypatch.setattr(qp_layout, "SHAPES", SHAPES)
        qp_layout._run_programs(report, arms, tmp_path)
        return report

    return run


def saying(text):
    return f"cat <<'END'\n{text}END"


GOOD = PRINTED.replace("shape 288 0 288 0 1 24 97 -1", "shape 576 0 0")


def test_report_of_runs(answers):
    report = answers({"control": saying(PRINTED), "treatment": saying(GOOD)},
                     control="out of bounds")  # fmt: skip
    assert report.exit_code == 0
    assert valid(report.document())["facts"]["judged_on"]["name"] == "NVIDIA H200"
    rows = {row.check: row.found for row in report.rows}
    assert rows["control: all"] == "336 right, 0 wrong peer, 288 out of bounds, as expected"
    assert rows["treatment: time"] == "41.0 ns a lookup (40.0 to 41.5), 81 clocks at 1980 MHz"
    assert rows["treatment: instructions"] == "24 a lookup (SASS)"


def test_a_control_without_the_fault_fails(answers):
    """A reproducer that cannot see the fault proves nothing."""
    report = answers({"control": saying(GOOD), "treatment": saying(GOOD)}, control="wrong peer")
    assert report.exit_code == 1
    assert [r.check for r in report.rows if r.result == "fail"] == ["control: all"]


def test_a_pair_fails_by_shape(answers):
    report = answers({"pair": saying(PRINTED)})
    results = {row.check: row.result for row in report.rows}
    assert report.exit_code == 1
    assert results["24 QPs, 20 SMs"] == "pass"
    assert results["24 QPs, 48 SMs"] == results["all"] == "fail"


@pytest.mark.parametrize("script, said", [
    ("echo 'cudaMalloc: out of memory' >&2; exit 1", "cudaMalloc: out of memory"),
    ("kill -SEGV $$", "exit code -11"),
    (saying(PRINTED[:120]), "cut short"),
])  # fmt: skip
def test_an_arm_that_fails_leaves_the_others(answers, script, said):
    report = answers({"control": script, "treatment": saying(GOOD)})
    rows = {row.check: row for row in report.rows}
    assert report.exit_code == 1
    assert rows["treatment: all"].result == "pass"
    assert rows["control: all"].result == "fail" and said in rows["control: all"].found


def test_no_gpu_in_the_program_is_set_up(answers):
    with pytest.raises(UsageError, match="no GPU: none is visible"):
        answers({"pair": "echo 'no GPU: none is visible' >&2; exit 2"})


# nvcc 13.0.88, sm_90: #564 alone, and what stands around it
SASS = """
		Function : qp_nothing
        /*0000*/                   MOV R4, R5 ;                          /* 0x000000050004 */
                                                                         /* 0x003fde000000 */
        /*0010*/                   RET.ABS.NODEC R20 0x0 ;
		..........
		Function : qp_lookup
	.headerflags	@"EF_CUDA_64BIT_ADDRESS EF_CUDA_SM90"
        /*0000*/                   LDC.64 R6, c[0x3][0x2358] ;           /* 0x0008d600ff067b82 */
                                                                         /* 0x000e220000000a00 */
        /*0010*/                   ULDC UR4, c[0x3][0x8] ;
        /*0020*/               @P0 IMAD R4, R5, UR4, R4 ;
        /*0030*/              @!P1 IMAD.WIDE R4, R4, 0xb8, R6 ;
        /*0040*/                   RET.ABS.NODEC R20 0x0 ;
        /*0050*/                   BRA 0x50;
        /*0060*/                   NOP;
		..........
"""


def test_instructions_are_counted():
    assert qp_build.count_instructions(SASS) == 4
    assert qp_build.count_instructions(SASS.replace("IMAD R4", "NOP")) == 3
    assert qp_build.count_instructions(SASS.replace("qp_lookup", "other")) is None
    assert qp_build.count_instructions(SASS.replace("RET", "BRA")) is None


def valid(document):
    """The document, valid by the report's schema."""
    schema = json.loads((DISPATCH / "schemas" / "report.schema.json").read_text())
    Draft202012Validator(schema).validate(document)
    return document


def test_pinned_revision_is_the_recipes():
    url, commit = qp_build.pinned_revision()
    assert url == "https://github.com/deepseek-ai/DeepEP.git"
    assert commit == DEEPEP_COMMITS["1.2.1-4214430"]
