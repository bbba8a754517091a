// The table of queue pairs, as JSON: what was asked of each, and what became of it
#pragma once

namespace fabric {

// Reports may be written from now on: settings and segment are there
void enable_report();
// Writes settings().report_dir/queue-pairs-rank-R.json by a temporary name; the caller holds the
// NIC's lock
void write_report(bool finished, const char* fatal);
// For an end of the process: without the lock if it cannot be had soon
void write_report_at_end(const char* fatal);

}  // namespace fabric
