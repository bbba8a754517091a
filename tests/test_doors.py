"""The commands themselves: usage, reports, isolation, set-up, and what stops them."""

import json
import os
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from deepep_ci import documents, paths, spack


@pytest.mark.parametrize(
    "command, arguments, said",
    [
        ("check", ["h200"], "no environment h200; there are: h100,"),
        ("check", ["common"], "no environment common"),
        ("check", ["--spack", "maybe"], "invalid choice: 'maybe'"),
        ("check", ["--jsn", "x"], "unrecognized arguments"),
        ("check", ["--spack", "off", "--json", "/nonexistent/report.json"], "cannot write"),
        ("check", ["--spack", "off", "--junit", "/nonexistent/report.xml"], "cannot write"),
        ("lock", [], "the following arguments are required: ENV"),
        ("lock", ["nowhere"], "no environment nowhere"),
        ("sources", [], "the following arguments are required: DIR"),
        ("sources", ["/proc/no"], "cannot make /proc/no"),
        ("spack", [], "usage: ci/spack ARGS"),
    ],
)
def test_usage(run, command, arguments, said):
    done = run(paths.TOP, command, *arguments)
    assert done.returncode == 2
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_paths_name_environments_too(run):
    done = run(paths.TOP, "check", "--spack", "off", "environments/h100-site/")
    assert done.returncode == 0
    assert "h100-site" in done.stdout and "h100-control" not in done.stdout


def test_reports(run, tmp_path):
    report, junit = tmp_path / "report.json", tmp_path / "report.xml"
    done = run(paths.TOP, "check", "--spack", "off", "--json", str(report), "--junit", str(junit))
    assert done.returncode == 0
    document = documents.validated(report, "report")
    assert document["holds"] is True
    assert "Spack was not tried" in document["notes"][0]
    assert document["notes"][0] in done.stdout.replace("\n", " ")
    suites = ElementTree.parse(junit).getroot()
    assert suites.get("tests") == str(len(document["results"]))
    expected = {*paths.environment_names(), "refusals"}
    assert {suite.get("name") for suite in suites} == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.json", "report.xml"]


def test_failed_report(run, clone, tmp_path):
    (clone / "environments/h100/expect.json").write_text("{")
    report, junit = tmp_path / "report.json", tmp_path / "report.xml"
    done = run(clone, "check", "--spack", "off", "--json", str(report), "--junit", str(junit))
    assert done.returncode == 1
    assert json.loads(report.read_text())["holds"] is False
    assert ElementTree.parse(junit).getroot().get("failures") == "1"


def test_damaged_data_of_our_own(run, clone):
    """Pins, pairing and refusals are data too: a bad file is named, with the place."""
    pins = clone / "ci" / "pins.json"
    good = pins.read_text()
    pins.write_text(good.replace('"default": "5817', '"default": "zzzz'))
    done = run(clone, "check")
    assert done.returncode == 2
    assert "pins.json:6: $.spack.default" in done.stderr and "Traceback" not in done.stderr
    pins.write_text(good)

    table = clone / "ci" / "refusals.json"
    table.write_text(table.read_text().replace('"because"', '"becuase"', 1))
    (clone / "ci" / "pairing.json").write_text("{}")
    done = run(clone, "check", "--spack", "off")
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert "'because' is a required property" in said
    assert "ci/pairing.json:1: $: 'rows' is a required property" in said

    repos = clone / "environments" / "common" / "repos.yaml"
    repos.write_text("repos: {}\n")
    done = run(clone, "spack", "--version", SPACK_ROOT=str(fake_spack(clone / "s", "1.1.0")))
    assert done.returncode == 2
    assert "the pin of spack-packages" in done.stderr


def test_reader_that_goes_away(run):
    command = f"{paths.CI}/check --spack off | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""


@pytest.fixture
def no_network(tmp_path):
    """Environment variables with which git reaches nothing, and a cache without a Spack."""
    config = tmp_path / "gitconfig"
    config.write_text('[url "file:///nonexistent/"]\n  insteadOf = https://github.com/\n')
    cache = tmp_path / "cache"
    cache.mkdir()
    # The virtual environment is not what these tests take away
    for venv in paths.cache().glob("venv-*"):
        (cache / venv.name).symlink_to(venv)
    return {"GIT_CONFIG_GLOBAL": str(config), "DEEPEP_CACHE": str(cache)}


def test_without_spack_auto_says_so(run, no_network):
    done = run(paths.TOP, "check", **no_network)
    assert done.returncode == 0
    said = [line for line in done.stdout.splitlines() if "Spack could not be had" in line]
    assert len(said) == 1
    assert "nothing was concretized anew" in " ".join(done.stdout.split())


def test_without_spack_require_stops(run, no_network):
    done = run(paths.TOP, "check", "--spack", "require", **no_network)
    assert done.returncode == 2
    assert "Spack cannot be cloned" in done.stderr
    assert not list(Path(no_network["DEEPEP_CACHE"]).glob("spack-*"))


@pytest.mark.parametrize("command", ["lock", "spack", "sources"])
def test_without_spack_others_stop(run, no_network, tmp_path, command):
    argument = str(tmp_path / "mirror") if command == "sources" else "h100-site"
    done = run(paths.TOP, command, argument, **no_network)
    assert done.returncode == 2
    assert "Spack cannot be cloned" in done.stderr


def fake_spack(root: Path, version: str) -> Path:
    (root / "lib/spack/spack").mkdir(parents=True)
    (root / "lib/spack/spack/__init__.py").write_text(f'__version__ = "{version}"\n')
    (root / "bin").mkdir()
    (root / "bin/spack").touch()
    return root


@pytest.mark.parametrize("version, used", [("1.1.0", True), ("1.10.2", True), ("1.0.4", False)])
def test_version_of_spack_root(tmp_path, monkeypatch, capsys, version, used):
    root = fake_spack(tmp_path / "spack", version)
    pinned = fake_spack(tmp_path / "pinned", "9.9.9")
    monkeypatch.setenv("SPACK_ROOT", str(root))
    monkeypatch.setattr(spack, "pinned_clone", lambda url, commit: pinned)
    found = spack.find()
    assert (found.root == root) == used
    if not used:
        assert f"is Spack {version}, 1.1.0 is needed" in capsys.readouterr().err


def test_spack_root_without_spack(tmp_path, monkeypatch, capsys):
    pinned = fake_spack(tmp_path / "pinned", "9.9.9")
    monkeypatch.setenv("SPACK_ROOT", str(tmp_path / "nothing"))
    monkeypatch.setattr(spack, "pinned_clone", lambda url, commit: pinned)
    assert spack.find().root == pinned
    assert "holds no Spack" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["spack", "--version"], ["check"], ["lock", "h100-site"]])
def test_site_file_that_is_missing(run, command):
    done = run(paths.TOP, *command, DEEPEP_SITE_YAML="/nonexistent/site.yaml")
    assert done.returncode == 2
    assert "DEEPEP_SITE_YAML=/nonexistent/site.yaml: no such file" in done.stderr


@pytest.mark.spack
def test_isolation(run, pinned_spack, tmp_path):
    """Nothing of the user's own Spack configuration is read, nothing is written to the home."""
    home = tmp_path / "home"
    (home / ".spack").mkdir(parents=True)
    # A user's broken configuration would stop any Spack that reads it
    (home / ".spack" / "config.yaml").write_text("config: {nonsense: true}\n")
    before = sorted(p.relative_to(home) for p in home.rglob("*"))
    done = run(
        paths.TOP,
        "spack",
        "config",
        "get",
        "config",
        HOME=str(home),
        DEEPEP_CACHE=str(paths.cache()),
        GIT_CONFIG_GLOBAL=os.environ.get("GIT_CONFIG_GLOBAL", os.path.expanduser("~/.gitconfig")),
        SPACK_ENV="/nonexistent/environment",
    )
    assert done.returncode == 0, done.stderr
    assert "nonsense" not in done.stdout
    assert sorted(p.relative_to(home) for p in home.rglob("*")) == before


def test_setup_without_python(run, tmp_path):
    """A machine whose Python is too old gets a sentence that says what to install."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for tool in ("bash", "env", "dirname", "basename", "readlink", "sha256sum", "cut", "mkdir",
                 "flock", "rm"):  # fmt: skip
        source = subprocess.run(["which", tool], capture_output=True, text=True, check=True)
        (bin_ / tool).symlink_to(source.stdout.strip())
    old = bin_ / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = run(paths.TOP, "check", PATH=str(bin_), DEEPEP_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 2
    assert "needs Python 3.10 or later" in done.stderr


def test_setup_without_index(run, tmp_path):
    cache = tmp_path / "cache"
    done = run(
        paths.TOP,
        "check",
        DEEPEP_CACHE=str(cache),
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS="/nonexistent",
    )
    assert done.returncode == 2
    assert "cannot install ci/requirements.txt" in done.stderr
    assert not list(cache.glob("venv-*"))


@pytest.mark.slow
def test_two_first_runs_at_once(tmp_path):
    """Two runs on a fresh cache: one sets up, the other waits, both hold."""
    environment = {**os.environ, "DEEPEP_CACHE": str(tmp_path / "cache")}
    command = [str(paths.CI / "check"), "--spack", "off"]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    if any(b"cannot install" in err for _, err in outputs):
        pytest.skip("no package index can be reached: " + outputs[0][1].decode()[-200:])
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sum(b"first use" in err for _, err in outputs) == 1
    assert len(list((tmp_path / "cache").glob("venv-*"))) == 1
