// Queue pairs of this process, and what the NIC keeps of each
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>

#include "cqe.h"
#include "memory_region.h"
#include "send_queue.h"
#include "wqe.h"

namespace fabric {

struct UarPage;

struct Counters {
    uint64_t doorbells = 0, foreign_doorbells = 0;  // the latter with another queue pair's number
    uint64_t wqes = 0, foreign_wqes = 0;
    uint64_t writes = 0, inline_writes = 0, reads = 0, nops = 0, dumps = 0;
    uint64_t fetch_adds = 0, compare_swaps = 0;
    uint64_t bytes = 0;  // of writes and reads, without the operands of atomics
    uint64_t completions = 0, dropped_completions = 0;
    std::map<uint32_t, uint64_t> aimed_at;  // rank that owns the rkey -> WQEs
    std::map<Syndrome, uint64_t> errors;
    std::string first_error;
};

// A WQE that the NIC took and whose completion is due
struct Outstanding {
    uint8_t opcode;
    uint16_t wqe_index;
    bool completion;
    bool is_issued;       // all its messages are posted
    uint32_t unanswered;  // messages
    Reason reason;
    bool at_responder;
};

struct QueuePair {
    uint32_t qpn = 0, nic = 0, user_index = 0;
    bool is_rc = true;
    QueuePairEntry* entry = nullptr;  // in the shared table
    uint32_t remote_qpn = 0;
    uint32_t peer_rank = 0;  // that made the remote queue pair

    UarPage* uar = nullptr;
    SendQueue send_queue;
    Umem completion_queue;

    // In WQEBBs since creation; doorbells carry their lowest 16 bits
    uint64_t producer = 0, fetched = 0, consumer = 0;
    Reason forced_error = Reason::none;  // of the next WQE
    QpState last_state = QpState::reset;  // before it was destroyed
    bool has_error = false, drops_completions = false, is_stuck = false;

    std::deque<Outstanding> outstanding;
    uint64_t retired = 0;  // entries ever taken off the front of `outstanding`

    // A WQE of which some messages are not posted yet
    bool has_current = false;
    Wqe current;
    uint64_t current_offset = 0;  // bytes

    Counters counters;
};

// A CQ's buffer: its collapsed entry
struct CompletionQueue {
    uint32_t cqn;
    uint32_t nic;
    Umem entry;
};

}  // namespace fabric
