#include "requester.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include <infiniband/verbs.h>
#include <signal.h>
#include <unistd.h>

#include "accounting.h"
#include "defects.h"
#include "fault.h"
#include "nic.h"
#include "prm.h"
#include "refuse.h"
#include "settings.h"
#include "uar.h"

namespace fabric {
namespace {

constexpr uint64_t kCheckPeers = 100000000;  // ns

bool is_destroyed(const QueuePair& qp) { return qp.entry->state.load() == QpState::destroyed; }

}  // namespace

Requester::Requester(CopyEngine* engine) : engine_(engine), outbound_(settings().processes) {}

bool Requester::is_idle() const {
    return std::all_of(outbound_.begin(), outbound_.end(),
                       [](const Outbound& out) { return out.posted == out.answered; });
}

bool Requester::poll_doorbells() {
    bool busy = false;
    for (UarPage* page : uar_pages()) {
        if (page->queue_pairs.empty()) continue;
        const uint64_t word = __atomic_load_n(page->doorbell, __ATOMIC_ACQUIRE);
        if (word == page->last) continue;
        page->last = word;
        busy = true;
        const Doorbell doorbell = decode_doorbell(word);
        QueuePair* rung = nullptr;
        for (QueuePair* qp : page->queue_pairs)
            if (qp->qpn == doorbell.qpn) rung = qp;
        if (not rung) {
            QueuePair* owner = page->queue_pairs.front();
            if (owner->counters.foreign_doorbells++ == 0)
                say("the doorbell of queue pair 0x%x was rung for queue pair 0x%x: ignored",
                    owner->qpn, doorbell.qpn);
            continue;
        }
        if (not rung->is_rc)
            refuse("queue pair 0x%x is a DCI: data on DCIs is not emulated", rung->qpn);
        ++rung->counters.doorbells;
        const auto step = static_cast<uint16_t>(doorbell.producer_index -
                                                static_cast<uint16_t>(rung->producer));
        rung->producer += step;
        if (rung->producer - rung->consumer > rung->send_queue.wqebbs())
            refuse("the doorbell of queue pair 0x%x is %llu WQEBBs ahead of a ring of %u",
                   rung->qpn, static_cast<unsigned long long>(rung->producer - rung->consumer),
                   rung->send_queue.wqebbs());
        rung->send_queue.fetch(engine_, rung->fetched, rung->producer - rung->fetched);
        rung->fetched = rung->producer;
    }
    engine_->synchronize();
    return busy;
}

bool Requester::issue() {
    bool busy = false;
    for (QueuePair* qp : queue_pairs())
        if (not is_destroyed(*qp)) busy |= issue_from(qp);
    if (not posted_any_) return busy;
    posted_any_ = false;
    // Payloads are in the rings before their messages show
    engine_->synchronize();
    for (uint32_t peer = 0; peer < outbound_.size(); ++peer) {
        Ring& ring = segment().ring(settings().rank, peer);
        if (outbound_[peer].posted != outbound_[peer].answered)
            ring.posted.store(outbound_[peer].posted, std::memory_order_release);
    }
    return true;
}

bool Requester::issue_from(QueuePair* qp) {
    bool busy = false;
    // Bounded, so that one queue pair does not keep the others waiting
    for (uint32_t taken = 0; taken < kRingSlots; ++taken) {
        if (qp->is_stuck) return busy;
        const bool fails = qp->has_error or qp->forced_error != Reason::none;
        if (port_is_down() and not fails) return busy;
        if (not qp->has_current and not take_next(qp)) return busy;
        if (not post_rest(qp)) return busy;
        busy = true;
    }
    return busy;
}

// Decodes the next WQE into `current`, if there is one
bool Requester::take_next(QueuePair* qp) {
    if (qp->consumer == qp->producer) return false;
    uint8_t bytes[kMaxWqe];
    if (not qp->send_queue.gather(qp->consumer, qp->qpn, bytes, now_ns())) {
        // Of a ring in device memory, the copy was early
        qp->send_queue.fetch(engine_, qp->consumer, qp->producer - qp->consumer);
        return false;
    }

    const ControlSegment control = decode_control(bytes);
    // HCAs start a fenced WQE after the reads and atomics before it; after all is stricter
    if (control.fence and not qp->outstanding.empty() and not qp->has_error) return false;
    Port& counts = port();
    if (counts.wqes + 1 == faults().exhaust_at_wqe) {
        say("fault: queue pair 0x%x is not drained any more", qp->qpn);
        ++counts.wqes;
        qp->is_stuck = true;
        return false;
    }
    if (counts.wqes + 1 == faults().flap_at_wqe and not counts.has_flapped) {
        say("fault: the port goes down for %llu ms",
            static_cast<unsigned long long>(faults().flap_ns / 1000000));
        counts.has_flapped = true;
        const uint64_t now = now_ns();
        counts.up_at = now + faults().flap_ns;
        segment().tables().processes[settings().rank].port_down_since.store(now);
        return false;
    }
    if (++counts.wqes == faults().kill_at_wqe) {
        say("fault: this process dies at its WQE %llu",
            static_cast<unsigned long long>(counts.wqes));
        write_report_at_end("killed on purpose");
        kill(getpid(), SIGKILL);
    }

    Wqe& wqe = qp->current;
    uint32_t used = 1;
    if (control.wqe_index != static_cast<uint16_t>(qp->consumer) or control.qpn != qp->qpn) {
        wqe = {};
        wqe.control = control;
        wqe.reason = Reason::other_queue_pairs_wqe;
        ++qp->counters.foreign_wqes;
    } else {
        decode_wqe(bytes, &wqe);
        used = wqebbs_of(control);
        if (used > qp->producer - qp->consumer) {
            wqe.reason = Reason::malformed_wqe;
            used = 1;
        }
    }
    qp->send_queue.consume(qp->consumer, used);
    // wqe_counter of a completion is the WQE's place in the ring, whatever the WQE says
    const auto index = static_cast<uint16_t>(qp->consumer);
    qp->consumer += used;
    qp->outstanding.push_back(
        {control.opcode, index, control.completion, false, 0, Reason::none, false});
    qp->has_current = true;
    qp->current_offset = 0;
    ++qp->counters.wqes;
    if (qp->has_error)
        fail_current(qp, Reason::earlier_error);
    else if (qp->forced_error != Reason::none)
        fail_current(qp, qp->forced_error);
    else if (wqe.reason != Reason::none)
        fail_current(qp, wqe.reason);
    else
        count(qp);
    return true;
}

void Requester::count(QueuePair* qp) {
    Counters& counters = qp->counters;
    const Wqe& wqe = qp->current;
    switch (wqe.kind) {
        case Kind::nothing:
            ++(wqe.control.opcode == prm::kOpcodeDump ? counters.dumps : counters.nops);
            return;
        case Kind::write:
            ++counters.writes;
            counters.bytes += wqe.length;
            break;
        case Kind::inline_write:
            ++counters.inline_writes;
            counters.bytes += wqe.length;
            break;
        case Kind::read:
            ++counters.reads;
            counters.bytes += wqe.length;
            break;
        case Kind::atomic:
            ++(wqe.operation == Operation::fetch_add ? counters.fetch_adds
                                                     : counters.compare_swaps);
    }
    if (const MemoryRegionEntry* region = find_memory_region(wqe.rkey))
        ++counters.aimed_at[region->rank];
}

void Requester::fail_current(QueuePair* qp, Reason reason) {
    Outstanding& last = qp->outstanding.back();
    if (last.reason == Reason::none) last.reason = reason;
    last.is_issued = true;
    qp->has_error = true;
    qp->has_current = false;
}

// Posts messages of the current WQE; false if some have to wait
bool Requester::post_rest(QueuePair* qp) {
    if (not qp->has_current) return true;
    const Wqe& wqe = qp->current;
    if (wqe.kind == Kind::nothing) {
        qp->outstanding.back().is_issued = true;
        qp->has_current = false;
        return true;
    }
    if (qp->has_error) {
        fail_current(qp, Reason::earlier_error);
        return true;
    }
    if (qp->entry->state.load() != QpState::rts) {
        fail_current(qp, Reason::not_connected);
        return true;
    }
    Access local;
    const bool stores = wqe.kind == Kind::read or wqe.kind == Kind::atomic;
    if (wqe.kind != Kind::inline_write)
        local = check_access(wqe.lkey, settings().rank, qp->nic, wqe.local_address, wqe.length,
                             stores ? IBV_ACCESS_LOCAL_WRITE : 0);
    if (local.reason != Reason::none) {
        fail_current(qp, local.reason);
        return true;
    }
    const uint32_t processes = settings().processes;
    const uint32_t peer =
        has(Defect::swapped_peers) ? (qp->peer_rank ^ 1) % processes : qp->peer_rank;
    Outbound& out = outbound_[peer];
    if (out.is_dead) {
        fail_current(qp, Reason::peer_is_gone);
        return true;
    }
    Ring& ring = segment().ring(settings().rank, peer);
    // An inline write of no bytes is one message all the same
    do {
        if (out.posted - out.answered == kRingSlots) return false;
        const uint32_t slot = out.posted % kRingSlots;
        const auto length = static_cast<uint32_t>(
            std::min<uint64_t>(kFragment, wqe.length - qp->current_offset));
        Message& message = ring.messages[slot];
        message.operation = wqe.kind == Kind::atomic ? wqe.operation
                            : wqe.kind == Kind::read ? Operation::read
                                                     : Operation::write;
        message.source_qpn = qp->qpn;
        message.destination_qpn = qp->remote_qpn;
        message.rkey = wqe.rkey;
        message.length = length;
        message.remote_address = wqe.remote_address + qp->current_offset;
        message.swap_or_add = wqe.swap_or_add;
        message.compare = wqe.compare;
        message.swap_mask = wqe.swap_mask;
        message.compare_mask_or_boundary = wqe.compare_mask_or_boundary;
        message.posted_at = now_ns();
        message.is_split_tail =
            qp->current_offset > 0 and qp->current_offset + length == wqe.length;
        message.syndrome = message.reason = 0;
        message.claim.store(Claim::posted);
        if (wqe.kind == Kind::write)
            engine_->read(ring.payload[slot], local.address + qp->current_offset, length,
                          local.on_device);
        else if (wqe.kind == Kind::inline_write)
            std::memcpy(ring.payload[slot], wqe.inline_data + qp->current_offset, length);
        out.owners[slot] = {qp, qp->retired + qp->outstanding.size() - 1,
                            local.address + qp->current_offset, local.on_device};
        ++out.posted;
        posted_any_ = true;
        ++qp->outstanding.back().unanswered;
        qp->current_offset += length;
    } while (qp->current_offset < wqe.length);
    qp->outstanding.back().is_issued = true;
    qp->has_current = false;
    return true;
}

Outstanding* Requester::entry_of(const Owner& owner) {
    return &owner.queue_pair->outstanding[owner.sequence - owner.queue_pair->retired];
}

bool Requester::take_answers(uint32_t peer) {
    Outbound& out = outbound_[peer];
    Ring& ring = segment().ring(settings().rank, peer);
    const uint64_t served = ring.served.load(std::memory_order_acquire);
    const bool busy = not out.is_dead and out.answered != served;
    for (; not out.is_dead and out.answered != served; ++out.answered) {
        const uint32_t slot = out.answered % kRingSlots;
        const Owner& owner = out.owners[slot];
        // Null: the requester gave up on this message
        if (not owner.queue_pair) continue;
        const Message& message = ring.messages[slot];
        Outstanding* wqe = entry_of(owner);
        --wqe->unanswered;
        const auto reason = static_cast<Reason>(message.reason);
        if (reason != Reason::none) {
            if (wqe->reason == Reason::none) wqe->reason = reason;
            wqe->at_responder = true;
            owner.queue_pair->has_error = true;
        } else if (message.operation != Operation::write and not is_destroyed(*owner.queue_pair)) {
            engine_->write(owner.local_address, ring.payload[slot], message.length,
                           owner.on_device);
        }
    }
    return busy;
}

bool Requester::complete() {
    bool busy = false;
    for (uint32_t peer = 0; peer < outbound_.size(); ++peer) busy |= take_answers(peer);
    // What a read or an atomic brought is in memory before its completion
    engine_->synchronize();
    for (QueuePair* qp : queue_pairs()) busy |= retire(qp);
    engine_->synchronize();
    return busy;
}

bool Requester::retire(QueuePair* qp) {
    bool busy = false;
    while (not qp->outstanding.empty()) {
        const Outstanding& first = qp->outstanding.front();
        if (not first.is_issued or first.unanswered > 0) break;
        if (not is_destroyed(*qp)) complete_wqe(qp, first);
        qp->outstanding.pop_front();
        ++qp->retired;
        busy = true;
    }
    return busy;
}

void Requester::complete_wqe(QueuePair* qp, const Outstanding& wqe) {
    // What was in flight behind the first error is flushed
    const bool flushed = wqe.reason != Reason::none and not qp->counters.errors.empty();
    const Syndrome syndrome = flushed ? Syndrome::work_request_flushed
                                      : syndrome_of(wqe.reason, wqe.at_responder);
    if (syndrome != Syndrome::none) note_error(qp, wqe, syndrome);
    // An error completes a WQE that asked for no completion as well
    if (syndrome == Syndrome::none and not wqe.completion) return;
    ++port().completions;
    if (port().completions == faults().drop_completion) {
        say("fault: queue pair 0x%x completes nothing any more", qp->qpn);
        qp->drops_completions = true;
    }
    if (qp->drops_completions) {
        ++qp->counters.dropped_completions;
        return;
    }
    ++qp->counters.completions;
    write_cqe(engine_, qp->completion_queue, {qp->qpn, wqe.opcode, wqe.wqe_index, syndrome});
}

void Requester::note_error(QueuePair* qp, const Outstanding& wqe, Syndrome syndrome) {
    ++qp->counters.errors[syndrome];
    qp->entry->state.store(QpState::error);
    if (not qp->counters.first_error.empty()) return;
    char sentence[256];
    std::snprintf(sentence, sizeof sentence, "%s at WQE %u, opcode 0x%x: %s", text(syndrome),
                  wqe.wqe_index, wqe.opcode, text(wqe.reason));
    qp->counters.first_error = sentence;
    say("queue pair 0x%x (user index %u, peer rank %u): %s", qp->qpn, qp->user_index,
        qp->peer_rank, sentence);
}

void Requester::cancel_unserved(uint32_t peer, Reason reason) {
    Outbound& out = outbound_[peer];
    Ring& ring = segment().ring(settings().rank, peer);
    for (uint64_t number = out.answered; number != out.posted; ++number) {
        const uint32_t slot = number % kRingSlots;
        Owner& owner = out.owners[slot];
        Claim unserved = Claim::posted;
        if (not owner.queue_pair or
            (not ring.messages[slot].claim.compare_exchange_strong(unserved, Claim::cancelled) and
             reason != Reason::peer_is_gone))
            continue;
        Outstanding* wqe = entry_of(owner);
        --wqe->unanswered;
        if (wqe->reason == Reason::none) wqe->reason = reason;
        owner.queue_pair->has_error = true;
        owner.queue_pair = nullptr;
    }
}

void Requester::give_up(uint64_t now) {
    if (now < next_check_) return;
    next_check_ = now + kCheckPeers;
    const uint64_t retry = uint64_t{settings().retry_ms} * 1000000;
    Tables& tables = segment().tables();
    const uint64_t own_since = tables.processes[settings().rank].port_down_since.load();
    const bool own_down = own_since != 0 and now - own_since > retry;
    for (uint32_t peer = 0; peer < outbound_.size(); ++peer) {
        Outbound& out = outbound_[peer];
        if (out.is_dead) continue;
        if (not segment().alive(peer)) {
            // What it served before it went is answered all the same
            take_answers(peer);
            cancel_unserved(peer, Reason::peer_is_gone);
            out.is_dead = true;
            out.answered = out.posted;
            continue;
        }
        const uint64_t since = tables.processes[peer].port_down_since.load();
        if (own_down or (since != 0 and now - since > retry))
            cancel_unserved(peer, Reason::port_is_down);
    }
    if (not own_down) return;
    for (QueuePair* qp : queue_pairs()) {
        if (is_destroyed(*qp)) continue;
        if (qp->has_current)
            fail_current(qp, Reason::port_is_down);
        else if (qp->consumer != qp->producer)
            qp->forced_error = Reason::port_is_down;
    }
}

}  // namespace fabric
