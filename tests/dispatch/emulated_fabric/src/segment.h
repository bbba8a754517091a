// What the processes of one fabric share in /dev/shm: tables of processes, queue pairs and memory
// regions, and one ring of messages for each ordered pair of processes.
//
// A fresh file is all zero, which is a valid state of every table: nobody has to go first.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace fabric {

constexpr uint32_t kMaxProcesses = 64;
constexpr uint32_t kMaxNics = 8;
constexpr uint32_t kMaxQueuePairs = 1u << 16;
constexpr uint32_t kMaxMemoryRegions = 1u << 16;

constexpr uint32_t kRingSlots = 64;
constexpr uint32_t kFragment = 32 * 1024;  // bytes of payload in one message

enum class Liveness : uint32_t { absent, running, gone };

struct ProcessEntry {
    std::atomic<Liveness> liveness;
    std::atomic<uint32_t> pid;
    std::atomic<uint64_t> port_down_since;  // ns of CLOCK_MONOTONIC, 0: the port is up
};

enum class QpState : uint32_t { absent, reset, init, rtr, rts, error, destroyed };

struct QueuePairEntry {
    std::atomic<QpState> state;
    uint32_t rank;
    uint32_t nic;
    uint32_t user_index;
    std::atomic<uint32_t> remote_qpn;
};

struct MemoryRegionEntry {
    std::atomic<uint32_t> live;
    uint32_t rank;
    uint32_t nic;
    uint32_t access;  // IBV_ACCESS_*
    uint32_t on_device;
    uint64_t iova;     // as WQEs name it
    uint64_t address;  // in the owner's address space
    uint64_t length;   // bytes
};

enum class Operation : uint32_t { write, read, fetch_add, compare_swap };

// Who has the message: it is taken once, by the responder or by a requester that gives up
enum class Claim : uint32_t { posted, responder, cancelled };

struct Message {
    std::atomic<Claim> claim;
    Operation operation;
    uint32_t source_qpn;
    uint32_t destination_qpn;
    uint32_t rkey;
    uint32_t length;  // bytes of this fragment, or of the atomic's operand
    uint64_t remote_address;
    uint64_t swap_or_add, compare, swap_mask, compare_mask_or_boundary;
    uint64_t posted_at;  // ns of CLOCK_MONOTONIC
    uint32_t is_split_tail;
    // The answer
    uint32_t syndrome;
    uint32_t reason;
};

struct Ring {
    alignas(64) std::atomic<uint64_t> posted;  // messages ever posted, by the source
    alignas(64) std::atomic<uint64_t> served;  // messages ever answered, by the destination
    alignas(64) Message messages[kRingSlots];
    alignas(64) uint8_t payload[kRingSlots][kFragment];
};

struct Tables {
    std::atomic<uint64_t> geometry;
    std::atomic<uint32_t> queue_pairs_used, memory_regions_used;
    ProcessEntry processes[kMaxProcesses];
    QueuePairEntry queue_pairs[kMaxQueuePairs];
    MemoryRegionEntry memory_regions[kMaxMemoryRegions];
};

class Segment {
public:
    // Maps settings().segment and enters this process; refuses a rank that is taken
    Segment();

    Tables& tables() { return *tables_; }
    Ring& ring(uint32_t source, uint32_t destination);
    // Reserves a ring's memory now, so that a full /dev/shm is a sentence and not a SIGBUS
    void reserve_ring(uint32_t source, uint32_t destination);
    bool alive(uint32_t rank);
    void leave();

private:
    size_t ring_offset(uint32_t source, uint32_t destination) const;

    int file_ = -1;
    Tables* tables_ = nullptr;
};

Segment& segment();

// Numbers as the HCA shows them
constexpr uint32_t kFirstQpn = 0x100;
inline uint32_t qpn_of(uint32_t index) { return index + kFirstQpn; }
// The entry of a queue pair number, or null if no process made one
QueuePairEntry* find_queue_pair(uint32_t qpn);

constexpr uint32_t kKeyTag = 0x5a;
inline uint32_t key_of(uint32_t index) { return index << 8 | kKeyTag; }
// The entry of an lkey or rkey, or null if no process registered it
MemoryRegionEntry* find_memory_region(uint32_t key);

uint64_t now_ns();

}  // namespace fabric
