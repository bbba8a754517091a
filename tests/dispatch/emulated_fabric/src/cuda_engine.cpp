// Copies by the CUDA driver API, whose library is opened at run time.
//
// A stream of our own that does not wait for the legacy stream: kernels of the process spin until
// these copies are done.
#include <dlfcn.h>

#include <cuda.h>

#include "copy_engine.h"
#include "refuse.h"

namespace fabric {
namespace {

constexpr size_t kStaging = 8u << 20;

// Entry points by the versioned names that cuda.h gives them
struct Driver {
    decltype(&::cuCtxGetCurrent) ctx_get_current;
    decltype(&::cuCtxSetCurrent) ctx_set_current;
    decltype(&::cuStreamCreate) stream_create;
    decltype(&::cuStreamSynchronize) stream_synchronize;
    decltype(&::cuMemHostAlloc) mem_host_alloc;
    decltype(&::cuMemcpyDtoHAsync) memcpy_dtoh;
    decltype(&::cuMemcpyHtoDAsync) memcpy_htod;
    decltype(&::cuPointerGetAttribute) pointer_get_attribute;
    decltype(&::cuGetErrorString) get_error_string;
};

template <typename F>
void resolve(void* library, const char* name, F* function) {
    *function = reinterpret_cast<F>(dlsym(library, name));
    if (not *function) fail_cuda("libcuda.so.1 has no %s", name);
}

Driver open_driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (not library)
        fail_cuda("the CUDA driver cannot be opened (%s); EMULATED_FABRIC_COPY=memcpy needs none",
                  dlerror());
    Driver driver;
    resolve(library, "cuCtxGetCurrent", &driver.ctx_get_current);
    resolve(library, "cuCtxSetCurrent", &driver.ctx_set_current);
    resolve(library, "cuStreamCreate", &driver.stream_create);
    resolve(library, "cuStreamSynchronize", &driver.stream_synchronize);
    resolve(library, "cuMemHostAlloc", &driver.mem_host_alloc);
    resolve(library, "cuMemcpyDtoHAsync_v2", &driver.memcpy_dtoh);
    resolve(library, "cuMemcpyHtoDAsync_v2", &driver.memcpy_htod);
    resolve(library, "cuPointerGetAttribute", &driver.pointer_get_attribute);
    resolve(library, "cuGetErrorString", &driver.get_error_string);
    return driver;
}

const Driver& driver() {
    static const Driver once = open_driver();
    return once;
}

void check(CUresult result, const char* call) {
    if (result == CUDA_SUCCESS) return;
    const char* text = nullptr;
    driver().get_error_string(result, &text);
    fail_cuda("%s: CUDA error %d (%s)", call, static_cast<int>(result), text ? text : "unknown");
}

uint8_t* pinned_staging() {
    CUcontext context = nullptr;
    check(driver().ctx_get_current(&context), "cuCtxGetCurrent");
    if (not context) fail_cuda("the thread that first uses the NIC has no CUDA context");
    void* staging = nullptr;
    check(driver().mem_host_alloc(&staging, kStaging, CU_MEMHOSTALLOC_PORTABLE),
          "cuMemHostAlloc");
    return static_cast<uint8_t*>(staging);
}

class CudaEngine : public CopyEngine {
public:
    CudaEngine() : CopyEngine(pinned_staging(), kStaging) {
        check(driver().ctx_get_current(&context_), "cuCtxGetCurrent");
        check(driver().stream_create(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    }

    bool on_device(const void* address) override {
        const auto pointer = reinterpret_cast<CUdeviceptr>(address);
        unsigned int managed = 0, type = 0;
        const CUresult known = driver().pointer_get_attribute(
            &type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer);
        // Memory that CUDA does not know is the host's
        if (known == CUDA_ERROR_INVALID_VALUE) return false;
        check(known, "cuPointerGetAttribute(MEMORY_TYPE)");
        check(driver().pointer_get_attribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, pointer),
              "cuPointerGetAttribute(IS_MANAGED)");
        if (managed) refuse("managed memory at %p is registered: not emulated", address);
        return type == CU_MEMORYTYPE_DEVICE;
    }

    void enter_thread() override { check(driver().ctx_set_current(context_), "cuCtxSetCurrent"); }

protected:
    bool queues(bool on_device) const override { return on_device; }

    void start(const Copy& copy) override {
        if (copy.is_read)
            check(driver().memcpy_dtoh(copy.staged, copy.address, copy.bytes, stream_),
                  "cuMemcpyDtoHAsync");
        else
            check(driver().memcpy_htod(copy.address, copy.staged, copy.bytes, stream_),
                  "cuMemcpyHtoDAsync");
    }

    void finish(const std::vector<Copy>&) override {
        check(driver().stream_synchronize(stream_), "cuStreamSynchronize");
    }

private:
    CUcontext context_ = nullptr;
    CUstream stream_ = nullptr;
};

}  // namespace

std::unique_ptr<CopyEngine> make_cuda_engine() { return std::make_unique<CudaEngine>(); }

}  // namespace fabric
