// Bodies of the cases; cases.cpp has their table
#pragma once

#include "harness.h"
#include "producer.h"

constexpr uint8_t kRemoteAccess = 0x13, kLocalProtection = 0x04, kNotConnected = 0x15;
constexpr uint8_t kFlushed = 0x05, kLocalOperation = 0x02;

// Two connected ranks; the sender writes into the receiver's memory
struct Pair {
    explicit Pair(Ranks& ranks, int ids = 1, int log_size = 6, size_t bytes = 1u << 20);
    bool sends() const { return ranks.rank() == 0; }
    Sender& sender(int id = 0) { return *senders[static_cast<size_t>(id)]; }
    // In the peer's memory
    Remote at(size_t offset) const { return {peer.address + offset, peer.rkey}; }

    Ranks& ranks;
    Nic nic;
    Buffer memory;
    std::vector<std::unique_ptr<Sender>> senders;
    Remote peer;
};

void fill(uint8_t* memory, size_t bytes, uint32_t seed);
bool is_filled(const uint8_t* memory, size_t bytes, uint32_t seed);
uint64_t load_flag(uint8_t* at);

// setup.cpp
void start_as_nvshmem(Ranks&);
void destroy(Ranks&);
// operations.cpp
void write(Ranks&);
void split_write(Ranks&);
void inline_write(Ranks&);
void write_with_immediate(Ranks&);
void read(Ranks&);
void atomics(Ranks&);
void masked_fetch_add(Ranks&);
void masked_compare_swap(Ranks&);
void nothing(Ranks&);
void completion(Ranks&);
// queues.cpp
void ring_wrap(Ranks&);
void index_wrap(Ranks&);
void late_wqe(Ranks&);
void fence(Ranks&);
void flag_after_data(Ranks&);
void foreign(Ranks&);
// checks.cpp
void remote_keys(Ranks&);
void local_keys(Ranks&);
void unconnected(Ranks&);
void two_nics(Ranks&);
// peers.cpp
void many_peers(Ranks&);
void many_threads(Ranks&);
// faults.cpp
void delayed(Ranks&);
void dropped_completion(Ranks&);
void killed_peer(Ranks&);
void short_flap(Ranks&);
void long_flap(Ranks&);
void exhausted_queue(Ranks&);
void sleeper(Ranks&);
