# Copyright DeepEP-on-Spack developers. See LICENSE-APACHE and LICENSE-MIT for details.
#
# SPDX-License-Identifier: (Apache-2.0 OR MIT)
"""What py-deep-ep checks before it is built, after every install, and in its stand-alone tests.

Beside the recipe, so that a better check is no other package: Spack's package hash covers
package.py and the patches only. What is read, and how, is in evidence.py.
"""

import os
import re

from spack.package import InstallError, find, find_first, join_path, set_env

from spack_repo.deepep import evidence


class DeepEpChecks:
    """Mixin of the recipe. A check returns nothing, or raises EvidenceError with a sentence that
    says what was found and what to do."""

    def checked(self, *checks):
        """Runs checks in a build, which a failing one ends."""
        for check in checks:
            try:
                check()
            except evidence.EvidenceError as error:
                raise InstallError(f"{self.name}: {error}") from None

    @property
    def nvshmem_release(self):
        """Release of the spec's NVSHMEM, without the suffix of the recipe: "3.4.5"."""
        return str(self.spec["nvshmem"].version.up_to(3))

    @property
    def platlib(self):
        return join_path(self.prefix, self.spec["python"].package.platlib)

    def site_packages(self, name):
        """Where a dependency keeps its Python modules."""
        return join_path(self.spec[name].prefix, self.spec["python"].package.platlib)

    @property
    def wheels_include(self):
        """Where PyTorch's wheels keep CUDA's headers."""
        return join_path(self.site_packages("py-torch"), "nvidia", "cu13", "include")

    @property
    def cuobjdump(self):
        """CUDA's cuobjdump: the toolkit's, or the one that PyTorch's Triton brings."""
        triton = join_path(self.site_packages("py-torch"), "triton", "backends", "nvidia", "bin")
        return evidence.find_cuobjdump([self.spec["cuda"].prefix.bin, triton])

    def extension(self, name):
        path = find_first(self.platlib, f"{name}.*.so")
        if path is None:
            raise evidence.EvidenceError(f"there is no extension {name} in {self.platlib}")
        return path

    @property
    def extensions(self):
        return find(self.platlib, "*_ep_cpp.*.so", recursive=False)

    def loaded(self, *modules):
        """What importing modules loads, in a process of its own."""
        return evidence.loaded_by(self.module.python.exe, modules)

    def check_pytorch(self):
        """The PyTorch is the one the spec says, and brings no other NVSHMEM: of two, the one that
        is loaded first wins, and that is PyTorch's."""
        torch, prefix = self.spec["py-torch"], self.spec["py-torch"].prefix
        try:
            found = self.loaded("torch")
        except evidence.EvidenceError as error:
            raise evidence.EvidenceError(
                f"the PyTorch in {prefix} does not import: {error}"
            ) from None
        _, version = found["modules"]["torch"]
        if torch.external and version.split("+")[0] != str(torch.version):
            raise evidence.EvidenceError(
                f"the PyTorch in {prefix} is {version}, not {torch.version}: correct the entry in "
                "site.yaml and concretize again (ci/lock)"
            )
        if not (found["torch_cuda"] or "").startswith("13."):
            raise evidence.EvidenceError(
                f"the PyTorch in {prefix} is built for CUDA {found['torch_cuda']}: name a CUDA 13 "
                "build of it in site.yaml"
            )
        for path, brought in found["nvshmem"].items():
            if brought != self.nvshmem_release:
                raise evidence.EvidenceError(
                    f"the PyTorch in {prefix} brings NVSHMEM {brought} ({path}), which would be "
                    f"loaded in place of {self.nvshmem_release}: give it the same release "
                    f"({prefix.bin.python3} -m pip install --no-deps "
                    f"nvidia-nvshmem-cu13=={self.nvshmem_release}), or name another PyTorch in "
                    "site.yaml"
                )

    def check_tools(self):
        """What the build and the checks after it need, and a trimmed toolkit may lack."""
        self.cuobjdump  # raises where there is none
        if self.spec.satisfies("hybrid_ep=multinode_doca"):
            folders = (self.spec["cuda"].prefix.include, self.wheels_include)
            if not any(os.path.exists(join_path(folder, "nvml.h")) for folder in folders):
                raise evidence.EvidenceError(
                    "HybridEP between nodes needs nvml.h, which is not in "
                    f"{' or '.join(folders)}: install the toolkit's cuda-nvml-dev package"
                )

    def check_links(self):
        """The extensions find our NVSHMEM and our rdma-core first, and nothing in a stage."""
        names = ["deep_ep_cpp"]
        if self.spec.variants.get("hybrid_ep") and not self.spec.satisfies("hybrid_ep=none"):
            names.append("hybrid_ep_cpp")
        for name in names:
            path = self.extension(name)
            needed, rpath = evidence.dynamic(path)
            wanted = {"libmlx5.so.1": "rdma-core", "libibverbs.so.1": "rdma-core"}
            if name == "deep_ep_cpp":
                wanted["libnvshmem_host.so.3"] = "nvshmem"
            for library, package in wanted.items():
                if library not in needed:
                    raise evidence.EvidenceError(f"{path} is not linked with {library}")
                ours = self.spec[package].prefix
                folder = next((f for f in rpath if os.path.exists(join_path(f, library))), None)
                if folder is None or not _below(folder, ours):
                    found = folder or "no folder of its RPATH"
                    raise evidence.EvidenceError(
                        f"{path} finds {library} in {found}, not in {ours}"
                    )
            for folder in rpath:
                if "spack-stage" in folder or not os.path.isabs(folder):
                    raise evidence.EvidenceError(f"{path} has {folder} in its RPATH")

    def check_device_code(self):
        """Machine code for exactly the asked architectures, and no PTX."""
        asked = {f"sm_{arch}" for arch in self.spec.variants["cuda_arch"].value}
        for path in self.extensions:
            found = evidence.device_code(path, self.cuobjdump)
            # The device linker makes one of all kernels that may call each other
            once = os.path.basename(path).startswith("deep_ep_cpp")
            if set(found) != asked or (once and any(number != 1 for number in found.values())):
                raise evidence.EvidenceError(
                    f"{path} holds device code {found}, asked was for {', '.join(sorted(asked))}"
                )

    def check_rc_lookup(self):
        """The queue-pair lookup in the device code is the one that patches and NVSHMEM make."""
        release = self.nvshmem_release
        expected = evidence.Lookup(evidence.expected_layout(release), True)
        if self.spec.satisfies("broken_on_purpose=control"):
            expected = evidence.Lookup("v1", True)
        elif self.spec.satisfies("broken_on_purpose=no_bound"):
            expected = evidence.Lookup("v2", False)
        path = self.extension("deep_ep_cpp")
        for arch, found in sorted(evidence.rc_lookups(path, self.cuobjdump).items()):
            if found != expected:
                raise evidence.EvidenceError(
                    f"{path} indexes RC queue pairs by layout {found.words} for {arch}; with "
                    f"NVSHMEM {release} and this spec it must be {expected.words}"
                )

    def check_clean(self):
        """No trace of the build: sources, objects, repositories, the stage's path."""
        for folder, folders, files in os.walk(self.prefix):
            if folder == self.prefix and ".spack" in folders:
                folders.remove(".spack")
            # HybridEP compiles and links its kernels at run time from here
            backend = os.path.join("deep_ep", "backend") in folder
            for name in files + folders:
                path = join_path(folder, name)
                if name == ".git" or (re.search(r"\.(cu|cpp|o|a|d)$", name) and not backend):
                    raise evidence.EvidenceError(f"{path} is left over from the build")
            for name in files:
                path = join_path(folder, name)
                with open(path, "rb") as stream:
                    if b"spack-stage-" in stream.read():
                        raise evidence.EvidenceError(f"{path} contains the path of the stage")

    def check_import(self):
        """import deep_ep, in a process of its own, with one NVSHMEM: of the spec's release."""
        # In a build PYTHONPATH has the dependencies, in a stand-alone test this package too
        path = [self.platlib] + [p for p in (os.environ.get("PYTHONPATH"),) if p]
        with set_env(PYTHONPATH=os.pathsep.join(path)):
            try:
                found = self.loaded("torch", "deep_ep")
            except evidence.EvidenceError as error:
                raise evidence.EvidenceError(f"import deep_ep fails: {error}") from None
        if list(found["nvshmem"].values()) != [self.nvshmem_release]:
            raise evidence.EvidenceError(
                f"import deep_ep loads {found['nvshmem'] or 'no NVSHMEM'}, not one of "
                f"{self.nvshmem_release}"
            )
        ours = self.spec["rdma-core"].prefix
        for library in ("libibverbs.so", "libmlx5.so"):
            for path in found["libraries"][library]:
                if not _below(path, ours):
                    raise evidence.EvidenceError(f"import deep_ep loads {path}, not {ours}'s")


def _below(path, prefix):
    return os.path.realpath(path).startswith(os.path.realpath(prefix) + os.sep)
