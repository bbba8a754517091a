#include "cqe.h"

#include <cstddef>
#include <cstring>

#include <infiniband/mlx5dv.h>

#include "byte_order.h"
#include "defects.h"

namespace fabric {
namespace {

// An error CQE shares its place with mlx5_cqe64 up to the syndrome before sop_drop_qpn
constexpr size_t kSyndrome = offsetof(mlx5_cqe64, sop_drop_qpn) - 1;
constexpr size_t kLastWord = offsetof(mlx5_cqe64, wqe_counter);

}  // namespace

Syndrome syndrome_of(Reason reason, bool at_responder) {
    switch (reason) {
        case Reason::none:
            return Syndrome::none;
        case Reason::malformed_wqe:
        case Reason::other_queue_pairs_wqe:
            return Syndrome::local_qp_operation;
        case Reason::earlier_error:
            return Syndrome::work_request_flushed;
        case Reason::unknown_queue_pair:
        case Reason::queue_pair_of_other_rank:
        case Reason::not_connected:
        case Reason::peer_is_gone:
        case Reason::port_is_down:
            return Syndrome::transport_retry_exceeded;
        default:
            return at_responder ? Syndrome::remote_access : Syndrome::local_protection;
    }
}

const char* text(Syndrome syndrome) {
    switch (syndrome) {
        case Syndrome::none: return "none";
        case Syndrome::local_qp_operation: return "local QP operation error";
        case Syndrome::local_protection: return "local protection error";
        case Syndrome::work_request_flushed: return "work request flushed";
        case Syndrome::remote_access: return "remote access error";
        case Syndrome::transport_retry_exceeded: return "transport retry exceeded";
    }
    return "unnamed";
}

void write_cqe(CopyEngine* engine, const Umem& queue, const Completion& completion) {
    uint8_t entry[sizeof(mlx5_cqe64)] = {};
    const bool error = completion.syndrome != Syndrome::none;
    entry[kSyndrome] = static_cast<uint8_t>(completion.syndrome);
    store_be32(entry + offsetof(mlx5_cqe64, sop_drop_qpn),
               uint32_t{completion.opcode} << 24 | completion.qpn);
    const auto counter = static_cast<uint16_t>(completion.wqe_index +
                                               (has(Defect::wrong_cqe_index) ? 1 : 0));
    store_be16(entry + kLastWord, counter);
    entry[offsetof(mlx5_cqe64, op_own)] =
        static_cast<uint8_t>((error ? MLX5_CQE_REQ_ERR : MLX5_CQE_REQ) << 4);
    if (queue.on_device) {
        engine->write(reinterpret_cast<uint64_t>(queue.address), entry, sizeof entry, true);
        return;
    }
    // The consumer reads while this is written: whole words, the last one with release
    for (size_t at = 0; at < kLastWord; at += sizeof(uint32_t))
        __atomic_store_n(reinterpret_cast<uint32_t*>(queue.address + at),
                         load<uint32_t>(entry + at), __ATOMIC_RELAXED);
    __atomic_store_n(reinterpret_cast<uint32_t*>(queue.address + kLastWord),
                     load<uint32_t>(entry + kLastWord), __ATOMIC_RELEASE);
}

}  // namespace fabric
