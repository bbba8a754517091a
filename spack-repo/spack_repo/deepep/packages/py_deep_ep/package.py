# Copyright DeepEP-on-Spack developers. See LICENSE-APACHE and LICENSE-MIT for details.
#
# SPDX-License-Identifier: (Apache-2.0 OR MIT)

import os

from spack_repo.builtin.build_systems.cuda import CudaPackage
from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *

from spack_repo.deepep import evidence
from spack_repo.deepep.deep_ep_checks import DeepEpChecks

#: Revisions of branch hybrid-ep: deep_ep_cpp and hybrid_ep_cpp
_hybrid = ("1.2.1-4214430", "1.2.1-7febc6e", "1.2.1-17cfb81", "1.2.1-94a9f8f")

#: Revisions whose only RC lookup is that of layout v1. Found by reading the code: ancestry
#: does not tell, since later trees lost the fix (DeepEP#707, DeepEP#764)
_affected = _hybrid + ("1.2.1",)

#: Revisions that have DeepEP#564
_fixed = ("1.2.1-567632d",)


def _at(versions):
    """Spec constraint for any of exactly these versions."""
    return "@" + ",".join(f"={v}" for v in versions)


class PyDeepEp(DeepEpChecks, PythonPackage, CudaPackage):
    """DeepEP: expert-parallel dispatch and combine for mixture-of-experts models, over NVLink
    and over InfiniBand by NVSHMEM's GPU-initiated RDMA (IBGDA), and HybridEP."""

    homepage = "https://github.com/deepseek-ai/DeepEP"
    git = "https://github.com/deepseek-ai/DeepEP.git"

    # The tests use none of the build's files
    test_requires_compiler = False

    license("MIT")

    # Branch hybrid-ep. 4214430 is what Automodel ships (NVIDIA-NeMo/Automodel#3967)
    version("1.2.1-4214430", commit="42144303752422ade37f24bca9e2dde12df70e09", preferred=True)
    version("1.2.1-94a9f8f", commit="94a9f8f6b146c07d97ec58f67cd6d303296d6098")
    version("1.2.1-17cfb81", commit="17cfb817bccec3a9c247013360cc550c2bac441e")
    version("1.2.1-7febc6e", commit="7febc6e25660af0f54d95dd781ecdcd62265ecca")
    # Branch main
    version("1.2.1-567632d", commit="567632dd59810d77b3cc05553df953cc0f779799")
    version("1.2.1", tag="v1.2.1", commit="9af0e0d0e74f3577af1979c9b9e1ac2cad0104ee")

    variant("cuda", default=True, description="Build with CUDA")
    variant(
        "rc_layout_backport",
        default=True,
        when=_at(_affected),
        description="Index RC queue pairs by NVSHMEM's layout v2 too (DeepEP#564, DeepEP#696)",
    )
    variant(
        "hybrid_ep",
        default="single_node",
        values=("none", "single_node", "multinode_doca", "multinode_nixl"),
        multi=False,
        when=_at(_hybrid),
        description="HybridEP: without, NVLink only, or between nodes by DOCA GPUNetIO",
    )
    variant(
        "aggressive_ptx",
        default=False,
        description="Loads that bypass L1 in a way PTX does not document (cuda_arch=90 only)",
    )
    variant(
        "broken_on_purpose",
        default="none",
        values=("none", "control", "no_bound"),
        multi=False,
        sticky=True,
        description="For experiments: hangs (control) or corrupts memory (no_bound) between nodes",
    )

    depends_on("c", type="build")
    depends_on("cxx", type="build")

    with default_args(type="build"):
        depends_on("gmake", when="hybrid_ep=multinode_doca")
        depends_on("ninja")
        depends_on("py-setuptools")

    with default_args(type=("build", "link", "run")):
        # HybridEP compiles its kernels at run time with $CUDA_HOME/bin/nvcc
        depends_on("cuda")
        depends_on("nvshmem")
        depends_on("rdma-core@35:")

    # DeepEP#55: builtin's source builds have no IBGDA, the binary distribution has
    depends_on("nvshmem build_system=generic")
    depends_on("py-torch+cuda+distributed", type=("build", "link", "run"))
    # Upstream asks for pynvml, whose module this maintained package provides
    depends_on("py-nvidia-ml-py", type="run")

    # The commit of submodule third-party/nccl; only its DOCA GPUNetIO objects are built. Not in
    # that folder: a clone has it empty, and Spack places no resource over what exists
    resource(
        name="nccl",
        git="https://github.com/NVIDIA/nccl.git",
        commit="1e0c869c39bb33f1034cb9920bd2a8a8406f04a3",
        destination="third-party",
        placement={"": "nccl-doca"},
        when="hybrid_ep=multinode_doca",
    )

    conflicts("~cuda", msg="DeepEP is CUDA only: use +cuda (the default) and cuda_arch=90")
    conflicts(
        "cuda_arch=none",
        msg="DeepEP needs the GPU's compute capability: cuda_arch=90 for H100 and H200, 100 for "
        "B200, 120 for RTX PRO 6000",
    )
    for _arch in CudaPackage.cuda_arch_values:
        if int(_arch.rstrip("af")) < 90:
            conflicts(
                f"cuda_arch={_arch}",
                msg="DeepEP's internode and low-latency kernels need compute capability 9.0 or "
                "later: use cuda_arch=90 (H100)",
            )
        if _arch != "90":
            # setup.py asserts it
            conflicts(
                f"cuda_arch={_arch}",
                when="+aggressive_ptx",
                msg="DeepEP allows +aggressive_ptx for cuda_arch=90 alone: use ~aggressive_ptx",
            )
    for _cuda in ("@:12", "@14:"):
        conflicts(
            f"^cuda{_cuda}",
            msg="DeepEP is built against CUDA 13 here, as NVSHMEM's binaries are: use cuda@13",
        )

    # DeepEP#564: the known-bad pair does not concretize by accident
    conflicts(
        "^nvshmem@3.5.19:",
        when=_at(_affected) + " ~rc_layout_backport broken_on_purpose=none",
        msg="this DeepEP revision indexes RC queue pairs by the layout that NVSHMEM changed in "
        "3.5.19, and internode dispatch times out (DeepEP#564): use +rc_layout_backport (the "
        "default) or nvshmem@3.4.5-cu13; to build the broken pair for a control run, say "
        "broken_on_purpose=control",
    )
    _nothing_broken = (
        "broken_on_purpose={0} would build nothing broken here: it needs {1}; use "
        "broken_on_purpose=none"
    )
    for _when in ("+rc_layout_backport", "^nvshmem@:3.4", _at(_fixed)):
        conflicts(
            "broken_on_purpose=control",
            when=_when,
            msg=_nothing_broken.format(
                "control", "an affected revision, ~rc_layout_backport and nvshmem@3.6:"
            ),
        )
    conflicts(
        "broken_on_purpose=control",
        when="^nvshmem@3.5",
        msg="the control does not link against NVSHMEM 3.5.19 and 3.5.21 (duplicate "
        "nvshmemi_ibgda_device_state_d, DeepEP#557): use nvshmem@3.6.5",
    )
    for _when in ("~rc_layout_backport", "^nvshmem@:3.4"):
        conflicts(
            "broken_on_purpose=no_bound",
            when=_when,
            msg=_nothing_broken.format("no_bound", "+rc_layout_backport and nvshmem@3.5.19:"),
        )

    conflicts(
        "hybrid_ep=multinode_nixl",
        msg="HybridEP over NIXL is not packaged yet: use hybrid_ep=multinode_doca or single_node",
    )
    with when("hybrid_ep=multinode_doca"):
        conflicts(
            "^rdma-core@:59",
            msg="HybridEP between nodes is built with rdma-core 60 (include/ and lib/ under one "
            "prefix): use rdma-core@60.0 of this repository, not an older or the system's",
        )
        conflicts(
            "target=aarch64:",
            msg="HybridEP between nodes (DOCA GPUNetIO) is for x86_64: use hybrid_ep=single_node",
        )

    patch(
        "deep-ep-564-rc-layout.patch",
        when=_at(_affected) + " +rc_layout_backport ^nvshmem@3.5.19:",
    )
    # DeepEP#564 alone runs out of bounds (10 QPs and 20 SMs): patches/README.md
    for _when in (_at(_affected) + " +rc_layout_backport", _at(_fixed)):
        patch("deep-ep-rc-bound.patch", when=f"{_when} broken_on_purpose=none ^nvshmem@3.5.19:")
    # Which NVSHMEM the process has is checked at import, and stubs stand in for a missing driver
    patch("deep-ep-loading.patch")

    @property
    def revision(self):
        """Abbreviated commit, as upstream's setup.py appends it to the version."""
        return self.versions[self.version]["commit"][:7]

    def patch(self):
        release = str(self.spec["nvshmem"].version.up_to(3))
        self._replace("deep_ep/_loading.py", "@NVSHMEM_VERSION@", release)
        # The stage may have no .git, or sit inside another repository
        self._replace(
            "setup.py",
            "'+' + subprocess.check_output(cmd).decode('ascii').rstrip()",
            f"'+{self.revision}'",
        )
        if not self.spec.satisfies(_at(_hybrid)):
            return
        self._replace("setup.py", "'pynvml'", "'nvidia-ml-py'")
        # DeepEP#698: torch's headers need C++20 since 2.14
        if self.spec.satisfies("^py-torch@2.14:"):
            self._replace("setup.py", '"-std=c++17"', '"-std=c++20"')
        if self.spec.satisfies("hybrid_ep=none"):
            self._replace("setup.py", "            get_extension_hybrid_ep_cpp()\n", "")
            self._replace(
                "deep_ep/__init__.py", "from .hybrid_ep_buffer import HybridEPBuffer\n", ""
            )
            self._replace(
                "deep_ep/__init__.py", "from hybrid_ep_cpp import HybridEpConfigInstance", ""
            )
            os.remove("deep_ep/hybrid_ep_buffer.py")
        if self.spec.satisfies("hybrid_ep=multinode_doca"):
            # The resource stands for the submodule; build_doca_objects builds what is needed
            self._replace("setup.py", '"third-party/nccl"', '"third-party/nccl-doca"')
            self._replace(
                "setup.py",
                'subprocess.run(["git", "submodule", "update", "--init", "--recursive"], '
                "cwd=current_dir)\n",
                "\n",
            )
            self._replace("setup.py", '"make", "-j", "src.build", ', '"true", ')

    def _replace(self, path, old, new):
        """Replaces the one occurrence of a text; a source without it is not the one we know."""
        with open(path) as stream:
            text = stream.read()
        if text.count(old) != 1:
            raise InstallError(f"{self.name}: {path} has {text.count(old)} times, not once: {old}")
        with open(path, "w") as stream:
            stream.write(text.replace(old, new))

    def setup_build_environment(self, env: EnvironmentModifications) -> None:
        spec = self.spec
        cuda = spec["cuda"].prefix
        arch = self.compute_capabilities(spec.variants["cuda_arch"].value)
        env.set("CUDA_HOME", cuda)
        env.set("NVSHMEM_DIR", spec["nvshmem"].prefix)
        env.set("RDMA_CORE_HOME", spec["rdma-core"].prefix)
        env.set("TORCH_CUDA_ARCH_LIST", " ".join(arch))
        env.set("MAX_JOBS", str(make_jobs))
        env.set("DISABLE_SM90_FEATURES", "0")
        env.set("DISABLE_AGGRESSIVE_PTX_INSTRS", "0" if "+aggressive_ptx" in spec else "1")
        multinode = spec.satisfies("hybrid_ep=multinode_doca")
        env.set("HYBRID_EP_MULTINODE", "1" if multinode else "0")
        env.unset("USE_NIXL")
        # CUDA 13 moved CCCL: nvcc finds it, the host compiler does not (DeepEP#476)
        env.append_path("CPATH", cuda.include.cccl)
        env.append_path("CPATH", spec["rdma-core"].prefix.include)
        # PyTorch's headers include cuBLAS's, which its wheels have where the toolkit is trimmed
        if not os.path.exists(join_path(cuda.include, "cublas_v2.h")):
            env.append_path("CPATH", self.wheels_include)
        # Build hosts have no driver: libcuda is linked against a stub (DeepEP#606)
        env.append_path("LIBRARY_PATH", join_path(self.stage.path, "stubs"))
        env.append_path("LIBRARY_PATH", join_path(cuda.lib64, "stubs"))
        # Without it Ubuntu's linker drops libcuda, of which a stub need not define every symbol
        env.append_flags("LDFLAGS", "-Wl,--no-as-needed")
        # An NVSHMEM that PyTorch brings finds no rdma-core of its own: have ours in the process
        env.append_flags("LDFLAGS", "-lmlx5 -libverbs")
        # No path of the build host stays, in debug information or as __FILE__ in assertions
        env.append_flags("LDFLAGS", "-Wl,--strip-debug")
        for name, folder in (
            ("deep_ep", self.stage.source_path),
            ("nvshmem", spec["nvshmem"].prefix),
            ("python", spec["python"].package.config_vars["include"]),
        ):
            shown = f"-ffile-prefix-map={folder}={name}"
            env.append_flags("CFLAGS", shown)
            env.append_flags("NVCC_APPEND_FLAGS", f"-Xcompiler {shown}")

    def setup_run_environment(self, env: EnvironmentModifications) -> None:
        env.set("CUDA_HOME", self.spec["cuda"].prefix)
        env.set("NVSHMEM_DIR", self.spec["nvshmem"].prefix)

    @run_before("install")
    def check_before(self):
        """Better now than after minutes of compiling."""
        self.checked(self.check_pytorch, self.check_tools)

    @run_before("install")
    def make_driver_stubs(self):
        """Stand-ins to link with for the driver's libraries, by the SONAME of run time."""
        stubs = join_path(self.stage.path, "stubs")
        for library in ("libcuda.so.1", "libnvidia-ml.so.1"):
            self._make_stub(stubs, library, [])
            link_name = join_path(stubs, library[: -len(".1")])
            if not os.path.lexists(link_name):
                symlink(library, link_name)

    def _make_stub(self, folder, library, functions):
        """Makes a library of functions that answer CUDA_ERROR_STUB_LIBRARY."""
        mkdirp(folder)
        source = join_path(self.stage.path, f"{library}.c")
        with open(source, "w") as stream:
            stream.writelines(f"int {name}(void) {{ return 34; }}\n" for name in functions)
        soname = f"-Wl,-soname,{library}"
        target = join_path(folder, library)
        Executable(os.environ["CC"])("-shared", "-fPIC", soname, source, "-o", target)

    @run_before("install")
    def build_doca_objects(self):
        """Builds the 13 DOCA GPUNetIO objects that setup.py copies, not all of NCCL."""
        if not self.spec.satisfies("hybrid_ep=multinode_doca"):
            return
        nccl = join_path(self.stage.source_path, "third-party", "nccl-doca")
        if not os.path.exists(join_path(nccl, "src", "Makefile")):
            raise InstallError(f"{nccl} has no NCCL source: HybridEP's resource is missing")
        build = join_path(nccl, "build")
        doca = join_path("transport", "net_ib", "gdaki", "doca-gpunetio")
        sources = find(join_path(nccl, "src", doca, "src"), "doca_*.cpp", recursive=False)
        objects = [
            join_path(build, "obj", doca, os.path.basename(source)[: -len(".cpp")] + ".o")
            for source in sources
        ]
        make("-C", join_path(nccl, "src"), f"BUILDDIR={build}", *objects)
        # setup.py installs the whole folder: no path of the stage in there
        for dependencies in find(build, "*.d"):
            os.remove(dependencies)
        which("strip", required=True)("--strip-debug", *objects)

    @run_after("install")
    def install_driver_stubs(self):
        """What deep_ep/_loading.py loads where there is no driver."""
        stubs = join_path(self.platlib, "deep_ep", "driver_stubs")
        extensions = find(self.platlib, "*_ep_cpp.*.so", recursive=False)
        for library, prefix, more in (
            # More: what CUDA's runtime asks a driver first
            ("libcuda.so.1", "cu[A-Z]", ["cuInit", "cuDriverGetVersion", "cuGetProcAddress_v2"]),
            ("libnvidia-ml.so.1", "nvml[A-Z]", []),
        ):
            if any(library in evidence.dynamic(path).needed for path in extensions):
                names = {n for path in extensions for n in evidence.undefined(path, prefix)}
                self._make_stub(stubs, library, sorted(names.union(more)))

    @run_after("install")
    def remove_traces(self):
        """pip notes the folder it installed from, which is the stage."""
        for note in find(self.platlib, "direct_url.json"):
            os.remove(note)
            filter_file(r"^.*direct_url\.json.*\n", "", join_path(os.path.dirname(note), "RECORD"))

    @run_after("install")
    def check_after(self):
        """What was built is what the spec promises."""
        self.checked(
            self.check_links,
            self.check_device_code,
            self.check_rc_lookup,
            self.check_clean,
            self.check_import,
        )

    def test_links(self):
        """the extensions find our NVSHMEM and rdma-core"""
        self.check_links()

    def test_device_code(self):
        """device code is for the asked architectures, and the queue-pair lookup is right"""
        self.check_device_code()
        self.check_rc_lookup()

    def test_import(self):
        """import deep_ep works, with one NVSHMEM in the process"""
        self.check_import()
