"""Environment variables of a process on the emulated fabric.

Runs in the site's Python (3.9 or later) with the standard library.
"""

import os
from pathlib import Path

from .build import MLX5, PRELOAD, VERBS

#: gethostname() answers this once it is set. Each emulated node needs a name of its own, or
#: NVSHMEM shares memory between processes that it takes for one node's; but torch.distributed
#: connects by the real name, so set it after init_process_group and before NVSHMEM starts.
HOST = "EMULATED_FABRIC_HOST"

#: What makes the unmodified NVSHMEM take the emulated NIC, and only by IBGDA
NVSHMEM = {
    "NVSHMEM_REMOTE_TRANSPORT": "none",  # IBRC would post by verbs, which are not emulated
    "NVSHMEM_IB_ENABLE_IBGDA": "1",
    "NVSHMEM_IB_DISABLE_DMABUF": "1",  # plain addresses instead of file descriptors
    "NVSHMEM_DISABLE_DATA_DIRECT": "1",
    "NVSHMEM_DISABLE_GDRCOPY": "1",
    "NVSHMEM_IBGDA_NIC_HANDLER": "gpu",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_DISABLE_MNNVL": "1",
    # A kernel's first launch would wait for running ones, and the NIC's copies behind it
    "CUDA_MODULE_LOADING": "EAGER",
}

MEMORY_TYPES = ("hostmem", "gpumem")


def environment(
    build,
    segment,
    rank,
    processes,
    *,
    npes=0,
    host="",
    nics=1,
    memory="hostmem",
    fault="",
    report_dir="",
    library_path=(),
    inherited=None,
):
    """Variables to add to those of a process, as a dict of str.

    build: folder of build.build(). segment: file below /dev/shm, new for each run, that the
    processes share. rank: of this process among processes, from 0. npes: PEs of one NVSHMEM job,
    which names the PE of each queue pair in the report; 0 leaves that out. host: see HOST; empty
    leaves it to be set later. nics: per process. memory: where NVSHMEM puts the NIC's buffers,
    one of MEMORY_TYPES. fault: see README.md. report_dir: folder for the tables of queue pairs;
    empty writes none. library_path: folders to search first, NVSHMEM's among them. inherited: the
    variables to extend LD_PRELOAD and LD_LIBRARY_PATH of, os.environ by default. Raises
    ValueError.
    """
    if not 0 <= rank < processes:
        raise ValueError("rank {} is not among {} processes".format(rank, processes))
    if memory not in MEMORY_TYPES:
        raise ValueError("{} is none of {}".format(memory, ", ".join(MEMORY_TYPES)))
    inherited = os.environ if inherited is None else inherited
    build = Path(build)

    def joined(name, *first):
        return ":".join([*(str(f) for f in first), *filter(None, [inherited.get(name)])])

    # Preloaded, since an installed transport's RPATH names a real libmlx5 and comes before
    # LD_LIBRARY_PATH; a library that is there by its soname is not searched again
    preload = [build / name for name in (PRELOAD, MLX5, VERBS)]
    variables = {
        **NVSHMEM,
        "NVSHMEM_IBGDA_FORCE_NIC_BUF_MEMTYPE": memory,
        "LD_PRELOAD": joined("LD_PRELOAD", *preload),
        "LD_LIBRARY_PATH": joined("LD_LIBRARY_PATH", build, *library_path),
        "EMULATED_FABRIC_SEGMENT": str(segment),
        "EMULATED_FABRIC_RANK": str(rank),
        "EMULATED_FABRIC_PROCESSES": str(processes),
        "EMULATED_FABRIC_NICS": str(nics),
        "EMULATED_FABRIC_COPY": "cuda",
    }
    optional = {
        "EMULATED_FABRIC_NPES": str(npes) if npes else "",
        "EMULATED_FABRIC_FAULT": fault,
        "EMULATED_FABRIC_REPORT_DIR": str(report_dir),
        HOST: host,
    }
    variables.update((name, value) for name, value in optional.items() if value)
    return variables
