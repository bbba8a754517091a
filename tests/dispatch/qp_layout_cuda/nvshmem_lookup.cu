// NVSHMEM's lookup, from its own header
#include <nvshmem.h>
#include <nvshmemx.h>

#include <non_abi/device/pt-to-pt/ibgda_device.cuh>

#include "kernels.cuh"

__global__ void nvshmem_answers(unsigned asker, bool any, int turns, Address* answers) {
// The lookup is visible to device code only
#ifdef __CUDA_ARCH__
    // In turn, not at once: releases up to 3.7 count without atomics
    if (blockIdx.x != asker) return;
    bool shared = false;
    for (int pe = 0; pe < nvshmemi_device_state_d.npes; ++pe) {
        // NVSHMEM asserts that no PE asks for itself
        if (pe == nvshmemi_device_state_d.mype) continue;
        for (int turn = 0; turn < turns; ++turn) {
#if RC_LAYOUT == 2
            QueuePair* qp = any ? ibgda_get_rc(pe, &shared, NVSHMEMX_QP_ANY) : ibgda_get_rc(pe, &shared);
#else
            QueuePair* qp = ibgda_get_rc(pe, &shared);
#endif
            answers[pe * turns + turn] = reinterpret_cast<Address>(qp);
        }
    }
#endif
}
