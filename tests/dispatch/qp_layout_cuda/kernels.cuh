// What the translation units of the GPU share: each lookup has one of its own, since the two
// functions have one name and their argument types one namespace
#pragma once

#include "lookup.h"

#include <non_abi/device/threadgroup/nvshmemi_common_device_defines.cuh>

// Addresses only: an answer may lie outside the table, and nothing is read through one
using Address = unsigned long long;

struct Chain {
    long long cycles;
    Address last;
};

// answers[pe * turns + turn]: as block `asker`, ask for each PE but mype, `turns` times. With any,
// round robin over all queue pairs (layout v2), else the queue pairs of that block
__global__ void nvshmem_answers(unsigned asker, bool any, int turns, Address* answers);

// answers[pe * ids + id]
__global__ void deepep_answers(int ids, Address* answers);

// `steps` lookups by one thread, each waiting for the one before, and the same without lookups.
// zero is 0, which the compiler does not know
__global__ void lookup_chain(int pe, int ids, int steps, Address zero, Chain* out);
__global__ void nothing_chain(int pe, int ids, int steps, Address zero, Chain* out);
