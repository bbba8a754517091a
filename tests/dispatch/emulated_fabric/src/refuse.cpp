#include "refuse.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include <unistd.h>

#include "accounting.h"

namespace fabric {
namespace {

constexpr size_t kSentence = 512;

void print(const char* sentence) {
    const char* rank = std::getenv("EMULATED_FABRIC_RANK");
    char line[kSentence + 64];
    const int length = std::snprintf(line, sizeof line, "emulated fabric: rank %s: %s\n",
                                     rank ? rank : "0", sentence);
    // One write: processes that share stderr do not cut each other's lines
    if (write(STDERR_FILENO, line, static_cast<size_t>(length)) < 0) return;
}

[[noreturn]] void leave(int status, const char* format, va_list arguments) {
    char sentence[kSentence];
    std::vsnprintf(sentence, sizeof sentence, format, arguments);
    print(sentence);
    write_report_at_end(sentence);
    // Not exit: handlers of a process whose CUDA context is lost may never return
    _exit(status);
}

}  // namespace

void say(const char* format, ...) {
    char sentence[kSentence];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    print(sentence);
}

void refuse(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    leave(kExitRefused, format, arguments);
}

void fail_cuda(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    leave(kExitCudaError, format, arguments);
}

}  // namespace fabric
