// Status words: how blocks tell each other the aggregates of their tiles.
//
// A slot holds an aggregate's words. Payload and tag are in one naturally aligned word that is
// loaded and stored by single instructions, so that no fence and no separate flag is needed:
//
//     one word      8 bytes   {payload, tag}
//     more         16 bytes   {payload, payload, payload, tag}, as many as it takes
//
// Parts that no payload fills hold the tag too, and all of them are compared: where a part of a load
// is not used, ptxas replaces the load by several narrower ones, between which a slot may change.
//
// A slot is ready when all its tags are the launch's. A tag is the epoch plus one; the epoch lives
// in device memory, counts launches and is raised by the last block that finishes: nothing is
// cleared between launches, replays of a CUDA graph included. A slot is written once per launch and
// never changes afterwards. Payloads are never read as tags: a workspace has slots of 8 or of 16
// bytes, never both. Before the epoch would repeat, the last block clears all slots.
//
// A launch ends, for the protocol, when all warps that look at slots are done with them: while the
// last tiles are still scanned and stored.
//
// Progress: a block waits only for tiles of the same wave or an earlier one; the launch is
// cooperative, so every block runs, and a block publishes a tile before it waits for it (lanes_scan.cuh,
// rows_scan.cuh). The watchdog ends the wait of a launch that nevertheless does not progress.
//
// Uses load_word*, store_word*, load_counter, … of device.cuh or of a version for the CPU.
#pragma once

constexpr u64 PATIENCE = 15000000000ull;  // nanoseconds that a block waits for one slot
constexpr u32 POLLS_PER_LOOK = 1024;      // at the clock: about once a millisecond
constexpr u32 LAST_EPOCH = 0xfffffffeu;

struct Header {
    u32 done;       // lookers that have finished
    u32 epoch;      // launches so far
    u32 abandoned;  // the tag of a launch whose blocks stop waiting
    u32 unused[61];
};

template <int WORDS>
constexpr int SLOT_BYTES = WORDS == 1 ? 8 : 16 * ((WORDS + 2) / 3);

template <int WORDS>
INLINE void publish(char* slot, const u32* payload, u32 tag) {
    if constexpr (WORDS == 1) {
        store_word64(slot, Word64{{payload[0], tag}});
    } else {
        UNROLL for (int k = 0; k < WORDS; k += 3) {
            Word128 word;
            UNROLL for (int p = 0; p < 3; ++p)
                word.part[p] = k + p < WORDS ? payload[k + p < WORDS ? k + p : k] : tag;
            word.part[3] = tag;
            store_word128(slot + 16 * (k / 3), word);
        }
    }
}

// What one look at a slot finds; several looks can be under way before the first is read.
template <int WORDS>
struct Look {
    Word128 word[(WORDS + 2) / 3];
    INLINE_MEMBER void load(const char* slot) {
        UNROLL for (int k = 0; k < WORDS; k += 3) word[k / 3] = load_word128(slot + 16 * (k / 3));
    }
    INLINE_MEMBER bool ready(u32* payload, u32 tag) const {
        bool all = true;
        UNROLL for (int k = 0; k < (WORDS + 2) / 3; ++k)
            UNROLL for (int p = 0; p < 4; ++p) {
                const u32 part = word[k].part[p];
                if (p < 3 && 3 * k + p < WORDS) payload[3 * k + p] = part;
                else all = all && part == tag;
            }
        return all;
    }
};
template <>
struct Look<1> {
    Word64 word;
    INLINE_MEMBER void load(const char* slot) { word = load_word64(slot); }
    INLINE_MEMBER bool ready(u32* payload, u32 tag) const {
        payload[0] = word.part[0];
        return word.part[1] == tag;
    }
};

struct Watchdog {
    Header* header;
    u32* alarm;  // in the host's memory
    u32 tag;
    bool gave_up;
    u32 polls;
    u64 begin;

    INLINE_MEMBER void start(Header* h, u32* a, u32 t) {
        header = h, alarm = a, tag = t, gave_up = false, polls = 0, begin = 0;
    }
    INLINE_MEMBER void found() { polls = 0, begin = 0; }
    // Whether to stop waiting; to be asked after every look that was too early.
    INLINE_MEMBER bool stops() {
        if (gave_up) return true;
        if (++polls % POLLS_PER_LOOK != 0) return false;
        const u64 now = nanoseconds();
        if (begin == 0) begin = now;
        if (now - begin < PATIENCE && load_counter(&header->abandoned) != tag) return false;
        store_counter(&header->abandoned, tag);
        store_system(alarm, 1);
        return gave_up = true;
    }
};

// Polls a slot until it is ready: the simplest look. Others poll several slots at a time
// (`await_slots` in element.cuh).
template <int WORDS>
INLINE void await_slot(const char* slot, u32* payload, u32 tag, Watchdog& watchdog) {
    Look<WORDS> look;
    do look.load(slot);
    while (!look.ready(payload, tag) && !watchdog.stops());
    watchdog.found();
}

INLINE u32 launch_tag(const Header* header) { return load_counter(&header->epoch) + 1; }

// By each of `lookers` in all blocks, after all that it has looked at and all that was published
// for tiles of its own. `bytes` is what the workspace has: larger launches before this one may have
// used all of it.
INLINE void finish(Header* header, u32 tag, int lookers, char* slots, i64 bytes) {
    if (count_up(&header->done) + 1 != (u32)lookers) return;
    u32 epoch = tag;
    if (epoch == LAST_EPOCH) {
        const Word128 zero = {{0, 0, 0, 0}};
        for (i64 k = 0; k < bytes; k += 16) store_word128(slots + k, zero);
        epoch = 0;
    }
    store_word64((char*)header, Word64{{0, epoch}});
}
