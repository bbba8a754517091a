# Copyright DeepEP-on-Spack developers. See LICENSE-APACHE and LICENSE-MIT for details.
#
# SPDX-License-Identifier: (Apache-2.0 OR MIT)

import os
import platform
import sys
import zipfile

from spack_repo.builtin.build_systems import generic
from spack_repo.builtin.build_systems.python import PythonPackage
from spack_repo.builtin.packages.nvshmem.package import Nvshmem as BuiltinNvshmem

from spack.package import *

from spack_repo.deepep import evidence

#: NVIDIA's binary distribution, PyPI's nvidia-nvshmem-cu13: {version: {machine: (sha256, folder)}}
#: with sha256 and content-addressed folder as PyPI's index lists them
_wheels = {
    "3.8.0": {
        "x86_64": (
            "81a4d1f666543e6d34df6d2ff940c7da1435e34e186aab6f3c2b48861b64ef38",
            "74/5d/674525ba89232e9f7ae71f393ee97a7855e82728099ebda4c377901300e2",
        ),
        "aarch64": (
            "8120175024f52a64323cfc5d645e95ac7345f1ee243a998d140ce19163285294",
            "49/a3/a17ee2e50d4cdf0a18716d8ded8be8248430f768c87f6807d431681645c2",
        ),
    },
    "3.7.2": {
        "x86_64": (
            "b9a4f843c62b5dded8ad33fd6d220e007dcd39f06cee549292f5ba14ce4c235c",
            "4f/4a/037dfbbafc96ad1828ef62326f27970cae2c0eb271cf5b8e6922f32a7427",
        ),
        "aarch64": (
            "0e748308b9e0a8a8d81859353f3e6c98fbe85a85f652a915a2ba60149a0bd124",
            "81/11/1767ef120299972822a43aceffbc81ac813aad2089d817e36e4e12aa4c9c",
        ),
    },
    "3.6.5": {
        "x86_64": (
            "4001aabc72ead32ecc3c9add3c6781befcb71adcbe286d7f5956042e68668c70",
            "5d/7b/2ab033584a3339552472ac8d79543c503a0e06dd0d082448b06697e7f716",
        ),
        "aarch64": (
            "94aa0149490be658cf95945ce9f16ba90a90edbd6a564366f996ead7496f2f22",
            "83/6b/4c642d2cce57c8bd32043b4a608b6acc8cd0579c2f53af9a7ef9e1e1ccca",
        ),
    },
    "3.5.21": {
        "x86_64": (
            "17b376ca5f91726e3795aa888dc7a2b48e642d7bc210c71354114ddb8493da71",
            "e1/0a/3963b15c1e51d197490fad1856b9dc372b141ef96fefe8661744b11021b9",
        ),
        "aarch64": (
            "b6c2f7dc8c8f3084e0a23e495b020a30c6cbaf4e1674500860bcb65c79a8cb3d",
            "44/48/55705c0a9c6c5cfed0fcc4729d001570b36e3ff4b19bb8516c1c5b767890",
        ),
    },
    "3.5.19": {
        "x86_64": (
            "0f734285d3a04824c13e9e2c1169dbb818be9cb0819de69389aaa067b8d18c93",
            "c8/0f/28e11b20c47e8b67d108c6895f4e3eba05071df16bc5bd2e11a572918330",
        ),
        "aarch64": (
            "53440ae98eadd3bd83fc875c793d737e2ce618632759942a32d4cfb1814c0a74",
            "4e/62/d0835400d6d93474ed0b4655411eed2e807b8a1a8bb1e3a0e128e5209a63",
        ),
    },
    "3.4.5": {
        "x86_64": (
            "290f0a2ee94c9f3687a02502f3b9299a9f9fe826e6d0287ee18482e78d495b80",
            "3c/35/a9bf80a609e74e3b000fef598933235c908fcefcef9026042b8e6dfde2a9",
        ),
        "aarch64": (
            "6dc2a197f38e5d0376ad52cd1a2a3617d3cdc150fd5966f4aee9bcebb1d68fe9",
            "dc/0f/05cc9c720236dcd2db9c1ab97fff629e96821be2e63103569da0c9b72f19",
        ),
    },
}

# builtin builds 3.4.5 from source under that very version; the suffix tells the binary apart
_spack_version = {"3.4.5": "3.4.5-cu13"}


#: Transports that use libibverbs or libmlx5
_infiniband_transports = ("ibgda", "ibrc", "ibdevx")


class _Wheel(PythonPackage):
    """Knows, as every PyPI package in Spack, where PyPI keeps its files."""

    pypi = "nvidia-nvshmem-cu13/nvidia-nvshmem-cu13-0.tar.gz"


def _wheel_url(release, machine):
    """Address of the wheel of an NVSHMEM release (a key of _wheels) for a machine (uname -m)."""
    folder = _wheels[release][machine][1]
    tags = f"py3-none-manylinux2014_{machine}.manylinux_2_17_{machine}"
    files = _Wheel.url.split("/source/")[0]
    return f"{files}/{folder}/nvidia_nvshmem_cu13-{release}-{tags}.whl"


class Nvshmem(BuiltinNvshmem):
    """NVSHMEM, with the releases DeepEP meets in the field from NVIDIA's binary distribution
    (build_system=generic: IBGDA, IBRC and the other transports as plug-ins, CUDA 13) beside
    builtin's source releases."""

    for _release, _machines in _wheels.items():
        if platform.machine() in _machines:
            version(
                _spack_version.get(_release, _release),
                sha256=_machines[platform.machine()][0],
                url=_wheel_url(_release, platform.machine()),
                expand=False,
                preferred=_release == "3.6.5",
            )

    build_system(
        conditional("generic", when="@3.4.5-cu13,3.5.19:"),
        conditional("cmake", when="@2.9.0:3.3,=3.4.5"),
        conditional("makefile", when="@:2.11"),
        default="generic",
    )

    # The binary distribution has all of these as plug-ins that look for their library at run
    # time: neither a build-time dependency (+x) nor absent (~x)
    for _name in ("ucx", "nccl", "gdrcopy", "mpi", "shmem", "libfabric"):
        variant(
            _name,
            default="plugin",
            values=("plugin",),
            multi=False,
            when="build_system=generic",
            description="In the binary distribution: found at run time",
        )

    with when("build_system=generic"):
        depends_on("patchelf", type="build")
        # nvshmem_transport_ibgda needs MLX5_1.19, nvshmem_transport_ibrc opens libibverbs
        depends_on("rdma-core@35:", type=("link", "run"))
        for _cuda in ("@:12", "@14:"):
            conflicts(
                f"^cuda{_cuda}",
                msg="NVSHMEM's binaries here are built for CUDA 13 (nvidia-nvshmem-cu13): use "
                "cuda@13, or a source release (nvshmem@:3.3)",
            )
        conflicts(
            "platform=darwin", msg="NVIDIA publishes NVSHMEM for Linux on x86_64 and aarch64 only"
        )

    def url_for_version(self, version):
        # Spack asks this for versions with a url of their own too
        return self.versions.get(version, {}).get("url") or super().url_for_version(version)

    def check_transports(self):
        """The InfiniBand transports find the spec's rdma-core before the system's."""
        ours = os.path.realpath(self.spec["rdma-core"].prefix.lib)
        for transport in _infiniband_transports:
            plugins = find(self.prefix.lib, f"nvshmem_transport_{transport}.so.*")
            if not plugins:
                raise evidence.EvidenceError(f"{self.prefix.lib} has no transport {transport}")
            for plugin in plugins:
                folders = [os.path.realpath(f) for f in evidence.dynamic(plugin).rpath]
                if ours not in folders and filter_system_paths([ours]):
                    raise evidence.EvidenceError(f"{plugin} does not look into {ours}")

    def check_host_library(self):
        """The host library loads, without a GPU, and says that it is of the spec's release."""
        release = str(self.spec.version.up_to(3))
        library = join_path(self.prefix.lib, "libnvshmem_host.so.3")
        found = evidence.loaded_by([sys.executable], [library])["nvshmem"]
        if list(found.values()) != [release]:
            raise evidence.EvidenceError(f"{library} says it is NVSHMEM {found}, not {release}")

    def test_transports(self):
        """the InfiniBand transports find the spec's rdma-core"""
        if not self.spec.satisfies("build_system=generic"):
            raise SkipTest("a source build has no rdma-core in its spec")
        self.check_transports()

    def test_host_library(self):
        """the host library loads and is of the spec's release"""
        if not self.spec.satisfies("build_system=generic"):
            raise SkipTest("a source build is tested by NVSHMEM's own tests")
        self.check_host_library()


class GenericBuilder(generic.GenericBuilder):
    """Unpacks the wheel's files, and completes what a build against them needs."""

    def install(self, pkg, spec, prefix):
        root = "nvidia/nvshmem/"
        with zipfile.ZipFile(pkg.stage.archive_file) as wheel:
            for member in wheel.infolist():
                if member.is_dir():
                    continue
                if member.filename.startswith(root):
                    target = member.filename[len(root) :]
                elif "/licenses/" in member.filename:
                    target = join_path("share", "nvshmem", os.path.basename(member.filename))
                else:
                    continue
                if not target.endswith("__init__.py"):
                    self._write(wheel.read(member), join_path(prefix, target))

        # The wheel ships SONAMEs only; -lnvshmem_host and DeepEP's setup.py ask for this name
        symlink("libnvshmem_host.so.3", join_path(prefix.lib, "libnvshmem_host.so"))
        self._link_rdma_core(spec, prefix)
        self._write_cmake_config(spec, prefix)

    @staticmethod
    def _write(data, path):
        mkdirp(os.path.dirname(path))
        with open(path, "wb") as stream:
            stream.write(data)
        if ".so" in os.path.basename(path):
            set_executable(path)

    @staticmethod
    def _link_rdma_core(spec, prefix):
        """Lets the transports find the spec's libibverbs and libmlx5 before the system's."""
        rpath = ["$ORIGIN"] + filter_system_paths([spec["rdma-core"].prefix.lib])
        patchelf = which("patchelf", required=True)
        for transport in _infiniband_transports:
            for plugin in find(prefix.lib, f"nvshmem_transport_{transport}.so.*"):
                patchelf("--force-rpath", "--set-rpath", ":".join(rpath), plugin)

    @staticmethod
    def _write_cmake_config(spec, prefix):
        release = str(spec.version.up_to(3))
        config = join_path(prefix.lib, "cmake", "nvshmem")
        mkdirp(config)
        here = os.path.dirname(__file__)
        for name in ("NVSHMEMConfig.cmake", "NVSHMEMConfigVersion.cmake"):
            target = join_path(config, name)
            install(join_path(here, name), target)
            filter_file("@NVSHMEM_VERSION@", release, target, string=True, backup=False)

    @run_after("install")
    def check_release(self):
        """The headers must be of the release the spec names."""
        release = str(self.spec.version.up_to(3))
        header = join_path(self.prefix.include, "non_abi", "nvshmem_version.h")
        with open(header) as stream:
            defines = dict(
                line.split()[1:3] for line in stream if line.startswith("#define NVSHMEM_VENDOR_")
            )
        found = ".".join(
            defines[f"NVSHMEM_VENDOR_{part}_VERSION"] for part in ("MAJOR", "MINOR", "PATCH")
        )
        if found != release:
            raise InstallError(f"{header} is of NVSHMEM {found}, not of {release}")

    @run_after("install")
    def check_installed(self):
        try:
            self.pkg.check_transports()
            self.pkg.check_host_library()
        except evidence.EvidenceError as error:
            raise InstallError(f"nvshmem: {error}") from None
