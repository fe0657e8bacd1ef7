// Attention in float arithmetic, for any machine and both types.
#pragma once

#include "attention.h"

namespace ostinato {
namespace {

template <class T>
struct Plain {
    static constexpr bool single = false;
    static constexpr bool fast = false;
    static constexpr int keys = 64;  // a block and what belongs to it fit the first-level cache
    using Query = float;

    static int query_size(int dim) { return dim * LANES; }

    static void load_query(float* qt, const T* const* rows, int lanes, int dim) {
        for (int l = 0; l < lanes; l++)
            for (int d = 0; d < dim; d++) qt[d * LANES + l] = to_float(rows[l][d]);
    }

    static void write(const float* o, const float* inverse, T* const* rows, int lanes, int dim) {
        for (int l = 0; l < lanes; l++)
            for (int d = 0; d < dim; d++) from_float(o[d * LANES + l] * inverse[l], rows[l][d]);
    }

    const float *k, *v;
    int64_t k_step, v_step;

    static const float* gather(Scratch& to, const T* base, const Block& b, int dim, int64_t* step) {
        if (std::is_same<T, float>::value && b.contiguous) {
            *step = dim;
            return reinterpret_cast<const float*>(base) + int64_t(b.slot[0]) * dim;
        }
        float* f = to.get<float>(size_t(KEYS) * dim);
        for (int i = 0; i < b.count; i++)
            for (int d = 0; d < dim; d++) f[i * dim + d] = to_float(base[int64_t(b.slot[i]) * dim + d]);
        *step = dim;
        return f;
    }

    void load_block(const T* kb, const T* vb, const Block& b, int dim) {
        k = gather(work.key, kb, b, dim, &k_step);
        v = gather(work.value, vb, b, dim, &v_step);
    }

    template <int N>
    INLINE void score(const float* qt, int dim, int at, float* scores) const {
        for (int part = 0; part < LANES; part += WIDTH) {
            f32v s[N] = {};
            for (int d = 0; d < dim; d++) {
                const f32v x = load_part(qt + d * LANES + part);
                for (int i = 0; i < N; i++) s[i] += x * k[(at + i) * k_step + d];
            }
            for (int i = 0; i < N; i++) store_part(scores + (at + i) * LANES + part, s[i]);
        }
    }

    void scores(const float* qt, int n, int dim, float* out) const {
        int at = 0;
        for (; at + 8 <= n; at += 8) score<8>(qt, dim, at, out);
        for (; at < n; at++) score<1>(qt, dim, at, out);
    }

    template <int N>
    INLINE void mix(const float* weights, int count, int d, float* output, const float* alpha) const {
        for (int part = 0; part < LANES; part += WIDTH) {
            f32v o[N];
            for (int i = 0; i < N; i++) o[i] = load_part(output + (d + i) * LANES + part);
            if (alpha)
                for (int i = 0; i < N; i++) o[i] *= load_part(alpha + part);
            for (int j = 0; j < count; j++) {
                const f32v p = load_part(weights + j * LANES + part);
                const float* row = v + j * v_step + d;
                for (int i = 0; i < N; i++) o[i] += p * row[i];
            }
            for (int i = 0; i < N; i++) store_part(output + (d + i) * LANES + part, o[i]);
        }
    }

    void values(const float* weights, const uint32_t*, int n, int dim, float* output, const float* alpha) const {
        int d = 0;
        for (; d + 8 <= dim; d += 8) mix<8>(weights, n, d, output, alpha);
        for (; d < dim; d++) mix<1>(weights, n, d, output, alpha);
    }

    static void begin() {}
    static void end() {}
};

}  // namespace
}  // namespace ostinato
