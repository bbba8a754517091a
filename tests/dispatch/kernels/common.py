"""What several families of kernels do alike."""

import torch

from ..inputs import POISON


def skip_nvlink_check(job, deep_ep):
    """Ranks on one GPU have no NVLink between them, which DeepEP's Buffer asks for."""
    if job.shares_gpu:
        deep_ep.buffer.check_nvlink_connections = lambda *args, **kwargs: None


def poison_outputs(job, size):
    """Fills free memory that outputs of up to size bytes will be made of."""
    sizes = [max(1, size)] * 2 + [1 << bits for bits in range(9, 20)]
    blocks = [torch.empty(n, dtype=torch.uint8, device=job.device).fill_(POISON) for n in sizes]
    del blocks
