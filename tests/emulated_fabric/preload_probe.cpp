// Prints, a line each, what a process sees through the preload library; argv[1]: fake driver
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <dlfcn.h>
#include <unistd.h>

#include <cuda.h>
#include <infiniband/mlx5dv.h>

#include "producer.h"

int main(int, char** arguments) {
    char host[256] = "", path[PATH_MAX] = "";
    gethostname(host, sizeof host);
    std::printf("host %s\n", host);
    std::printf("short %d\n", gethostname(host, 3));
    std::printf("peermem %d\n", access("/sys/module/nvidia_peermem/version", F_OK));
    std::printf("missing %d\n", access("/no/such/file", F_OK));
    std::printf("real %s\n", realpath("/usr/../usr", path) ? path : "none");
    std::printf("nic %s\n",
                realpath("/sys/class/infiniband/mlx5_0/device", path) ? path : "none");

    // RTLD_NEXT of this program is behind it, the preload library's first
    auto* next = reinterpret_cast<int (*)(const char*, int)>(dlsym(RTLD_NEXT, "access"));
    Dl_info info = {};
    dladdr(reinterpret_cast<void*>(next), &info);
    std::printf("next %s\n", std::strrchr(info.dli_fname, '/') + 1);
    std::printf("unknown %d\n", dlsym(RTLD_DEFAULT, "no_such_symbol_at_all") != nullptr);

    void* driver = dlopen(arguments[1], RTLD_NOW | RTLD_GLOBAL);
    if (not driver) return 2;
    auto flags = reinterpret_cast<unsigned int (*)()>(dlsym(driver, "last_flags"));
    auto get = reinterpret_cast<decltype(&cuGetProcAddress_v2)>(
        dlsym(RTLD_DEFAULT, "cuGetProcAddress_v2"));
    void* function = nullptr;
    get("cuMemHostRegister", &function, 13000, 0, nullptr);
    auto host_register = reinterpret_cast<decltype(&cuMemHostRegister)>(function);
    Nic nic;
    mlx5dv_devx_uar* uar = mlx5dv_devx_alloc_uar(nic.context, MLX5DV_UAR_ALLOC_TYPE_NC);
    constexpr unsigned int all = 7;  // portable, mapped, I/O memory
    host_register(uar->reg_addr, 8, all);
    std::printf("uar %u\n", flags());
    host_register(path, 8, all);
    std::printf("other %u\n", flags());
    return 0;
}
