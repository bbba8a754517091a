// Ranks of a case as processes, and what they tell each other beside the fabric
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

constexpr int kMaxRanks = 8;
constexpr int kMaxNotes = 64;

// Shared by the ranks; each writes its own row
struct Board {
    std::atomic<uint32_t> arrived, failed;
    uint64_t notes[kMaxRanks][kMaxNotes];
};

extern Board* the_board;

// A barrier orders memory between processes, which the thread sanitizer cannot see: any verb takes
// the NIC's lock, which it can. Set by the first Nic.
extern void (*around_barrier)();

class Ranks {
public:
    Ranks(Board* board, int rank, int count) : board_(board), rank_(rank), count_(count) {}
    int rank() const { return rank_; }
    int count() const { return count_; }
    void note(int place, uint64_t value) { board_->notes[rank_][place] = value; }
    uint64_t note_of(int rank, int place) const { return board_->notes[rank][place]; }
    // Returns when each rank has called it as often; a rank that failed does not
    void barrier();

private:
    Board* board_;
    int rank_, count_;
    uint32_t barriers_ = 0;
};

struct Case {
    const char* name;
    int ranks;
    void (*body)(Ranks&);
    int nics = 1;
    const char* fault = "";
    // Rank that has to be killed by SIGKILL; -1 for none
    int killed = -1;
    const char* retry_ms = "4000";
};
extern const Case kCases[];
extern const int kCaseCount;

// Leaves the process with status 1 and a line of what did not hold
[[noreturn]] void fail(const char* file, int line, const std::string& what);

#define EXPECT(condition) \
    do { \
        if (not(condition)) fail(__FILE__, __LINE__, #condition); \
    } while (false)

#define EXPECT_EQUAL(got, expected) \
    do { \
        const uint64_t got_ = (got), expected_ = (expected); \
        if (got_ != expected_) \
            fail(__FILE__, __LINE__, \
                 std::string(#got " is ") + std::to_string(got_) + ", expected " + \
                     std::to_string(expected_)); \
    } while (false)

// Time that something may take before the case fails: SELF_TEST_SECONDS, or 15
double patience();

// Waits until the condition holds; false after the time
template <typename Condition>
bool until(Condition condition, double seconds = patience());

// Gives the processor away; sleeps if the wait is a long one. Ends the process if a rank failed.
void pause_briefly(bool long_since);

template <typename Condition>
bool until(Condition condition, double seconds) {
    const auto start = std::chrono::steady_clock::now();
    while (not condition()) {
        const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
        if (waited.count() > seconds) return false;
        pause_briefly(waited.count() > 0.01);
    }
    return true;
}
