#include "cases.h"

#include <cstring>

const Case kCases[] = {
    {"start_as_nvshmem", 1, start_as_nvshmem},
    {"destroy", 2, destroy},
    {"write", 2, write},
    {"split_write", 2, split_write},
    {"inline_write", 2, inline_write},
    {"write_with_immediate", 2, write_with_immediate},
    {"read", 2, read},
    {"atomics", 2, atomics},
    {"masked_fetch_add", 2, masked_fetch_add},
    {"masked_compare_swap", 2, masked_compare_swap},
    {"nothing", 2, nothing},
    {"completion", 2, completion},
    {"ring_wrap", 2, ring_wrap},
    {"index_wrap", 2, index_wrap},
    {"late_wqe", 2, late_wqe},
    {"fence", 2, fence},
    {"flag_after_data", 2, flag_after_data},
    {"foreign", 2, foreign},
    {"remote_keys", 2, remote_keys},
    {"local_keys", 2, local_keys},
    {"unconnected", 2, unconnected},
    {"two_nics", 2, two_nics, 2},
    {"many_peers", 6, many_peers},
    {"many_threads", 2, many_threads},
    {"delayed", 2, delayed, 1, "delay=200"},
    {"dropped_completion", 2, dropped_completion, 1, "drop-completion=0@3"},
    {"killed_peer", 2, killed_peer, 1, "kill-peer=1@2", 1},
    {"short_flap", 2, short_flap, 1, "flap-port=0@2:300"},
    {"long_flap", 2, long_flap, 1, "flap-port=0@2:4000", -1, "300"},
    {"exhausted_queue", 2, exhausted_queue, 1, "exhaust-queue=0@3"},
    {"sleeper", 2, sleeper},
};
const int kCaseCount = static_cast<int>(sizeof kCases / sizeof *kCases);

Pair::Pair(Ranks& its_ranks, int ids, int log_size, size_t bytes)
    : ranks(its_ranks), memory(nic, bytes) {
    connect_pair(ranks, nic, &senders, ids, log_size);
    ranks.note(0, memory.address());
    ranks.note(1, memory.mr->rkey);
    ranks.barrier();
    const int other = 1 - ranks.rank();
    peer = {ranks.note_of(other, 0), static_cast<uint32_t>(ranks.note_of(other, 1))};
    ranks.barrier();
}

void fill(uint8_t* memory, size_t bytes, uint32_t seed) {
    uint32_t state = seed * 2654435761u + 1;
    for (size_t at = 0; at < bytes; ++at) {
        state = state * 1664525u + 1013904223u;
        memory[at] = static_cast<uint8_t>(state >> 24);
    }
}

bool is_filled(const uint8_t* memory, size_t bytes, uint32_t seed) {
    std::unique_ptr<uint8_t[]> expected(new uint8_t[bytes]);
    fill(expected.get(), bytes, seed);
    return std::memcmp(memory, expected.get(), bytes) == 0;
}

uint64_t load_flag(uint8_t* at) {
    return __atomic_load_n(reinterpret_cast<uint64_t*>(at), __ATOMIC_ACQUIRE);
}
