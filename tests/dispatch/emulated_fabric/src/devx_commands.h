// Command mailboxes of mlx5dv_devx_*: one function for each command that NVSHMEM sends
#pragma once

#include <cstddef>
#include <cstdint>

namespace fabric {

struct Mailbox {
    const uint8_t* in;
    size_t in_bytes;
    uint8_t* out;  // zeroed before the command runs
    size_t out_bytes;
};

void query_hca_cap(const Mailbox& mailbox);
uint32_t create_cq(uint32_t nic, const Mailbox& mailbox);  // returns the cqn
uint32_t create_qp(uint32_t nic, const Mailbox& mailbox);  // returns the qpn
void rst2init_qp(uint32_t qpn);
void init2rtr_qp(uint32_t qpn, const Mailbox& mailbox);
void rtr2rts_qp(uint32_t qpn);
void destroy_qp(uint32_t qpn);

// LID of a NIC's port: unique in the fabric, never 0
uint16_t lid_of(uint32_t rank, uint32_t nic);

// Refuses a mailbox that is too short for the command's fields
void need(const Mailbox& mailbox, size_t in_bytes, size_t out_bytes, const char* command);

}  // namespace fabric
