"""CI templates, and the pipelines that `spack ci generate` and `spack env depfile` make."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from deepep_ci import paths
from deepep_ci.documents import load_json, load_yaml

TEMPLATES = paths.CI / "templates"

#: What GitLab reserves at the top of a pipeline; all else is a job, or hidden by a dot
KEYWORDS = {"default", "include", "stages", "variables", "workflow"}

#: Jobs that one job may need, on GitLab's own servers
MOST_NEEDS = 50


def jobs_of(pipeline: dict) -> dict[str, dict]:
    """{name: job} of a GitLab pipeline, with what `extends` brings."""
    found = {}
    for name, job in pipeline.items():
        if name not in KEYWORDS and not name.startswith("."):
            base = pipeline[job["extends"]] if "extends" in job else {}
            found[name] = {**base, **job}
    return found


def needs_of(job: dict) -> list[str]:
    """Names of the jobs of the same pipeline that a job needs."""
    needs = [{"job": n} if isinstance(n, str) else n for n in job.get("needs", [])]
    return [need["job"] for need in needs if "pipeline" not in need]


def faults(pipeline: dict) -> list[str]:
    """What GitLab refuses that its schema cannot say."""
    found, jobs = [], jobs_of(pipeline)
    order = {stage: index for index, stage in enumerate(pipeline["stages"])}
    for name, job in jobs.items():
        if job["stage"] not in order:
            found.append(f"{name}: stage {job['stage']} is not in stages")
            continue
        if not job.get("script") and "trigger" not in job:
            found.append(f"{name}: neither script nor trigger")
        if len(job.get("needs", [])) > MOST_NEEDS:
            found.append(f"{name}: needs {len(job['needs'])} jobs")
        for need in needs_of(job):
            if need not in jobs:
                found.append(f"{name}: needs {need}, which is no job")
            elif order[jobs[need]["stage"]] >= order[job["stage"]]:
                found.append(f"{name}: needs {need}, which runs no earlier")
    return found


@pytest.fixture(scope="session")
def against_schema(tmp_path_factory):
    """Function (document, schema's name) -> what the published schema says, "" for valid."""
    folder = tmp_path_factory.mktemp("schema")

    def check(document: dict, name: str) -> str:
        # JSON is YAML, and drops the anchors that Spack writes
        path = folder / "document.yaml"
        path.write_text(json.dumps(document))
        tool = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{name}"]
        done = subprocess.run([*tool, str(path)], capture_output=True, text=True, timeout=60)
        assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
        return "" if done.returncode == 0 else done.stdout + done.stderr

    return check


@pytest.mark.parametrize(
    "file, schema", [("gitlab-ci.yml", "gitlab-ci"), ("github.yaml", "github-workflows")]
)
def test_template_is_valid(against_schema, file, schema):
    assert not against_schema(load_yaml(TEMPLATES / file), schema)


def test_gitlab_template_holds_together():
    template = load_yaml(TEMPLATES / "gitlab-ci.yml")
    assert not faults(template)
    jobs = jobs_of(template)
    included = jobs["build"]["trigger"]["include"][0]
    assert included["job"] in needs_of(jobs["build"])
    assert included["artifact"] in " ".join(jobs["generate"]["script"])
    assert included["artifact"].startswith(jobs["generate"]["artifacts"]["paths"][0] + "/")


def test_faults_and_schema_find_damage(against_schema):
    good = load_yaml(TEMPLATES / "gitlab-ci.yml")
    for damage, text in {
        "stage": "is not in stages",
        "needs": "which is no job",
        "order": "which runs no earlier",
        "script": "neither script nor trigger",
    }.items():
        bad = copy.deepcopy(good)
        if damage == "stage":
            bad["check"]["stage"] = "nowhere"
        elif damage == "needs":
            bad["build"]["needs"] = ["nobody"]
        elif damage == "order":
            bad["stages"] = list(reversed(bad["stages"]))
        else:
            del bad["check"]["script"]
        assert any(text in fault for fault in faults(bad)), damage
    bad = copy.deepcopy(good)
    bad["check"]["script"] = {"not": "a list"}
    assert "check" in against_schema(bad, "gitlab-ci")


def script_of(job: dict) -> str:
    return "\n".join([*job.get("before_script", []), *job["script"]])


@pytest.fixture
def in_job(clone):
    """Function: runs a job's script in the copy of the repository, as a runner does."""

    def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if k not in ("SPACK_ROOT", "DEEPEP_SITE_YAML")}
        kept.update(CI_PROJECT_DIR=str(clone), CI_JOB_NAME="generate", CI_PIPELINE_ID="4711")
        kept.update(DEEPEP_BUILDCACHE=(clone / "buildcache").as_uri(), **variables)
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", script],
            cwd=clone,
            env=kept,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )

    return run


@pytest.mark.spack
@pytest.mark.parametrize("environment", ["h100", "h100-hybridep", "h100-site"])
def test_generated_pipeline(any_spack, against_schema, clone, in_job, environment):
    """One job for each package to build, after those it needs, about this environment's lock."""
    job = jobs_of(load_yaml(TEMPLATES / "gitlab-ci.yml"))["generate"]
    done = in_job(script_of(job), SPACK_ROOT=str(any_spack.root), DEEPEP_ENVIRONMENT=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    pipeline = load_yaml(clone / "jobs" / "pipeline.yml")
    assert not against_schema(pipeline, "gitlab-ci")
    assert not faults(pipeline)

    lock = load_json(paths.ENVIRONMENTS / environment / "spack.lock")["concrete_specs"]
    wanted = {hash for hash, node in lock.items() if "external" not in node}
    jobs = jobs_of(pipeline)
    names = {job["variables"]["SPACK_JOB_SPEC_DAG_HASH"]: name for name, job in jobs.items()}
    assert set(names) == wanted and len(names) == len(jobs)
    for hash, name in names.items():
        assert name.startswith(f"{lock[hash]['name']}@{lock[hash]['version']}")
        direct = {d["hash"] for d in lock[hash].get("dependencies", [])} & wanted
        assert {names[h] for h in direct} <= set(needs_of(jobs[name])), name
        parent = [need for need in jobs[name]["needs"] if "pipeline" in need]
        assert parent == [{"job": "generate", "pipeline": "4711"}]

    # The jobs use the environment that was generated from, not another folder of that name
    folder = pipeline["variables"]["SPACK_CONCRETE_ENV_DIR"]
    assert (clone / folder).relative_to(clone / "jobs")
    assert load_json(clone / folder / "spack.lock")["concrete_specs"].keys() == lock.keys()
    manifest = load_yaml(clone / folder / "spack.yaml")["spack"]
    original = load_yaml(paths.ENVIRONMENTS / environment / "spack.yaml")["spack"]
    assert list(manifest["specs"]) == list(original["specs"])
    for entry in manifest["include"]:
        relative = entry if isinstance(entry, str) else entry["path"]
        assert (clone / folder / relative).is_file(), relative
    for job in jobs.values():
        for command in job["script"]:
            assert command.startswith("ci/spack ") and f" -e {folder} " in command
            assert "{env_dir}" not in command


@pytest.mark.spack
@pytest.mark.parametrize("environment", ["h100", "h100-hybridep", "h100-site"])
def test_depfile(any_spack, clone, in_job, environment):
    """`spack env depfile` makes a makefile: each package of the lock, after those it needs."""
    makefile = clone / "Makefile.spack"
    done = in_job(
        f"ci/spack -e environments/{environment} env depfile -o {makefile}",
        SPACK_ROOT=str(any_spack.root),
    )
    assert done.returncode == 0, done.stderr
    lock = load_json(paths.ENVIRONMENTS / environment / "spack.lock")["concrete_specs"]
    # A plain `make -n` would install: the lines that call Spack begin with +
    done = in_job(f"make -n -f {makefile} SPACK='echo install:'")
    assert done.returncode == 0, done.stderr
    order = re.findall(r"^install: .* /(\w{32})", done.stdout, re.MULTILINE)
    assert sorted(order) == sorted(set(order))
    position = {hash: index for index, hash in enumerate(order)}
    wanted = {hash for hash, node in lock.items() if "external" not in node}
    assert wanted <= position.keys() <= lock.keys()
    for hash in wanted:
        for dependency in lock[hash].get("dependencies", []):
            if dependency["hash"] in wanted:
                assert position[dependency["hash"]] < position[hash]


@pytest.mark.build
@pytest.mark.slow
def test_generated_job_runs(site, clone, in_job, tmp_path):
    """A job builds its package, signs it and pushes it; the next pipeline leaves it out."""
    # The real packages of this machine, without the real install's tree: the template has its own
    document = load_json(site.environment.parent / "h100-site" / "site.yaml")
    site_yaml = tmp_path / "site.yaml"
    site_yaml.write_text(json.dumps({"packages": document["packages"]}))
    lock = clone / "environments" / "h100-site" / "spack.lock"
    shutil.copy(site.environment / "spack.lock", lock)
    # Short, since the agent's socket lies in it, and TMPDIR is where the job makes its keyring
    with tempfile.TemporaryDirectory(prefix="gpg") as folder:
        key, ring = Path(folder) / "key.asc", Path(folder) / "ring"
        variables = {
            "DEEPEP_ENVIRONMENT": "h100-site",
            "DEEPEP_SITE_YAML": str(site_yaml),
            "DEEPEP_SIGNING_KEY": str(key),
            "SPACK_ROOT": str(site.spack.root),
            "TMPDIR": folder,
        }
        done = in_job(
            "ci/spack gpg create 'Site Cache' cache@example.com\n"
            f"ci/spack gpg export --secret {key}\n"
            f"gpgconf --homedir {ring} --kill all",
            **variables,
            SPACK_GNUPGHOME=str(ring),
        )
        assert done.returncode == 0, done.stderr
        template = jobs_of(load_yaml(TEMPLATES / "gitlab-ci.yml"))

        def generated() -> dict[str, dict]:
            done = in_job(script_of(template["generate"]), **variables)
            assert done.returncode == 0, done.stderr
            return load_yaml(clone / "jobs" / "pipeline.yml")

        pipeline = generated()
        first = jobs_of(pipeline)
        (name,) = [name for name in first if name.startswith("python-venv@")]
        done = in_job(
            script_of(first[name]),
            **variables,
            # As GitLab does: the pipeline's and the job's; the cache is that of the tests
            **pipeline["variables"],
            **{k: v for k, v in first[name]["variables"].items() if k != "DEEPEP_CACHE"},
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        # No keyring with the private key stays on the runner
        (kept,) = Path(folder).rglob("private-keys-v1.d")
        assert kept.parent == ring
        done = in_job(script_of(template["index"]), **variables)
        assert done.returncode == 0, done.stderr
    (manifest,) = (clone / "buildcache").glob("v3/manifests/spec/*/*.spec.manifest.json")
    assert manifest.parent.name == "python-venv"
    assert manifest.read_text().startswith("-----BEGIN PGP SIGNED MESSAGE-----")
    (prefix,) = (clone / ".store").glob("**/python-venv-*")
    assert len(str(prefix)) > 128
    assert set(jobs_of(generated())) == set(first) - {name}
