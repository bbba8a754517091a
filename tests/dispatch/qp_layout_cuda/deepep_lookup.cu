// DeepEP's lookup, from its own header, whole
#include <ibgda_device.cuh>

#include "kernels.cuh"

__global__ void deepep_answers(int ids, Address* answers) {
    const int count = nvshmemi_device_state_d.npes * ids;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        answers[i] = reinterpret_cast<Address>(deep_ep::ibgda_get_rc(i / ids, i % ids));
}

// Not inlined: no part of a lookup is done once for all steps, and its instructions can be counted
extern "C" __device__ __noinline__ Address qp_lookup(int pe, int id) {
    return reinterpret_cast<Address>(deep_ep::ibgda_get_rc(pe, id));
}
extern "C" __device__ __noinline__ Address qp_nothing(int, int id) { return static_cast<unsigned>(id); }

template <Address (*Answer)(int, int)>
__device__ __forceinline__ Chain chain(int pe, int ids, int steps, Address zero) {
    int id = 0;
    Address answer = 0;
    const long long start = clock64();
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        answer = Answer(pe, id);
        id += 1 + static_cast<int>(answer & zero);
        if (id >= ids) id = 0;
    }
    return {clock64() - start, answer};
}

__global__ void lookup_chain(int pe, int ids, int steps, Address zero, Chain* out) {
    *out = chain<qp_lookup>(pe, ids, steps, zero);
}
__global__ void nothing_chain(int pe, int ids, int steps, Address zero, Chain* out) {
    *out = chain<qp_nothing>(pe, ids, steps, zero);
}
