// affine
struct State { float s0; float s1; };
struct Raw { float x0; float x1; };
struct Out { float y0; float y1; };
INLINE State lift(const Raw& x) {
    State y;
    y.s0 = x.x0;
    y.s1 = x.x1;
    return y;
}
INLINE State combine(const State& a, const State& b) {
    State y;
    const float v0 = a.s0 * b.s0;
    const float v1 = a.s1 * b.s0;
    const float v2 = b.s1 + v1;
    y.s0 = v0;
    y.s1 = v2;
    return y;
}
INLINE State identity() {
    State y;
    y.s0 = 1.0f;
    y.s1 = 0.0f;
    return y;
}
INLINE Out lower(const State& a, const Raw& x, bool boundary) {
    Out y;
    (void)boundary;
    y.y0 = a.s0;
    y.y1 = a.s1;
    return y;
}
constexpr int WORDS = 2;
INLINE void to_words(const State& s, uint32_t* w) {
    w[0] = bits_of(s.s0);
    w[1] = bits_of(s.s1);
}
INLINE State from_words(const uint32_t* w) {
    State s;
    s.s0 = float_of(w[0]);
    s.s1 = float_of(w[1]);
    return s;
}
