// affine
struct State { float s0; float s1; float s2; float s3; };
struct Live { float s0; float s1; float s2; float s3; };
struct Raw { float x0; float x1; float x2; float x3; };
struct Out { float y0; float y1; float y2; float y3; };
INLINE State lift(const Raw& x) {
    State y;
    y.s0 = x.x0;
    y.s1 = x.x1;
    y.s2 = x.x2;
    y.s3 = x.x3;
    return y;
}
INLINE State combine(const State& a, const State& b) {
    State y;
    const float v0 = a.s0 * b.s0;
    const float v1 = a.s1 * b.s1;
    const float v2 = v0 - v1;
    const float v3 = a.s1 * b.s0;
    const float v4 = a.s0 * b.s1;
    const float v5 = v3 + v4;
    const float v6 = a.s2 * b.s0;
    const float v7 = a.s3 * b.s1;
    const float v8 = v6 - v7;
    const float v9 = a.s3 * b.s0;
    const float v10 = a.s2 * b.s1;
    const float v11 = v9 + v10;
    const float v12 = b.s2 + v8;
    const float v13 = b.s3 + v11;
    y.s0 = v2;
    y.s1 = v5;
    y.s2 = v12;
    y.s3 = v13;
    return y;
}
INLINE Live advance(const Live& a, const State& b) {
    Live y;
    const float v0 = a.s0 * b.s0;
    const float v1 = a.s1 * b.s1;
    const float v2 = v0 - v1;
    const float v3 = a.s1 * b.s0;
    const float v4 = a.s0 * b.s1;
    const float v5 = v3 + v4;
    const float v6 = a.s2 * b.s0;
    const float v7 = a.s3 * b.s1;
    const float v8 = v6 - v7;
    const float v9 = a.s3 * b.s0;
    const float v10 = a.s2 * b.s1;
    const float v11 = v9 + v10;
    const float v12 = b.s2 + v8;
    const float v13 = b.s3 + v11;
    y.s0 = v2;
    y.s1 = v5;
    y.s2 = v12;
    y.s3 = v13;
    return y;
}
INLINE Live begin(const State& s) {
    Live y;
    y.s0 = s.s0;
    y.s1 = s.s1;
    y.s2 = s.s2;
    y.s3 = s.s3;
    return y;
}
INLINE Live identity() {
    Live y;
    y.s0 = 1.0f;
    y.s1 = 0.0f;
    y.s2 = 0.0f;
    y.s3 = 0.0f;
    return y;
}
INLINE Out lower(const Live& a, const Raw& x, bool edge) {
    Out y;
    (void)edge;
    y.y0 = a.s0;
    y.y1 = a.s1;
    y.y2 = a.s2;
    y.y3 = a.s3;
    return y;
}
