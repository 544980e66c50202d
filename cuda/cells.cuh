// Cells: the bytes of one leaf that a thread holds at one step, and how they are copied and read.
//
// Input<J> and Output<J> (generated) describe leaf J: Memory, the type of its scalars in memory;
// SCALARS, their number per element; ALIGN, a power of two that divides its addresses, in bytes;
// ONE: it is the same for all channels (in rows: for all steps). A leaf whose addresses are not
// multiples of 4 is copied as the aligned words around it; the shift is undone when it is read.
#pragma once

constexpr int largest_power(int bytes, int most) {
    int power = 1;
    while (power < most && bytes % (2 * power) == 0) power *= 2;
    return power;
}
constexpr int least(int a, int b) { return a < b ? a : b; }

// COUNT elements of a leaf, side by side in memory.
template <class Leaf, int COUNT>
struct Cell {
    typedef typename Leaf::Memory Memory;
    static constexpr int SCALARS = (Leaf::ONE ? 1 : COUNT) * Leaf::SCALARS;
    static constexpr int BYTES = SCALARS * (int)sizeof(Memory);
    static constexpr bool SKEWED = Leaf::ALIGN < 4;
    static constexpr int WORDS = (BYTES + 3) / 4 + (SKEWED ? 1 : 0);
    static constexpr int STRIDE = 4 * WORDS;
    static constexpr int ACCESS = largest_power(STRIDE, 16);
    static constexpr int COPY = least(ACCESS, SKEWED ? 4 : Leaf::ALIGN);
    // The pieces of 16 bytes of a cell that is some of them, and not one for all channels.
    static constexpr int PIECES = COPY == 16 && !Leaf::ONE ? BYTES / 16 : 1;

    // Start the copy of the first `valid` bytes; the rest of the cell becomes zero. Piece b lies at
    // b ^ key.
    static INLINE_MEMBER void copy(char* cell, const char* from, int valid, int key = 0) {
        if constexpr (SKEWED) {
            const int skew = (int)((u64)from & 3);
            UNROLL for (int b = 0; b < STRIDE; b += 4)
                copy_async<4>(cell + b, from - skew + (b < skew + valid ? b : 0),
                              b < skew + valid);
        } else {
            UNROLL for (int b = 0; b < STRIDE; b += COPY)
                copy_async<COPY>(cell + (b ^ key), b < valid ? from + b : from, b < valid);
        }
    }
    // The cell's words, without the skew of the address that it was copied from.
    static INLINE_MEMBER void read(u32* words, const char* cell, const char* from, int key = 0) {
        UNROLL for (int b = 0; b < STRIDE; b += ACCESS)
            load<ACCESS>(words + b / 4, cell + (b ^ key));
        if constexpr (SKEWED) {
            const u32 bits = 8 * (u32)((u64)from & 3);
            UNROLL for (int k = 0; k + 1 < WORDS; ++k)
                words[k] = funnel_right(words[k], words[k + 1], bits);
        }
    }
};

// Scalar i of some words. i is a constant once loops are unrolled.
template <class Memory>
INLINE Memory scalar_at(const u32* words, int i) {
    Memory x;
    if constexpr (sizeof(Memory) == 8) {
        const u64 u = (u64)words[2 * i] | ((u64)words[2 * i + 1] << 32);
        __builtin_memcpy(&x, &u, 8);
    } else if constexpr (sizeof(Memory) == 4) {
        __builtin_memcpy(&x, words + i, 4);
    } else if constexpr (sizeof(Memory) == 2) {
        const uint16_t u = (uint16_t)(words[i / 2] >> (16 * (i % 2)));
        __builtin_memcpy(&x, &u, 2);
    } else {
        const uint8_t u = (uint8_t)(words[i / 4] >> (8 * (i % 4)));
        __builtin_memcpy(&x, &u, 1);
    }
    return x;
}

// Two 16-bit values in one word, the first in the lower half.
template <class Memory, class Value>
INLINE u32 pack_two(Value first, Value second) {
    if constexpr (same<Memory, bf16>) return narrow_two_bf16(first, second);
    else if constexpr (same<Memory, f16>) return narrow_two_f16(first, second);
    else {
        const Memory x = to_memory<Memory>(first), y = to_memory<Memory>(second);
        return (u32)(uint16_t)x | ((u32)(uint16_t)y << 16);
    }
}

// Converts COUNT values to the words that are stored.
template <class Memory, class Value, int COUNT>
INLINE void pack(u32* words, const Value* values) {
    if constexpr (sizeof(Memory) == 8) {
        UNROLL for (int i = 0; i < COUNT; ++i) {
            const Memory x = to_memory<Memory>(values[i]);
            u64 u;
            __builtin_memcpy(&u, &x, 8);
            words[2 * i] = (u32)u, words[2 * i + 1] = (u32)(u >> 32);
        }
    } else if constexpr (sizeof(Memory) == 4) {
        UNROLL for (int i = 0; i < COUNT; ++i) {
            const Memory x = to_memory<Memory>(values[i]);
            __builtin_memcpy(words + i, &x, 4);
        }
    } else if constexpr (sizeof(Memory) == 2) {
        UNROLL for (int i = 0; i < COUNT; i += 2)
            words[i / 2] = pack_two<Memory>(
                values[i], i + 1 < COUNT ? values[i + 1 < COUNT ? i + 1 : i] : Value());
    } else {
        UNROLL for (int i = 0; i < (COUNT + 3) / 4; ++i) words[i] = 0;
        UNROLL for (int i = 0; i < COUNT; ++i) {
            const Memory x = to_memory<Memory>(values[i]);
            uint8_t u;
            __builtin_memcpy(&u, &x, 1);
            words[i / 4] |= (u32)u << (8 * (i % 4));
        }
    }
}

// Store the first `valid` bytes of a cell of BYTES at an address that is a multiple of ALIGN.
template <int BYTES, int ALIGN>
INLINE void store_cell(char* to, const u32* words, int valid) {
    constexpr int UNIT = least(largest_power(BYTES, 16), ALIGN);
    UNROLL for (int b = 0; b < BYTES; b += UNIT) {
        if (b >= valid) continue;
        if constexpr (UNIT >= 4) store<UNIT>(to + b, words + b / 4);
        else if constexpr (UNIT == 2)
            *(uint16_t*)(to + b) = (uint16_t)(words[b / 4] >> (8 * (b % 4)));
        else *(uint8_t*)(to + b) = (uint8_t)(words[b / 4] >> (8 * (b % 4)));
    }
}
