// matrix_affine
struct State { float s0; float s1; float s2; float s3; float s4; float s5; };
struct Live { float s0; float s1; float s2; float s3; float s4; float s5; };
struct Raw { float x0; float x1; float x2; float x3; float x4; float x5; };
struct Out { float y0; float y1; float y2; float y3; float y4; float y5; };
INLINE State lift(const Raw& x) {
    State y;
    y.s0 = x.x0;
    y.s1 = x.x1;
    y.s2 = x.x2;
    y.s3 = x.x3;
    y.s4 = x.x4;
    y.s5 = x.x5;
    return y;
}
INLINE State combine(const State& a, const State& b) {
    State y;
    const float v0 = a.s0 * b.s0;
    const float v1 = a.s2 * b.s1;
    const float v2 = a.s1 * b.s0;
    const float v3 = a.s3 * b.s1;
    const float v4 = a.s0 * b.s2;
    const float v5 = a.s2 * b.s3;
    const float v6 = a.s1 * b.s2;
    const float v7 = a.s3 * b.s3;
    const float v8 = v0 + v1;
    const float v9 = v2 + v3;
    const float v10 = v4 + v5;
    const float v11 = v6 + v7;
    const float v12 = a.s4 * b.s0;
    const float v13 = a.s5 * b.s1;
    const float v14 = a.s4 * b.s2;
    const float v15 = a.s5 * b.s3;
    const float v16 = v12 + v13;
    const float v17 = v14 + v15;
    const float v18 = b.s4 + v16;
    const float v19 = b.s5 + v17;
    y.s0 = v8;
    y.s1 = v9;
    y.s2 = v10;
    y.s3 = v11;
    y.s4 = v18;
    y.s5 = v19;
    return y;
}
INLINE Live advance(const Live& a, const State& b) {
    Live y;
    const float v0 = a.s0 * b.s0;
    const float v1 = a.s2 * b.s1;
    const float v2 = a.s1 * b.s0;
    const float v3 = a.s3 * b.s1;
    const float v4 = a.s0 * b.s2;
    const float v5 = a.s2 * b.s3;
    const float v6 = a.s1 * b.s2;
    const float v7 = a.s3 * b.s3;
    const float v8 = v0 + v1;
    const float v9 = v2 + v3;
    const float v10 = v4 + v5;
    const float v11 = v6 + v7;
    const float v12 = a.s4 * b.s0;
    const float v13 = a.s5 * b.s1;
    const float v14 = a.s4 * b.s2;
    const float v15 = a.s5 * b.s3;
    const float v16 = v12 + v13;
    const float v17 = v14 + v15;
    const float v18 = b.s4 + v16;
    const float v19 = b.s5 + v17;
    y.s0 = v8;
    y.s1 = v9;
    y.s2 = v10;
    y.s3 = v11;
    y.s4 = v18;
    y.s5 = v19;
    return y;
}
INLINE Live begin(const State& s) {
    Live y;
    y.s0 = s.s0;
    y.s1 = s.s1;
    y.s2 = s.s2;
    y.s3 = s.s3;
    y.s4 = s.s4;
    y.s5 = s.s5;
    return y;
}
INLINE Live identity() {
    Live y;
    y.s0 = 1.0f;
    y.s1 = 0.0f;
    y.s2 = 0.0f;
    y.s3 = 1.0f;
    y.s4 = 0.0f;
    y.s5 = 0.0f;
    return y;
}
INLINE Out lower(const Live& a, const Raw& x, bool edge) {
    Out y;
    (void)edge;
    y.y0 = a.s0;
    y.y1 = a.s1;
    y.y2 = a.s2;
    y.y3 = a.s3;
    y.y4 = a.s4;
    y.y5 = a.s5;
    return y;
}
