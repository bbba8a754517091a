#include "fault.h"

#include <cstdlib>

#include "refuse.h"
#include "settings.h"

namespace fabric {
namespace {

constexpr uint64_t kMillisecond = 1000000;

// One fault "NAME=[RANK@]NUMBER[:MS]"
struct Clause {
    std::string name;
    bool has_rank = false, has_ms = false;
    uint64_t rank = 0, number = 0, ms = 0;
};

uint64_t digits(const std::string& text, size_t* at) {
    const size_t first = *at;
    uint64_t value = 0;
    while (*at < text.size() and text[*at] >= '0' and text[*at] <= '9')
        value = value * 10 + static_cast<uint64_t>(text[(*at)++] - '0');
    if (*at == first or *at - first > 12)
        refuse("the fault \"%s\" lacks a number: expected NAME=[RANK@]NUMBER[:MS]", text.c_str());
    return value;
}

Clause parse(const std::string& text) {
    Clause clause;
    const size_t equals = text.find('=');
    clause.name = text.substr(0, equals);
    size_t at = equals == std::string::npos ? text.size() : equals + 1;
    clause.number = digits(text, &at);
    if (at < text.size() and text[at] == '@') {
        clause.has_rank = true;
        clause.rank = clause.number;
        clause.number = digits(text, &++at);
    }
    if (at < text.size() and text[at] == ':') {
        clause.has_ms = true;
        clause.ms = digits(text, &++at);
    }
    if (at != text.size())
        refuse("the fault \"%s\" goes on where it should end: expected NAME=[RANK@]NUMBER[:MS]",
               text.c_str());
    return clause;
}

void apply(const Clause& clause, const std::string& text, Faults* faults) {
    const std::string& name = clause.name;
    if (name != "delay" and name != "drop-completion" and name != "kill-peer" and
        name != "flap-port" and name != "exhaust-queue")
        refuse("there is no fault \"%s\"; there are delay, drop-completion, kill-peer, flap-port "
               "and exhaust-queue", name.c_str());
    if ((name == "kill-peer" or name == "flap-port") and not clause.has_rank)
        refuse("the fault \"%s\" has to say which rank: %s=RANK@NUMBER", text.c_str(),
               name.c_str());
    if (clause.has_ms != (name == "flap-port"))
        refuse("the fault \"%s\": \":MS\" goes with flap-port and only there", text.c_str());
    if (clause.has_rank and clause.rank >= settings().processes)
        refuse("the fault \"%s\" names a rank beyond the %u processes", text.c_str(),
               settings().processes);
    if (name != "delay" and clause.number == 0)
        refuse("the fault \"%s\" counts from 1", text.c_str());
    if (clause.has_rank and clause.rank != settings().rank) return;
    if (name == "delay") faults->delay_ns = clause.number * kMillisecond;
    if (name == "drop-completion") faults->drop_completion = clause.number;
    if (name == "kill-peer") faults->kill_at_wqe = clause.number;
    if (name == "exhaust-queue") faults->exhaust_at_wqe = clause.number;
    if (name == "flap-port") {
        faults->flap_at_wqe = clause.number;
        faults->flap_ns = clause.ms * kMillisecond;
    }
}

Faults read() {
    Faults faults;
    const std::string& all = settings().fault;
    for (size_t at = 0; at < all.size();) {
        const size_t comma = std::min(all.find(',', at), all.size());
        const std::string text = all.substr(at, comma - at);
        apply(parse(text), text, &faults);
        at = comma + 1;
    }
    return faults;
}

}  // namespace

const Faults& faults() {
    static const Faults once = read();
    return once;
}

}  // namespace fabric
