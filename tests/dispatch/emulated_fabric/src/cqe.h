// Completion queue entries of a collapsed CQ: one entry of 64 bytes that each completion replaces
#pragma once

#include <cstdint>

#include "copy_engine.h"
#include "memory_region.h"

namespace fabric {

// Syndromes of an error CQE, as the IB specification names them
enum class Syndrome : uint8_t {
    none = 0x00,
    local_qp_operation = 0x02,
    local_protection = 0x04,
    work_request_flushed = 0x05,
    remote_access = 0x13,
    transport_retry_exceeded = 0x15,
};
Syndrome syndrome_of(Reason reason, bool at_responder);
const char* text(Syndrome syndrome);

struct Completion {
    uint32_t qpn;
    uint8_t opcode;  // of the WQE
    uint16_t wqe_index;
    Syndrome syndrome;
};
// Writes the entry; the producer polls its last word, which comes last
void write_cqe(CopyEngine* engine, const Umem& queue, const Completion& completion);

}  // namespace fabric
