// Entry points of libmlx5 that NVSHMEM's IBGDA transport imports (libmlx5.map has their versions)
#include <cerrno>
#include <cstring>

#include "byte_order.h"
#include "devx_commands.h"
#include "memory_region.h"
#include "nic.h"
#include "objects.h"
#include "prm.h"
#include "refuse.h"
#include "uar.h"

using namespace fabric;

namespace {

Mailbox open_mailbox(const void* in, size_t in_bytes, void* out, size_t out_bytes) {
    const Mailbox mailbox{static_cast<const uint8_t*>(in), in_bytes, static_cast<uint8_t*>(out),
                          out_bytes};
    need(mailbox, prm::mailbox::kBytes, prm::mailbox::kBytes, "a DevX command");
    std::memset(out, 0, out_bytes);
    return mailbox;
}

uint16_t opcode_of(const Mailbox& mailbox) {
    return load_be16(mailbox.in + prm::mailbox::kOpcode);
}

// What a umem or a UAR is, behind the pointer to its public part
struct UmemObject {
    mlx5dv_devx_umem base;
};
struct UarObject {
    mlx5dv_devx_uar base;
    UarPage* page;
};

}  // namespace

extern "C" {

int mlx5dv_devx_general_cmd(ibv_context*, const void* in, size_t in_bytes, void* out,
                            size_t out_bytes) {
    const Mailbox mailbox = open_mailbox(in, in_bytes, out, out_bytes);
    if (opcode_of(mailbox) != prm::kQueryHcaCap)
        refuse("the DevX command 0x%x is not emulated", opcode_of(mailbox));
    query_hca_cap(mailbox);
    return 0;
}

mlx5dv_devx_obj* mlx5dv_devx_obj_create(ibv_context* context, const void* in, size_t in_bytes,
                                        void* out, size_t out_bytes) {
    const Mailbox mailbox = open_mailbox(in, in_bytes, out, out_bytes);
    const uint16_t opcode = opcode_of(mailbox);
    uint32_t number = 0;
    if (opcode == prm::kCreateCq)
        number = create_cq(nic_of(context), mailbox);
    else if (opcode == prm::kCreateQp)
        number = create_qp(nic_of(context), mailbox);
    else
        refuse("the DevX command 0x%x creates an object that is not emulated", opcode);
    store_be24(mailbox.out + prm::mailbox::kNumber, number);
    return new mlx5dv_devx_obj{context, opcode, number};
}

int mlx5dv_devx_obj_modify(mlx5dv_devx_obj* object, const void* in, size_t in_bytes, void* out,
                           size_t out_bytes) {
    const Mailbox mailbox = open_mailbox(in, in_bytes, out, out_bytes);
    const uint16_t opcode = opcode_of(mailbox);
    const uint32_t qpn = load_be24(mailbox.in + prm::mailbox::kNumber);
    if (object->command != prm::kCreateQp or qpn != object->number)
        refuse("the DevX command 0x%x for number 0x%x goes to an object of number 0x%x", opcode,
               qpn, object->number);
    switch (opcode) {
        case prm::kRst2InitQp: rst2init_qp(qpn); break;
        case prm::kInit2RtrQp: init2rtr_qp(qpn, mailbox); break;
        case prm::kRtr2RtsQp: rtr2rts_qp(qpn); break;
        default: refuse("the DevX command 0x%x modifies nothing that is emulated", opcode);
    }
    return 0;
}

int mlx5dv_devx_obj_destroy(mlx5dv_devx_obj* object) {
    if (object->command == prm::kCreateQp) {
        destroy_qp(object->number);
    } else {
        const NicLock lock;
        remove_completion_queue(object->number);
    }
    delete object;
    return 0;
}

mlx5dv_devx_umem* mlx5dv_devx_umem_reg(ibv_context* context, void* address, size_t bytes,
                                       uint32_t) {
    Umem umem;
    umem.address = static_cast<uint8_t*>(address);
    umem.bytes = bytes;
    umem.nic = nic_of(context);
    umem.on_device = copy_engine().on_device(address);
    return &(new UmemObject{{register_umem(umem)}})->base;
}

mlx5dv_devx_umem* mlx5dv_devx_umem_reg_ex(ibv_context* context, mlx5dv_devx_umem_in* in) {
    if (in->comp_mask != 0)
        refuse("a umem by DMA-BUF (comp_mask 0x%llx) is not emulated: set "
               "NVSHMEM_IB_DISABLE_DMABUF=1", static_cast<unsigned long long>(in->comp_mask));
    return mlx5dv_devx_umem_reg(context, in->addr, in->size, in->access);
}

int mlx5dv_devx_umem_dereg(mlx5dv_devx_umem* umem) {
    deregister_umem(umem->umem_id);
    delete reinterpret_cast<UmemObject*>(umem);
    return 0;
}

mlx5dv_devx_uar* mlx5dv_devx_alloc_uar(ibv_context* context, uint32_t) {
    auto* uar = new UarObject{};
    uar->page = allocate_uar(nic_of(context));
    uar->base.reg_addr = uar->base.base_addr = uar->page->doorbell;
    uar->base.page_id = uar->page->page_id;
    return &uar->base;
}

void mlx5dv_devx_free_uar(mlx5dv_devx_uar* base) {
    auto* uar = reinterpret_cast<UarObject*>(base);
    free_uar(uar->page);
    delete uar;
}

int mlx5dv_devx_query_eqn(ibv_context*, uint32_t, uint32_t* eqn) {
    *eqn = 1;  // only named in CREATE_CQ: a CQ that is polled raises no events
    return 0;
}

int mlx5dv_init_obj(mlx5dv_obj* object, uint64_t type) {
    constexpr uint64_t known =
        MLX5DV_OBJ_PD | MLX5DV_OBJ_CQ | MLX5DV_OBJ_SRQ | MLX5DV_OBJ_AH;
    if (type & ~known)
        refuse("mlx5dv_init_obj of type 0x%llx is not emulated",
               static_cast<unsigned long long>(type));
    if (type & MLX5DV_OBJ_PD)
        object->pd.out->pdn = reinterpret_cast<ProtectionDomain*>(object->pd.in)->pdn;
    if (type & MLX5DV_OBJ_CQ)
        object->cq.out->cqn = reinterpret_cast<VerbsCompletionQueue*>(object->cq.in)->cqn;
    if (type & MLX5DV_OBJ_SRQ)
        object->srq.out->srqn = reinterpret_cast<SharedReceiveQueue*>(object->srq.in)->srqn;
    if (type & MLX5DV_OBJ_AH)
        object->ah.out->av = &reinterpret_cast<AddressHandle*>(object->ah.in)->address_vector;
    return 0;
}

ibv_qp* mlx5dv_create_qp(ibv_context* context, ibv_qp_init_attr_ex* attributes,
                         mlx5dv_qp_init_attr* mlx5_attributes) {
    // NVSHMEM makes DCTs always; no data moves over one, since doorbells of DCIs are refused
    if (attributes->qp_type != IBV_QPT_DRIVER or
        mlx5_attributes->dc_init_attr.dc_type != MLX5DV_DCTYPE_DCT)
        refuse("mlx5dv_create_qp of type %d is not emulated: only a DCT is",
               static_cast<int>(attributes->qp_type));
    auto* qp = new ibv_qp{};
    qp->context = context;
    qp->qp_num = next_number();
    qp->qp_type = IBV_QPT_DRIVER;
    qp->state = IBV_QPS_RESET;
    return qp;
}

bool mlx5dv_is_supported(ibv_device*) { return true; }

int mlx5dv_get_data_direct_sysfs_path(ibv_context*, char*, size_t) { return ENODEV; }

ibv_mr* mlx5dv_reg_dmabuf_mr(ibv_pd*, uint64_t, size_t, uint64_t, int, int, int) {
    // How a NIC without the feature answers NVSHMEM's trial
    errno = EOPNOTSUPP;
    return nullptr;
}

// For the preload library, which shares the process
int emulated_fabric_is_uar(const void* address) { return is_uar(address); }

}  // extern "C"
