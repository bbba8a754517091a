// UAR pages: where a producer writes doorbells
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace fabric {

struct QueuePair;

struct UarPage {
    uint64_t* doorbell = nullptr;  // the page's first word
    uint32_t page_id = 0;
    uint32_t nic = 0;
    uint64_t last = 0;                    // the doorbell as the NIC last read it
    std::vector<QueuePair*> queue_pairs;  // that name this page in their qpc
};

// The doorbell register's two words, as the producer writes them
struct Doorbell {
    uint32_t qpn;
    uint16_t producer_index;  // of the next WQEBB, modulo 2^16
};
Doorbell decode_doorbell(uint64_t word);

UarPage* allocate_uar(uint32_t nic);
void free_uar(UarPage* page);
// The page of an id, or null
UarPage* find_uar(uint32_t page_id);
// All pages, for the NIC thread; holds under nic_mutex()
const std::vector<UarPage*>& uar_pages();
// Does the address lie in a UAR page?
bool is_uar(const void* address);

}  // namespace fabric
