#include "responder.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include <infiniband/verbs.h>

#include "defects.h"
#include "fault.h"
#include "memory_region.h"
#include "nic.h"
#include "settings.h"
#include "wqe.h"

namespace fabric {
namespace {

constexpr uint32_t kWord = 8;  // bytes; no more than what a consumer polls in one access

bool is_atomic(const Message& message) {
    return message.operation == Operation::fetch_add or
           message.operation == Operation::compare_swap;
}

bool is_word(const Message& message) {
    return is_atomic(message) or
           (message.operation == Operation::write and message.length <= kWord);
}

uint32_t right_of(const Message& message) {
    if (is_atomic(message)) return IBV_ACCESS_REMOTE_ATOMIC;
    return message.operation == Operation::read ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
}

Reason check_connection(const Message& message, uint32_t* nic) {
    const QueuePairEntry* qp = find_queue_pair(message.destination_qpn);
    if (not qp) return Reason::unknown_queue_pair;
    if (qp->rank != settings().rank) return Reason::queue_pair_of_other_rank;
    const QpState state = qp->state.load();
    if ((state != QpState::rtr and state != QpState::rts) or
        qp->remote_qpn.load() != message.source_qpn)
        return Reason::not_connected;
    *nic = qp->nic;
    return Reason::none;
}

Access check(const Message& message) {
    uint32_t nic = 0;
    const Reason reason = check_connection(message, &nic);
    if (reason != Reason::none) return {reason};
    Access access = check_access(message.rkey, settings().rank, nic, message.remote_address,
                                 message.length, right_of(message));
    if (is_atomic(message) and message.remote_address % message.length != 0)
        access.reason = Reason::misaligned_atomic;
    return access;
}

void refuse_message(Message* message, Reason reason) {
    message->reason = static_cast<uint32_t>(reason);
    // As an HCA does: nothing more arrives on this queue pair
    QueuePairEntry* qp = find_queue_pair(message->destination_qpn);
    if (qp and qp->rank == settings().rank and reason != Reason::not_connected)
        qp->state.store(QpState::error);
}

}  // namespace

Responder::Responder(CopyEngine* engine) : engine_(engine), inbound_(settings().processes) {}

bool Responder::serve() {
    if (port_is_down()) return false;
    bool busy = false;
    for (uint32_t source = 0; source < inbound_.size(); ++source) {
        Inbound& in = inbound_[source];
        in.posted = segment().ring(source, settings().rank).posted.load(std::memory_order_acquire);
        busy |= in.posted != in.done;
    }
    if (not busy) return false;
    busy = false;
    do {
        words_.clear();
        for (uint32_t source = 0; source < inbound_.size(); ++source) busy |= advance(source);
        do_words();
    } while (not words_.empty());
    engine_->synchronize();
    for (uint32_t source = 0; source < inbound_.size(); ++source)
        segment().ring(source, settings().rank).served.store(inbound_[source].done,
                                                             std::memory_order_release);
    return busy;
}

bool Responder::overlaps_a_word(uint64_t address, uint32_t bytes) const {
    return std::any_of(words_.begin(), words_.end(), [&](const Word& word) {
        return address < word.address + word.message->length and word.address < address + bytes;
    });
}

bool Responder::advance(uint32_t source) {
    Inbound& in = inbound_[source];
    Ring& ring = segment().ring(source, settings().rank);
    bool busy = false;
    while (in.done != in.posted) {
        const uint32_t slot = in.done % kRingSlots;
        Message& message = ring.messages[slot];
        if (faults().delay_ns != 0 and now_ns() - message.posted_at < faults().delay_ns)
            return busy;
        const Access access = check(message);
        const bool good = access.reason == Reason::none;
        // Two words at one place go one after the other
        if (good and is_word(message) and overlaps_a_word(access.address, message.length))
            return busy;
        Claim unclaimed = Claim::posted;
        if (not message.claim.compare_exchange_strong(unclaimed, Claim::responder)) {
            ++in.done;  // the requester gave up
            continue;
        }
        busy = true;
        if (not good) {
            refuse_message(&message, access.reason);
        } else if (is_word(message)) {
            words_.push_back(
                {source, &message, ring.payload[slot], access.address, access.on_device});
            // The ring goes on in the next round, behind this word
            ++in.done;
            return true;
        } else if (message.operation == Operation::read) {
            engine_->read(ring.payload[slot], access.address, message.length, access.on_device);
        } else if (not(has(Defect::dropped_split_tail) and message.is_split_tail)) {
            engine_->write(access.address, ring.payload[slot], message.length, access.on_device);
        }
        ++in.done;
    }
    return busy;
}

void Responder::do_words() {
    if (has(Defect::flag_before_data)) {
        store_written_words();
        // Long enough for a consumer to look: the defect is to be seen every time
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    for (Word& word : words_)
        if (is_atomic(*word.message))
            engine_->read(&word.old, word.address, word.message->length, word.on_device);
    engine_->synchronize();
    if (not has(Defect::flag_before_data)) store_written_words();
    for (const Word& word : words_) {
        const Message& message = *word.message;
        if (not is_atomic(message)) continue;
        const uint64_t value = apply_atomic(message, word.old, message.length);
        std::memcpy(word.payload, &word.old, message.length);
        engine_->store_word(word.address, &value, message.length, word.on_device);
    }
}

void Responder::store_written_words() {
    for (const Word& word : words_)
        if (not is_atomic(*word.message))
            engine_->store_word(word.address, word.payload, word.message->length, word.on_device);
}

}  // namespace fabric
