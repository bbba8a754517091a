#include "nic.h"

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <thread>

#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "accounting.h"
#include "refuse.h"
#include "requester.h"
#include "responder.h"
#include "settings.h"

namespace fabric {
namespace {

constexpr uint64_t kReportPeriod = 1000000000;  // ns
constexpr uint64_t kLinger = 30000000;          // ns without work before the thread ends
constexpr int kSpins = 200;                     // idle passes before the thread sleeps between
constexpr long kNap = 20000;                    // ns
constexpr int kStopPatience = 5000;             // ms for the thread to end
constexpr int kPatience = 300;                  // ms for a lock or a report at the end

std::recursive_mutex mutex;
std::atomic<int> waiting{0};
std::atomic<bool> stopping{false}, stopped{false}, terminating{false}, reported{false};

// Objects live until the process ends: the thread may run into its last moments
std::vector<QueuePair*>& all_queue_pairs() {
    static std::vector<QueuePair*>& once = *new std::vector<QueuePair*>;
    return once;
}

std::vector<CompletionQueue>& completion_queues() {
    static std::vector<CompletionQueue>& once = *new std::vector<CompletionQueue>;
    return once;
}

void nap(long ns) {
    const timespec time = {0, ns};
    nanosleep(&time, nullptr);
}

void run() {
    CopyEngine& engine = copy_engine();
    engine.enter_thread();
    Requester requester(&engine);
    Responder responder(&engine);
    uint64_t next_report = 0, last_work = now_ns();
    int idle = 0;
    while (true) {
        while (waiting.load() > 0) std::this_thread::yield();
        uint64_t now = now_ns();
        bool busy = false;
        {
            const std::lock_guard<std::recursive_mutex> lock(mutex);
            busy |= requester.poll_doorbells();
            busy |= requester.issue();
            busy |= responder.serve();
            busy |= requester.complete();
            now = now_ns();
            requester.give_up(now);
            if (terminating.load() and not reported.load()) {
                write_report(false, "SIGTERM");
                reported.store(true);
            } else if (now >= next_report) {
                next_report = now + kReportPeriod;
                write_report(false, nullptr);
            }
            if (busy) last_work = now;
            // Peers may still wait for answers to their last messages
            if (stopping.load() and now - last_work > kLinger) {
                write_report(requester.is_idle(), nullptr);
                stopped.store(true);
                return;
            }
        }
        idle = busy ? 0 : idle + 1;
        if (idle > kSpins)
            nap(kNap);
        else if (idle > 0)
            std::this_thread::yield();
    }
}

std::thread& thread() {
    static std::thread& once = *new std::thread;
    return once;
}

void stop() {
    stopping.store(true);
    // A copy may wait for a kernel that never ends: the process has to, all the same
    for (int ms = 0; ms < kStopPatience and not stopped.load(); ++ms) nap(1000000);
    if (stopped.load()) thread().join();
    segment().leave();
}

// A launcher that ends a hung run sends this first; only calls that a handler may make
void on_sigterm(int) {
    terminating.store(true);
    for (int ms = 0; ms < kPatience and not reported.load(); ++ms) nap(1000000);
    signal(SIGTERM, SIG_DFL);
    raise(SIGTERM);
}

}  // namespace

NicLock::NicLock() {
    waiting.fetch_add(1);
    mutex.lock();
    waiting.fetch_sub(1);
}
NicLock::~NicLock() { mutex.unlock(); }

bool try_lock_nic() {
    for (int ms = 0; ms < kPatience; ++ms) {
        if (mutex.try_lock()) return true;
        nap(1000000);
    }
    return false;
}
void unlock_nic() { mutex.unlock(); }

const std::vector<QueuePair*>& queue_pairs() { return all_queue_pairs(); }

QueuePair* find_own_queue_pair(uint32_t qpn) {
    for (QueuePair* qp : all_queue_pairs())
        if (qp->qpn == qpn and qp->entry->state.load() != QpState::destroyed) return qp;
    return nullptr;
}

void add_queue_pair(QueuePair* queue_pair) { all_queue_pairs().push_back(queue_pair); }

void add_completion_queue(const CompletionQueue& queue) { completion_queues().push_back(queue); }

const CompletionQueue* find_completion_queue(uint32_t cqn) {
    for (const CompletionQueue& queue : completion_queues())
        if (queue.cqn == cqn) return &queue;
    return nullptr;
}

void remove_completion_queue(uint32_t cqn) {
    auto& all = completion_queues();
    for (auto at = all.begin(); at != all.end(); ++at) {
        if (at->cqn != cqn) continue;
        all.erase(at);
        return;
    }
}

void start_nic() {
    static std::once_flag once;
    std::call_once(once, [] {
        copy_engine();
        struct sigaction now = {};
        sigaction(SIGTERM, nullptr, &now);
        if (now.sa_handler == SIG_DFL) signal(SIGTERM, on_sigterm);
        // The process's signals are not this thread's
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        thread() = std::thread(run);
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        pthread_setname_np(thread().native_handle(), "emulated-nic");
        std::atexit(stop);
    });
}

Port& port() {
    static Port once;
    return once;
}

bool port_is_down() {
    Port& p = port();
    if (p.up_at == 0) return false;
    if (now_ns() < p.up_at) return true;
    p.up_at = 0;
    segment().tables().processes[settings().rank].port_down_since.store(0);
    say("fault: the port is up again");
    return false;
}

}  // namespace fabric
