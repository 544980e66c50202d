// The walk of lanes_walk.cuh where chains are few and long: an axis is cut into parts, which are
// walked at the same time.
//
// The state before a part is not known until the part before it has been walked. But many steps
// forget: however different two states are, after enough of the same steps they are equal, to the
// last bit. So each part but the first starts from init, `warm` steps early. The states are kept
// before its own first step and after every CHECK steps.
//
// The block that finishes its part last then goes through all parts of the chain, in order. Where a
// part began with the very state that the part before ended with, it is right as it is. Where it
// did not, the block walks along the part itself, from the right state, until its state is one of
// those that were kept: the rest is right. So no result depends on a guess, whatever the step does;
// what it forgets decides about the time alone. No block waits for another.
//
// A step that does not forget would be walked twice. So a part is first tried (P.trial > 0): it is
// walked to from init twice, from `trial` and from `warm` steps before its first one. If the two
// states are not alike, the step does not forget, and the part is left to the last block.
//
// A component that only sums what each step adds to it, as the gradient of a parameter does, never
// forgets. So sums begin anew after every CHECK steps. Those of a part are added in order, then
// those of the parts: in the same order whoever walked.
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
    // The state after every CHECK steps and after the last one, each with the sums of these steps.
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
    // The states that are kept from this word on; components that are not kept stay as they are.
    INLINE_MEMBER void read(State* states, int word) const {
        UNROLL for (int v = 0; v < CHANNELS; ++v) {
            u32 words[KEPT_WORDS];
            UNROLL for (int k = 0; k < KEPT_WORDS; ++k) words[k] = load(word + k, v);
            from_kept(states[v], words);
        }
    }
    INLINE_MEMBER bool is_walked() const { return all_lanes(load(IS_WALKED, 0) != 0); }
    // The first word of what is kept so many steps after the first.
    static INLINE_MEMBER int check(i64 steps) {
        return CHECKS + (int)((steps + CHECK - 1) / CHECK - 1) * KEPT_WORDS;
    }
    // Whether these states are those that are kept from this word on. If so, the rest of the part is
    // right: they become the states after its last step (whose words are `last`), and the sums of
    // the rest are added.
    INLINE_MEMBER bool completes(State* states, State* sums, int word, int last,
                                 int channels) const {
        State then[CHANNELS];
        UNROLL for (int v = 0; v < CHANNELS; ++v) then[v] = states[v];
        read(then, word);
        if (!all_lanes(are_equal(then, states, channels))) return false;
        ROLLED for (word = HAS_SUMS ? word + KEPT_WORDS : last; word <= last; word += KEPT_WORDS) {
            read(states, word);
            UNROLL for (int v = 0; v < CHANNELS; ++v) add_sums(sums[v], states[v]);
        }
        return true;
    }
};

// Whether two states of each channel are about the same, in every lane.
INLINE bool are_alike(const State* first, const State* second, int channels) {
    bool alike = true;
    UNROLL for (int v = 0; v < CHANNELS; ++v)
        alike = alike && (v >= channels || are_near(first[v], second[v]));
    return all_lanes(alike);
}
// The next part, from this one on, that was walked.
INLINE int first_walked(const Params& P, int chain, int part, int lane) {
    Record record;
    ROLLED for (; part < P.parts; ++part) {
        record.find(P, chain, part, lane);
        if (record.is_walked()) break;
    }
    return part;
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

// Whether all other parts of the chain are done. What their blocks have written is then visible.
INLINE bool is_last(const Params& P, int chain, int lane) {
    u32* const counter = (u32*)P.slots + chain;
    Walker::meet();
    const u32 others = shuffle_from(lane == 0 ? count_up(counter) : 0, 0);
    if ((int)others + 1 < P.parts) return false;
    if (lane == 0) store_counter(counter, 0);  // for the next launch
    Walker::meet();
    return true;
}

// A block's walks along pieces of a chain.
struct PieceWalk {
    Pipeline pipeline;
    char* ring;
    int chain;

    INLINE_MEMBER Place& place() { return pipeline.walker.place; }
    // Goes to a step; copies go on up to `stop`.
    INLINE_MEMBER void start(const Params& P, i64 step, i64 stop) {
        copies_wait<0>();  // of a walk that ended early
        Walker::meet();
        place().chain = chain, place().step = step, place().stop = stop;
        pipeline.start(P, ring);
    }
    // Walks on, up to this step.
    INLINE_MEMBER void walk(const Params& P, i64 stop) {
        place().chain = chain, place().stop = stop;
        ROLLED while (place().exists(P)) pipeline.walk(P, ring);
    }
};

KERNEL(ALL_THREADS, BLOCKS_PER_PROCESSOR) scan(PARAMETERS(Params, P)) {
    // What a block does: the trial of a part, the steps before it, the part; then, in the last block
    // of a chain, the parts that are not right.
    enum Phase { TRIAL, BEFORE, PART, MEND };
    PieceWalk piece;
    piece.ring = shared_memory() + RING_AT;
    Walker& walker = piece.pipeline.walker;
    Place& here = walker.place;
    const int lane = walker.lane = thread_index();
    ROLLED for (int job = block_index(); job < P.chains * P.parts; job += block_count()) {
        piece.chain = here.chain = job / P.parts;
        int part = job - piece.chain * P.parts;
        here.find(P);
        walker.enter(P);
        State tried[CHANNELS], sums[CHANNELS], sums_of_part[CHANNELS];
        Record record;
        record.find(P, piece.chain, part, lane);
        Phase phase = part == 0 ? PART : P.trial > 0 ? TRIAL : BEFORE;
        ROLLED while (true) {
            const i64 first = part * P.part_steps;
            int next = part + 1;
            bool joins = phase == MEND && record.is_walked();  // it may reach a state that was kept
            if (phase == MEND && !joins) next = first_walked(P, piece.chain, next, lane);
            const i64 end = next < P.parts ? next * P.part_steps : P.length;
            const bool writes = phase == PART || phase == MEND;
            const i64 stop = writes ? end : first;
            // Steps before the part write their outputs to its first places, which it overwrites.
            here.step = first;
            walker.outputs.find(P, here, lane);
            if (phase != PART || part == 0)
                piece.start(P, first - (phase == TRIAL ? P.trial : phase == BEFORE ? P.warm : 0),
                            phase == TRIAL ? first : end);
            if (phase == PART) record.write_before(walker.carry, true);
            UNROLL for (int v = 0; v < CHANNELS; ++v) {
                if (writes && part > 0) clear_sums(walker.carry[v]);
                sums_of_part[v] = walker.carry[v];
                clear_sums(sums_of_part[v]);
            }
            ROLLED while (here.step < stop) {
                i64 then = here.step + CHECK;  // where the sums begin anew
                if (!writes || then > stop) then = stop;
                piece.walk(P, then);
                if (!writes) break;
                UNROLL for (int v = 0; v < CHANNELS; ++v)
                    add_sums(sums_of_part[v], walker.carry[v]);
                const int check = Record::check(then - first);
                if (phase == PART) record.write(walker.carry, check);
                if (joins && record.completes(walker.carry, sums_of_part, check,
                                              Record::check(end - first), walker.channels))
                    break;
                UNROLL for (int v = 0; v < CHANNELS; ++v) clear_sums(walker.carry[v]);
                if (phase == MEND && then < stop && then % P.part_steps == 0)
                    UNROLL for (int v = 0; v < CHANNELS; ++v) {
                        add_sums(sums[v], sums_of_part[v]);
                        clear_sums(sums_of_part[v]);
                    }
            }
            if (phase == TRIAL) {
                UNROLL for (int v = 0; v < CHANNELS; ++v) tried[v] = walker.carry[v];
                walker.restart(P, walker.carry);
                phase = BEFORE;
                continue;
            }
            if (phase == BEFORE) {
                if (P.trial == 0 || are_alike(tried, walker.carry, walker.channels)) {
                    phase = PART;
                    continue;
                }
                record.write_before(walker.carry, false);
            }
            if (phase == PART) {
                UNROLL for (int v = 0; v < CHANNELS; ++v)
                    take_sums(walker.carry[v], sums_of_part[v]);
                record.write(walker.carry, Record::AFTER);
            }
            if (phase == MEND) {
                UNROLL for (int v = 0; v < CHANNELS; ++v) add_sums(sums[v], sums_of_part[v]);
            } else {
                if (!is_last(P, piece.chain, lane)) break;
                phase = MEND, next = 1;
                record.find(P, piece.chain, 0, lane);
                record.read(walker.carry, Record::AFTER);
                UNROLL for (int v = 0; v < CHANNELS; ++v) sums[v] = walker.carry[v];
            }
            part = pass_right_ones(P, piece.chain, next, walker.carry, sums, walker.channels, lane);
            record.find(P, piece.chain, part, lane);
            if (part == P.parts) break;
        }
        if (HAS_FINAL && phase == MEND) {
            UNROLL for (int v = 0; v < CHANNELS; ++v) {
                take_sums(walker.carry[v], sums[v]);
                if (v < walker.channels)
                    store_final(P, here.row, walker.channel(v), here.sequence, walker.carry[v]);
            }
        }
    }
    copies_wait<0>();
}

LAUNCH_NUMBERS
