// Entry points of libibverbs that NVSHMEM's IBGDA transport finds by dlsym
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "accounting.h"
#include "devx_commands.h"
#include "fault.h"
#include "memory_region.h"
#include "nic.h"
#include "objects.h"
#include "refuse.h"
#include "settings.h"

// verbs.h wraps these names in macros for callers
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

using namespace fabric;

namespace {

// What NVSHMEM reads of a device: one port, and how many reads and atomics may be under way
constexpr int kPorts = 1, kMaxReadAtomic = 16;

Device* devices() {
    static std::once_flag once;
    static Device all[kMaxNics];
    std::call_once(once, [] {
        faults();  // a wrong fault is said before anything else happens
        segment();
        enable_report();
        for (uint32_t nic = 0; nic < settings().nics; ++nic) {
            Device& device = all[nic];
            device.nic = nic;
            device.base.node_type = IBV_NODE_CA;
            device.base.transport_type = IBV_TRANSPORT_IB;
            std::snprintf(device.base.name, sizeof device.base.name, "mlx5_%u", nic);
            std::snprintf(device.base.dev_name, sizeof device.base.dev_name, "uverbs%u", nic);
        }
    });
    return all;
}

int refuse_post_send(ibv_qp*, ibv_send_wr*, ibv_send_wr**) {
    refuse("ibv_post_send is not emulated: set NVSHMEM_REMOTE_TRANSPORT=none, so that only IBGDA "
           "is used");
}
int refuse_post_recv(ibv_qp*, ibv_recv_wr*, ibv_recv_wr**) {
    refuse("ibv_post_recv is not emulated");
}
int refuse_poll_cq(ibv_cq*, int, ibv_wc*) { refuse("ibv_poll_cq is not emulated"); }

ibv_pd* make_pd(ibv_context* context) {
    auto* pd = new ProtectionDomain{};
    pd->base.context = context;
    pd->pdn = next_number();
    return &pd->base;
}

ibv_pd* alloc_parent_domain(ibv_context* context, ibv_parent_domain_init_attr*) {
    return make_pd(context);
}

ibv_mr* register_mr(ibv_pd* pd, void* address, size_t bytes, uint64_t iova, int access) {
    auto* mr = new ibv_mr{};
    mr->context = pd->context;
    mr->pd = pd;
    mr->addr = address;
    mr->length = bytes;
    mr->lkey = mr->rkey = register_region(nic_of(pd), address, bytes, iova, access);
    return mr;
}

// Up to link_layer: what is behind it is not in the struct of ibv_query_port's callers
constexpr size_t kPortAttributes = offsetof(ibv_port_attr, link_layer) + 1;

}  // namespace

uint32_t fabric::nic_of(const ibv_context* context) {
    const auto* base = reinterpret_cast<const char*>(context) - offsetof(Context, base.context);
    return reinterpret_cast<const Context*>(base)->nic;
}

extern "C" {

int ibv_fork_init() { return 0; }

ibv_device** ibv_get_device_list(int* count) {
    auto** list = new ibv_device*[kMaxNics + 1]();
    for (uint32_t nic = 0; nic < settings().nics; ++nic) list[nic] = &devices()[nic].base;
    if (count) *count = static_cast<int>(settings().nics);
    return list;
}

void ibv_free_device_list(ibv_device** list) { delete[] list; }

const char* ibv_get_device_name(ibv_device* device) { return device->name; }

ibv_context* ibv_open_device(ibv_device* device) {
    auto* context = new Context{};
    context->nic = reinterpret_cast<Device*>(device)->nic;
    context->base.sz = sizeof(verbs_context);
    context->base.alloc_parent_domain = alloc_parent_domain;
    ibv_context& base = context->base.context;
    base.device = device;
    base.abi_compat = __VERBS_ABI_IS_EXTENDED;
    base.cmd_fd = base.async_fd = -1;
    base.num_comp_vectors = 1;
    base.ops.post_send = refuse_post_send;
    base.ops.post_recv = refuse_post_recv;
    base.ops.poll_cq = refuse_poll_cq;
    pthread_mutex_init(&base.mutex, nullptr);
    return &base;
}

int ibv_close_device(ibv_context* context) {
    auto* base = reinterpret_cast<char*>(context) - offsetof(Context, base.context);
    pthread_mutex_destroy(&context->mutex);
    delete reinterpret_cast<Context*>(base);
    return 0;
}

int ibv_query_device(ibv_context*, ibv_device_attr* attributes) {
    *attributes = {};
    attributes->phys_port_cnt = kPorts;
    attributes->max_qp_rd_atom = kMaxReadAtomic;
    attributes->max_qp = kMaxQueuePairs;
    attributes->max_mr = kMaxMemoryRegions;
    attributes->atomic_cap = IBV_ATOMIC_HCA;
    return 0;
}

int ibv_query_port(ibv_context* context, uint8_t number, _compat_ibv_port_attr* attributes) {
    if (number != kPorts) return EINVAL;
    ibv_port_attr port = {};
    {
        const NicLock lock;
        port.state = port_is_down() ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
    }
    port.max_mtu = port.active_mtu = IBV_MTU_4096;
    port.gid_tbl_len = 1;
    port.pkey_tbl_len = 1;
    port.lid = lid_of(settings().rank, nic_of(context));
    port.link_layer = IBV_LINK_LAYER_INFINIBAND;
    std::memcpy(static_cast<void*>(attributes), &port, kPortAttributes);
    return 0;
}

int ibv_query_gid(ibv_context* context, uint8_t number, int index, ibv_gid* gid) {
    if (number != kPorts or index != 0) return EINVAL;
    *gid = {};
    gid->global.subnet_prefix = htobe64(0xfe80000000000000u);
    gid->global.interface_id = htobe64(lid_of(settings().rank, nic_of(context)));
    return 0;
}

ibv_pd* ibv_alloc_pd(ibv_context* context) { return make_pd(context); }

int ibv_dealloc_pd(ibv_pd* pd) {
    delete reinterpret_cast<ProtectionDomain*>(pd);
    return 0;
}

ibv_mr* ibv_reg_mr(ibv_pd* pd, void* address, size_t bytes, int access) {
    return register_mr(pd, address, bytes, reinterpret_cast<uint64_t>(address), access);
}

ibv_mr* ibv_reg_mr_iova(ibv_pd* pd, void* address, size_t bytes, uint64_t iova, int access) {
    return register_mr(pd, address, bytes, iova, access);
}

ibv_mr* ibv_reg_dmabuf_mr(ibv_pd*, uint64_t, size_t, uint64_t, int, int) {
    refuse("ibv_reg_dmabuf_mr is not emulated: set NVSHMEM_IB_DISABLE_DMABUF=1");
}

int ibv_dereg_mr(ibv_mr* mr) {
    deregister_region(mr->lkey);
    delete mr;
    return 0;
}

ibv_cq* ibv_create_cq(ibv_context* context, int entries, void* cq_context, ibv_comp_channel*,
                      int) {
    auto* cq = new VerbsCompletionQueue{};
    cq->base.context = context;
    cq->base.cq_context = cq_context;
    cq->base.cqe = entries;
    cq->cqn = next_number();
    return &cq->base;
}

int ibv_destroy_cq(ibv_cq* cq) {
    delete reinterpret_cast<VerbsCompletionQueue*>(cq);
    return 0;
}

ibv_srq* ibv_create_srq(ibv_pd* pd, ibv_srq_init_attr*) {
    auto* srq = new SharedReceiveQueue{};
    srq->base.context = pd->context;
    srq->base.pd = pd;
    srq->srqn = next_number();
    return &srq->base;
}

int ibv_destroy_srq(ibv_srq* srq) {
    delete reinterpret_cast<SharedReceiveQueue*>(srq);
    return 0;
}

ibv_ah* ibv_create_ah(ibv_pd* pd, ibv_ah_attr* attributes) {
    auto* handle = new AddressHandle{};
    handle->base.context = pd->context;
    handle->base.pd = pd;
    handle->address_vector.rlid = htobe16(attributes->dlid);
    return &handle->base;
}

int ibv_destroy_ah(ibv_ah* handle) {
    delete reinterpret_cast<AddressHandle*>(handle);
    return 0;
}

ibv_qp* ibv_create_qp(ibv_pd*, ibv_qp_init_attr*) {
    refuse("ibv_create_qp is not emulated: set NVSHMEM_REMOTE_TRANSPORT=none, so that only IBGDA "
           "is used");
}

int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
    if (mask & IBV_QP_STATE) qp->state = attributes->qp_state;
    return 0;
}

int ibv_destroy_qp(ibv_qp* qp) {
    delete qp;
    return 0;
}

}  // extern "C"
