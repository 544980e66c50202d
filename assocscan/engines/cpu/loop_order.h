// Results that no loop gives, and how they are found.
//
// The aggregate of several steps may overflow where the carry that enters them makes that irrelevant:
// the product of 2, 2, 2, ... is infinite, and after a 0 all products are 0, but 0 * inf is NaN; and
// 1e20 times 1e20 is infinite, though 1e-30 stands before them. So after carry and aggregate are
// combined, the result is looked at: if it is NaN and the carry was not, or infinite and the carry
// was finite, the steps are scanned again one after the other. For an operator that is one product (PRODUCT) this
// is also done if the carry was neither 0 nor infinite, and the carry, the aggregate or a result is
// outside of the normal range of its dtype: it may have overflowed, or lost bits, where the loop's
// product has not.
//
// An operator that FORGETS starts afresh where a flag is set: what was NaN or infinite before is not seen
// in the state after a tile. Of such ones the state at every step is looked at.
//
// A NaN, an infinity or a 0 of the input does the same once: afterwards the carry itself is one.
#pragma once
#include "layout.h"

// Whether x is NaN where `other` is not, or not finite where `other` is.
template <class T> INLINE bool exceeds(T x, T other) {
    if constexpr (is_float<T>)
        return (x != x && other == other) || (x - x != 0 && other - other == 0);
    else return false;
}

// Neither 0 nor subnormal nor infinite nor NaN.
template <class T> INLINE bool is_ordinary(T x) {
    constexpr T least = sizeof(T) == 4 ? (T)0x1p-126 : (T)0x1p-1022;
    if constexpr (is_float<T>) return (x >= least || -x >= least) && x - x == 0;
    else return true;
}

#define EXCEEDS(name, ...) | exceeds(x.name, other.name)
#define ORDINARY(name, ...) & is_ordinary(v.name)
#define VARIES(name, ...) & (v.name != 0 && v.name - v.name == 0)
// In any component.
INLINE bool any_exceeds(const Live& x, const Live& other) {
    (void)x; (void)other;
    return false LIVE(EXCEEDS);
}
INLINE bool in_range(const Live& v) { (void)v; return true LIVE(ORDINARY); }
// Neither 0 nor infinite nor NaN: what a product stays at.
INLINE bool goes_on(const Live& v) { (void)v; return true LIVE(VARIES); }
// 0 if all components are finite, else NaN.
template <class T> INLINE float difference(T x) {
    if constexpr (is_float<T>) return (float)(x - x);
    else return 0;
}
#define DIFFERENCE(name, ...) + difference(v.name)
INLINE float distance_to_finite(const Live& v) { (void)v; return 0 LIVE(DIFFERENCE); }
#undef DIFFERENCE
#undef EXCEEDS
#undef ORDINARY
#undef VARIES

// The size of an element that is one float.
#define SIZE(name, ...) return v.name < 0 ? -v.name : v.name;
template <class S> INLINE auto size_of(const S& v) { LIVE(SIZE) }
#undef SIZE

// The least and the greatest of several sizes. NaN is neither: a product stays NaN, and its end tells.
template <class T> struct Extent {
    T least[WIDE], most[WIDE];
    INLINE_METHOD void start(int w) { least[w] = 1; most[w] = 1; }
    INLINE_METHOD void add(int w, T size) {
        least[w] = size < least[w] ? size : least[w];
        most[w] = size > most[w] ? size : most[w];
    }
    INLINE_METHOD bool in_range() const {
        bool all = true;
        for (int w = 0; w < WIDE; ++w) all &= is_ordinary(least[w]) & is_ordinary(most[w]);
        return all;
    }
};

// Whether combining the carry with an aggregate gave `after`, and a loop may give something else.
INLINE bool may_leave_range(const Live& carry, const State& aggregate, const Live& after) {
    if (any_exceeds(after, carry)) return true;
    if constexpr (PRODUCT)
        return goes_on(carry)
            && !(in_range(carry) && in_range(begin(aggregate)) && in_range(after));
    return false;
}

// Whether two numbers are the same or differ by less than 1/16. Roundings of products differ by less.
template <class T> INLINE bool is_near(T a, T b) {
    const T distance = a < b ? b - a : a - b, size = b < 0 ? -b : b;
    return a == b || (a != a && b != b) || 16 * distance < size;
}

// Whether a carry that was computed from aggregates is to be replaced by that of the steps in order.
INLINE bool is_replaced(const Live& computed, const Live& in_order) {
    if (any_exceeds(computed, in_order)) return true;
#define NEAR(name, ...) & is_near(computed.name, in_order.name)
    if constexpr (PRODUCT) return !(true LIVE(NEAR));
#undef NEAR
    return false;
}
