// Send WQEs: a control segment of 16 bytes, and what its opcode puts behind it
#pragma once

#include <cstddef>
#include <cstdint>

#include "memory_region.h"
#include "segment.h"

namespace fabric {

constexpr size_t kWqebb = 64;      // bytes; the unit of indices
constexpr size_t kWqeSegment = 16;  // bytes; the unit of ds
constexpr size_t kMaxWqe = 63 * kWqeSegment;

struct ControlSegment {
    uint8_t opcode, opmod;
    uint16_t wqe_index;
    uint32_t qpn;
    uint32_t ds;  // segments of 16 bytes
    bool completion;  // wants a CQE
    bool fence;       // starts after all before it are done
};
ControlSegment decode_control(const uint8_t* wqe);

uint32_t wqebbs_of(const ControlSegment& control);

// How many bytes the producer writes for this opcode, as far as `wqe` with `seen` bytes tells:
// an inline WQE says so only in its third segment. Refuses opcodes that are not emulated.
size_t written_bytes(const uint8_t* wqe, size_t seen);

enum class Kind { nothing, write, inline_write, read, atomic };

struct Wqe {
    ControlSegment control;
    Kind kind = Kind::nothing;
    Reason reason = Reason::none;  // malformed_wqe where sizes do not fit
    // Remote address segment
    uint64_t remote_address = 0;
    uint32_t rkey = 0;
    // Data segment: local memory, of an atomic where the old value goes
    uint64_t local_address = 0;
    uint32_t lkey = 0;
    uint32_t length = 0;  // bytes
    // Inline data
    uint8_t inline_data[kMaxWqe];
    // Atomic segment
    Operation operation = Operation::write;
    uint64_t swap_or_add = 0, compare = 0, swap_mask = 0, compare_mask_or_boundary = 0;
};
// `bytes` holds the whole WQE
void decode_wqe(const uint8_t* bytes, Wqe* wqe);

// The atomic's new value of an operand of `bytes` bytes
uint64_t apply_atomic(const Message& message, uint64_t old, size_t bytes);

}  // namespace fabric
