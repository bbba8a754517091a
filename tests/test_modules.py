"""Activation and module files of the installed h100-site, in real Lmod and Environment Modules."""

import json
import os
import pwd
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import missing
from deepep_ci import paths, spack
from deepep_ci.documents import load_yaml

pytestmark = [pytest.mark.build, pytest.mark.slow]

#: What the module systems keep for themselves
BOOKKEEPING = re.compile(
    r"(LMOD_|__LMOD_|_ModuleTable|__MODULES_|MODULES_|MODULEPATH$|LOADEDMODULES$|_LMFILES_$|_$|SHLVL$)"
)

#: Prints where things come from; its last line is JSON
IMPORT = (
    "import json, os, sys, torch, deep_ep, pynvml; print(json.dumps({'python': sys.executable,"
    " 'deep_ep': deep_ep.__file__, 'torch': torch.__file__, 'pynvml': pynvml.__file__,"
    " 'env': dict(os.environ)}))"
)

#: A shell's way from before the load to after the unload
ROUND = """set -e
snap before
module load py-deep-ep
snap loaded
module unload py-deep-ep
snap after
"""

#: Modules as a site may have them: (name/version, Tcl commands)
FOREIGN = [
    ("cuda/12.4", "setenv CUDA_HOME /foreign/cuda"),
    ("cuda/13.0", "setenv CUDA_HOME /site/cuda"),
    ("pytorch/2.14", "setenv SITE_PYTORCH loaded"),
    ("libnvshmem/3.4.5", "prepend-path LD_LIBRARY_PATH /foreign/lib"),
    ("nvhpc/25.9", "prepend-path LD_LIBRARY_PATH /foreign/lib"),
    ("nvshmem/3.4.5", "prepend-path LD_LIBRARY_PATH /foreign/lib"),
]

USER = pwd.getpwuid(os.getuid()).pw_name


def _lmod() -> list[str]:
    for path in (os.environ.get("LMOD_CMD"), "/usr/share/lmod/lmod/libexec/lmod"):
        if path and os.access(path, os.X_OK):
            return [path]
    missing("build", "Lmod is not installed (apt or dnf install lmod), nor named by LMOD_CMD")


def _environment_modules() -> list[str]:
    tclsh = shutil.which("tclsh")
    if tclsh is None:
        missing("build", "Environment Modules need tclsh (apt or dnf install tcl)")
    # Debian's package cannot be installed beside Lmod's: unpacked, it does as well
    unpacked = paths.cache() / "tests" / "environment-modules"
    found = [
        "usr/lib/x86_64-linux-gnu/modulecmd.tcl",
        "usr/lib/aarch64-linux-gnu/modulecmd.tcl",
        "usr/share/Modules/libexec/modulecmd.tcl",
    ]
    for path in (os.environ.get("MODULES_CMD"), *(f"/{name}" for name in found)):
        if path and Path(path).is_file():
            return [tclsh, path]
    if not unpacked.is_dir():
        _unpack_debian("environment-modules", unpacked)
    for name in found:
        if (unpacked / name).is_file():
            return [tclsh, str(unpacked / name)]
    missing("build", f"no modulecmd.tcl in {unpacked}, unpacked from Debian's package")


def _unpack_debian(package: str, target: Path) -> None:
    """Downloads and unpacks a Debian package, without installing it."""
    fresh = target.with_name(f"{target.name}.new.{os.getpid()}")
    fresh.mkdir(parents=True)
    try:
        for command in (["apt-get", "download", package], ["sh", "-c", "dpkg -x *.deb ."]):
            done = subprocess.run(
                command, cwd=fresh, stdin=subprocess.DEVNULL, capture_output=True, text=True
            )
            if done.returncode:
                missing("build", f"{package} is not installed, and: {done.stderr.strip()[-200:]}")
        if not target.is_dir():
            fresh.rename(target)
    except FileNotFoundError as error:
        missing("build", f"{package} is not installed, and there is no {error.filename}")
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def refresh(site, spack_of, folder: Path, more: dict | None = None) -> dict[str, Path]:
    """Module files below a folder, as a site sets its roots: {"lmod" or "tcl": its root}."""
    document = load_yaml(site.environment / "site.yaml")
    roots = {kind: folder / kind for kind in ("lmod", "tcl")}
    modules = document.setdefault("modules", {}).setdefault("default", {})
    modules["roots"] = {kind: str(root) for kind, root in roots.items()}
    modules.update(more or {})
    named = folder / "site.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    named.write_text(json.dumps(document))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPEP_SITE_YAML", str(named))
        for kind in roots:
            arguments = ["-e", str(site.environment), "module", kind, "refresh", "-y"]
            done = spack_of.run(arguments, timeout=300)
            # Spack only warns about a template that fails
            assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr[-3000:]
    return roots


@pytest.fixture(scope="module")
def modules(site, tmp_path_factory):
    """The site's module files, by kind."""
    return refresh(site, site.spack, tmp_path_factory.mktemp("modules"))


@dataclass
class System:
    """A module system, as a shell uses it."""

    command: list[str]
    kind: str
    name: str

    def path(self, roots: dict[str, Path]) -> Path:
        """What `module use` takes."""
        return roots["lmod"] / "Core" if self.kind == "lmod" else roots["tcl"]

    def bash(
        self, tmp: Path, roots: dict[str, Path], script: str, **env: str | None
    ) -> "tuple[subprocess.CompletedProcess[str], dict[str, dict[str, str]]]":
        """Runs a script with `module`, and `snap NAME`, which takes an environment."""
        foreign = tmp / "foreign"
        for name, commands in FOREIGN:
            path = foreign / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#%Module1.0\n{commands}\n")
        snaps = tmp / "snaps"
        shutil.rmtree(snaps, ignore_errors=True)
        snaps.mkdir()
        (tmp / "home").mkdir(exist_ok=True)
        environment: dict[str, str | None] = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(tmp / "home"),
            "LANG": "C.UTF-8",
            "MODULEPATH": f"{self.path(roots)}:{foreign}",
            **env,
        }
        command = " ".join(self.command)
        prelude = (
            f'module() {{ eval "$({command} bash "$@")"; }}\nsnap() {{ env -0 >{snaps}/"$1"; }}\n'
        )
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-c", prelude + script],
            env={k: v for k, v in environment.items() if v is not None},
            cwd=tmp,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return done, {path.name: _environment(path) for path in snaps.iterdir()}


def _environment(path: Path) -> dict[str, str]:
    pairs = (line.partition("=") for line in path.read_text().split("\0") if line)
    return {name: value for name, _, value in pairs if not BOOKKEEPING.match(name)}


@pytest.fixture(scope="module", params=["lmod", "lmod-tcl", "environment-modules"])
def system(request):
    """Lmod with Lua files, Lmod with Tcl files, Environment Modules."""
    if request.param == "environment-modules":
        return System(_environment_modules(), "tcl", request.param)
    return System(_lmod(), "lmod" if request.param == "lmod" else "tcl", request.param)


@pytest.fixture
def bash(system, modules, tmp_path):
    """Function (script, variables) -> (finished process, {snap: environment})."""
    return lambda script, **env: system.bash(tmp_path, modules, script, **env)


def _version(site, name: str) -> str:
    return site.nodes()[name]["version"]


def test_names(site, modules):
    """Ours and what they need at run time; no hash, no build tool, nothing that the site has."""
    expected = {
        f"{name}/{_version(site, name)}"
        for name in ("nvshmem", "py-deep-ep", "py-nvidia-ml-py", "rdma-core")
    }
    assert {"py-deep-ep/1.2.1-4214430", "nvshmem/3.6.5", "rdma-core/60.0"} < expected
    for kind, suffix in (("lmod", ".lua"), ("tcl", "")):
        root = modules[kind] / "Core" if kind == "lmod" else modules[kind]
        found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
        assert found - {"module-index.yaml"} == {name + suffix for name in expected}


def test_default_roots(site):
    """Without a word in site.yaml they lie in the environment, in a folder git ignores."""
    for kind, leaf in (("lmod", "Core/nvshmem/3.6.5.lua"), ("tcl", "nvshmem/3.6.5")):
        site.run("module", kind, "refresh", "-y", check=True)
        assert (site.environment / ".spack-env" / "modules" / kind / leaf).is_file()


def test_load_import_unload(site, bash):
    done, snaps = bash(
        f'snap before; python3 -c "{IMPORT}" && exit 3\n'
        "module load py-deep-ep || exit 4\n"
        f'snap loaded; python -c "{IMPORT}" || exit 5\n'
        "module unload py-deep-ep || exit 6\nsnap after; module list 2>&1"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "py-deep-ep" not in done.stdout.splitlines()[-1]
    found = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert found["python"].startswith(f"{site.prefix('python')}/bin/")
    assert found["torch"].startswith(f"{site.prefix('py-torch')}/")
    assert found["deep_ep"].startswith(f"{site.prefix('py-deep-ep')}/")
    assert found["pynvml"].startswith(f"{site.prefix('py-nvidia-ml-py')}/")
    loaded = snaps["loaded"]
    assert loaded["CUDA_HOME"] == str(site.prefix("cuda"))
    assert loaded["NVSHMEM_DIR"] == str(site.prefix("nvshmem"))
    assert loaded["HYBRID_EP_CACHE_DIR"] == loaded["HOME"] + "/.cache/deep-ep"
    for name in ("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "LD_PRELOAD"):
        assert loaded.get(name) == snaps["before"].get(name)
    assert snaps["after"] == snaps["before"]


def test_unload_gives_back_what_the_user_had(bash):
    mine = {
        "CUDA_HOME": "/my/cuda",
        "NVSHMEM_DIR": "/my/nvshmem",
        "HYBRID_EP_CACHE_DIR": "/my/cache",
        "PYTHONPATH": "/my/python",
        "MANPATH": "/my/man:",
    }
    done, snaps = bash(
        ROUND + "module load py-deep-ep; module purge; snap again",
        **mine,
    )
    assert done.returncode == 0, done.stderr
    assert snaps["loaded"]["CUDA_HOME"] != "/my/cuda"
    assert snaps["loaded"]["NVSHMEM_DIR"] != "/my/nvshmem"
    assert snaps["loaded"]["HYBRID_EP_CACHE_DIR"] == "/my/cache"
    assert snaps["loaded"]["PYTHONPATH"].endswith(":/my/python")
    assert snaps["after"] == snaps["again"] == snaps["before"]


def test_module_of_another_cuda_is_no_conflict(site, bash):
    done, snaps = bash(f"module load cuda/12.4; {ROUND}")
    assert done.returncode == 0, done.stderr
    assert snaps["before"]["CUDA_HOME"] == "/foreign/cuda"
    assert snaps["loaded"]["CUDA_HOME"] == str(site.prefix("cuda"))
    assert snaps["after"] == snaps["before"]


@pytest.mark.parametrize("other", ["nvhpc", "libnvshmem", "nvshmem"])
def test_another_nvshmem_is_loaded(system, bash, other):
    done, snaps = bash(
        f"module load {other}/{'25.9' if other == 'nvhpc' else '3.4.5'} || exit 3\nsnap before\n"
        "module load py-deep-ep; status=$?; snap after; module -t list 2>&1; exit $status"
    )
    assert snaps["before"]["LD_LIBRARY_PATH"] == "/foreign/lib"
    if other == "nvshmem" and system.name != "environment-modules":
        # Lmod has one version of a name, and says that it changed
        assert done.returncode == 0
        assert "nvshmem/3.4.5 => nvshmem/3.6.5" in done.stdout + done.stderr
        assert "LD_LIBRARY_PATH" not in snaps["after"]
        assert (
            "nvshmem/3.6.5" in done.stdout.split() and "nvshmem/3.4.5" not in done.stdout.split()
        )
    else:
        assert done.returncode == 1
        assert re.search(r"because these module\(s\)|due to a conflict", done.stderr), done.stderr
        assert snaps["after"] == snaps["before"]


@pytest.mark.parametrize("other", ["nvhpc/25.9", "nvshmem/3.4.5"])
def test_another_nvshmem_comes_later(system, bash, other):
    done, snaps = bash(
        "module load py-deep-ep || exit 3\nsnap before\n"
        f"module load {other}; echo status $?; snap after"
    )
    if system.name == "environment-modules":
        assert "status 1" in done.stdout and "due to a conflict" in done.stderr
        assert snaps["after"] == snaps["before"]
    elif other.startswith("nvshmem"):
        assert "nvshmem/3.6.5 => nvshmem/3.4.5" in done.stdout + done.stderr
    else:
        # Lmod asks the conflicts of what is being loaded, before release 9 only of that
        assert done.returncode == 0


def test_nvshmem_on_the_library_path_is_told(bash, tmp_path):
    (tmp_path / "foreign-lib").mkdir()
    (tmp_path / "foreign-lib" / "libnvshmem_host.so.3").touch()
    load = "set -e; module load py-deep-ep; module unload py-deep-ep; echo done"
    done, _ = bash(load, LD_LIBRARY_PATH=f"/nowhere:{tmp_path}/foreign-lib")
    told = (done.stdout + done.stderr).replace("\n", " ")
    assert f"has another NVSHMEM, which PyTorch may load first: {tmp_path}/foreign-lib" in told
    assert done.stdout.endswith("done\n")
    done, _ = bash(load, LD_LIBRARY_PATH=f"/nowhere:{tmp_path}")
    assert "another NVSHMEM" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "env, expected",
    [
        ({}, "{tmp}/home/.cache/deep-ep"),
        ({"XDG_CACHE_HOME": "{tmp}/xdg"}, "{tmp}/xdg/deep-ep"),
        # Nobody can write into /proc, root included
        ({"HOME": "/proc", "TMPDIR": "{tmp}/t m p"}, "{tmp}/t m p/deep-ep-{user}"),
        ({"HOME": None, "TMPDIR": "{tmp}/t m p"}, "{tmp}/t m p/deep-ep-{user}"),
        ({"HOME": "/proc", "TMPDIR": "/proc"}, None),
    ],
    ids=["home", "xdg", "read-only-home", "no-home", "nowhere"],
)
def test_cache_directory(bash, tmp_path, env, expected):
    """Chosen as the module is loaded, not as it was written; it must be there and private."""
    (tmp_path / "t m p").mkdir()
    fill = {"tmp": str(tmp_path), "user": USER}
    done, snaps = bash(
        ROUND,
        **{name: value and value.format(**fill) for name, value in env.items()},
    )
    assert done.returncode == 0, done.stderr
    cache = snaps["loaded"].get("HYBRID_EP_CACHE_DIR")
    assert cache == (expected and expected.format(**fill))
    if cache:
        assert Path(cache).stat().st_mode & 0o777 == 0o700
    assert snaps["after"] == snaps["before"]


@pytest.mark.parametrize("trap", ["link", "owner"])
def test_cache_directory_of_somebody_else(bash, tmp_path, trap):
    """DeepEP runs what is in the cache: a folder that others prepared in /tmp is not taken."""
    folder = tmp_path / "tmp" / f"deep-ep-{USER}"
    folder.parent.mkdir()
    if trap == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder to somebody else")
        folder.mkdir()
        os.chown(folder, 65534, 65534)
    done, snaps = bash(
        "module load py-deep-ep || exit 3\nsnap loaded", HOME="/proc", TMPDIR=str(folder.parent)
    )
    assert done.returncode == 0, done.stderr
    assert "HYBRID_EP_CACHE_DIR" not in snaps["loaded"]


def test_cache_directory_changed_after_load_stays(bash):
    done, snaps = bash(
        "set -e; module load py-deep-ep; export HYBRID_EP_CACHE_DIR=/my/cache\n"
        "module unload py-deep-ep; snap after"
    )
    assert snaps["after"]["HYBRID_EP_CACHE_DIR"] == "/my/cache"
    assert not [name for name in snaps["after"] if name.startswith("DEEP_EP_")]


def test_help(bash):
    done, _ = bash("module help py-deep-ep; module whatis py-deep-ep")
    text = done.stdout + done.stderr
    for said in (
        "python -c 'import deep_ep'",
        "spack test run py-deep-ep",
        "python tests/dispatch doctor",
        "NVSHMEM 3.6.5, rdma-core 60.0",
        "compute capabilities: 90",
        "HybridEP: single_node",
        "DeepEP#564",
        "Not with another NVSHMEM",
    ):
        assert said in text, text


@pytest.mark.spack
def test_both_spacks(site, any_spack, system, tmp_path):
    """Each tested Spack has templates of its own that ours extend."""
    roots = refresh(site, any_spack, tmp_path / "roots")
    done, snaps = system.bash(
        tmp_path,
        roots,
        ROUND,
        CUDA_HOME="/my/cuda",
    )
    assert done.returncode == 0, done.stderr
    assert snaps["loaded"]["NVSHMEM_DIR"] == str(site.prefix("nvshmem"))
    assert str(site.prefix("py-nvidia-ml-py")) in snaps["loaded"]["PYTHONPATH"]
    assert snaps["after"] == snaps["before"]


def test_site_adds_to_what_is_here(site, tmp_path):
    """Lists of site.yaml are added, not put in the place of ours."""
    more = {"lmod": {"py-deep-ep": {"conflict": ["site-nvshmem"]}}}
    roots = refresh(site, site.spack, tmp_path, more)
    text = (roots["lmod"] / "Core" / "py-deep-ep" / "1.2.1-4214430.lua").read_text()
    assert 'conflict("site-nvshmem")' in text and 'conflict("nvhpc")' in text


#: For `spack python`: sets `modules:` of externals in memory (in site.yaml it would be another
#: hash, and another install), and writes the module file
EXTERNAL_MODULES = """
import json, sys
import spack.environment, spack.modules
specs = spack.environment.active_environment().all_specs()
spec = next(s for s in specs if s.name == "py-deep-ep")
for name, module in json.loads(sys.argv[2]).items():
    spec[name].external_modules = [module]
kind = spack.modules.module_types[sys.argv[1]]
write = getattr(kind, "from_spec", kind)(spec, "default", True)
write.write(overwrite=True)
print("name", write.layout.use_name)
"""


def test_modules_of_the_site_are_loaded(site, system, modules, tmp_path, monkeypatch):
    """Externals with `modules:` come with theirs, and PATH is left to these."""
    script = tmp_path / "external.py"
    script.write_text(EXTERNAL_MODULES)
    roots = {kind: tmp_path / "roots" / kind for kind in modules}
    for kind, root in modules.items():
        shutil.copytree(root, roots[kind])
    document = load_yaml(site.environment / "site.yaml")
    document["modules"] = {"default": {"roots": {k: str(v) for k, v in roots.items()}}}
    named = tmp_path / "site.yaml"
    named.write_text(json.dumps(document))
    monkeypatch.setenv("DEEPEP_SITE_YAML", str(named))
    names = {"cuda": "cuda/13.0", "python": "pytorch/2.14", "py-torch": "pytorch/2.14"}
    site.run("python", str(script), system.kind, json.dumps(names), check=True)
    done, snaps = system.bash(tmp_path, roots, ROUND)
    assert done.returncode == 0, done.stderr
    loaded = snaps["loaded"]
    assert loaded["SITE_PYTORCH"] == "loaded"
    assert f"{site.prefix('python')}/bin" not in loaded["PATH"].split(":")
    assert loaded["CUDA_HOME"] == str(site.prefix("cuda"))
    assert snaps["after"] == snaps["before"]


#: For `spack python`: the names that py-deep-ep's modules would have
NAMES = """
import spack.environment, spack.modules
specs = spack.environment.active_environment().all_specs()
spec = next(s for s in specs if s.name == "py-deep-ep")
for kind in ("lmod", "tcl"):
    kind = spack.modules.module_types[kind]
    print("name", getattr(kind, "from_spec", kind)(spec, "default", True).layout.use_name)
"""


@pytest.mark.spack
@pytest.mark.parametrize(
    "environment, name",
    [
        ("h100-site", "py-deep-ep/1.2.1-4214430"),
        ("h100-hybridep", "py-deep-ep/1.2.1-4214430-multinode"),
        # `module load py-deep-ep` must not find what hangs
        ("h100-control", "py-deep-ep-control/1.2.1-4214430"),
    ],
)
def test_builds_of_one_version_have_names_of_their_own(
    clone, any_spack, tmp_path, environment, name
):
    script = tmp_path / "names.py"
    script.write_text(NAMES)
    folder = clone / "environments" / environment
    done = any_spack.run(["-e", str(folder), "python", str(script)], timeout=300)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("name")] == [
        f"name {name}"
    ] * 2


def test_install_writes_them_where_enabled(site, tmp_path):
    """Not by default; a site may ask for it. The install is a fake one, in a store of its own."""
    top = tmp_path / "copy"
    shutil.copytree(
        site.environment.parent,
        top / "environments",
        ignore=shutil.ignore_patterns(".spack-env"),
        symlinks=True,
    )
    (top / "spack-repo").symlink_to(paths.TOP / "spack-repo")
    environment = top / "environments" / site.environment.name
    document = load_yaml(environment / "site.yaml")
    document["config"] = {"install_tree": {"root": str(tmp_path / "store")}}
    lua = environment / ".spack-env" / "modules" / "lmod" / "Core" / "rdma-core" / "60.0.lua"
    for enable in ([], ["lmod"]):
        document["modules"] = {"default": {"enable": enable}}
        (environment / "site.yaml").write_text(json.dumps(document))
        arguments = ["-e", str(environment), "install", "--fake", "rdma-core"]
        done = site.spack.run(arguments, timeout=300)
        assert done.returncode == 0, done.stderr
        assert lua.is_file() == bool(enable)
        shutil.rmtree(tmp_path / "store")


def test_activate(site, tmp_path):
    """`spack env activate` gives PATH, PYTHONPATH and the view, without LD_LIBRARY_PATH."""
    done = subprocess.run(
        site.spack.command(["env", "activate", "--sh", str(site.environment)]),
        env=spack.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "LD_LIBRARY_PATH" not in done.stdout
    view = site.environment / ".spack-env" / "view"
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-c", f'{done.stdout}\npython -c "{IMPORT}"'],
        env=_clean(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["python"].startswith(f"{view}/bin/python")
    assert found["deep_ep"].startswith(f"{view}/lib/")
    assert found["torch"].startswith(f"{site.prefix('py-torch')}/")
    assert found["env"]["CUDA_HOME"] == str(site.prefix("cuda"))
    # DeepEP's own default then: the home directory
    assert "HYBRID_EP_CACHE_DIR" not in found["env"]
    assert (view / "lib" / "libnvshmem_host.so.3").exists()


def _clean(home: Path) -> dict[str, str]:
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8"}


def test_templates_are_found_by_name_only_here():
    """A template of Spack's own name would stand in for it in every environment."""
    templates = paths.ENVIRONMENTS / "common" / "templates" / "modules"
    assert sorted(path.name for path in templates.iterdir()) == [
        "cache-dir.sh",
        "py-deep-ep.lua",
        "py-deep-ep.tcl",
        "py-deep-ep.txt",
    ]
    config = load_yaml(paths.ENVIRONMENTS / "common" / "config.yaml")
    assert config["config"]["template_dirs"] == ["templates"]
