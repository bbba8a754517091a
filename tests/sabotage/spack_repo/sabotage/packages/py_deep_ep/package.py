# Copyright DeepEP-on-Spack developers. See LICENSE-APACHE and LICENSE-MIT for details.
#
# SPDX-License-Identifier: (Apache-2.0 OR MIT)

import glob
import os

from spack_repo.deepep.packages.py_deep_ep.package import PyDeepEp as RealPyDeepEp

from spack.package import *


class PyDeepEp(RealPyDeepEp):
    """py-deep-ep whose build is a copy of a really built one, damaged: its install must fail.

    The recipe's own checks run, on real files, without minutes of compiling each. Folders of what
    is copied come from the variables DEEPEP_TEST_BUILT (h100-site's), DEEPEP_TEST_CONTROL and
    DEEPEP_TEST_NO_BOUND (prefixes).
    """

    variant(
        "damage",
        default="none",
        values=(
            "none",
            "control",
            "no_bound",
            "not_linked",
            "other_nvshmem",
            "other_rdma_core",
            "stage_in_rpath",
            "ptx",
            "no_nvshmem",
            "source_left",
            "stage_path",
            "no_import",
            "nvshmem_twice",
        ),
        description="What is wrong with it",
    )

    depends_on("patchelf", type="build")

    def install(self, spec, prefix):
        damage = spec.variants["damage"].value
        install_tree(join_path(os.environ["DEEPEP_TEST_BUILT"], "lib"), prefix.lib, symlinks=True)
        extension = self.extension("deep_ep_cpp")
        arm = os.environ.get(f"DEEPEP_TEST_{damage.upper()}")
        if arm:
            # Built for real, and broken on purpose
            install(find_first(arm, "deep_ep_cpp.*.so"), extension)
        getattr(self, f"damage_{damage}", lambda extension: None)(extension)

    def _rpath(self, extension, *folders):
        which("patchelf", required=True)(
            "--force-rpath", "--set-rpath", ":".join(folders), extension
        )

    @property
    def _folders(self):
        """Where the extensions look: ours, and what they cannot do without."""
        python = join_path(self.spec["python"].package.platlib)
        torch = join_path(self.spec["py-torch"].prefix, python, "torch", "lib")
        nvshmem, rdma = self.spec["nvshmem"].prefix.lib, self.spec["rdma-core"].prefix.lib
        return nvshmem, rdma, torch, self.spec["cuda"].prefix.lib64

    def damage_not_linked(self, extension):
        which("patchelf", required=True)("--remove-needed", "libmlx5.so.1", extension)

    def damage_other_nvshmem(self, extension):
        nvshmem, rdma, torch, cuda = self._folders
        theirs = glob.glob(join_path(torch, "..", "..", "nvidia", "nvshmem", "lib"))[0]
        self._rpath(extension, theirs, nvshmem, rdma, torch, cuda)

    def damage_other_rdma_core(self, extension):
        nvshmem, _, torch, cuda = self._folders
        self._rpath(extension, nvshmem, torch, cuda)

    def damage_stage_in_rpath(self, extension):
        nvshmem, rdma, torch, cuda = self._folders
        self._rpath(extension, nvshmem, rdma, torch, cuda, "/tmp/spack-stage/spack-stage-x/lib")

    def _compile(self, extension, *options):
        """Puts a small library with device code beside the extension, under a name of its kind."""
        source = join_path(self.stage.path, "small.cu")
        with open(source, "w") as stream:
            stream.write("__global__ void small(int *p) { *p = 1; }\n")
        target = join_path(os.path.dirname(extension), "small_ep_cpp.abi.so")
        nvcc = Executable(join_path(self.spec["cuda"].prefix.bin, "nvcc"))
        nvcc(*options, "-shared", "-Xcompiler", "-fPIC", source, "-o", target)
        return target

    def damage_ptx(self, extension):
        self._compile(extension, "-gencode", "arch=compute_90,code=[sm_90,compute_90]")

    def damage_no_nvshmem(self, extension):
        """An extension without internode kernels, as setup.py builds when it finds no NVSHMEM."""
        # One cubin, as the device linker makes it
        target = self._compile(extension, "-gencode", "arch=compute_90,code=sm_90", "-rdc=true")
        patchelf = which("patchelf", required=True)
        for library in ("libnvshmem_host.so.3", "libmlx5.so.1", "libibverbs.so.1"):
            patchelf("--add-needed", library, target)
        self._rpath(target, *self._folders)
        rename(target, extension)

    def damage_source_left(self, extension):
        mkdirp(join_path(self.prefix, "share", "deep_ep"))
        touch(join_path(self.prefix, "share", "deep_ep", "internode.cu"))

    def damage_stage_path(self, extension):
        with open(join_path(os.path.dirname(extension), "deep_ep", "note.txt"), "w") as stream:
            stream.write("/tmp/spack-stage/spack-stage-py-deep-ep-1/spack-src")

    def damage_no_import(self, extension):
        os.remove(join_path(os.path.dirname(extension), "deep_ep", "utils.py"))

    def damage_nvshmem_twice(self, extension):
        """A module of deep_ep loads a second copy of the same release."""
        copy = join_path(self.prefix.lib, "nvshmem")
        mkdirp(copy)
        install(join_path(self.spec["nvshmem"].prefix.lib, "libnvshmem_host.so.3"), copy)
        with open(join_path(os.path.dirname(extension), "deep_ep", "__init__.py"), "a") as stream:
            stream.write(
                f"\nimport ctypes\nctypes.CDLL({join_path(copy, 'libnvshmem_host.so.3')!r})\n"
            )
