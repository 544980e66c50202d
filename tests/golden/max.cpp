// max
struct State { int64_t s0; };
struct Live { int64_t s0; };
struct Raw { int64_t x0; };
struct Out { int64_t y0; };
INLINE State lift(const Raw& x) {
    State y;
    y.s0 = x.x0;
    return y;
}
INLINE State combine(const State& a, const State& b) {
    State y;
    const int64_t v0 = maximum(a.s0, b.s0);
    y.s0 = v0;
    return y;
}
INLINE Live advance(const Live& a, const State& b) {
    Live y;
    const int64_t v0 = maximum(a.s0, b.s0);
    y.s0 = v0;
    return y;
}
INLINE Live begin(const State& s) {
    Live y;
    y.s0 = s.s0;
    return y;
}
INLINE Live identity() {
    Live y;
    y.s0 = INT64_MIN;
    return y;
}
INLINE Out lower(const Live& a, const Raw& x, bool edge) {
    Out y;
    (void)edge;
    y.y0 = a.s0;
    return y;
}
