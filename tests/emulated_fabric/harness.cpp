// self_test CASE: runs the case's ranks as processes of one fabric. Exit 0 if all hold, else 1.
// self_test --refused WHAT: exits as the process does that asks for it.
#include "harness.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "refusals.h"

namespace {

void set(const char* name, const std::string& value) { setenv(name, value.c_str(), 1); }

std::string segment_path() {
    return "/dev/shm/emulated-fabric-self-test-" + std::to_string(getpid());
}

// What the caller of the program set stays
void set_common(const std::string& segment, int ranks, int nics) {
    const auto set_default = [](const char* name, const std::string& value) {
        setenv(name, value.c_str(), 0);
    };
    set_default("EMULATED_FABRIC_SEGMENT", segment);
    set_default("EMULATED_FABRIC_PROCESSES", std::to_string(ranks));
    set_default("EMULATED_FABRIC_NPES", std::to_string(ranks));
    set_default("EMULATED_FABRIC_NICS", std::to_string(nics));
    set_default("EMULATED_FABRIC_COPY", "memcpy");
}

bool ended_well(const Case& its, int rank, int status) {
    if (rank == its.killed) return WIFSIGNALED(status) and WTERMSIG(status) == SIGKILL;
    if (WIFEXITED(status) and WEXITSTATUS(status) == 0) return true;
    std::fprintf(stderr, "self test: rank %d of %s ended with %s %d\n", rank, its.name,
                 WIFEXITED(status) ? "exit status" : "signal",
                 WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
    return false;
}

int run(const Case& its) {
    void* shared = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    Board* board = the_board = new (shared) Board{};
    const std::string segment = segment_path();
    set_common(segment, its.ranks, its.nics);
    set("EMULATED_FABRIC_RETRY_MS", its.retry_ms);
    if (*its.fault) set("EMULATED_FABRIC_FAULT", its.fault);
    pid_t children[kMaxRanks];
    for (int rank = 0; rank < its.ranks; ++rank) {
        children[rank] = fork();
        if (children[rank] != 0) continue;
        set("EMULATED_FABRIC_RANK", std::to_string(rank));
        Ranks ranks(board, rank, its.ranks);
        its.body(ranks);
        std::exit(0);
    }
    bool good = true;
    for (int rank = 0; rank < its.ranks; ++rank) {
        int status = 0;
        waitpid(children[rank], &status, 0);
        good = ended_well(its, rank, status) and good;
    }
    unlink(segment.c_str());
    return good ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
    if (count == 2 and std::strcmp(arguments[1], "--list") == 0) {
        for (int n = 0; n < kCaseCount; ++n) std::puts(kCases[n].name);
        return 0;
    }
    for (int n = 0; count == 2 and n < kCaseCount; ++n)
        if (std::strcmp(arguments[1], kCases[n].name) == 0) return run(kCases[n]);
    if (count == 3 and std::strcmp(arguments[1], "--refused") == 0) {
        // One process, which the emulator is to end; its status is ours
        const std::string segment = segment_path();
        set_common(segment, 1, 1);
        const pid_t child = fork();
        if (child == 0) std::exit(ask_for_refusal(arguments[2]));
        int status = 0;
        waitpid(child, &status, 0);
        unlink(segment.c_str());
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    std::fprintf(stderr, "usage: self_test CASE | --list | --refused WHAT\n");
    return 2;
}
