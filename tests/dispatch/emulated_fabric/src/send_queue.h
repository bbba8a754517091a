// The send queue's ring of WQEBBs, in host or in device memory
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "copy_engine.h"
#include "memory_region.h"
#include "wqe.h"

namespace fabric {

class SendQueue {
public:
    // `ring` has a power of two of WQEBBs; one in host memory is filled with the stale mark
    void attach(const Umem& ring, uint32_t wqebbs);
    uint32_t wqebbs() const { return wqebbs_; }

    // Queues the copy of new WQEBBs out of device memory; nothing to do for host memory
    void fetch(CopyEngine* engine, uint64_t first, uint64_t count);

    // The WQE at `index`, gathered over the ring's end, if the producer's stores have arrived.
    // A kernel orders its stores before the doorbell for device memory only, so that in host
    // memory a WQE can be seen late: each of its words then still has the stale mark. Gives up
    // waiting after some time, since a payload may hold the mark itself.
    bool gather(uint64_t index, uint32_t qpn, uint8_t* wqe, uint64_t now);
    uint64_t stale_waits() const { return stale_waits_; }

    // Marks consumed WQEBBs stale, before a completion lets the producer write them again
    void consume(uint64_t index, uint32_t count);

private:
    uint32_t word(uint64_t index, size_t offset) const;
    bool complete(uint64_t index, uint32_t qpn, uint8_t* wqe) const;

    Umem ring_;
    uint32_t wqebbs_ = 0;
    std::vector<uint8_t> shadow_;  // of a ring in device memory
    uint64_t waiting_since_ = 0;
    uint64_t stale_waits_ = 0;
};

}  // namespace fabric
