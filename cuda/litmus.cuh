// Message passing through status words alone: a test of the memory order that every poll relies on.
//
// Blocks come in pairs. The first publishes slots whose words are functions of the slot's number
// and the launch. The second polls them in the opposite order, and counts words that are wrong
// although the tag is right.
#pragma once

constexpr int THREADS = 128, SLOTS_PER_THREAD = 8;
constexpr int ALL_THREADS = THREADS, SHARED_BYTES = 128;

struct Params {
    Header* header;
    char* slots;
    u32 *wrong, *alarm;
    i64 slot_bytes;
};

INLINE u32 message(int slot, int word, u32 tag) {
    return (u32)(slot * 7 + word + 1) * (2 * tag + 1);
}

KERNEL(ALL_THREADS, 1) scan(PARAMETERS(Params, P)) {
    const u32 tag = launch_tag(P.header);
    const int pair = block_index() / 2;
    for (int k = 0; k < SLOTS_PER_THREAD; ++k) {
        const bool writes = block_index() % 2 == 0;
        const int step = writes ? k : SLOTS_PER_THREAD - 1 - k;
        const int slot = (pair * SLOTS_PER_THREAD + step) * THREADS + thread_index();
        char* at = P.slots + (i64)slot * SLOT_BYTES<WORDS>;
        u32 words[WORDS];
        if (writes) {
            for (int j = 0; j < WORDS; ++j) words[j] = message(slot, j, tag);
            publish<WORDS>(at, words, tag);
        } else {
            Watchdog watchdog;
            watchdog.start(P.header, P.alarm, tag);
            await_slot<WORDS>(at, words, tag, watchdog);
            for (int j = 0; j < WORDS; ++j)
                if (words[j] != message(slot, j, tag)) count_up(P.wrong);
        }
    }
    sync_block();
    if (thread_index() == 0) finish(P.header, tag, block_count(), P.slots, P.slot_bytes);
}

LAUNCH_NUMBERS
