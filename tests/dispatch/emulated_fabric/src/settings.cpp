#include "settings.h"

#include <cstdlib>
#include <cstring>

#include "refuse.h"
#include "segment.h"

namespace fabric {
namespace {

std::string text(const char* name) {
    const char* value = std::getenv(name);
    return value ? value : "";
}

uint32_t number(const char* name, uint32_t otherwise, uint32_t low, uint32_t high) {
    const std::string value = text(name);
    if (value.empty()) return otherwise;
    char* end = nullptr;
    const unsigned long parsed = std::strtoul(value.c_str(), &end, 10);
    if (*end or value[0] < '0' or value[0] > '9' or parsed < low or parsed > high)
        refuse("%s is \"%s\", expected a number from %u to %u", name, value.c_str(), low, high);
    return static_cast<uint32_t>(parsed);
}

Settings read() {
    Settings s;
    s.segment = text("EMULATED_FABRIC_SEGMENT");
    if (s.segment.empty())
        refuse("EMULATED_FABRIC_SEGMENT has to name the file that the processes share");
    s.processes = number("EMULATED_FABRIC_PROCESSES", 1, 1, kMaxProcesses);
    s.rank = number("EMULATED_FABRIC_RANK", 0, 0, s.processes - 1);
    s.npes = number("EMULATED_FABRIC_NPES", 0, 1, 1u << 16);
    s.nics = number("EMULATED_FABRIC_NICS", 1, 1, kMaxNics);
    s.retry_ms = number("EMULATED_FABRIC_RETRY_MS", s.retry_ms, 1, 600000);
    const std::string copy = text("EMULATED_FABRIC_COPY");
    if (copy != "" and copy != "cuda" and copy != "memcpy")
        refuse("EMULATED_FABRIC_COPY is \"%s\", expected cuda or memcpy", copy.c_str());
    s.cuda = copy != "memcpy";
    s.report_dir = text("EMULATED_FABRIC_REPORT_DIR");
    s.fault = text("EMULATED_FABRIC_FAULT");
    return s;
}

}  // namespace

const Settings& settings() {
    static const Settings once = read();
    return once;
}

}  // namespace fabric
