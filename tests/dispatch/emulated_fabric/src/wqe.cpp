#include "wqe.h"

#include <algorithm>

#include <infiniband/mlx5dv.h>

#include "byte_order.h"
#include "defects.h"
#include "prm.h"
#include "refuse.h"

namespace fabric {
namespace {

// opmod of a masked atomic: log2 of the operand's size in bytes below an "extended" bit
constexpr uint8_t kOpmodMasked4 = 0x08, kOpmodMasked8 = 0x09;
constexpr uint8_t kFenceMode = 0xe0;  // of fm_ce_se
constexpr uint8_t kCompletionMode = 0x0c;

constexpr size_t kRaddr = kWqeSegment;
constexpr size_t kBehindRaddr = 2 * kWqeSegment;

size_t rounded(size_t bytes) { return (bytes + kWqeSegment - 1) / kWqeSegment; }

bool is_write(uint8_t opcode) {
    return opcode == MLX5_OPCODE_RDMA_WRITE or opcode == MLX5_OPCODE_RDMA_WRITE_IMM;
}

size_t operand_bytes(const ControlSegment& control) {
    if (control.opcode == MLX5_OPCODE_ATOMIC_CS or control.opcode == MLX5_OPCODE_ATOMIC_FA) {
        if (control.opmod != 0)
            refuse("opmod 0x%x of opcode 0x%x is not emulated", control.opmod, control.opcode);
        return 8;
    }
    if (control.opmod == kOpmodMasked4) return 4;
    if (control.opmod == kOpmodMasked8) return 8;
    refuse("opmod 0x%x of the masked atomic 0x%x is not emulated: only 4 and 8 bytes are",
           control.opmod, control.opcode);
}

// Segments of an atomic: the masks of 8 bytes need one more
uint32_t atomic_segments(const ControlSegment& control) {
    const bool wide =
        control.opcode == MLX5_OPCODE_ATOMIC_MASKED_CS and operand_bytes(control) == 8;
    return wide ? 5 : 4;
}

void set_data(const uint8_t* segment, Wqe* wqe) {
    const auto data = load<mlx5_wqe_data_seg>(segment);
    wqe->length = be32toh(data.byte_count);
    wqe->lkey = be32toh(data.lkey);
    wqe->local_address = be64toh(data.addr);
    if (wqe->length == 0)
        refuse("a data segment of byte count 0, which means 2^31 bytes, is not emulated");
}

void decode_write(const uint8_t* bytes, Wqe* wqe) {
    const uint8_t* behind = bytes + kBehindRaddr;
    const uint32_t count = load_be32(behind);
    if (not(count & MLX5_INLINE_SEG)) {
        wqe->kind = Kind::write;
        if (wqe->control.ds != 3) {
            wqe->reason = Reason::malformed_wqe;
            return;
        }
        set_data(behind, wqe);
        return;
    }
    wqe->kind = Kind::inline_write;
    wqe->length = count & ~MLX5_INLINE_SEG;
    const size_t header = sizeof(mlx5_wqe_inl_data_seg);
    if (wqe->control.ds != 2 + rounded(header + wqe->length)) {
        wqe->reason = Reason::malformed_wqe;
        return;
    }
    if (has(Defect::ignored_byte_count)) wqe->length = 4;
    std::copy_n(behind + header, wqe->length, wqe->inline_data);
}

uint64_t operand(const uint8_t* at, size_t bytes) {
    return bytes == 8 ? load_be64(at) : load_be32(at);
}

void decode_atomic(const uint8_t* bytes, Wqe* wqe) {
    const ControlSegment& control = wqe->control;
    wqe->kind = Kind::atomic;
    const size_t size = operand_bytes(control);
    const uint32_t segments = atomic_segments(control);
    if (control.ds != segments) {
        wqe->reason = Reason::malformed_wqe;
        return;
    }
    const uint8_t* at = bytes + kBehindRaddr;
    const uint64_t all = size == 8 ? ~uint64_t{0} : 0xffffffffu;
    wqe->swap_or_add = operand(at, size);
    switch (control.opcode) {
        case MLX5_OPCODE_ATOMIC_FA:
            wqe->operation = Operation::fetch_add;
            break;
        case MLX5_OPCODE_ATOMIC_MASKED_FA:
            wqe->operation = Operation::fetch_add;
            wqe->compare_mask_or_boundary = operand(at + size, size);
            break;
        case MLX5_OPCODE_ATOMIC_CS:
            wqe->operation = Operation::compare_swap;
            wqe->compare = operand(at + size, size);
            wqe->swap_mask = wqe->compare_mask_or_boundary = all;
            break;
        default:
            wqe->operation = Operation::compare_swap;
            wqe->compare = operand(at + size, size);
            wqe->swap_mask = operand(at + 2 * size, size);
            wqe->compare_mask_or_boundary = operand(at + 3 * size, size);
    }
    if (has(Defect::wrong_endian_add) and wqe->operation == Operation::fetch_add)
        wqe->swap_or_add =
            size == 8 ? load<uint64_t>(at) : load<uint32_t>(at);
    set_data(bytes + (segments - 1) * kWqeSegment, wqe);
    if (wqe->length != size) wqe->reason = Reason::malformed_wqe;
}

}  // namespace

ControlSegment decode_control(const uint8_t* bytes) {
    const auto segment = load<mlx5_wqe_ctrl_seg>(bytes);
    const uint32_t first = be32toh(segment.opmod_idx_opcode), second = be32toh(segment.qpn_ds);
    ControlSegment control;
    control.opcode = static_cast<uint8_t>(first);
    control.wqe_index = static_cast<uint16_t>(first >> 8);
    control.opmod = static_cast<uint8_t>(first >> 24);
    control.qpn = second >> 8;
    control.ds = second & 0x3f;
    control.completion = (segment.fm_ce_se & kCompletionMode) == MLX5_WQE_CTRL_CQ_UPDATE;
    control.fence = segment.fm_ce_se & kFenceMode;
    return control;
}

uint32_t wqebbs_of(const ControlSegment& control) {
    if (has(Defect::opcode_size)) return 1;
    const auto per_wqebb = static_cast<uint32_t>(kWqebb / kWqeSegment);
    return std::max(1u, (control.ds + per_wqebb - 1) / per_wqebb);
}

size_t written_bytes(const uint8_t* wqe, size_t seen) {
    const ControlSegment control = decode_control(wqe);
    switch (control.opcode) {
        case MLX5_OPCODE_NOP:
            return kWqeSegment;  // whatever ds says
        case prm::kOpcodeDump:
            return 2 * kWqeSegment;
        case MLX5_OPCODE_RDMA_WRITE:
        case MLX5_OPCODE_RDMA_WRITE_IMM: {
            const size_t header = kBehindRaddr + sizeof(mlx5_wqe_inl_data_seg);
            if (seen < header) return header;
            const uint32_t count = load_be32(wqe + kBehindRaddr);
            if (not(count & MLX5_INLINE_SEG)) return 3 * kWqeSegment;
            return std::min<size_t>(header + (count & ~MLX5_INLINE_SEG), kMaxWqe);
        }
        case MLX5_OPCODE_RDMA_READ:
            return 3 * kWqeSegment;
        case MLX5_OPCODE_ATOMIC_CS:
        case MLX5_OPCODE_ATOMIC_FA:
        case MLX5_OPCODE_ATOMIC_MASKED_CS:
        case MLX5_OPCODE_ATOMIC_MASKED_FA:
            return atomic_segments(control) * kWqeSegment;
        default:
            refuse("opcode 0x%x of WQE %u of queue pair 0x%x is not emulated", control.opcode,
                   control.wqe_index, control.qpn);
    }
}

void decode_wqe(const uint8_t* bytes, Wqe* wqe) {
    *wqe = {};
    wqe->control = decode_control(bytes);
    const uint8_t opcode = wqe->control.opcode;
    if (opcode == MLX5_OPCODE_NOP or opcode == prm::kOpcodeDump) return;
    const auto remote = load<mlx5_wqe_raddr_seg>(bytes + kRaddr);
    wqe->remote_address = be64toh(remote.raddr);
    wqe->rkey = be32toh(remote.rkey);
    if (is_write(opcode)) {
        decode_write(bytes, wqe);
    } else if (opcode == MLX5_OPCODE_RDMA_READ) {
        wqe->kind = Kind::read;
        if (wqe->control.ds == 3)
            set_data(bytes + kBehindRaddr, wqe);
        else
            wqe->reason = Reason::malformed_wqe;
    } else {
        decode_atomic(bytes, wqe);
    }
}

uint64_t apply_atomic(const Message& message, uint64_t old, size_t bytes) {
    if (has(Defect::lost_atomic)) return old;
    if (message.operation == Operation::compare_swap) {
        const uint64_t compared = message.compare_mask_or_boundary;
        if ((old & compared) != (message.compare & compared)) return old;
        return (old & ~message.swap_mask) | (message.swap_or_add & message.swap_mask);
    }
    // A boundary bit ends a field: no carry goes from that bit to the next
    const uint64_t boundary = message.compare_mask_or_boundary;
    const unsigned bits = static_cast<unsigned>(bytes * 8);
    uint64_t sum = 0, carry = 0;
    for (unsigned bit = 0; bit < bits; ++bit) {
        const uint64_t a = old >> bit & 1, b = message.swap_or_add >> bit & 1;
        sum |= (a ^ b ^ carry) << bit;
        carry = (a & b) | (carry & (a | b));
        if (boundary >> bit & 1) carry = 0;
    }
    return sum;
}

}  // namespace fabric
