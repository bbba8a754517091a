// What the translation units share. NVSHMEM's own headers give every type.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include <cuda_runtime_api.h>

#include <device_host/nvshmem_types.h>
#include <device_host_transport/nvshmem_common_ibgda.h>
#include <device_host_transport/nvshmem_constants.h>

#ifndef __CUDACC__
// NVSHMEM declares this one only in a header that needs nvcc
extern nvshmemi_device_host_state_t nvshmemi_device_state_d;
#endif

#if NVSHMEM_VENDOR_VERSION >= 30519
#define RC_LAYOUT 2
#else
#define RC_LAYOUT 1
#endif
#if RC_LAYOUT == 1
static_assert(std::is_same_v<nvshmemi_ibgda_device_state_t, nvshmemi_ibgda_device_state_v1>);
#elif RC_LAYOUT == 2
static_assert(std::is_same_v<nvshmemi_ibgda_device_state_t, nvshmemi_ibgda_device_state_v2>);
#endif

using QueuePair = nvshmemi_ibgda_device_qp_t;

// DeepEP's lookup: the address of the queue pair for (pe, id)
QueuePair* deepep_rc(int pe, int id);

// NVSHMEM's lookup: every queue pair it ever hands out for pe, repeats included
std::vector<QueuePair*> nvshmem_rcs(int pe);
