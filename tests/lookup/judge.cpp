// Reads shapes "npes devices qps ids", one a line, and prints for each, on one line,
// "right wrong_peer out_of_bounds" and the first miss, "rank pe id index owner", if any, where
// owner is -1 for an index outside the table
#include "lookup.h"

#include <cstdio>
#include <cstdlib>

nvshmemi_ibgda_device_state_t nvshmemi_ibgda_device_state_d;
nvshmemi_device_host_state_t nvshmemi_device_state_d;

namespace {

constexpr int kNobody = -1;

[[noreturn]] void fail(const char* what, long slot, int pe) {
    std::fprintf(stderr, "NVSHMEM's lookup %s: slot %ld, pe %d\n", what, slot, pe);
    std::exit(3);
}

// A lookup may answer outside the table, where subtracting pointers means nothing
long index_of(const QueuePair* qp, const QueuePair* table) {
    const auto bytes = reinterpret_cast<intptr_t>(qp) - reinterpret_cast<intptr_t>(table);
    constexpr auto size = static_cast<intptr_t>(sizeof(QueuePair));
    return bytes / size - (bytes % size < 0);
}

void judge(int npes, int devices, int qps, int ids) {
    const int per_pe = devices * qps;
    std::vector<QueuePair> table(static_cast<size_t>(npes) * per_pe);
    const long slots = static_cast<long>(table.size());

    auto& state = nvshmemi_ibgda_device_state_d;
    using Switch = std::remove_pointer_t<decltype(state.globalmem.qp_group_switches)>;
    // One a group, and room for the two round robins of layout v2
    std::vector<Switch> switches(static_cast<size_t>(per_pe) + 2);
    state.globalmem.qp_group_switches = switches.data();
    state.globalmem.rcs = table.data();
    state.num_rc_per_pe = static_cast<uint32_t>(qps);
    state.num_devices_initialized = devices;
    state.num_qp_groups = static_cast<uint32_t>(per_pe);
#if RC_LAYOUT == 2
    state.num_default_rc_per_pe = qps;
#endif
    nvshmemi_device_state_d.npes = npes;

    std::vector<int> owner(table.size(), kNobody);
    for (int rank = 0; rank < npes; ++rank) {
        nvshmemi_device_state_d.mype = rank;
        for (int pe = 0; pe < npes; ++pe) {
            if (pe == rank) continue;
            // The counters of releases up to 3.7 have eight bits and wrap
            for (Switch& counter : switches) counter = 0;
            for (const QueuePair* qp : nvshmem_rcs(pe)) {
                const long slot = index_of(qp, table.data());
                if (slot < 0 or slot >= slots) fail("leaves the table", slot, pe);
                int& its = owner[slot];
                if (its != kNobody and its != pe) fail("gives a slot to two PEs", slot, pe);
                its = pe;
            }
        }
    }
    for (long slot = 0; slot < slots; ++slot)
        if (owner[slot] == kNobody) fail("never reached a slot", slot, kNobody);

    long right = 0, wrong_peer = 0, out_of_bounds = 0;
    std::vector<long> miss;
    for (int rank = 0; rank < npes; ++rank) {
        nvshmemi_device_state_d.mype = rank;
        for (int pe = 0; pe < npes; ++pe) {
            if (pe == rank) continue;
            for (int id = 0; id < ids; ++id) {
                const long slot = index_of(deepep_rc(pe, id), table.data());
                const bool outside = slot < 0 or slot >= slots;
                const int got = outside ? kNobody : owner[slot];
                if (got == pe) {
                    ++right;
                    continue;
                }
                ++(outside ? out_of_bounds : wrong_peer);
                if (miss.empty()) miss = {rank, pe, id, slot, got};
            }
        }
    }
    std::printf("%ld %ld %ld", right, wrong_peer, out_of_bounds);
    for (const long number : miss) std::printf(" %ld", number);
    std::printf("\n");
}

}  // namespace

int main() {
    int npes, devices, qps, ids;
    while (std::scanf("%d %d %d %d", &npes, &devices, &qps, &ids) == 4)
        judge(npes, devices, qps, ids);
}
