#include "producer.h"

#include <cstdlib>
#include <cstring>

#include <dlfcn.h>

#define u8 uint8_t
#include <infiniband/mlx5_ifc.h>
#undef u8

namespace {

template <typename F>
void find(void* library, const char* name, F* function) {
    *function = reinterpret_cast<F>(dlsym(library, name));
    if (not *function) fail(__FILE__, __LINE__, std::string("no ") + name);
}

Verbs open_verbs() {
    void* library = dlopen("libibverbs.so.1", RTLD_NOW);
    if (not library) fail(__FILE__, __LINE__, dlerror());
    Verbs v;
    find(library, "ibv_get_device_list", &v.get_device_list);
    find(library, "ibv_get_device_name", &v.get_device_name);
    find(library, "ibv_open_device", &v.open_device);
    find(library, "ibv_close_device", &v.close_device);
    find(library, "ibv_query_device", &v.query_device);
    find(library, "ibv_query_port", &v.query_port);
    find(library, "ibv_query_gid", &v.query_gid);
    find(library, "ibv_alloc_pd", &v.alloc_pd);
    find(library, "ibv_dealloc_pd", &v.dealloc_pd);
    find(library, "ibv_reg_mr", &v.reg_mr);
    find(library, "ibv_reg_mr_iova", &v.reg_mr_iova);
    find(library, "ibv_reg_dmabuf_mr", &v.reg_dmabuf_mr);
    find(library, "ibv_dereg_mr", &v.dereg_mr);
    find(library, "ibv_create_cq", &v.create_cq);
    find(library, "ibv_destroy_cq", &v.destroy_cq);
    find(library, "ibv_create_srq", &v.create_srq);
    find(library, "ibv_destroy_srq", &v.destroy_srq);
    find(library, "ibv_create_ah", &v.create_ah);
    find(library, "ibv_destroy_ah", &v.destroy_ah);
    find(library, "ibv_create_qp", &v.create_qp);
    find(library, "ibv_modify_qp", &v.modify_qp);
    find(library, "ibv_destroy_qp", &v.destroy_qp);
    find(library, "ibv_fork_init", &v.fork_init);
    return v;
}

// CREATE_CQ is not in mlx5_ifc.h: bytes of the mailbox, as NVSHMEM's transport fills it
constexpr size_t kCreateCqBytes = 272;
constexpr size_t kCqContext = 0x10, kCqUmemOffset = 0x50, kCqUmemId = 0x58;

void put_be(uint8_t* at, uint64_t value, int bytes) {
    for (int n = 0; n < bytes; ++n) at[n] = static_cast<uint8_t>(value >> 8 * (bytes - 1 - n));
}

template <typename T>
void append(std::vector<uint8_t>* bytes, const T& segment) {
    const auto* from = reinterpret_cast<const uint8_t*>(&segment);
    bytes->insert(bytes->end(), from, from + sizeof segment);
}

void append_be(std::vector<uint8_t>* bytes, uint64_t value, int count) {
    for (int n = 0; n < count; ++n)
        bytes->push_back(static_cast<uint8_t>(value >> 8 * (count - 1 - n)));
}

std::vector<uint8_t> remote_segment(Remote to) {
    mlx5_wqe_raddr_seg segment = {};
    segment.raddr = htobe64(to.address);
    segment.rkey = htobe32(to.rkey);
    std::vector<uint8_t> bytes;
    append(&bytes, segment);
    return bytes;
}

void append_data(std::vector<uint8_t>* bytes, uint64_t address, uint32_t lkey, uint32_t count) {
    mlx5_wqe_data_seg segment = {};
    mlx5dv_set_data_seg(&segment, count, lkey, address);
    append(bytes, segment);
}

constexpr uint8_t kMasked4 = 8, kMasked8 = 9;
constexpr uint8_t kDump = 0x23;
constexpr uint8_t kFence = 2 << 5;

}  // namespace

const Verbs& verbs() {
    static const Verbs once = open_verbs();
    return once;
}

namespace {

ibv_context* first_context = nullptr;

void take_the_nics_lock() {
    ibv_port_attr port = {};
    verbs().query_port(first_context, 1, &port);
}

}  // namespace

Nic::Nic(int number) {
    int count = 0;
    ibv_device** list = verbs().get_device_list(&count);
    EXPECT(number < count);
    context = verbs().open_device(list[number]);
    EXPECT(context);
    ibv_port_attr port = {};
    EXPECT_EQUAL(verbs().query_port(context, 1, &port), 0);
    lid = port.lid;
    pd = verbs().alloc_pd(context);
    if (first_context) return;
    first_context = context;
    around_barrier = take_the_nics_lock;
}

Buffer::Buffer(const Nic& nic, size_t size, int access)
    : memory(new uint8_t[size]()), bytes(size),
      mr(verbs().reg_mr(nic.pd, memory.get(), size, access)) {
    EXPECT(mr);
}

Pages::Pages(size_t bytes, int fill) {
    void* pages = nullptr;
    EXPECT_EQUAL(posix_memalign(&pages, 4096, bytes), 0);
    memory = static_cast<uint8_t*>(pages);
    std::memset(memory, fill, bytes);
}

Pages::~Pages() { std::free(memory); }

// One WQEBB of zeros behind the ring: an index that does not wrap reads it
Sender::Sender(const Nic& nic, uint32_t user_index, int log_size, uint8_t service)
    : nic_(nic), log_size_(log_size), ring_((size() + 1) * kWqebbBytes, 0),
      entries_(size() * kWqebbBytes, 0xff), records_(64, 0) {
    ring_umem_ = mlx5dv_devx_umem_reg(nic.context, ring_.memory, (size() + 1) * kWqebbBytes,
                                      IBV_ACCESS_LOCAL_WRITE);
    entries_umem_ = mlx5dv_devx_umem_reg(nic.context, entries_.memory, size() * kWqebbBytes,
                                         IBV_ACCESS_LOCAL_WRITE);
    records_umem_ =
        mlx5dv_devx_umem_reg(nic.context, records_.memory, 64, IBV_ACCESS_LOCAL_WRITE);
    uint32_t eqn = 0;
    EXPECT_EQUAL(mlx5dv_devx_query_eqn(nic.context, 0, &eqn), 0);
    cq_uar_ = mlx5dv_devx_alloc_uar(nic.context, MLX5DV_UAR_ALLOC_TYPE_NC);

    uint8_t cq_in[kCreateCqBytes] = {}, cq_out[16] = {};
    put_be(cq_in, 0x400, 2);
    cq_in[kCqContext + 1] = 0x10;  // cc
    cq_in[kCqContext + 1] |= 0x04;  // oi
    put_be(cq_in + kCqContext + 0x0c, static_cast<uint64_t>(log_size) << 24 | cq_uar_->page_id, 4);
    put_be(cq_in + kCqContext + 4, records_umem_->umem_id, 4);
    put_be(cq_in + kCqUmemOffset, 0, 8);
    put_be(cq_in + kCqUmemId, entries_umem_->umem_id, 4);
    cq_ = mlx5dv_devx_obj_create(nic.context, cq_in, sizeof cq_in, cq_out, sizeof cq_out);
    EXPECT(cq_);
    const uint32_t cqn = static_cast<uint32_t>(cq_out[9]) << 16 | cq_out[10] << 8 | cq_out[11];

    uar_ = mlx5dv_devx_alloc_uar(nic.context, MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED);
    uint8_t in[DEVX_ST_SZ_BYTES(create_qp_in)] = {}, out[DEVX_ST_SZ_BYTES(create_qp_out)] = {};
    DEVX_SET(create_qp_in, in, opcode, MLX5_CMD_OP_CREATE_QP);
    DEVX_SET(create_qp_in, in, wq_umem_id, ring_umem_->umem_id);
    DEVX_SET(create_qp_in, in, wq_umem_valid, 1);
    void* qpc = DEVX_ADDR_OF(create_qp_in, in, qpc);
    DEVX_SET(qpc, qpc, st, service);
    DEVX_SET(qpc, qpc, uar_page, uar_->page_id);
    DEVX_SET(qpc, qpc, cqn_snd, cqn);
    DEVX_SET(qpc, qpc, log_sq_size, log_size);
    DEVX_SET(qpc, qpc, dbr_umem_valid, 1);
    DEVX_SET(qpc, qpc, dbr_umem_id, records_umem_->umem_id);
    DEVX_SET(qpc, qpc, user_index, user_index);
    qp_ = mlx5dv_devx_obj_create(nic.context, in, sizeof in, out, sizeof out);
    EXPECT(qp_);
    qpn_ = DEVX_GET(create_qp_out, out, qpn);
    EXPECT(qpn_ != 0);
}

Sender::~Sender() {
    EXPECT_EQUAL(mlx5dv_devx_obj_destroy(qp_), 0);
    EXPECT_EQUAL(mlx5dv_devx_obj_destroy(cq_), 0);
    mlx5dv_devx_free_uar(uar_);
    mlx5dv_devx_free_uar(cq_uar_);
    for (mlx5dv_devx_umem* umem : {ring_umem_, entries_umem_, records_umem_})
        EXPECT_EQUAL(mlx5dv_devx_umem_dereg(umem), 0);
}

void Sender::to_init() {
    uint8_t in[DEVX_ST_SZ_BYTES(rst2init_qp_in)] = {}, out[DEVX_ST_SZ_BYTES(rst2init_qp_out)];
    DEVX_SET(rst2init_qp_in, in, opcode, MLX5_CMD_OP_RST2INIT_QP);
    DEVX_SET(rst2init_qp_in, in, qpn, qpn_);
    EXPECT_EQUAL(mlx5dv_devx_obj_modify(qp_, in, sizeof in, out, sizeof out), 0);
}

void Sender::to_rtr(uint32_t remote_qpn, uint16_t remote_lid) {
    uint8_t in[DEVX_ST_SZ_BYTES(init2rtr_qp_in)] = {}, out[DEVX_ST_SZ_BYTES(init2rtr_qp_out)];
    DEVX_SET(init2rtr_qp_in, in, opcode, MLX5_CMD_OP_INIT2RTR_QP);
    DEVX_SET(init2rtr_qp_in, in, qpn, qpn_);
    void* qpc = DEVX_ADDR_OF(init2rtr_qp_in, in, qpc);
    DEVX_SET(qpc, qpc, remote_qpn, remote_qpn);
    DEVX_SET(qpc, qpc, primary_address_path.rlid, remote_lid);
    EXPECT_EQUAL(mlx5dv_devx_obj_modify(qp_, in, sizeof in, out, sizeof out), 0);
}

void Sender::to_rts() {
    uint8_t in[DEVX_ST_SZ_BYTES(rtr2rts_qp_in)] = {}, out[DEVX_ST_SZ_BYTES(rtr2rts_qp_out)];
    DEVX_SET(rtr2rts_qp_in, in, opcode, MLX5_CMD_OP_RTR2RTS_QP);
    DEVX_SET(rtr2rts_qp_in, in, qpn, qpn_);
    EXPECT_EQUAL(mlx5dv_devx_obj_modify(qp_, in, sizeof in, out, sizeof out), 0);
}

void Sender::connect(uint32_t remote_qpn, uint16_t remote_lid) {
    to_init();
    to_rtr(remote_qpn, remote_lid);
    to_rts();
}

uint16_t Sender::put(uint8_t opcode, uint8_t opmod, Ask ask, const std::vector<uint8_t>& behind,
                     int ds, size_t written) {
    std::vector<uint8_t> wqe(sizeof(mlx5_wqe_ctrl_seg));
    const auto index = static_cast<uint16_t>(next_);
    const auto segments =
        static_cast<uint8_t>(ds ? ds : static_cast<int>((16 + behind.size() + 15) / 16));
    const uint8_t mode = static_cast<uint8_t>((ask == Ask::nothing ? 0 : MLX5_WQE_CTRL_CQ_UPDATE) |
                                              (ask == Ask::fenced_completion ? kFence : 0));
    mlx5_wqe_ctrl_seg control = {};
    mlx5dv_set_ctrl_seg(&control, index, opcode, opmod, number_in_wqes ? number_in_wqes : qpn_,
                        mode, segments, 0, 0);
    std::memcpy(wqe.data(), &control, sizeof control);
    wqe.insert(wqe.end(), behind.begin(), behind.end());
    if (written) wqe.resize(written);
    wqe.resize((wqe.size() + 3) / 4 * 4);
    // As device code does: words, which the NIC may look at meanwhile
    for (size_t at = 0; at < wqe.size(); at += 4) {
        uint32_t word;
        std::memcpy(&word, wqe.data() + at, sizeof word);
        const size_t place = (next_ % size() * kWqebbBytes + at) % (size() * kWqebbBytes);
        __atomic_store_n(reinterpret_cast<uint32_t*>(ring_.memory + place), word,
                         __ATOMIC_RELAXED);
    }
    next_ += (segments + 3u) / 4;
    return index;
}

uint16_t Sender::write(const Buffer& from, size_t offset, uint32_t bytes, Remote to, Ask ask,
                       uint8_t opcode) {
    auto behind = remote_segment(to);
    append_data(&behind, from.address(offset), from.mr->lkey, bytes);
    return put(opcode, 0, ask, behind);
}

uint16_t Sender::write_inline(const void* from, uint32_t bytes, Remote to, Ask ask) {
    auto behind = remote_segment(to);
    append_be(&behind, bytes | MLX5_INLINE_SEG, 4);
    const auto* data = static_cast<const uint8_t*>(from);
    behind.insert(behind.end(), data, data + bytes);
    return put(MLX5_OPCODE_RDMA_WRITE, 0, ask, behind);
}

uint16_t Sender::read(const Buffer& to, size_t offset, uint32_t bytes, Remote from, Ask ask) {
    auto behind = remote_segment(from);
    append_data(&behind, to.address(offset), to.mr->lkey, bytes);
    return put(MLX5_OPCODE_RDMA_READ, 0, ask, behind);
}

uint16_t Sender::fetch_add(uint64_t add, const Buffer& old, Remote to) {
    auto behind = remote_segment(to);
    append_be(&behind, add, 8);
    append_be(&behind, 0, 8);
    append_data(&behind, old.address(), old.mr->lkey, 8);
    return put(MLX5_OPCODE_ATOMIC_FA, 0, Ask::completion, behind);
}

uint16_t Sender::compare_swap(uint64_t compare, uint64_t swap, const Buffer& old, Remote to) {
    auto behind = remote_segment(to);
    append_be(&behind, swap, 8);
    append_be(&behind, compare, 8);
    append_data(&behind, old.address(), old.mr->lkey, 8);
    return put(MLX5_OPCODE_ATOMIC_CS, 0, Ask::completion, behind);
}

uint16_t Sender::masked_fetch_add(int bytes, uint64_t add, uint64_t boundary, const Buffer& old,
                                  Remote to) {
    auto behind = remote_segment(to);
    append_be(&behind, add, bytes);
    append_be(&behind, boundary, bytes);
    behind.resize(32);
    append_data(&behind, old.address(), old.mr->lkey, static_cast<uint32_t>(bytes));
    return put(MLX5_OPCODE_ATOMIC_MASKED_FA, bytes == 4 ? kMasked4 : kMasked8, Ask::completion,
               behind);
}

uint16_t Sender::masked_compare_swap(int bytes, uint64_t compare, uint64_t compare_mask,
                                     uint64_t swap, uint64_t swap_mask, const Buffer& old,
                                     Remote to) {
    auto behind = remote_segment(to);
    append_be(&behind, swap, bytes);
    append_be(&behind, compare, bytes);
    append_be(&behind, swap_mask, bytes);
    append_be(&behind, compare_mask, bytes);
    append_data(&behind, old.address(), old.mr->lkey, static_cast<uint32_t>(bytes));
    // As NVSHMEM does: the wide one is two WQEBBs, and the NOP behind it is what completes
    if (bytes == 4)
        return put(MLX5_OPCODE_ATOMIC_MASKED_CS, kMasked4, Ask::completion, behind);
    put(MLX5_OPCODE_ATOMIC_MASKED_CS, kMasked8, Ask::nothing, behind);
    return nop();
}

uint16_t Sender::nop() { return put(MLX5_OPCODE_NOP, 0, Ask::completion, {}, 2, 16); }

uint16_t Sender::dump(const Buffer& from) {
    std::vector<uint8_t> behind;
    append_data(&behind, from.address(), from.mr->lkey, 1);
    return put(kDump, 0, Ask::fenced_completion, behind);
}

void Sender::ring_as(uint32_t qpn, uint16_t producer_index) {
    uint8_t bytes[8];
    put_be(bytes, static_cast<uint32_t>(producer_index) << 8, 4);
    put_be(bytes + 4, qpn << 8, 4);
    uint64_t word;
    std::memcpy(&word, bytes, sizeof word);
    __atomic_store_n(static_cast<uint64_t*>(uar_->reg_addr), word, __ATOMIC_RELEASE);
}

namespace {

uint32_t last_word(const uint8_t* entry) {
    return be32toh(
        __atomic_load_n(reinterpret_cast<const uint32_t*>(entry + 60), __ATOMIC_ACQUIRE));
}

}  // namespace

uint16_t Sender::completed_index() const {
    return static_cast<uint16_t>(last_word(entries_.memory) >> 16);
}
uint8_t Sender::completion_opcode() const {
    return static_cast<uint8_t>(last_word(entries_.memory)) >> 4;
}
uint8_t Sender::syndrome() const {
    return static_cast<uint8_t>(be32toh(__atomic_load_n(
        reinterpret_cast<const uint32_t*>(entries_.memory + 52), __ATOMIC_RELAXED)));
}
uint32_t Sender::completion_qpn() const {
    return be32toh(__atomic_load_n(reinterpret_cast<const uint32_t*>(entries_.memory + 56),
                                   __ATOMIC_RELAXED)) &
           0xffffff;
}

bool Sender::wait(uint16_t index, double seconds) const {
    // A CQ that was never written reads 0xffff and an opcode that does not exist
    return until([&] { return completion_opcode() != 0xf and completed_index() == index; },
                 seconds);
}

void Sender::finish() {
    const uint16_t last = nop();
    ring();
    EXPECT(wait(last));
    EXPECT_EQUAL(completion_opcode(), MLX5_CQE_REQ);
    EXPECT_EQUAL(completion_qpn(), qpn_);
}

void Sender::expect_error(uint8_t expected) {
    const auto last = static_cast<uint16_t>(next_ - 1);
    ring();
    EXPECT(wait(last));
    EXPECT_EQUAL(completion_opcode(), MLX5_CQE_REQ_ERR);
    EXPECT_EQUAL(syndrome(), expected);
}

void connect_pair(Ranks& ranks, Nic& nic, std::vector<std::unique_ptr<Sender>>* senders, int ids,
                  int log_size) {
    const auto peer = static_cast<uint32_t>(1 - ranks.rank());
    for (int id = 0; id < ids; ++id) {
        senders->push_back(std::make_unique<Sender>(nic, peer + 2u * static_cast<uint32_t>(id),
                                                    log_size));
        ranks.note(id, senders->back()->qpn());
    }
    ranks.note(kMaxNotes - 1, nic.lid);
    ranks.barrier();
    const auto other = static_cast<int>(peer);
    for (int id = 0; id < ids; ++id)
        (*senders)[static_cast<size_t>(id)]->connect(
            static_cast<uint32_t>(ranks.note_of(other, id)),
            static_cast<uint16_t>(ranks.note_of(other, kMaxNotes - 1)));
    ranks.barrier();
}
