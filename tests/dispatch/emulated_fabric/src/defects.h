// Defects on purpose, for the self test: -DFABRIC_DEFECT=NAME compiles one of them in.
//
// The self test has to turn red with each; a build without the macro holds none of them.
#pragma once

#ifndef FABRIC_DEFECT
#define FABRIC_DEFECT none
#endif

namespace fabric {

enum class Defect {
    none,
    opcode_size,         // a WQE of two WQEBBs is taken for one of one
    ignored_rkey,        // a remote key of any owner, NIC or range will do
    swapped_peers,       // a message goes to the queue pair's rank with its lowest bit flipped
    lost_atomic,         // atomics answer, but memory stays as it was
    flag_before_data,    // words of up to 8 bytes overtake the copies before them
    no_ring_wrap,        // a WQE at the end of the ring is read on beyond it
    wrong_cqe_index,     // wqe_counter names the WQEBB after the WQE
    ignored_byte_count,  // an inline WQE carries 4 bytes whatever it says
    dropped_split_tail,  // the last fragment of a split write is not written
    wrong_endian_add,    // the operand of an add is taken as little-endian
};

constexpr bool has(Defect defect) { return defect == Defect::FABRIC_DEFECT; }

}  // namespace fabric
