// Status words: slots in global memory, through which blocks tell each other aggregates and
// prefixes.
//
// A slot holds the words of one element. Payload and tag are in one naturally aligned word that is
// loaded and stored by single instructions, so that no fence and no separate flag is needed:
//
//     one word      8 bytes   {payload, tag}
//     more         16 bytes   {payload, payload, payload, tag}, as many as it takes
//
// Parts without payload hold the tag too, and all of them are compared: where a part of a load is
// not used, ptxas replaces the load by several narrower ones, and the slot may change between them.
//
// A slot is ready when all its tags are the tag of the launch: the epoch plus one. The epoch lives
// in device memory, counts launches and is raised by the last block that finishes, so that nothing
// is cleared between launches, also when a CUDA graph is replayed. A slot is written once per
// launch and does not change afterwards. A workspace has slots of 8 or of 16 bytes, never both, so
// that a payload is never read as a tag. Before the epoch would repeat, the last block clears all
// slots.
//
// For the protocol a launch ends when all warps that read slots have finished. The last tiles may
// still be scanned and stored then: signalling the end before the last stores saves 1 to 2 us per
// launch.
//
// Progress: lanes_scan.cuh and rows_scan.cuh say why no block waits forever. The watchdog ends the
// wait of a launch that nevertheless does not progress.
//
// Uses load_word*, store_word*, load_counter, … of device.cuh, or of another file on the CPU.
#pragma once

constexpr u64 PATIENCE = 15000000000ull;  // nanoseconds that a block waits for one slot
constexpr u32 POLLS_PER_TIME = 1024;      // polls per reading of the clock: about a millisecond
constexpr u32 LAST_EPOCH = 0xfffffffeu;

struct Header {
    u32 done;       // warps that read slots and have finished
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

// A poll of one slot: load() starts it, ready() reads it. Several can be in flight.
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
    // Whether to stop waiting; called after every poll that found a slot not ready.
    INLINE_MEMBER bool stops() {
        if (gave_up) return true;
        if (++polls % POLLS_PER_TIME != 0) return false;
        const u64 now = nanoseconds();
        if (begin == 0) begin = now;
        if (now - begin < PATIENCE && load_counter(&header->abandoned) != tag) return false;
        store_counter(&header->abandoned, tag);
        store_system(alarm, 1);
        return gave_up = true;
    }
};

INLINE u32 launch_tag(const Header* header) { return load_counter(&header->epoch) + 1; }

// Signals the end of the launch. Called by each of the `readers` of slots in all blocks, after its
// last poll and after the last slot of its block is published. `bytes` is the size of the whole
// workspace: earlier launches may have used more of it than this one.
INLINE void finish(Header* header, u32 tag, int readers, char* slots, i64 bytes) {
    if (count_up(&header->done) + 1 != (u32)readers) return;
    u32 epoch = tag;
    if (epoch == LAST_EPOCH) {
        const Word128 zero = {{0, 0, 0, 0}};
        for (i64 k = 0; k < bytes; k += 16) store_word128(slots + k, zero);
        epoch = 0;
    }
    store_word64((char*)header, Word64{{0, epoch}});
}
