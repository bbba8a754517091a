// LD_PRELOAD: what NVSHMEM asks the system about a NIC, outside verbs.
//
// Each function stands in for the C library's of its name and answers only for the emulated NIC.
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include <dirent.h>
#include <dlfcn.h>
#include <unistd.h>

#include <cuda.h>

// In libmlx5.so.1, which is preloaded as well
extern "C" int emulated_fabric_is_uar(const void* address) __attribute__((weak));

namespace {

constexpr char kInfiniband[] = "/sys/class/infiniband/";
constexpr char kPeerMemory[] = "/sys/module/nvidia_peermem/version";
constexpr char kPciDevices[] = "/sys/bus/pci/devices";
constexpr char kNvidia[] = "0x10de";

// dlsym cannot be asked for itself; its version differs between C libraries and machines
void* next(const char* name) {
    for (const char* version : {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.3", "GLIBC_2.2.5"})
        if (void* function = dlvsym(RTLD_NEXT, name, version)) return function;
    std::fprintf(stderr, "emulated fabric: the C library has no %s\n", name);
    _exit(70);
}

template <typename F>
F next_as(const char* name) {
    return reinterpret_cast<F>(next(name));
}

// The NIC's place on the PCI bus is the GPU's own, so that NVSHMEM pairs the two
bool find_gpu(char* path, size_t bytes) {
    if (const char* given = std::getenv("EMULATED_FABRIC_GPU_PCI"))
        return static_cast<size_t>(std::snprintf(path, bytes, "%s/%s", kPciDevices, given)) <
               bytes;
    DIR* folder = opendir(kPciDevices);
    if (not folder) return false;
    bool found = false;
    while (const dirent* entry = readdir(folder)) {
        char vendor_path[512], vendor[16] = {};
        std::snprintf(vendor_path, sizeof vendor_path, "%s/%s/vendor", kPciDevices,
                      entry->d_name);
        std::FILE* file = std::fopen(vendor_path, "r");
        if (not file) continue;
        found = std::fgets(vendor, sizeof vendor, file) and
                std::strncmp(vendor, kNvidia, sizeof kNvidia - 1) == 0;
        std::fclose(file);
        if (not found) continue;
        std::snprintf(path, bytes, "%s/%s", kPciDevices, entry->d_name);
        break;
    }
    closedir(folder);
    return found;
}

using HostRegister = decltype(&::cuMemHostRegister);
using GetProcAddress = decltype(&::cuGetProcAddress);
using GetProcAddress1 = CUresult (*)(const char*, void**, int, cuuint64_t);

HostRegister real_host_register = nullptr;
GetProcAddress real_get_proc_address = nullptr;
GetProcAddress1 real_get_proc_address_1 = nullptr;

// A doorbell page is plain memory here, and the driver takes I/O memory only where it is some
CUresult host_register(void* address, size_t bytes, unsigned int flags) {
    if (emulated_fabric_is_uar and emulated_fabric_is_uar(address))
        flags &= ~static_cast<unsigned int>(CU_MEMHOSTREGISTER_IOMEMORY);
    return real_host_register(address, bytes, flags);
}

void replace(const char* symbol, void** function) {
    if (not function or not *function) return;
    if (std::strcmp(symbol, "cuMemHostRegister") == 0) {
        real_host_register = reinterpret_cast<HostRegister>(*function);
        *function = reinterpret_cast<void*>(host_register);
    }
}

CUresult get_proc_address(const char* symbol, void** function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult* status) {
    const CUresult result = real_get_proc_address(symbol, function, version, flags, status);
    if (result == CUDA_SUCCESS) replace(symbol, function);
    return result;
}

CUresult get_proc_address_1(const char* symbol, void** function, int version, cuuint64_t flags) {
    const CUresult result = real_get_proc_address_1(symbol, function, version, flags);
    if (result == CUDA_SUCCESS) replace(symbol, function);
    return result;
}

// noexcept, or a frame stays behind that ends the process on an exception
using Dlsym = void* (*)(void*, const char*) noexcept;
Dlsym real_dlsym = nullptr;

__attribute__((noinline)) void* wrapped(void* function, const char* symbol) {
    if (not function) return nullptr;
    if (std::strcmp(symbol, "cuGetProcAddress_v2") == 0) {
        real_get_proc_address = reinterpret_cast<GetProcAddress>(function);
        return reinterpret_cast<void*>(get_proc_address);
    }
    real_get_proc_address_1 = reinterpret_cast<GetProcAddress1>(function);
    return reinterpret_cast<void*>(get_proc_address_1);
}

bool is_get_proc_address(const char* symbol) {
    return symbol[0] == 'c' and (std::strcmp(symbol, "cuGetProcAddress_v2") == 0 or
                                 std::strcmp(symbol, "cuGetProcAddress") == 0);
}

// Before main, when there is one thread
__attribute__((constructor)) void find_dlsym() { real_dlsym = next_as<Dlsym>("dlsym"); }

}  // namespace

#pragma GCC diagnostic ignored "-Wnonnull-compare"

extern "C" {

// Optimized, so that the last call is a jump: the C library tells RTLD_NEXT by who called it
__attribute__((optimize("O2"))) void* dlsym(void* handle, const char* symbol) noexcept {
    // Other libraries' constructors come before this one's
    if (not real_dlsym) find_dlsym();
    if (is_get_proc_address(symbol)) return wrapped(real_dlsym(handle, symbol), symbol);
    return real_dlsym(handle, symbol);
}

char* realpath(const char* path, char* resolved) noexcept {
    static const auto real = next_as<char* (*)(const char*, char*)>("realpath");
    if (path and std::strncmp(path, kInfiniband, sizeof kInfiniband - 1) == 0) {
        char gpu[512];
        if (find_gpu(gpu, sizeof gpu)) return real(gpu, resolved);
    }
    return real(path, resolved);
}

int access(const char* path, int mode) noexcept {
    static const auto real = next_as<int (*)(const char*, int)>("access");
    if (path and std::strcmp(path, kPeerMemory) == 0) return 0;
    return real(path, mode);
}

int gethostname(char* name, size_t bytes) noexcept {
    static const auto real = next_as<int (*)(char*, size_t)>("gethostname");
    const char* host = std::getenv("EMULATED_FABRIC_HOST");
    if (not host or not *host) return real(name, bytes);
    if (std::strlen(host) >= bytes) {
        errno = ENAMETOOLONG;
        return -1;
    }
    std::strcpy(name, host);
    return 0;
}

}  // extern "C"
