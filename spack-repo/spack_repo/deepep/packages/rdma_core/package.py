# Copyright DeepEP-on-Spack developers. See LICENSE-APACHE and LICENSE-MIT for details.
#
# SPDX-License-Identifier: (Apache-2.0 OR MIT)

from spack_repo.builtin.packages.rdma_core.package import RdmaCore as BuiltinRdmaCore

from spack.package import *


class RdmaCore(BuiltinRdmaCore):
    """RDMA core userspace libraries and daemons, with the release HybridEP is built with."""

    git = "https://github.com/linux-rdma/rdma-core.git"

    # Upstream publishes no release tarball checksum that we could verify, so the tag is pinned
    version("60.0", tag="v60.0", commit="5321d809e095d6dd32a1355a5d4aa2ebbda4ba74")

    # Libraries and headers are all a job needs; man pages pull docutils, pyverbs pulls cython
    variant("pyverbs", default=False, description="Build with support for pyverbs")
    variant("man_pages", default=False, description="Build with support for man pages")

    def cmake_args(self):
        # HybridEP's setup.py takes RDMA_CORE_HOME/lib; GNUInstallDirs says lib64 on RHEL
        return super().cmake_args() + [self.define("CMAKE_INSTALL_LIBDIR", "lib")]
