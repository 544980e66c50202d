// Which tiles a block of a walk takes, and where they lie in memory.
//
// A chain is the tiles of BLOCK_CHANNELS adjacent channels, from the first step of a row or of a
// packed sequence to the last. A block takes one chain after another, every block_count()-th; or,
// IN_PARTS, some steps of a chain (parts_walk.cuh).
#pragma once
#include "lanes_memory.cuh"

static_assert(HAS_INIT && !SEGMENTED && COLUMNS == 32, "a block is one warp");
static_assert(!(IN_PARTS && SEQUENCES), "packed sequences are walked as a whole");

// A tile, from which `next` leads to the block's other ones.
struct Place {
    int chain, row, sequence;  // row: which of `outer`; sequence: which packed one, else 0
    i64 channel;               // the first one
    i64 begin, length;         // where the sequence begins on the axis, and its number of steps
    i64 step;                  // the tile's first step, counted from the sequence's
    i64 stop;                  // IN_PARTS: the walk that is under way ends before this step

    INLINE_MEMBER bool exists(const Params& P) const { return chain < P.chains; }
    // Goes to the first tile of the chain or, if that has no steps, of the next one that has.
    INLINE_MEMBER void start(const Params& P) {
        ROLLED for (; exists(P); chain += block_count()) {
            find(P);
            if (length > 0) return;
        }
    }
    // Goes to the first tile of the chain: finds all of the above from `chain`.
    INLINE_MEMBER void find(const Params& P) {
        step = 0;
        const int m = row_of(P, chain);
        channel = (i64)(chain - m * P.channel_blocks) * BLOCK_CHANNELS;
        row = m, sequence = 0, begin = 0, length = P.length;
#if SEQUENCES
        row = m / sequences_of(P), sequence = m - row * sequences_of(P);
        begin = bounded(P, offset_at(P, sequence));
        const i64 end = bounded(P, offset_at(P, sequence + 1));
        length = end > begin ? end - begin : 0;
#endif
    }
    // An offset, within the axis. Wrong ones raise an error at the next call only, and until then
    // must not lead to other memory.
    static INLINE_MEMBER i64 bounded(const Params& P, i64 at) {
        return at < 0 ? 0 : at < P.length ? at : P.length;
    }
    // The step before which the walk ends.
    INLINE_MEMBER i64 end() const { return IN_PARTS ? stop : length; }
    // Whether it ends with the last step of the sequence.
    INLINE_MEMBER bool to_the_last() const { return !IN_PARTS || stop == length; }
    // Goes on by so many tiles.
    INLINE_MEMBER void next(const Params& P, int tiles) {
        step += (i64)tiles * ITEMS;
        if (step < end()) return;
        chain = IN_PARTS ? P.chains : chain + block_count();
        if (!IN_PARTS) start(P);
    }
    // How many tiles are whole, one after another from this one on: all their steps and channels
    // exist and, unless all steps are alike (LAST_ALIKE), the step after them does, too. SHIFTED
    // leaves are read there, and at the last step they have boundary values.
    INLINE_MEMBER int whole(const Params& P) const {
        const i64 left = end() - step - (LAST_ALIKE || !to_the_last() ? 0 : 1);
        if (!exists(P) || left < ITEMS || channel + BLOCK_CHANNELS > P.channels) return 0;
        return left < (1 << 30) ? (int)left / ITEMS : (1 << 30) / ITEMS;
    }
    // Where the step that comes k after the tile's first one lies on the axis.
    INLINE_MEMBER i64 at(i64 k) const {
        return REVERSE ? begin + length - 1 - step - k : begin + step + k;
    }
};
