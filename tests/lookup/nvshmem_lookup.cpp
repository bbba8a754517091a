// NVSHMEM's lookup, cut verbatim out of non_abi/device/pt-to-pt/ibgda_device.cuh
#include "lookup.h"

#define NVSHMEMI_STATIC static
#define NVSHMEMI_DEVICE_ALWAYS_INLINE inline
#define CONSTANT_ADDRESS_SPACE

namespace {

// The thread that asks: first of a block of one warp, so every map type sees the same number
uint32_t asking_block = 0;
constexpr int kWarpSize = 32;

uint32_t ibgda_get_ctaid() { return asking_block; }
uint32_t ibgda_get_smid() { return asking_block; }

// For layout v1
int nvshmemi_thread_id_in_block() { return 0; }
int nvshmemi_block_size() { return kWarpSize; }
int nvshmemi_warp_size() { return kWarpSize; }

// For 3.8
enum Threadgroup { NVSHMEMI_THREADGROUP_WARP, NVSHMEMI_THREADGROUP_BLOCK };
template <Threadgroup>
int nvshmemi_thread_id_in_threadgroup() { return 0; }
template <Threadgroup>
int nvshmemi_threadgroup_size() { return kWarpSize; }

template <typename T>
T atomicAdd(T* address, T value) {
    const T old = *address;
    *address += value;
    return old;
}

#include "nvshmem_cut.inc"

}  // namespace

std::vector<QueuePair*> nvshmem_rcs(int pe) {
    const auto& state = nvshmemi_ibgda_device_state_d;
    const int per_pe = static_cast<int>(state.num_rc_per_pe) * state.num_devices_initialized;
    std::vector<QueuePair*> found;
    bool shared = false;

    for (auto map : {NVSHMEMI_IBGDA_DEVICE_QP_MAP_TYPE_CTA,
                     NVSHMEMI_IBGDA_DEVICE_QP_MAP_TYPE_SM,
                     NVSHMEMI_IBGDA_DEVICE_QP_MAP_TYPE_WARP}) {
        nvshmemi_ibgda_device_state_d.rc_map_type = map;
        for (int block = 0; block < per_pe; ++block) {
            asking_block = static_cast<uint32_t>(block);
            // A counter of NVSHMEM's turns to the next device at every call
            for (int turn = 0; turn < state.num_devices_initialized; ++turn)
                found.push_back(ibgda_get_rc(pe, &shared));
        }
    }

#if RC_LAYOUT == 2
    // Round robin over all queue pairs, with no handle whose numbering we would have to guess
    for (int turn = 0; turn < per_pe; ++turn)
        found.push_back(ibgda_get_rc(pe, &shared, NVSHMEMX_QP_ANY));
#endif
    return found;
}
