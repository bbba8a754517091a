// Asks both lookups on the GPU. Reads jobs (compare.h), one a line, and prints
//   header  what print_header_facts says
//   gpu     compute capability, highest SM clock in kHz, name
//   shape   for each job, what Counts::print says
//   time    "lookup" or "nothing", then for each repeat: ns and SM clocks a step
// Exit code 2: no GPU to ask; 1: a CUDA call failed; 3: NVSHMEM's answers cannot judge
#include "compare.h"
#include "kernels.cuh"

#include <algorithm>
#include <typeinfo>
#include <utility>

// Ours, as no NVSHMEM is initialized: libnvshmem_device.a defines them together with host code
// that needs libnvshmem_host.so
__constant__ nvshmemi_device_host_state_t nvshmemi_device_state_d;
__constant__ nvshmemi_ibgda_device_state_t nvshmemi_ibgda_device_state_d;

namespace {

// The state's counters have eight bits up to 3.7, so one sweep may pass over a slot
constexpr int kMostSweeps = 64;

constexpr int kSteps = 20000, kWarmups = 3, kRepeats = 21;
// The report's job: 2 nodes of 8 GPUs, Automodel's defaults
constexpr Job kTimed = {16, 1, 24, 24};

void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    std::exit(1);
}
#define CHECK(call) check(call, #call)
#define LAUNCHED(what) check(cudaGetLastError(), "launch of " what)

template <typename T>
class DeviceArray {
public:
    explicit DeviceArray(size_t count) : count_(count) {
        CHECK(cudaMalloc(&data_, count * sizeof(T)));
        CHECK(cudaMemset(data_, 0, count * sizeof(T)));
    }
    ~DeviceArray() { cudaFree(data_); }
    DeviceArray(const DeviceArray&) = delete;

    T* get() const { return data_; }
    std::vector<T> read() const {
        std::vector<T> host(count_);
        CHECK(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
        return host;
    }

private:
    size_t count_;
    T* data_ = nullptr;
};

// The device's state for a job, with a table and counters of its own
class Device {
public:
    explicit Device(const Job& job)
        : job_(job), table_(job.slots()), switches_(switches_of(job)) {
        static nvshmemi_ibgda_device_state_t state;
        fill(state, job, table_.get(), switches_.get());
        CHECK(cudaMemcpyToSymbol(nvshmemi_ibgda_device_state_d, &state, sizeof state));
    }
    void be(int rank) {
        static nvshmemi_device_host_state_t state;
        state.npes = job_.npes;
        state.mype = rank;
        CHECK(cudaMemcpyToSymbol(nvshmemi_device_state_d, &state, sizeof state));
    }
    long slot(Address answer) const {
        return index_of(answer, reinterpret_cast<uintptr_t>(table_.get()));
    }

private:
    const Job job_;
    const DeviceArray<QueuePair> table_;
    const DeviceArray<Switch> switches_;
};

// Hands each answer of NVSHMEM's lookup, asked by one rank for all others, to owners
void ask_nvshmem(const Job& job, int rank, const Device& device, Owners& owners) {
    const auto sweep = [&](int askers, bool any, int turns) {
        const size_t each = static_cast<size_t>(job.npes) * turns;
        const DeviceArray<Address> answers(each * askers);
        for (int asker = 0; asker < askers; ++asker) {
            nvshmem_answers<<<asker + 1, 1>>>(asker, any, turns, answers.get() + each * asker);
            LAUNCHED("nvshmem_answers");
        }
        const auto all = answers.read();
        for (size_t i = 0; i < all.size(); ++i) {
            const int pe = static_cast<int>(i % each) / turns;
            if (pe != rank) owners.note(device.slot(all[i]), pe);
        }
    };
    // An odd number of turns: no two sweeps need begin at the same count
    sweep(job.per_pe(), false, job.devices | 1);
#if RC_LAYOUT == 2
    sweep(1, true, job.per_pe() | 1);
#endif
}

void judge(const Job& job) {
    Device device(job);
    Owners owners(job);
    // Owners are the same to all ranks, so two ask for all PEs, and Owners sees that they agree
    for (int sweep = 0; sweep < kMostSweeps and not owners.complete(); ++sweep) {
        for (const int rank : {0, job.npes - 1}) {
            device.be(rank);
            ask_nvshmem(job, rank, device, owners);
        }
    }
    owners.require_complete();

    Counts counts;
    const DeviceArray<Address> answers(static_cast<size_t>(job.npes) * job.ids);
    for (int rank = 0; rank < job.npes; ++rank) {
        device.be(rank);
        deepep_answers<<<32, 256>>>(job.ids, answers.get());
        LAUNCHED("deepep_answers");
        const auto all = answers.read();
        counts.add(job, rank, owners, [&](int pe, int id) {
            return device.slot(all[static_cast<size_t>(pe) * job.ids + id]);
        });
    }
    std::printf("shape ");
    counts.print();
}

void time_lookup() {
    Device device(kTimed);
    device.be(0);
    const DeviceArray<Chain> result(1);
    cudaEvent_t start, stop;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&stop));
    std::vector<std::pair<double, double>> times[2];
    for (int repeat = -kWarmups; repeat < kRepeats; ++repeat) {
        for (const int which : {0, 1}) {
            const auto kernel = which == 0 ? lookup_chain : nothing_chain;
            CHECK(cudaEventRecord(start));
            kernel<<<1, 1>>>(1, kTimed.ids, kSteps, 0, result.get());
            LAUNCHED("a chain of lookups");
            CHECK(cudaEventRecord(stop));
            CHECK(cudaEventSynchronize(stop));
            float milliseconds = 0;
            CHECK(cudaEventElapsedTime(&milliseconds, start, stop));
            if (repeat >= 0)
                times[which].push_back(
                    {milliseconds * 1e6 / kSteps, static_cast<double>(result.read()[0].cycles) / kSteps});
        }
    }
    for (const int which : {0, 1}) {
        std::printf("time %s", which == 0 ? "lookup" : "nothing");
        for (const auto& [ns, clocks] : times[which]) std::printf(" %.3f %.3f", ns, clocks);
        std::printf("\n");
    }
}

}  // namespace

int main() {
    int devices = 0;
    const cudaError_t found = cudaGetDeviceCount(&devices);
    if (found != cudaSuccess or devices == 0) {
        std::fprintf(stderr, "no GPU: %s\n", found == cudaSuccess ? "none is visible" : cudaGetErrorString(found));
        return 2;
    }
    cudaDeviceProp gpu;
    CHECK(cudaGetDeviceProperties(&gpu, 0));
    int khz = 0;
    CHECK(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
    // Before any launch: device code for another GPU says so here
    cudaFuncAttributes attributes;
    CHECK(cudaFuncGetAttributes(&attributes, deepep_answers));

    std::printf("header ");
    print_header_facts(typeid(nvshmemi_ibgda_device_state_t).name());
    std::printf("gpu %d.%d %d %s\n", gpu.major, gpu.minor, khz, gpu.name);
    for (Job job; job.read();) {
        judge(job);
        std::fflush(stdout);
    }
    time_lookup();
    CHECK(cudaDeviceSynchronize());
    return 0;
}
