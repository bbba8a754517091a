// What the environment variables EMULATED_FABRIC_* ask for (README.md has the list)
#pragma once

#include <cstdint>
#include <string>

namespace fabric {

struct Settings {
    std::string segment;     // path of the shared segment, below /dev/shm
    uint32_t rank = 0;       // of this process in the segment
    uint32_t processes = 1;  // that share the segment
    uint32_t npes = 0;       // PEs of one NVSHMEM job, to read user_index; 0: not told
    uint32_t nics = 1;       // mlx5_0, mlx5_1 ... of each process
    uint32_t retry_ms = 4000;
    bool cuda = true;        // copies by the CUDA driver, else by memcpy
    std::string report_dir;  // for the table of queue pairs; empty: none is written
    std::string fault;
};

// Read once, at the first verb; refuses what is missing or out of range
const Settings& settings();

}  // namespace fabric
