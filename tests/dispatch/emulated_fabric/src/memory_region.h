// Memory regions (lkey, rkey) and umems, and the checks that an HCA makes of an address
#pragma once

#include <cstddef>
#include <cstdint>

#include "segment.h"

namespace fabric {

// Why an access is refused, in more detail than the syndrome of a CQE
enum class Reason : uint32_t {
    none,
    unknown_key,
    key_of_other_rank,
    key_of_other_nic,
    out_of_range,
    no_right,
    unknown_queue_pair,
    queue_pair_of_other_rank,
    not_connected,
    misaligned_atomic,
    malformed_wqe,
    other_queue_pairs_wqe,
    peer_is_gone,
    port_is_down,
    earlier_error,
};
const char* text(Reason reason);

// Makes a region of the NIC and returns its lkey, which is its rkey as well
uint32_t register_region(uint32_t nic, void* address, size_t bytes, uint64_t iova, int access);
void deregister_region(uint32_t key);

struct Access {
    Reason reason = Reason::none;
    bool on_device = false;
    uint64_t address = 0;  // in the owner's address space
};
// May the NIC of the rank access this? right: an IBV_ACCESS_* bit, 0 for a local read
Access check_access(uint32_t key, uint32_t rank, uint32_t nic, uint64_t iova, uint64_t bytes,
                    uint32_t right);

struct Umem {
    uint8_t* address = nullptr;
    size_t bytes = 0;
    uint32_t nic = 0;
    bool on_device = false;
};
uint32_t register_umem(const Umem& umem);
void deregister_umem(uint32_t id);
// The umem's part from offset on; refuses an unknown id or a part beyond its end
Umem umem_part(uint32_t id, uint32_t nic, uint64_t offset, uint64_t bytes, const char* what);

}  // namespace fabric
