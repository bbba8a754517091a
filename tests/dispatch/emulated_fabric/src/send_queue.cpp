#include "send_queue.h"

#include <algorithm>

#include "byte_order.h"
#include "defects.h"

namespace fabric {
namespace {

constexpr uint32_t kStale = 0xa5c3f00d;
constexpr uint64_t kPatience = 200000000;  // ns

}  // namespace

void SendQueue::attach(const Umem& ring, uint32_t wqebbs) {
    ring_ = ring;
    wqebbs_ = wqebbs;
    if (ring.on_device)
        shadow_.assign(wqebbs * kWqebb, 0);
    else
        consume(0, wqebbs);
}

void SendQueue::fetch(CopyEngine* engine, uint64_t first, uint64_t count) {
    if (not ring_.on_device) return;
    while (count > 0) {
        const uint64_t slot = first % wqebbs_;
        const uint64_t part = std::min<uint64_t>(count, wqebbs_ - slot);
        engine->read(shadow_.data() + slot * kWqebb,
                     reinterpret_cast<uint64_t>(ring_.address) + slot * kWqebb, part * kWqebb,
                     true);
        first += part;
        count -= part;
    }
}

uint32_t SendQueue::word(uint64_t index, size_t offset) const {
    const size_t from_start = index % wqebbs_ * kWqebb + offset;
    const size_t at =
        has(Defect::no_ring_wrap) ? from_start : from_start % (wqebbs_ * kWqebb);
    if (ring_.on_device) return load<uint32_t>(shadow_.data() + at);
    return __atomic_load_n(reinterpret_cast<const uint32_t*>(ring_.address + at),
                           __ATOMIC_ACQUIRE);
}

bool SendQueue::complete(uint64_t index, uint32_t qpn, uint8_t* wqe) const {
    bool fresh = true;
    size_t seen = 0;
    const auto take = [&](size_t bytes) {
        for (; seen < bytes; seen += sizeof(uint32_t)) {
            const uint32_t value = word(index, seen);
            store(wqe + seen, value);
            fresh = fresh and value != kStale;
        }
    };
    take(kWqeSegment);
    if (not fresh) return false;
    const ControlSegment control = decode_control(wqe);
    if (control.wqe_index != static_cast<uint16_t>(index) or control.qpn != qpn) return false;
    // The second time an inline WQE tells its length
    take(written_bytes(wqe, seen));
    if (fresh) take(written_bytes(wqe, seen));
    return fresh;
}

bool SendQueue::gather(uint64_t index, uint32_t qpn, uint8_t* wqe, uint64_t now) {
    std::fill_n(wqe, kMaxWqe, uint8_t{0});
    if (complete(index, qpn, wqe)) {
        waiting_since_ = 0;
        return true;
    }
    if (waiting_since_ == 0) waiting_since_ = now;
    if (now - waiting_since_ < kPatience) return false;
    waiting_since_ = 0;
    ++stale_waits_;
    for (size_t at = 0; at < kMaxWqe; at += sizeof(uint32_t)) store(wqe + at, word(index, at));
    return true;
}

void SendQueue::consume(uint64_t index, uint32_t count) {
    if (ring_.on_device) return;
    for (size_t at = 0; at < count * kWqebb; at += sizeof(uint32_t)) {
        const size_t offset = (index % wqebbs_ * kWqebb + at) % (wqebbs_ * kWqebb);
        __atomic_store_n(reinterpret_cast<uint32_t*>(ring_.address + offset), kStale,
                         __ATOMIC_RELEASE);
    }
}

}  // namespace fabric
