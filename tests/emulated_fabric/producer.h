// What NVSHMEM's IBGDA transport and its device code do: objects by verbs and DevX mailboxes,
// WQEs in host memory, doorbells on a UAR page, completions off a collapsed CQ.
//
// Mailboxes are filled by rdma-core's mlx5_ifc.h, where that has the command.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>

#include "harness.h"

constexpr size_t kWqebbBytes = 64;

// Entry points that NVSHMEM finds by dlsym in libibverbs.so.1
struct Verbs {
    ibv_device** (*get_device_list)(int*);
    const char* (*get_device_name)(ibv_device*);
    ibv_context* (*open_device)(ibv_device*);
    int (*close_device)(ibv_context*);
    int (*query_device)(ibv_context*, ibv_device_attr*);
    int (*query_port)(ibv_context*, uint8_t, ibv_port_attr*);
    int (*query_gid)(ibv_context*, uint8_t, int, ibv_gid*);
    ibv_pd* (*alloc_pd)(ibv_context*);
    int (*dealloc_pd)(ibv_pd*);
    ibv_mr* (*reg_mr)(ibv_pd*, void*, size_t, int);
    ibv_mr* (*reg_mr_iova)(ibv_pd*, void*, size_t, uint64_t, int);
    ibv_mr* (*reg_dmabuf_mr)(ibv_pd*, uint64_t, size_t, uint64_t, int, int);
    int (*dereg_mr)(ibv_mr*);
    ibv_cq* (*create_cq)(ibv_context*, int, void*, ibv_comp_channel*, int);
    int (*destroy_cq)(ibv_cq*);
    ibv_srq* (*create_srq)(ibv_pd*, ibv_srq_init_attr*);
    int (*destroy_srq)(ibv_srq*);
    ibv_ah* (*create_ah)(ibv_pd*, ibv_ah_attr*);
    int (*destroy_ah)(ibv_ah*);
    ibv_qp* (*create_qp)(ibv_pd*, ibv_qp_init_attr*);
    int (*modify_qp)(ibv_qp*, ibv_qp_attr*, int);
    int (*destroy_qp)(ibv_qp*);
    int (*fork_init)();
};
const Verbs& verbs();

struct Nic {
    explicit Nic(int number = 0);
    ibv_context* context = nullptr;
    ibv_pd* pd = nullptr;
    uint16_t lid = 0;
};

constexpr int kAllAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                           IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

// A registered buffer; `at` gives its bytes
struct Buffer {
    Buffer(const Nic& nic, size_t bytes, int access = kAllAccess);
    uint8_t* at(size_t offset) { return memory.get() + offset; }
    uint64_t address(size_t offset = 0) const {
        return reinterpret_cast<uint64_t>(memory.get()) + offset;
    }
    std::unique_ptr<uint8_t[]> memory;
    size_t bytes;
    ibv_mr* mr;
};

// Memory as posix_memalign gives it to NVSHMEM
struct Pages {
    explicit Pages(size_t bytes, int fill);
    ~Pages();
    Pages(const Pages&) = delete;
    uint8_t* memory = nullptr;
};

struct Remote {
    uint64_t address;
    uint32_t rkey;
};

enum class Ask { completion, nothing, fenced_completion };

class Sender {
public:
    static constexpr uint8_t kRc = 0, kDci = 5;
    Sender(const Nic& nic, uint32_t user_index, int log_size = 6, uint8_t service = kRc);
    ~Sender();
    Sender(const Sender&) = delete;

    uint32_t qpn() const { return qpn_; }
    uint32_t size() const { return 1u << log_size_; }
    void to_init();
    void to_rtr(uint32_t remote_qpn, uint16_t remote_lid);
    void to_rts();
    void connect(uint32_t remote_qpn, uint16_t remote_lid);

    // Each puts a WQE into the ring and returns its index; the doorbell comes with ring()
    uint16_t write(const Buffer& from, size_t offset, uint32_t bytes, Remote to,
                   Ask ask = Ask::completion, uint8_t opcode = MLX5_OPCODE_RDMA_WRITE);
    uint16_t write_inline(const void* from, uint32_t bytes, Remote to, Ask ask = Ask::completion);
    uint16_t read(const Buffer& to, size_t offset, uint32_t bytes, Remote from,
                  Ask ask = Ask::completion);
    uint16_t fetch_add(uint64_t add, const Buffer& old, Remote to);
    uint16_t compare_swap(uint64_t compare, uint64_t swap, const Buffer& old, Remote to);
    uint16_t masked_fetch_add(int bytes, uint64_t add, uint64_t boundary, const Buffer& old,
                              Remote to);
    uint16_t masked_compare_swap(int bytes, uint64_t compare, uint64_t compare_mask, uint64_t swap,
                                 uint64_t swap_mask, const Buffer& old, Remote to);
    uint16_t nop();   // writes its control segment only, though ds is 2
    uint16_t dump(const Buffer& from);
    // Any WQE: the control segment's index, size and number are filled in
    uint16_t put(uint8_t opcode, uint8_t opmod, Ask ask, const std::vector<uint8_t>& behind,
                 int ds = 0, size_t written = 0);

    void ring() { ring_as(qpn_, static_cast<uint16_t>(next_)); }
    void ring_as(uint32_t qpn, uint16_t producer_index);

    // The collapsed CQE
    uint16_t completed_index() const;
    uint8_t completion_opcode() const;
    uint8_t syndrome() const;
    uint32_t completion_qpn() const;
    bool wait(uint16_t index, double seconds = patience()) const;
    // Rings, and expects the last WQE's completion without an error
    void finish();
    // Rings, and expects the last WQE's completion with this syndrome
    void expect_error(uint8_t expected);
    uint32_t number_in_wqes = 0;  // 0: the queue pair's own

private:
    const Nic& nic_;
    int log_size_;
    Pages ring_, entries_, records_;
    mlx5dv_devx_umem *ring_umem_, *entries_umem_, *records_umem_;
    mlx5dv_devx_uar *cq_uar_, *uar_;
    mlx5dv_devx_obj *cq_, *qp_;
    uint32_t qpn_ = 0;
    uint64_t next_ = 0;
};

// Two ranks' queue pairs made for each other, `ids` of them, as NVSHMEM numbers them
void connect_pair(Ranks& ranks, Nic& nic, std::vector<std::unique_ptr<Sender>>* senders, int ids,
                  int log_size = 6);
