// The walk of lanes_walk.cuh where chains are few and long: an axis is cut into parts, which are
// walked at the same time.
//
// The state before a part is not known until the part before it has been walked. But many steps
// forget: however different two states are, after enough of the same steps they are equal, to the
// last bit. So the state before each part but the first is guessed: the walk starts from init, P.warm
// steps earlier. Kept in memory are the state before the first step of the part, and the one after
// every CHECK of its steps.
//
// Where two parts meet is an edge. The block that finishes its part second compares the state that
// the part before the edge ended with and the one that the part after it began with. If they differ,
// it walks along the later part again, from the state that the earlier one ended with, until it
// reaches the state that was kept at the same step. What follows needs no change. All edges are
// mended at the same time.
//
// If it reaches none of them, the part now ends with another state, and the next edge may have been
// compared with the old one. Then the block that finishes last goes through all edges of the chain
// again, in order. So no result depends on a guess, whatever the step does; how fast it forgets
// changes only the time. No block waits for another.
//
// A step that does not forget would be walked twice. So a part is first tried (P.trial > 0). The
// state before it is computed twice from init: starting P.warm and P.trial steps earlier. The two
// differ when the trial starts. If at most P.residue / 65536 of that difference is left at its end,
// the part is walked. If more is, but at most P.distant_residue / 65536, it is begun P.distant steps
// early. If still more is left, the block that finishes last walks it.
//
// A component that only sums what each step adds to it, as the gradient of a parameter does, never
// forgets. So each CHECK steps have a sum of their own. These are added in the order of the steps
// within a part, then part by part, whichever block walked.
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

// Whether in every channel c and d differ by at most residue / 65536 of what a and b do.
INLINE bool are_near(const State* a, const State* b, const State* c, const State* d, int residue,
                     int channels) {
    const float most = (float)residue * 0x1p-16f;
    bool near = true;
    UNROLL for (int v = 0; v < CHANNELS; ++v)
        near = near && (v >= channels || is_near(a[v], b[v], c[v], d[v], most));
    return all_lanes(near);
}

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

// What happens at the marks of a walk, after every CHECK steps: the states are kept, and sums begin
// anew.
struct Marks {
    static constexpr int NEVER = 0x7fffffff;
    Record record;
    int word;              // of `record`, where the next states are kept; 0: they are not
    int left;              // the steps to the next mark; NEVER: there is none
    State sums[CHANNELS];  // of the steps before the last mark

    INLINE_MEMBER void pass(State* carry, int steps) {
        if (left == NEVER) return;
        left -= steps;
        if (left == 0) mark(carry);
    }
    INLINE_MEMBER void mark(State* carry) {
        if (word > 0) {
            record.write(carry, word);
            word += KEPT_WORDS;
        }
        take(carry);
        left = CHECK;
    }
    // Adds the sums of some states to `sums`, and sets them to zero.
    INLINE_MEMBER void take(State* carry) {
        UNROLL for (int v = 0; v < CHANNELS; ++v) {
            add_sums(sums[v], carry[v]);
            clear_sums(carry[v]);
        }
    }
    // Adds `sums` to those of other states, and sets them to zero.
    INLINE_MEMBER void give(State* total) {
        UNROLL for (int v = 0; v < CHANNELS; ++v) {
            add_sums(total[v], sums[v]);
            clear_sums(sums[v]);
        }
    }
};

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
    // Writes the next outputs where those of this step belong.
    INLINE_MEMBER void write_from(const Params& P, i64 step) {
        Place there = place();
        there.step = step;
        pipeline.walker.outputs.find(P, there, pipeline.walker.lane);
    }
    // Walks on, up to this step.
    INLINE_MEMBER void walk(const Params& P, i64 stop, Marks& marks) {
        place().chain = chain, place().stop = stop;
        ROLLED while (place().exists(P)) pipeline.walk(P, ring, marks);
    }
};

KERNEL(ALL_THREADS, BLOCKS_PER_PROCESSOR) scan(PARAMETERS(Params, P)) {
    // What a block does: the trial of a part, the steps before it, the part; then the parts after
    // edges that do not fit: those of its own part and, in the block that finishes last, all of the
    // chain. They share one call of `walk`, since its code is long.
    enum Phase { TRIAL, BEFORE, PART, MEND, FINISH };
    PieceWalk piece;
    piece.ring = shared_memory() + RING_AT;
    Walker& walker = piece.pipeline.walker;
    Place& here = walker.place;
    const int lane = walker.lane = thread_index();
    // The last parts come first. A kernel's first blocks may gather on the few multiprocessors that
    // are free before the others, and if the step does not forget, the first parts have all the work.
    ROLLED for (int job = block_index(); job < P.chains * P.parts; job += block_count()) {
        const int own = P.parts - 1 - job / P.chains;
        int part = own;
        piece.chain = here.chain = job % P.chains;
        here.find(P);
        walker.enter(P);
        State tried[CHANNELS], far[CHANNELS], sums[CHANNELS];
        Counters counters;
        counters.find(P, piece.chain, lane);
        u32 edges = 0;       // of the own part, those that have not been looked at, as bits
        bool open = false;   // whether an edge must be looked at again, by the block that finishes last
        int early = P.warm;  // the part is begun so many steps before its first one
        Record record;
        record.find(P, piece.chain, part, lane);
        Phase phase = part == 0 ? PART : P.trial > 0 ? TRIAL : BEFORE;
        ROLLED while (true) {
            const i64 first = part * P.part_steps;
            int next = part + 1;
            // Whether the walk may reach a state that was kept.
            const bool joins = phase == MEND || (phase == FINISH && record.is_walked());
            const bool keeps = phase == PART || phase == MEND;  // whether the record is written
            const bool writes = keeps || phase == FINISH;
            if (phase == FINISH && !joins) next = first_walked(P, piece.chain, next, lane);
            const i64 end = next < P.parts ? next * P.part_steps : P.length;
            const i64 stop = writes ? end : first;
            piece.write_from(P, first);
            if (phase != PART || part == 0) {
                const i64 before = phase == TRIAL ? P.trial : phase == BEFORE ? early : 0;
                piece.start(P, before < first ? first - before : 0, phase == TRIAL ? first : end);
            }
            if (keeps) record.write_before(walker.carry, true);
            Marks marks;
            marks.record = record;
            marks.word = phase == PART ? Record::CHECKS : 0;
            const bool has_marks = phase == PART || (phase == FINISH && HAS_SUMS && !joins);
            marks.left = has_marks ? CHECK : Marks::NEVER;
            UNROLL for (int v = 0; v < CHANNELS; ++v) {
                if (writes && part > 0) clear_sums(walker.carry[v]);
                marks.sums[v] = walker.carry[v];
                clear_sums(marks.sums[v]);
            }
            bool joined = false;
            i64 edge = first + P.part_steps;  // the next one
            ROLLED while (here.step < stop) {
                i64 halt = stop;
                if (joins) halt = here.step + CHECK;
                if (phase == BEFORE) halt = here.step + P.warm;
                if (phase == FINISH && HAS_SUMS && !joins) halt = edge;
                if (phase == BEFORE && here.step < first - P.trial && first - P.trial < halt)
                    halt = first - P.trial;
                if (halt > stop) halt = stop;
                piece.walk(P, halt, marks);
                if (phase == BEFORE) {
                    if (halt == first - P.trial && early == P.warm)
                        UNROLL for (int v = 0; v < CHANNELS; ++v) far[v] = walker.carry[v];
                    // Steps before the part write their outputs to its first places, which it
                    // overwrites. No part has fewer than P.warm.
                    piece.write_from(P, first);
                }
                if (joins) {
                    const int check = Record::check(halt - first);
                    joined = record.holds(walker.carry, check, walker.channels);
                    if (keeps) record.write(walker.carry, check);
                    marks.take(walker.carry);
                    if (joined) {
                        record.skip(walker.carry, marks.sums, check, Record::check(end - first));
                        break;
                    }
                }
                if (halt == edge && halt < stop) {
                    marks.give(sums);
                    edge += P.part_steps;
                }
            }
            if (marks.left < CHECK) marks.mark(walker.carry);
            if (phase == TRIAL) {
                UNROLL for (int v = 0; v < CHANNELS; ++v) tried[v] = walker.carry[v];
                walker.restart(P, walker.carry);
                phase = BEFORE;
                continue;
            }
            if (phase == BEFORE) {
                bool near = true, distant = false;
                if (P.trial > 0 && early == P.warm) {
                    State init[CHANNELS];
                    walker.restart(P, init);
                    near = are_near(far, init, walker.carry, tried, P.residue, walker.channels);
                    distant = P.distant > 0 && are_near(far, init, walker.carry, tried,
                                                        P.distant_residue, walker.channels);
                }
                if (near) {
                    phase = PART;
                    continue;
                }
                if (distant) {
                    early = P.distant;
                    walker.restart(P, walker.carry);
                    continue;
                }
                record.write_before(walker.carry, false);
            }
            if (keeps) {
                UNROLL for (int v = 0; v < CHANNELS; ++v)
                    take_sums(walker.carry[v], marks.sums[v]);
                record.write(walker.carry, Record::AFTER);
            }
            if (phase == FINISH) {
                marks.give(sums);
            } else {
                if (phase == MEND) open = open || !joined;
                else edges = counters.arrive(own);
                bool mends = false;
                ROLLED while (edges != 0 && !mends) {
                    part = edges & 1 ? own : own + 1;
                    edges &= edges - 1;
                    Record earlier;
                    earlier.find(P, piece.chain, part - 1, lane);
                    record.find(P, piece.chain, part, lane);
                    if (!earlier.is_walked() || !record.is_walked()) {
                        open = true;
                        continue;
                    }
                    earlier.read(walker.carry, Record::AFTER);
                    mends = !record.holds(walker.carry, Record::BEFORE, walker.channels);
                }
                if (mends) {
                    phase = MEND;
                    continue;
                }
                if (!counters.finish(open)) break;
                phase = FINISH, next = 1;
                const bool is_right = !HAS_SUMS && !open;
                record.find(P, piece.chain, is_right ? P.parts - 1 : 0, lane);
                record.read(walker.carry, Record::AFTER);
                if (is_right) break;
                UNROLL for (int v = 0; v < CHANNELS; ++v) sums[v] = walker.carry[v];
            }
            part = pass_right_ones(P, piece.chain, next, walker.carry, sums, walker.channels, lane);
            record.find(P, piece.chain, part, lane);
            if (part == P.parts) break;
        }
        if (HAS_FINAL && phase == FINISH) {
            UNROLL for (int v = 0; v < CHANNELS; ++v) {
                if (HAS_SUMS) take_sums(walker.carry[v], sums[v]);
                if (v < walker.channels)
                    store_final(P, here.row, walker.channel(v), here.sequence, walker.carry[v]);
            }
        }
    }
    copies_wait<0>();
}

LAUNCH_NUMBERS
