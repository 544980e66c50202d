// Which tiles a block of a walk takes, and where they lie in memory.
#pragma once
#include "lanes_memory.cuh"

static_assert(HAS_INIT && !SEGMENTED && COLUMNS == 32, "a block is one warp");

// The tiles of a block, chain by chain.
struct Place {
    int chain, row, sequence;  // of sequences that are not packed there is one
    i64 channel;               // of lane 0
    i64 begin, length, step;   // where the sequence begins, its steps, the tile's first step

    INLINE_MEMBER bool exists(const Params& P) const { return chain < P.chains; }
    // The first tile of the chain, or of the next one that has steps.
    INLINE_MEMBER void start(const Params& P) {
        ROLLED for (; exists(P); chain += block_count()) {
            find(P);
            if (length > 0) return;
        }
    }
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
    // Offsets are checked before, but other memory is never touched.
    static INLINE_MEMBER i64 bounded(const Params& P, i64 at) {
        return at < 0 ? 0 : at < P.length ? at : P.length;
    }
    // Goes on by so many tiles.
    INLINE_MEMBER void next(const Params& P, int tiles) {
        step += (i64)tiles * ITEMS;
        if (step < length) return;
        chain += block_count();
        start(P);
    }
    // From this tile on, of how many all steps and channels exist, and the step after them.
    INLINE_MEMBER int whole(const Params& P) const {
        const i64 left = length - step - 1;
        if (!exists(P) || left < ITEMS || channel + BLOCK_CHANNELS > P.channels) return 0;
        return left < (1 << 30) ? (int)left / ITEMS : (1 << 30) / ITEMS;
    }
    // The place in memory of a step that is counted from the tile's first one.
    INLINE_MEMBER i64 at(i64 k) const {
        return REVERSE ? begin + length - 1 - step - k : begin + step + k;
    }
};
