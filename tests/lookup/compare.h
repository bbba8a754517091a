// DeepEP's answers held against NVSHMEM's: the same code for answers of the CPU and of a GPU
#pragma once

#include "lookup.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

constexpr int kNobody = -1;

// One line of the input: "npes devices qps ids"
struct Job {
    int npes, devices, qps, ids;

    bool read() { return std::scanf("%d %d %d %d", &npes, &devices, &qps, &ids) == 4; }
    int per_pe() const { return devices * qps; }
    long slots() const { return static_cast<long>(npes) * per_pe(); }
};

using Switch = std::remove_pointer_t<decltype(nvshmemi_ibgda_device_state_t{}.globalmem.qp_group_switches)>;

// One a group, and room for the two round robins of layout v2
inline size_t switches_of(const Job& job) { return static_cast<size_t>(job.per_pe()) + 2; }

// What the lookups read of the state, as NVSHMEM's host library leaves it
inline void fill(nvshmemi_ibgda_device_state_t& state, const Job& job, QueuePair* table, Switch* switches) {
    state.globalmem.qp_group_switches = switches;
    state.globalmem.rcs = table;
    state.num_rc_per_pe = static_cast<uint32_t>(job.qps);
    state.num_devices_initialized = job.devices;
    state.num_qp_groups = static_cast<uint32_t>(job.per_pe());
    state.rc_map_type = NVSHMEMI_IBGDA_DEVICE_QP_MAP_TYPE_CTA;
#if RC_LAYOUT == 2
    state.num_default_rc_per_pe = job.qps;
#endif
}

// A lookup may answer outside the table, where subtracting pointers means nothing
inline long index_of(uintptr_t answer, uintptr_t table) {
    const auto bytes = static_cast<intptr_t>(answer - table);
    constexpr auto size = static_cast<intptr_t>(sizeof(QueuePair));
    return bytes / size - (bytes % size < 0);
}

// Which PE each slot belongs to, by NVSHMEM's answers. Where they cannot judge, the program ends.
class Owners {
public:
    explicit Owners(const Job& job) : owner_(job.slots(), kNobody), unknown_(job.slots()) {}

    // NVSHMEM's lookup answered this slot for a PE
    void note(long slot, int pe) {
        if (not inside(slot)) fail("leaves the table", slot, pe);
        int& its = owner_[slot];
        if (its != kNobody and its != pe) fail("gives a slot to two PEs", slot, pe);
        if (its == kNobody) --unknown_;
        its = pe;
    }
    bool complete() const { return unknown_ == 0; }
    void require_complete() const {
        for (long slot = 0; slot < static_cast<long>(owner_.size()); ++slot)
            if (owner_[slot] == kNobody) fail("never reached a slot", slot, kNobody);
    }
    bool inside(long slot) const { return slot >= 0 and slot < static_cast<long>(owner_.size()); }
    int of(long slot) const { return owner_[slot]; }

private:
    std::vector<int> owner_;
    long unknown_;

    [[noreturn]] static void fail(const char* what, long slot, int pe) {
        std::fprintf(stderr, "NVSHMEM's lookup %s: slot %ld, pe %d\n", what, slot, pe);
        std::exit(3);
    }
};

class Counts {
public:
    // DeepEP's answers of one rank, for each peer but itself and each id; slot_of(pe, id) is one
    template <typename SlotOf>
    void add(const Job& job, int rank, const Owners& owners, SlotOf slot_of) {
        for (int pe = 0; pe < job.npes; ++pe) {
            if (pe == rank) continue;
            for (int id = 0; id < job.ids; ++id) {
                const long slot = slot_of(pe, id);
                const bool outside = not owners.inside(slot);
                const int got = outside ? kNobody : owners.of(slot);
                if (got == pe) {
                    ++right_;
                    continue;
                }
                ++(outside ? out_of_bounds_ : wrong_peer_);
                if (miss_.empty()) miss_ = {rank, pe, id, slot, got};
            }
        }
    }

    // "right wrong_peer out_of_bounds" and the first miss, "rank pe id index owner", if any,
    // where owner is -1 for an index outside the table
    void print() const {
        std::printf("%ld %ld %ld", right_, wrong_peer_, out_of_bounds_);
        for (const long number : miss_) std::printf(" %ld", number);
        std::printf("\n");
    }

private:
    long right_ = 0, wrong_peer_ = 0, out_of_bounds_ = 0;
    std::vector<long> miss_;
};

// "device state type, whether it is v1, its size, offset of num_rc_per_pe, version"
inline void print_header_facts(const char* type_name) {
    using State = nvshmemi_ibgda_device_state_t;
    std::printf("%s %d %zu %zu %d\n",
                type_name,
                static_cast<int>(std::is_same_v<State, nvshmemi_ibgda_device_state_v1>),
                sizeof(State),
                offsetof(State, num_rc_per_pe),
                static_cast<int>(NVSHMEM_VENDOR_VERSION));
}
