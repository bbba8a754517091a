// Faults on purpose: EMULATED_FABRIC_FAULT (README.md has the grammar)
#pragma once

#include <cstdint>
#include <string>

namespace fabric {

// What this process has to do wrong; kNever where nothing
struct Faults {
    static constexpr uint64_t kNever = ~uint64_t{0};

    uint64_t delay_ns = 0;               // each message waits this long before it is served
    uint64_t drop_completion = kNever;   // this completion and the rest of its queue pair's
    uint64_t kill_at_wqe = kNever;       // the process dies when it takes this WQE
    uint64_t flap_at_wqe = kNever;       // the port goes down at this WQE
    uint64_t flap_ns = 0;                // and comes back after this time
    uint64_t exhaust_at_wqe = kNever;    // the queue pair of this WQE is not drained any more
};

// Parses settings().fault for settings().rank; refuses what it does not know
const Faults& faults();

}  // namespace fabric
