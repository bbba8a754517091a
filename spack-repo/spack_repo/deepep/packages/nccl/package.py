# Copyright DeepEP-on-Spack developers. See LICENSE-APACHE and LICENSE-MIT for details.
#
# SPDX-License-Identifier: (Apache-2.0 OR MIT)

from spack_repo.builtin.packages.nccl.package import Nccl as BuiltinNccl

from spack.package import *


class Nccl(BuiltinNccl):
    """Optimized primitives for collective multi-GPU communication, with the release of #3967."""

    # The report's runs used it (NVIDIA-NeMo/Automodel#3967); builtin ends at 2.29
    version("2.30.7-1", tag="v2.30.7-1", commit="73cf112295c33aee2b895f329f592f2a9b4b0f97")
