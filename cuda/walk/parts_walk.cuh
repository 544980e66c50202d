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
// reaches a state that was kept at the same step. What follows needs no change. All edges are mended
// at the same time.
//
// If it reaches no kept state, the part now ends with another state, and the next edge may have been
// compared with the old one. Then, and wherever there are sums (below), the block that finishes last
// goes through all edges of the chain again, in order. So no result depends on a guess, whatever the
// step does; how fast it forgets changes only the time. No block waits for another.
//
// A step that does not forget would be walked twice. So a part is first tried (P.trial > 0), on the
// P.trial steps before it. Two walks along them end with two states: one starts there from init, the
// other started from init P.warm steps before the part. How much of the difference of the states that
// they start with is left at the end decides. At most P.residue / 65536: the part is walked. More,
// but at most P.distant_residue / 65536: it is begun P.distant steps early. Still more: the block
// that finishes last walks it.
//
// That is asked of every channel, since a step that multiplies leaves the same share each time. A
// step that decides, such as a neuron that fires, forgets all at once, sooner or later. Of its
// channels P.slow in 32 may still differ (`WalkStep.decides`).
//
// A component that only sums what each step adds to it, as the gradient of a parameter does, never
// forgets. So each CHECK steps have a sum of their own. These are added in the order of the steps
// within a part, then part by part, whichever block walked.
#pragma once
#include "parts_record.cuh"

// Whether of 32 lanes in which there was a difference `before`, all but `slow` have at most residue /
// 65536 of it `after`.
INLINE bool has_shrunk(const float* before, const float* after, int residue, int slow, int channels) {
    const float most = (float)residue * 0x1p-16f;
    bool differed = false, shrunk = true;
    UNROLL for (int v = 0; v < CHANNELS; ++v)
        if (v < channels) {
            differed = differed || !(before[v] == 0);
            shrunk = shrunk && (after[v] == 0 || after[v] <= before[v] * most);
        }
    return 32 * count_bits(lanes_where(!shrunk)) <= slow * count_bits(lanes_where(differed));
}

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
    // Moves the sums of these states to `sums`: they are zero then.
    INLINE_MEMBER void take(State* carry) {
        UNROLL for (int v = 0; v < CHANNELS; ++v) {
            add_sums(sums[v], carry[v]);
            clear_sums(carry[v]);
        }
    }
    // Moves `sums` to the sums of these states.
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
    // Outputs are written from here on as if this step were the next one.
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

// What a block does: the trial of a part, the steps before it, the part; then it mends a part after
// an edge that does not fit, of the two of its own part. The block that finishes last goes through
// the chain.
enum Phase { TRIAL, BEFORE, PART, MEND, FINISH };

// The step at which a walk halts next, since something is done with the states there: where it may
// reach a kept state (`joins`), after CHECK steps; before a part, at the start of its trial, and after
// P.warm steps; where the sums of parts are kept apart, at the next `edge`.
INLINE i64 next_halt(const Params& P, Phase phase, bool joins, i64 step, i64 first, i64 edge,
                     i64 stop) {
    i64 halt = stop;
    if (joins) {
        halt = step + CHECK;
    } else if (phase == BEFORE) {
        const i64 trial = first - P.trial;
        halt = step + P.warm;
        if (step < trial && trial < halt) halt = trial;
    } else if (phase == FINISH && HAS_SUMS) {
        halt = edge;
    }
    return halt < stop ? halt : stop;
}

KERNEL(ALL_THREADS, BLOCKS_PER_PROCESSOR) scan(PARAMETERS(Params, P)) {
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
        State tried[CHANNELS], sums[CHANNELS];
        float before[CHANNELS];  // differences where the trial starts
        Counters counters;
        counters.find(P, piece.chain, lane);
        u32 edges = 0;       // of the own part, those that have not been looked at, as bits
        bool open = false;   // whether an edge must be looked at again, by the block that finishes last
        int early = P.warm;  // the part is begun so many steps before its first one
        Record record;
        record.find(P, piece.chain, part, lane);
        Phase phase = part == 0 ? PART : P.trial > 0 ? TRIAL : BEFORE;
        // All phases share one call of `walk`, since its code is long.
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
                const i64 from = phase == TRIAL ? P.trial : phase == BEFORE ? early : 0;
                piece.start(P, from < first ? first - from : 0, phase == TRIAL ? first : end);
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
                const i64 halt = next_halt(P, phase, joins, here.step, first, edge, stop);
                piece.walk(P, halt, marks);
                if (phase == BEFORE) {
                    if (halt == first - P.trial && early == P.warm) {
                        State init[CHANNELS];
                        walker.restart(P, init);
                        UNROLL for (int v = 0; v < CHANNELS; ++v)
                            before[v] = difference(walker.carry[v], init[v], 0);
                    }
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
                bool is_walked = true, is_distant = false;
                if (P.trial > 0 && early == P.warm) {
                    float after[CHANNELS];
                    UNROLL for (int v = 0; v < CHANNELS; ++v)
                        after[v] = difference(walker.carry[v], tried[v], ROUNDINGS);
                    is_walked = has_shrunk(before, after, P.residue, P.slow, walker.channels);
                    is_distant =
                        P.distant > 0 && has_shrunk(before, after, P.distant_residue, P.slow,
                                                    walker.channels);
                }
                if (is_walked) {
                    phase = PART;
                    continue;
                }
                if (is_distant) {
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
