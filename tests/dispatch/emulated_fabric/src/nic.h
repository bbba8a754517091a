// The process's NICs: their objects, and the thread that plays them
#pragma once

#include <cstdint>
#include <vector>

#include "queue_pair.h"

namespace fabric {

// Objects change and the NIC thread works only under this lock; recursive, and a waiting caller
// goes before the thread's next pass
class NicLock {
public:
    NicLock();
    ~NicLock();
    NicLock(const NicLock&) = delete;
};
// Gives up after 300 ms, for reports at the process's end
bool try_lock_nic();
void unlock_nic();

// Every queue pair ever made, destroyed ones too; under NicLock
const std::vector<QueuePair*>& queue_pairs();
QueuePair* find_own_queue_pair(uint32_t qpn);
void add_queue_pair(QueuePair* queue_pair);

void add_completion_queue(const CompletionQueue& queue);
const CompletionQueue* find_completion_queue(uint32_t cqn);
void remove_completion_queue(uint32_t cqn);

// Starts the thread at the first call, after the CUDA driver: it stops before the driver does
void start_nic();

// State that a flapping port and the faults' counters share
struct Port {
    uint64_t up_at = 0;  // ns; down until then
    uint64_t wqes = 0, completions = 0;
    bool has_flapped = false;
};
Port& port();
bool port_is_down();

}  // namespace fabric
