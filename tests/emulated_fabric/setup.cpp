#include <cstring>

#include "cases.h"

#define u8 uint8_t
#include <infiniband/mlx5_ifc.h>
#undef u8

namespace {

struct Capability {
    uint8_t out[DEVX_ST_SZ_BYTES(query_hca_cap_out)];
};

void query(ibv_context* context, int type, Capability* capability) {
    uint8_t in[DEVX_ST_SZ_BYTES(query_hca_cap_in)] = {};
    DEVX_SET(query_hca_cap_in, in, opcode, MLX5_CMD_OP_QUERY_HCA_CAP);
    DEVX_SET(query_hca_cap_in, in, op_mod, type << 1 | 1);
    EXPECT_EQUAL(mlx5dv_devx_general_cmd(context, in, sizeof in, capability->out,
                                         sizeof capability->out),
                 0);
}

}  // namespace

// NVSHMEM's order of calls, with what it makes of each answer
void start_as_nvshmem(Ranks&) {
    EXPECT_EQUAL(verbs().fork_init(), 0);
    int count = 0;
    ibv_device** list = verbs().get_device_list(&count);
    EXPECT_EQUAL(count, 1);
    EXPECT(not list[1]);
    EXPECT(std::strstr(verbs().get_device_name(list[0]), "mlx5"));
    ibv_context* context = verbs().open_device(list[0]);
    EXPECT(context->device == list[0]);

    ibv_device_attr device = {};
    EXPECT_EQUAL(verbs().query_device(context, &device), 0);
    EXPECT_EQUAL(device.phys_port_cnt, 1);
    EXPECT_EQUAL(device.max_qp_rd_atom, 16);

    Capability capability;
    query(context, MLX5_CAP_GENERAL, &capability);
    void* general = DEVX_ADDR_OF(query_hca_cap_out, capability.out, capability.cmd_hca_cap);
    EXPECT_EQUAL(DEVX_GET(cmd_hca_cap, general, cqe_version), 1);
    EXPECT_EQUAL(DEVX_GET(cmd_hca_cap, general, log_bf_reg_size), 9);
    EXPECT_EQUAL(DEVX_GET(cmd_hca_cap, general, compact_address_vector), 1);

    mlx5dv_devx_uar* uar =
        mlx5dv_devx_alloc_uar(context, MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED);
    EXPECT(uar->reg_addr);
    mlx5dv_devx_free_uar(uar);
    Pages page(4096, 0);
    mlx5dv_devx_umem* umem =
        mlx5dv_devx_umem_reg(context, page.memory, 4096, IBV_ACCESS_LOCAL_WRITE);
    EXPECT_EQUAL(mlx5dv_devx_umem_dereg(umem), 0);

    query(context, MLX5_CAP_ATOMIC, &capability);
    void* atomic = DEVX_ADDR_OF(query_hca_cap_out, capability.out, capability);
    EXPECT_EQUAL(DEVX_GET(atomic_caps, atomic, atomic_operations), 0xf);
    EXPECT_EQUAL(DEVX_GET(atomic_caps, atomic, atomic_size_qp) & 0xc, 0xc);
    EXPECT_EQUAL(DEVX_GET(atomic_caps, atomic, atomic_size_dc) & 0xc, 0xc);
    EXPECT_EQUAL(DEVX_GET(atomic_caps, atomic, supported_atomic_req_8B_endianness_mode_1), 0);

    // Behind link_layer the caller's struct may end
    ibv_port_attr port;
    std::memset(&port, 0x77, sizeof port);
    EXPECT_EQUAL(verbs().query_port(context, 1, &port), 0);
    EXPECT_EQUAL(port.state, IBV_PORT_ACTIVE);
    EXPECT_EQUAL(port.link_layer, IBV_LINK_LAYER_INFINIBAND);
    EXPECT(port.lid != 0);
    EXPECT_EQUAL(port.flags, 0x77);
    ibv_gid gid;
    EXPECT_EQUAL(verbs().query_gid(context, 1, 0, &gid), 0);
    ibv_pd* pd = verbs().alloc_pd(context);

    mlx5dv_pd dv_pd = {};
    mlx5dv_obj object = {};
    object.pd.in = pd;
    object.pd.out = &dv_pd;
    EXPECT_EQUAL(mlx5dv_init_obj(&object, MLX5DV_OBJ_PD), 0);
    ibv_parent_domain_init_attr domain = {};
    domain.pd = pd;
    ibv_pd* parent = ibv_alloc_parent_domain(context, &domain);
    EXPECT(parent);
    ibv_srq_init_attr srq_attributes = {};
    ibv_srq* srq = verbs().create_srq(pd, &srq_attributes);
    mlx5dv_srq dv_srq = {};
    dv_srq.comp_mask = MLX5DV_SRQ_MASK_SRQN;
    object.srq.in = srq;
    object.srq.out = &dv_srq;
    EXPECT_EQUAL(mlx5dv_init_obj(&object, MLX5DV_OBJ_SRQ), 0);
    EXPECT(dv_srq.srqn != 0);
    ibv_cq* cq = verbs().create_cq(context, 16, nullptr, nullptr, 0);
    mlx5dv_cq dv_cq = {};
    object.cq.in = cq;
    object.cq.out = &dv_cq;
    EXPECT_EQUAL(mlx5dv_init_obj(&object, MLX5DV_OBJ_CQ), 0);
    EXPECT(dv_cq.cqn != 0);
    ibv_ah_attr address = {};
    address.dlid = port.lid;
    ibv_ah* ah = verbs().create_ah(pd, &address);
    mlx5dv_ah dv_ah = {};
    object.ah.in = ah;
    object.ah.out = &dv_ah;
    EXPECT_EQUAL(mlx5dv_init_obj(&object, MLX5DV_OBJ_AH), 0);
    EXPECT_EQUAL(be16toh(dv_ah.av->rlid), port.lid);

    ibv_qp_init_attr_ex dct_attributes = {};
    dct_attributes.qp_type = IBV_QPT_DRIVER;
    mlx5dv_qp_init_attr mlx5_attributes = {};
    mlx5_attributes.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_DC;
    mlx5_attributes.dc_init_attr.dc_type = MLX5DV_DCTYPE_DCT;
    ibv_qp* dct = mlx5dv_create_qp(context, &dct_attributes, &mlx5_attributes);
    ibv_qp_attr state = {};
    for (const ibv_qp_state next : {IBV_QPS_INIT, IBV_QPS_RTR}) {
        state.qp_state = next;
        EXPECT_EQUAL(verbs().modify_qp(dct, &state, IBV_QP_STATE), 0);
    }
    EXPECT(dct->qp_num != 0);

    Nic nic;
    {
        Sender dci(nic, 0, 6, Sender::kDci);
        dci.connect(0, 0);
    }
    Buffer buffer(nic, 262400);
    EXPECT_EQUAL(buffer.mr->lkey, buffer.mr->rkey);
    EXPECT_EQUAL(verbs().dereg_mr(buffer.mr), 0);
    EXPECT_EQUAL(verbs().destroy_qp(dct), 0);
    EXPECT_EQUAL(verbs().destroy_ah(ah), 0);
    EXPECT_EQUAL(verbs().destroy_cq(cq), 0);
    EXPECT_EQUAL(verbs().destroy_srq(srq), 0);
    EXPECT_EQUAL(verbs().dealloc_pd(parent), 0);
    EXPECT_EQUAL(verbs().dealloc_pd(pd), 0);
    EXPECT_EQUAL(verbs().close_device(context), 0);
}

// A queue pair goes while another works on; its peer's WQEs then find nobody
void destroy(Ranks& ranks) {
    Pair pair(ranks, 2);
    if (not pair.sends()) pair.senders[1].reset();
    ranks.barrier();
    if (not pair.sends()) {
        ranks.barrier();
        return;
    }
    pair.sender(0).write(pair.memory, 0, 64, pair.at(0));
    pair.sender(0).finish();
    pair.sender(1).write(pair.memory, 0, 64, pair.at(0));
    pair.sender(1).expect_error(kNotConnected);
    pair.senders.clear();
    ranks.barrier();
}
