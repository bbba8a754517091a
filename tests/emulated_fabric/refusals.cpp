#include "refusals.h"

#include <cstring>
#include <thread>

#include "producer.h"

#define u8 uint8_t
#include <infiniband/mlx5_ifc.h>
#undef u8

namespace {

struct Command {
    uint8_t in[272] = {}, out[272] = {};
    explicit Command(uint16_t opcode) {
        in[0] = static_cast<uint8_t>(opcode >> 8);
        in[1] = static_cast<uint8_t>(opcode);
    }
};

void general_command(Nic& nic) {
    Command command(0x102);
    mlx5dv_devx_general_cmd(nic.context, command.in, sizeof command.in, command.out,
                            sizeof command.out);
}
void capability(Nic& nic) {
    Command command(0x100);
    command.in[7] = 0x09;  // RoCE
    mlx5dv_devx_general_cmd(nic.context, command.in, sizeof command.in, command.out,
                            sizeof command.out);
}
void create(Nic& nic) {
    Command command(0x904);
    mlx5dv_devx_obj_create(nic.context, command.in, sizeof command.in, command.out,
                           sizeof command.out);
}
void plain_cq(Nic& nic) {
    Command command(0x400);
    mlx5dv_devx_obj_create(nic.context, command.in, sizeof command.in, command.out,
                           sizeof command.out);
}
void service_type(Nic& nic) { Sender sender(nic, 0, 6, 0x03); }
void short_mailbox(Nic& nic) {
    Command command(0x500);
    mlx5dv_devx_obj_create(nic.context, command.in, 32, command.out, sizeof command.out);
}
void state(Nic& nic) {
    Sender sender(nic, 0);
    sender.to_rts();
}
void remote_qpn(Nic& nic) {
    Sender sender(nic, 0);
    sender.to_init();
    sender.to_rtr(0x9999, 1);
}
void remote_lid(Nic& nic) {
    Sender sender(nic, 0);
    sender.to_init();
    sender.to_rtr(sender.qpn(), static_cast<uint16_t>(nic.lid + 1));
}
void dmabuf_umem(Nic& nic) {
    mlx5dv_devx_umem_in in = {};
    in.comp_mask = MLX5DV_UMEM_MASK_DMABUF;
    mlx5dv_devx_umem_reg_ex(nic.context, &in);
}
void dmabuf_mr(Nic& nic) { verbs().reg_dmabuf_mr(nic.pd, 0, 4096, 0, -1, 0); }
void verbs_qp(Nic& nic) {
    ibv_qp_init_attr attributes = {};
    verbs().create_qp(nic.pd, &attributes);
}
void init_obj(Nic&) {
    mlx5dv_obj object = {};
    mlx5dv_init_obj(&object, MLX5DV_OBJ_DM);
}

// The NIC's thread refuses, and ends the process
void wait_for_the_end() { std::this_thread::sleep_for(std::chrono::duration<double>(patience())); }

void opcode(Nic& nic, uint8_t code, uint8_t opmod, size_t behind = 48) {
    Sender sender(nic, 0);
    sender.connect(sender.qpn(), nic.lid);
    sender.put(code, opmod, Ask::completion, std::vector<uint8_t>(behind));
    sender.ring();
    wait_for_the_end();
}
void send_opcode(Nic& nic) { opcode(nic, MLX5_OPCODE_SEND, 0); }
void masked_opmod(Nic& nic) { opcode(nic, MLX5_OPCODE_ATOMIC_MASKED_FA, 0x0a); }
void empty_data(Nic& nic) { opcode(nic, MLX5_OPCODE_RDMA_WRITE, 0, 32); }
void overrun(Nic& nic) {
    Sender sender(nic, 0, 4);
    sender.connect(sender.qpn(), nic.lid);
    sender.ring_as(sender.qpn(), 17);
    wait_for_the_end();
}
void dci_doorbell(Nic& nic) {
    Sender sender(nic, 0, 4, Sender::kDci);
    sender.connect(0, 0);
    sender.ring_as(sender.qpn(), 1);
    wait_for_the_end();
}
void nothing(Nic&) {}

struct Refusal {
    const char* name;
    void (*ask)(Nic&);
};
constexpr Refusal kRefusals[] = {
    {"general_command", general_command},
    {"capability", capability},
    {"create", create},
    {"plain_cq", plain_cq},
    {"service_type", service_type},
    {"short_mailbox", short_mailbox},
    {"state", state},
    {"remote_qpn", remote_qpn},
    {"remote_lid", remote_lid},
    {"dmabuf_umem", dmabuf_umem},
    {"dmabuf_mr", dmabuf_mr},
    {"verbs_qp", verbs_qp},
    {"init_obj", init_obj},
    {"send_opcode", send_opcode},
    {"masked_opmod", masked_opmod},
    {"empty_data", empty_data},
    {"overrun", overrun},
    {"dci_doorbell", dci_doorbell},
    {"nothing", nothing},
};

}  // namespace

int ask_for_refusal(const char* what) {
    for (const Refusal& refusal : kRefusals) {
        if (std::strcmp(refusal.name, what) != 0) continue;
        Nic nic;
        refusal.ask(nic);
        return 1;
    }
    return 2;
}
