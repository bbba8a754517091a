#include "accounting.h"

#include <atomic>
#include <cstdio>
#include <string>

#include <unistd.h>

#include "nic.h"
#include "refuse.h"
#include "settings.h"

namespace fabric {
namespace {

std::atomic<bool> enabled{false};

// A JSON object or array under construction
class Json {
public:
    void open(char bracket) {
        separate();
        text_ += bracket;
        first_ = true;
    }
    void close(char bracket) {
        text_ += bracket;
        first_ = false;
    }
    void key(const std::string& name) {
        separate();
        quote(name);
        text_ += ": ";
        first_ = true;
    }
    void value(uint64_t number) {
        separate();
        text_ += std::to_string(number);
    }
    void value(bool truth) {
        separate();
        text_ += truth ? "true" : "false";
    }
    void value(const char* words) {
        separate();
        if (words)
            quote(words);
        else
            text_ += "null";
    }
    template <typename T>
    void member(const char* name, T given) {
        key(name);
        value(given);
    }
    const std::string& text() const { return text_; }

private:
    void separate() {
        if (not first_) text_ += ", ";
        first_ = false;
    }
    void quote(const std::string& words) {
        text_ += '"';
        for (const char c : words) {
            if (c == '"' or c == '\\') text_ += '\\';
            text_ += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
        }
        text_ += '"';
    }

    std::string text_;
    bool first_ = true;
};

const char* text(QpState state) {
    switch (state) {
        case QpState::absent: return "absent";
        case QpState::reset: return "RST";
        case QpState::init: return "INIT";
        case QpState::rtr: return "RTR";
        case QpState::rts: return "RTS";
        case QpState::error: return "ERR";
        case QpState::destroyed: break;  // told apart by another member
    }
    return "unnamed";
}

void add(Json* json, const QueuePair& qp) {
    const Counters& counters = qp.counters;
    const auto number = [json](const char* name, uint64_t n) { json->member(name, n); };
    json->open('{');
    number("qpn", qp.qpn);
    number("nic", qp.nic);
    json->member("transport", qp.is_rc ? "RC" : "DCI");
    const QpState state = qp.entry->state.load();
    const bool destroyed = state == QpState::destroyed;
    json->member("state", text(destroyed ? qp.last_state : state));
    json->member("destroyed", destroyed);
    number("user_index", qp.user_index);
    if (settings().npes != 0 and qp.is_rc) {
        number("made_for_pe", qp.user_index % settings().npes);
        number("id", qp.user_index / settings().npes);
    }
    if (qp.remote_qpn != 0) {
        number("remote_qpn", qp.remote_qpn);
        number("peer_rank", qp.peer_rank);
    }
    json->member("rung", counters.doorbells > 0);
    number("doorbells", counters.doorbells);
    number("foreign_doorbells", counters.foreign_doorbells);
    number("wqes", counters.wqes);
    number("foreign_wqes", counters.foreign_wqes);
    number("pending_wqebbs", qp.producer - qp.consumer);
    number("outstanding", qp.outstanding.size());
    number("writes", counters.writes);
    number("inline_writes", counters.inline_writes);
    number("reads", counters.reads);
    number("fetch_adds", counters.fetch_adds);
    number("compare_swaps", counters.compare_swaps);
    number("nops", counters.nops);
    number("dumps", counters.dumps);
    number("bytes", counters.bytes);
    json->key("aimed_at_rank");
    json->open('{');
    for (const auto& [rank, wqes] : counters.aimed_at)
        number(std::to_string(rank).c_str(), wqes);
    json->close('}');
    number("completions", counters.completions);
    number("dropped_completions", counters.dropped_completions);
    number("stale_waits", qp.send_queue.stale_waits());
    json->key("errors");
    json->open('{');
    for (const auto& [syndrome, times] : counters.errors) number(text(syndrome), times);
    json->close('}');
    json->member("first_error",
                 counters.first_error.empty() ? nullptr : counters.first_error.c_str());
    json->close('}');
}

std::string document(bool finished, const char* fatal) {
    const Settings& s = settings();
    Json json;
    json.open('{');
    json.member("format", "emulated-fabric-queue-pairs/1");
    json.member("rank", uint64_t{s.rank});
    json.member("pid", static_cast<uint64_t>(getpid()));
    json.member("nics", uint64_t{s.nics});
    json.member("npes", uint64_t{s.npes});
    json.member("fault", s.fault.empty() ? nullptr : s.fault.c_str());
    json.member("finished", finished);
    json.member("fatal", fatal);
    json.member("wqes", port().wqes);
    json.key("queue_pairs");
    json.open('[');
    for (const QueuePair* qp : queue_pairs()) add(&json, *qp);
    json.close(']');
    json.close('}');
    return json.text() + "\n";
}

}  // namespace

void enable_report() { enabled.store(true); }

void write_report(bool finished, const char* fatal) {
    if (not enabled.load() or settings().report_dir.empty()) return;
    const std::string path =
        settings().report_dir + "/queue-pairs-rank-" + std::to_string(settings().rank) + ".json";
    const std::string fresh = path + ".new";
    const std::string text = document(finished, fatal);
    std::FILE* file = std::fopen(fresh.c_str(), "w");
    const bool written =
        file and std::fwrite(text.data(), 1, text.size(), file) == text.size();
    if (not file or std::fclose(file) != 0 or not written or
        std::rename(fresh.c_str(), path.c_str()) != 0) {
        static std::atomic<bool> said{false};
        if (not said.exchange(true)) say("cannot write %s", path.c_str());
    }
}

void write_report_at_end(const char* fatal) {
    if (not enabled.load()) return;
    const bool locked = try_lock_nic();
    write_report(false, fatal);
    if (locked) unlock_nic();
}

}  // namespace fabric
