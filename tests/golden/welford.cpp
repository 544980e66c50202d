// welford
struct State { int64_t s0; float s1; float s2; };
struct Live { int64_t s0; float s1; float s2; };
struct Raw { float x0; };
struct Out { float y0; float y1; };
INLINE State lift(const Raw& x) {
    State y;
    const float v0 = x.x0 - x.x0;
    const float v1 = v0;
    const int64_t v2 = 1LL;
    y.s0 = v2;
    y.s1 = x.x0;
    y.s2 = v1;
    return y;
}
INLINE State combine(const State& a, const State& b) {
    State y;
    const int64_t v0 = (int64_t)(a.s0 + b.s0);
    const float v1 = b.s1 - a.s1;
    const float v2 = cast<float>(b.s0);
    const int64_t v3 = 1LL;
    const int64_t v4 = maximum(v0, v3);
    const float v5 = cast<float>(v4);
    const float v6 = v2 / v5;
    const float v7 = cast<float>(a.s0);
    const float v8 = v6 * v7;
    const float v9 = v1 * v8;
    const float v10 = v1 * v9;
    const float v11 = v1 * v6;
    const float v12 = a.s1 + v11;
    const float v13 = a.s2 + b.s2;
    const float v14 = v10 + v13;
    y.s0 = v0;
    y.s1 = v12;
    y.s2 = v14;
    return y;
}
INLINE Live advance(const Live& a, const State& b) {
    Live y;
    const int64_t v0 = (int64_t)(a.s0 + b.s0);
    const float v1 = b.s1 - a.s1;
    const float v2 = cast<float>(b.s0);
    const int64_t v3 = 1LL;
    const int64_t v4 = maximum(v0, v3);
    const float v5 = cast<float>(v4);
    const float v6 = v2 / v5;
    const float v7 = cast<float>(a.s0);
    const float v8 = v6 * v7;
    const float v9 = v1 * v8;
    const float v10 = v1 * v9;
    const float v11 = v1 * v6;
    const float v12 = a.s1 + v11;
    const float v13 = a.s2 + b.s2;
    const float v14 = v10 + v13;
    y.s0 = v0;
    y.s1 = v12;
    y.s2 = v14;
    return y;
}
INLINE Live begin(const State& s) {
    Live y;
    y.s0 = s.s0;
    y.s1 = s.s1;
    y.s2 = s.s2;
    return y;
}
INLINE Live identity() {
    Live y;
    y.s0 = 0LL;
    y.s1 = 0.0f;
    y.s2 = 0.0f;
    return y;
}
INLINE Out lower(const Live& a, const Raw& x, bool edge) {
    Out y;
    (void)edge;
    const int64_t v0 = 0LL;
    const bool v1 = a.s0 > v0;
    const float v2 = __builtin_nanf("");
    const float v3 = v1 ? a.s1 : v2;
    const float v4 = cast<float>(a.s0);
    const float v5 = a.s2 / v4;
    y.y0 = v3;
    y.y1 = v5;
    return y;
}
