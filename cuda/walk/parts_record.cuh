// What the blocks of a chain tell each other where its axis is cut into parts (parts_walk.cuh): a
// record of each part, and counters, by which a block finds out whether a neighbour has written its
// record.
#pragma once
#include "walker.cuh"

// Whether a lane's states are equal, to the bit. Sums, and what no step changes, are not compared.
INLINE bool are_equal(const State* first, const State* second, int channels) {
    bool equal = true;
    UNROLL for (int v = 0; v < CHANNELS; ++v) {
        u32 a[KEPT_WORDS], b[KEPT_WORDS];
        to_kept(first[v], a), to_kept(second[v], b);
        UNROLL for (int k = 0; k < FORGOTTEN_WORDS; ++k)
            equal = equal && (a[k] == b[k] || v >= channels);
    }
    return equal;
}

// What is kept of a part: word by word, for each channel.
struct Record {
    static constexpr int AFTER = 0;             // the state after its last step, and its sums
    static constexpr int BEFORE = KEPT_WORDS;   // the state before its first step
    static constexpr int IS_WALKED = 2 * KEPT_WORDS;  // whether it was walked
    // The state after every CHECK steps and after the last one, each with the sums of the steps since
    // the one before.
    static constexpr int CHECKS = IS_WALKED + 1;
    u32* at;  // of the lane's first channel

    INLINE_MEMBER void find(const Params& P, int chain, int part, int lane) {
        at = (u32*)(P.slots + COUNTER_BYTES + ((i64)chain * P.parts + part) * P.record_bytes) +
             lane * CHANNELS;
    }
    INLINE_MEMBER u32 load(int word, int v) const {
        return load_counter(at + (i64)word * BLOCK_CHANNELS + v);
    }
    INLINE_MEMBER void store(int word, int v, u32 x) const {
        store_counter(at + (i64)word * BLOCK_CHANNELS + v, x);
    }
    INLINE_MEMBER void write(const State* states, int word) const {
        UNROLL for (int v = 0; v < CHANNELS; ++v) {
            u32 words[KEPT_WORDS];
            to_kept(states[v], words);
            UNROLL for (int k = 0; k < KEPT_WORDS; ++k) store(word + k, v, words[k]);
        }
    }
    INLINE_MEMBER void write_before(const State* states, bool is_walked) const {
        write(states, BEFORE);
        store(IS_WALKED, 0, is_walked);
    }
    // The states that are kept at this word; components that are not kept stay as they are.
    INLINE_MEMBER void read(State* states, int word) const {
        UNROLL for (int v = 0; v < CHANNELS; ++v) {
            u32 words[KEPT_WORDS];
            UNROLL for (int k = 0; k < KEPT_WORDS; ++k) words[k] = load(word + k, v);
            from_kept(states[v], words);
        }
    }
    INLINE_MEMBER bool is_walked() const { return all_lanes(load(IS_WALKED, 0) != 0); }
    // Where the state after so many steps of the part is kept.
    static INLINE_MEMBER int check(i64 steps) {
        return CHECKS + (int)((steps + CHECK - 1) / CHECK - 1) * KEPT_WORDS;
    }
    // Whether these states are those that are kept at this word.
    INLINE_MEMBER bool holds(const State* states, int word, int channels) const {
        State kept[CHANNELS];
        UNROLL for (int v = 0; v < CHANNELS; ++v) kept[v] = states[v];
        read(kept, word);
        return all_lanes(are_equal(kept, states, channels));
    }
    // Takes the states that are kept at `last`, the end of the part, and adds all sums that are kept
    // after those at `word`.
    INLINE_MEMBER void skip(State* states, State* sums, int word, int last) const {
        ROLLED for (word = HAS_SUMS ? word + KEPT_WORDS : last; word <= last; word += KEPT_WORDS) {
            read(states, word);
            UNROLL for (int v = 0; v < CHANNELS; ++v) add_sums(sums[v], states[v]);
        }
    }
};

// The next part, from this one on, that was walked. Each lane looks at another part.
INLINE int first_walked(const Params& P, int chain, int part, int lane) {
    ROLLED for (; part < P.parts; part += 32) {
        Record record;
        record.find(P, chain, least(part + lane, P.parts - 1), 0);
        const u32 walked =
            lanes_where(part + lane < P.parts && record.load(Record::IS_WALKED, 0) != 0);
        if (walked != 0) return part + lowest_bit(walked);
    }
    return P.parts;
}

// Goes on through the parts of a chain that are right, from this one on, and returns the first that
// is not. `carry` is the state before `part`; it becomes the state before the part that is
// returned. LOOKS records are read at a time: a read takes about as long as ten steps.
INLINE int pass_right_ones(const Params& P, int chain, int part, State* carry, State* sums,
                           int channels, int lane) {
    constexpr int LOOKS = KEPT_WORDS <= 4 ? 4 : 1;
    ROLLED while (part < P.parts) {
        State before[LOOKS][CHANNELS], after[LOOKS][CHANNELS];
        bool walked[LOOKS];
        UNROLL for (int k = 0; k < LOOKS; ++k) {
            Record record;
            record.find(P, chain, least(part + k, P.parts - 1), lane);
            UNROLL for (int v = 0; v < CHANNELS; ++v) before[k][v] = after[k][v] = carry[v];
            record.read(before[k], Record::BEFORE);
            record.read(after[k], Record::AFTER);
            walked[k] = record.load(Record::IS_WALKED, 0) != 0;
        }
        UNROLL for (int k = 0; k < LOOKS; ++k) {
            if (part >= P.parts ||
                !all_lanes(walked[k] && are_equal(before[k], carry, channels)))
                return part;
            UNROLL for (int v = 0; v < CHANNELS; ++v) {
                carry[v] = after[k][v];
                add_sums(sums[v], carry[v]);
            }
            ++part;
        }
    }
    return part;
}

// The counters of a chain, which are zero between launches.
struct Counters {
    u32* at;  // counter k of all chains stand side by side
    int chains, parts, lane;

    INLINE_MEMBER void find(const Params& P, int chain, int lane_) {
        at = (u32*)P.slots + chain;
        chains = P.chains, parts = P.parts, lane = lane_;
    }
    // Counter k is that of the edge before part k. Counter 0 counts the finished blocks.
    INLINE_MEMBER u32* counter(int k) const { return at + (i64)k * chains; }
    // Whether some edge has to be looked at again.
    INLINE_MEMBER u32* is_open() const { return counter(parts); }

    // The edges of this part whose other part is done too, as bits: 1, the edge before it; 2, the
    // edge after it. What the other block has written is then visible.
    INLINE_MEMBER u32 arrive(int part) const {
        Walker::meet();
        const int edge = part + lane;
        u32 others = 0;
        if (lane < 2 && edge > 0 && edge < parts) {
            others = count_up(counter(edge));
            if (others > 0) store_counter(counter(edge), 0);
        }
        others = shuffle_from(others, 0) | shuffle_from(others, 1) << 1;
        Walker::meet();
        return others;
    }
    // Counts this block as finished, with its `open`. Returns whether it is the last one: then what
    // the others have written is visible, and `open` is whether any of them has set it.
    INLINE_MEMBER bool finish(bool& open) const {
        Walker::meet();
        u32 others = 0, any = 0;
        if (lane == 0) {
            if (open) store_counter(is_open(), 1);
            others = count_up(counter(0));
            if ((int)others + 1 == parts) {
                any = load_counter(is_open());
                store_counter(is_open(), 0), store_counter(counter(0), 0);
            }
        }
        others = shuffle_from(others, 0), open = shuffle_from(any, 0) != 0;
        Walker::meet();
        return (int)others + 1 == parts;
    }
};
