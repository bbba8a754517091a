// Sentences on stderr, and the end of the process where the emulator cannot go on
#pragma once

namespace fabric {

constexpr int kExitRefused = 70;    // something that is not emulated, or wrong usage
constexpr int kExitCudaError = 71;  // the CUDA driver returned an error to the NIC thread

// "emulated fabric: rank R: sentence" on stderr
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Says the sentence, writes the table of queue pairs, leaves with kExitRefused
[[noreturn]] void refuse(const char* format, ...) __attribute__((format(printf, 1, 2)));

// As refuse, with kExitCudaError
[[noreturn]] void fail_cuda(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace fabric
