#include "devx_commands.h"

#include <algorithm>

#include "byte_order.h"
#include "nic.h"
#include "objects.h"
#include "prm.h"
#include "refuse.h"
#include "settings.h"
#include "uar.h"

namespace fabric {
namespace {

constexpr uint32_t kMaxLogSqSize = 15;

QueuePair& own_queue_pair(uint32_t qpn, const char* command) {
    QueuePair* qp = find_own_queue_pair(qpn);
    if (not qp) refuse("%s names queue pair 0x%x, which this process does not hold", command, qpn);
    return *qp;
}

void expect_state(const QueuePair& qp, QpState state, const char* command, const char* name) {
    if (qp.entry->state.load() != state)
        refuse("%s of queue pair 0x%x, which is not in state %s", command, qp.qpn, name);
}

}  // namespace

uint32_t next_number() {
    static std::atomic<uint32_t> last{0};
    return ++last;
}

uint16_t lid_of(uint32_t rank, uint32_t nic) {
    return static_cast<uint16_t>(1 + rank * settings().nics + nic);
}

void need(const Mailbox& mailbox, size_t in_bytes, size_t out_bytes, const char* command) {
    if (mailbox.in_bytes < in_bytes or mailbox.out_bytes < out_bytes)
        refuse("%s with mailboxes of %zu and %zu bytes, which are too short for its fields",
               command, mailbox.in_bytes, mailbox.out_bytes);
}

void query_hca_cap(const Mailbox& mailbox) {
    namespace caps = prm::query_hca_cap;
    need(mailbox, prm::mailbox::kBytes, caps::kCapability + prm::general_cap::kEnd,
         "QUERY_HCA_CAP");
    const uint16_t op_mod = load_be16(mailbox.in + prm::mailbox::kOpMod);
    uint8_t* capability = mailbox.out + caps::kCapability;
    if (op_mod == caps::kGeneralCurrent) {
        using namespace prm::general_cap;
        capability[kCqeVersion] = kCqeVersion1;
        capability[kCompactAddressVector] = kCompactAddressVectorBit;
        capability[kLogBfRegSize] = kLogBfRegSize512;
    } else if (op_mod == caps::kAtomicCurrent) {
        using namespace prm::atomic_cap;
        store_be16(capability + kAtomicOperations,
                   kCompareSwap | kFetchAdd | kMaskedCompareSwap | kMaskedFetchAdd);
        store_be16(capability + kAtomicSizeQp, kSize4 | kSize8);
        store_be16(capability + kAtomicSizeDc, kSize4 | kSize8);
    } else {
        refuse("QUERY_HCA_CAP of capability type %u (op_mod 0x%x) is not emulated", op_mod >> 1,
               op_mod);
    }
}

uint32_t create_cq(uint32_t nic, const Mailbox& mailbox) {
    namespace cq = prm::create_cq;
    need(mailbox, cq::kBytes, prm::mailbox::kBytes, "CREATE_CQ");
    const uint16_t flags = load_be16(mailbox.in + cq::kContext + prm::cqc::kFlags);
    if (not(flags & prm::cqc::kCc) or not(flags & prm::cqc::kOi))
        refuse("CREATE_CQ without cc and oi (flags 0x%x): only a collapsed CQ that may overrun is "
               "emulated", flags);
    if ((flags & prm::cqc::kCqeSz) != prm::cqc::kCqeSz64)
        refuse("CREATE_CQ with cqe_sz %u: only CQEs of 64 bytes are emulated",
               (flags & prm::cqc::kCqeSz) >> 5);
    const uint32_t log_size = mailbox.in[cq::kContext + prm::cqc::kLogCqSize] & 0x1f;
    const Umem entries =
        umem_part(load_be32(mailbox.in + cq::kCqUmemId), nic,
                  load_be64(mailbox.in + cq::kCqUmemOffset), uint64_t{64} << log_size,
                  "CREATE_CQ");
    const uint32_t cqn = next_number();
    const NicLock lock;
    add_completion_queue({cqn, nic, entries});
    return cqn;
}

uint32_t create_qp(uint32_t nic, const Mailbox& mailbox) {
    namespace cmd = prm::create_qp;
    need(mailbox, cmd::kBytes, prm::mailbox::kBytes, "CREATE_QP");
    const uint8_t* qpc = mailbox.in + cmd::kQpc;
    const uint8_t service = qpc[prm::qpc::kSt];
    if (service != prm::qpc::kStRc and service != prm::qpc::kStDci)
        refuse("CREATE_QP of service type 0x%x is not emulated: RC (0) and DCI (5) are", service);
    const uint32_t log_size = qpc[prm::qpc::kLogSqSize] >> 3 & 0xf;
    if (log_size > kMaxLogSqSize)
        refuse("CREATE_QP of 2^%u WQEBBs: indices of 16 bits cannot tell such a ring's ends",
               log_size);
    const Umem ring = umem_part(load_be32(mailbox.in + cmd::kWqUmemId), nic,
                                load_be64(mailbox.in + cmd::kWqUmemOffset),
                                uint64_t{kWqebb} << log_size, "CREATE_QP");
    const NicLock lock;
    const uint32_t cqn = load_be24(qpc + prm::qpc::kCqnSnd);
    const CompletionQueue* completion_queue = find_completion_queue(cqn);
    if (not completion_queue or completion_queue->nic != nic)
        refuse("CREATE_QP names CQ %u, which this NIC does not hold", cqn);
    const uint32_t page_id = load_be24(qpc + prm::qpc::kUarPage);
    UarPage* page = find_uar(page_id);
    if (not page or page->nic != nic)
        refuse("CREATE_QP names UAR page %u, which this NIC does not hold", page_id);

    Tables& tables = segment().tables();
    const uint32_t index = tables.queue_pairs_used.fetch_add(1);
    if (index >= kMaxQueuePairs) refuse("more than %u queue pairs in one fabric", kMaxQueuePairs);
    auto* qp = new QueuePair;
    qp->qpn = qpn_of(index);
    qp->nic = nic;
    qp->user_index = load_be24(qpc + prm::qpc::kUserIndex);
    qp->is_rc = service == prm::qpc::kStRc;
    qp->entry = &tables.queue_pairs[index];
    qp->entry->rank = settings().rank;
    qp->entry->nic = nic;
    qp->entry->user_index = qp->user_index;
    qp->uar = page;
    qp->send_queue.attach(ring, 1u << log_size);
    qp->completion_queue = completion_queue->entry;
    qp->entry->state.store(QpState::reset);
    page->queue_pairs.push_back(qp);
    add_queue_pair(qp);
    start_nic();
    return qp->qpn;
}

void rst2init_qp(uint32_t qpn) {
    const NicLock lock;
    QueuePair& qp = own_queue_pair(qpn, "RST2INIT_QP");
    expect_state(qp, QpState::reset, "RST2INIT_QP", "RST");
    qp.entry->state.store(QpState::init);
}

void init2rtr_qp(uint32_t qpn, const Mailbox& mailbox) {
    need(mailbox, prm::modify_qp::kBytes, prm::mailbox::kBytes, "INIT2RTR_QP");
    const NicLock lock;
    QueuePair& qp = own_queue_pair(qpn, "INIT2RTR_QP");
    expect_state(qp, QpState::init, "INIT2RTR_QP", "INIT");
    if (qp.is_rc) {
        const uint8_t* qpc = mailbox.in + prm::modify_qp::kQpc;
        const uint32_t remote_qpn = load_be24(qpc + prm::qpc::kRemoteQpn);
        const uint16_t rlid = load_be16(qpc + prm::qpc::kRlid);
        const QueuePairEntry* remote = find_queue_pair(remote_qpn);
        if (not remote)
            refuse("INIT2RTR_QP connects queue pair 0x%x to 0x%x, which nobody made", qpn,
                   remote_qpn);
        if (rlid != lid_of(remote->rank, remote->nic))
            refuse("INIT2RTR_QP connects queue pair 0x%x to 0x%x at LID %u, but that is at LID %u",
                   qpn, remote_qpn, rlid, lid_of(remote->rank, remote->nic));
        qp.remote_qpn = remote_qpn;
        qp.peer_rank = remote->rank;
        segment().reserve_ring(settings().rank, remote->rank);
        segment().reserve_ring(remote->rank, settings().rank);
        qp.entry->remote_qpn.store(remote_qpn);
    }
    qp.entry->state.store(QpState::rtr);
}

void rtr2rts_qp(uint32_t qpn) {
    const NicLock lock;
    QueuePair& qp = own_queue_pair(qpn, "RTR2RTS_QP");
    expect_state(qp, QpState::rtr, "RTR2RTS_QP", "RTR");
    qp.entry->state.store(QpState::rts);
}

void destroy_qp(uint32_t qpn) {
    const NicLock lock;
    QueuePair& qp = own_queue_pair(qpn, "DESTROY_QP");
    auto& users = qp.uar->queue_pairs;
    users.erase(std::find(users.begin(), users.end(), &qp));
    qp.uar = nullptr;
    qp.last_state = qp.entry->state.load();
    qp.entry->state.store(QpState::destroyed);
}

}  // namespace fabric
