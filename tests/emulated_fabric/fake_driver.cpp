// Stands in for libcuda.so.1, to run the emulator's CUDA path without a GPU: copies happen when
// their stream is synchronized, and device memory is what FAKE_CUDA_DEVICE names: "all", or
// "heap" for what does not begin a page (NIC buffers do). Copy FAKE_CUDA_FAIL_AT fails.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include <cuda.h>

namespace {

struct Copy {
    void* to;
    const void* from;
    size_t bytes;
};

std::mutex mutex;
std::vector<Copy> copies;
uint64_t copies_ever = 0;
int some_context, some_stream;

CUresult add(void* to, const void* from, size_t bytes) {
    const char* fails = std::getenv("FAKE_CUDA_FAIL_AT");
    const std::lock_guard<std::mutex> lock(mutex);
    if (fails and ++copies_ever == std::strtoull(fails, nullptr, 10))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    copies.push_back({to, from, bytes});
    return CUDA_SUCCESS;
}

unsigned int flags_seen = 0;

CUresult register_host(void*, size_t, unsigned int flags) {
    flags_seen = flags;
    return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

// Flags that the last registration arrived with
unsigned int last_flags() { return flags_seen; }

CUresult cuGetProcAddress_v2(const char* symbol, void** function, int, cuuint64_t,
                             CUdriverProcAddressQueryResult*) {
    *function = std::strcmp(symbol, "cuMemHostRegister") == 0
                    ? reinterpret_cast<void*>(register_host)
                    : reinterpret_cast<void*>(cuGetProcAddress_v2);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
    *context = reinterpret_cast<CUcontext>(&some_context);
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
    const bool known = context == reinterpret_cast<CUcontext>(&some_context);
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuStreamCreate(CUstream* stream, unsigned int flags) {
    // The legacy stream's kernels would be waited for
    if (flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    *stream = reinterpret_cast<CUstream>(&some_stream);
    return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void** memory, size_t bytes, unsigned int) {
    *memory = std::malloc(bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream) {
    return add(to, reinterpret_cast<const void*>(from), bytes);
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream) {
    return add(reinterpret_cast<void*>(to), from, bytes);
}

CUresult cuStreamSynchronize(CUstream) {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const Copy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
    copies.clear();
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    auto* answer = static_cast<unsigned int*>(data);
    const char* given = std::getenv("FAKE_CUDA_DEVICE");
    const bool managed = given and std::strcmp(given, "managed") == 0;
    if (attribute == CU_POINTER_ATTRIBUTE_IS_MANAGED) {
        *answer = managed;
        return CUDA_SUCCESS;
    }
    const bool all = given and std::strcmp(given, "all") == 0;
    const bool heap = given and std::strcmp(given, "heap") == 0;
    if (not managed and not all and not(heap and pointer % 4096)) return CUDA_ERROR_INVALID_VALUE;
    *answer = CU_MEMORYTYPE_DEVICE;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult, const char** text) {
    *text = "the fake driver's error";
    return CUDA_SUCCESS;
}

}  // extern "C"
