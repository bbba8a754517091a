// The responder: messages of the peers' rings to memory.
//
// A peer's messages are done in order. Copies of a round run together; words of up to 8 bytes and
// atomics, which consumers poll, wait until every copy before them is done.
#pragma once

#include <cstdint>
#include <vector>

#include "copy_engine.h"
#include "segment.h"

namespace fabric {

class Responder {
public:
    explicit Responder(CopyEngine* engine);
    // Returns whether there was something to do
    bool serve();

private:
    struct Inbound {
        uint64_t done = 0, posted = 0;
    };
    struct Word {
        uint32_t source;
        Message* message;
        uint8_t* payload;
        uint64_t address;
        bool on_device;
        uint64_t old = 0;
    };

    // Does the copies of a ring up to its next word, which it appends to `words_`
    bool advance(uint32_t source);
    bool overlaps_a_word(uint64_t address, uint32_t bytes) const;
    void do_words();
    void store_written_words();

    CopyEngine* engine_;
    std::vector<Inbound> inbound_;
    std::vector<Word> words_;
};

}  // namespace fabric
