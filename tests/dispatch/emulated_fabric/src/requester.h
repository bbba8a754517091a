// The requester: doorbells to WQEs, WQEs to messages, answers to completions.
//
// Nothing here waits: what cannot go on is left for the next pass, so that the same thread can
// serve its peers.
#pragma once

#include <cstdint>
#include <vector>

#include "copy_engine.h"
#include "queue_pair.h"
#include "segment.h"

namespace fabric {

class Requester {
public:
    explicit Requester(CopyEngine* engine);

    // Each returns whether there was something to do
    bool poll_doorbells();
    bool issue();
    bool complete();
    // Fails what a peer that is gone, or a port that stays down, will never answer
    void give_up(uint64_t now);
    bool is_idle() const;

private:
    // The message in a slot of a ring belongs to this WQE
    struct Owner {
        QueuePair* queue_pair = nullptr;
        uint64_t sequence = 0;  // of the entry in `outstanding`, counted over all ever made
        uint64_t local_address = 0;
        bool on_device = false;
    };
    struct Outbound {
        uint64_t posted = 0, answered = 0;
        bool is_dead = false;
        std::vector<Owner> owners{kRingSlots};
    };

    bool issue_from(QueuePair* qp);
    bool take_next(QueuePair* qp);
    bool post_rest(QueuePair* qp);
    void fail_current(QueuePair* qp, Reason reason);
    bool take_answers(uint32_t peer);
    bool retire(QueuePair* qp);
    void complete_wqe(QueuePair* qp, const Outstanding& wqe);
    void count(QueuePair* qp);
    void note_error(QueuePair* qp, const Outstanding& wqe, Syndrome syndrome);
    void cancel_unserved(uint32_t peer, Reason reason);
    static Outstanding* entry_of(const Owner& owner);

    CopyEngine* engine_;
    std::vector<Outbound> outbound_;
    bool posted_any_ = false;  // since the rings last showed it
    uint64_t next_check_ = 0;
};

}  // namespace fabric
