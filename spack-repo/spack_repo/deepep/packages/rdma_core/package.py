# Copyright DeepEP-on-Spack developers. See LICENSE-APACHE and LICENSE-MIT for details.
#
# SPDX-License-Identifier: (Apache-2.0 OR MIT)

import os
import sys

from spack_repo.builtin.packages.rdma_core.package import RdmaCore as BuiltinRdmaCore

from spack.package import *

from spack_repo.deepep import evidence


class RdmaCore(BuiltinRdmaCore):
    """RDMA core userspace libraries and daemons, with the release HybridEP is built with."""

    git = "https://github.com/linux-rdma/rdma-core.git"

    # Upstream publishes no release tarball checksum that we could verify, so the tag is pinned
    version("60.0", tag="v60.0", commit="5321d809e095d6dd32a1355a5d4aa2ebbda4ba74")

    # Libraries and headers are all a job needs; man pages pull docutils, pyverbs pulls cython
    variant("pyverbs", default=False, description="Build with support for pyverbs")
    variant("man_pages", default=False, description="Build with support for man pages")

    def setup_build_environment(self, env: EnvironmentModifications) -> None:
        super().setup_build_environment(env)
        # Or __FILE__ in assertions leaves the path of the stage in the libraries
        env.append_flags("CFLAGS", f"-ffile-prefix-map={self.stage.source_path}=rdma-core")

    def cmake_args(self):
        # HybridEP's setup.py takes RDMA_CORE_HOME/lib; GNUInstallDirs says lib64 on RHEL
        return super().cmake_args() + [self.define("CMAKE_INSTALL_LIBDIR", "lib")]

    sanity_check_is_file = [
        join_path("include", "infiniband", "mlx5dv.h"),
        join_path("lib", "libibverbs.so"),
        join_path("lib", "libmlx5.so"),
    ]

    def test_libraries(self):
        """libmlx5 loads with this libibverbs, and has what NVSHMEM's IBGDA transport needs"""
        library = join_path(self.prefix.lib, "libmlx5.so.1")
        found = evidence.loaded_by([sys.executable], [library])["libraries"]["libibverbs.so"]
        ours = os.path.realpath(self.prefix)
        for path in found:
            assert os.path.realpath(path).startswith(ours + os.sep), f"loads {path}"
        # nvshmem_transport_ibgda is linked with this version of the symbols
        assert "MLX5_1.19" in evidence.version_names(library), f"{library} lacks MLX5_1.19"
