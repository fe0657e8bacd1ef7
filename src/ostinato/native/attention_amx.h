// Attention in bf16 on AMX tiles.
#pragma once

#include "attention.h"

#ifdef OSTINATO_AMX
namespace ostinato {
namespace {

// 16 x 16 matrix of 32-bit elements, in place.
INLINE void transpose16(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}

const __m512i INTERLEAVE = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                            21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);

// Two rows of 16 as one vector of pairs; a null row counts as zeros.
INLINE __m512i paired(const bf16* a, const bf16* b) {
    __m256i x = a ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)) : _mm256_setzero_si256();
    __m256i y = b ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)) : _mm256_setzero_si256();
    return _mm512_permutexvar_epi16(INTERLEAVE, _mm512_inserti64x4(_mm512_castsi256_si512(x), y, 1));
}

// bf16 on AMX tiles.
struct Amx {
    static constexpr bool single = false;
    static constexpr bool fast = true;
    static constexpr int keys = KEYS;
    using Query = uint32_t;

    static int query_size(int dim) { return round_up(dim, 32) / 2 * LANES; }

    static void load_query(uint32_t* qt, const bf16* const* rows, int lanes, int dim) {
        if (lanes < 5) {
            for (int l = 0; l < lanes; l++)
                for (int i = 0; i < dim / 2; i++) std::memcpy(qt + i * LANES + l, rows[l] + 2 * i, 4);
            return;
        }
        for (int d = 0; d < dim; d += 32) {
            const __mmask16 present = dim - d < 32 ? 0xff : 0xffff;
            __m512i r[16];
            for (int l = 0; l < 16; l++)
                r[l] = l < lanes ? _mm512_maskz_loadu_epi32(present, rows[l] + d) : _mm512_setzero_si512();
            transpose16(r);
            for (int i = 0; i < 16; i++) _mm512_store_si512(qt + (d / 2 + i) * LANES, r[i]);
        }
    }

    static void write(const float* o, const float* inverse, bf16* const* rows, int lanes, int dim) {
        const __m512 factor = _mm512_loadu_ps(inverse);
        for (int d = 0; d < dim; d += 16) {
            __m512i r[16];
            for (int i = 0; i < 16; i++)
                r[i] = (__m512i)_mm512_mul_ps(_mm512_loadu_ps(o + (d + i) * LANES), factor);
            transpose16(r);
            for (int l = 0; l < lanes; l++) store16(rows[l] + d, (f32x16)r[l]);
        }
    }

    const bf16* k;
    const bf16* tail;  // the last, partial 16 keys, zero-filled; null if there is none
    int k_step, full;

    void load_keys(const bf16* kb, const Block& b, int dim) {
        const int width = round_up(dim, 32);
        tail = nullptr;
        if (b.contiguous && width == dim) {
            k = kb + int64_t(b.slot[0]) * dim;
            k_step = dim;
            full = b.count / 16;
            if (b.count % 16) {
                bf16* t = work.key.get<bf16>(size_t(KEYS) * width);
                std::memcpy(t, k + full * 16 * dim, size_t(b.count % 16) * dim * 2);
                std::memset(t + (b.count % 16) * dim, 0, size_t(16 - b.count % 16) * dim * 2);
                tail = t;
            }
        } else {
            bf16* t = work.key.get<bf16>(size_t(KEYS) * width);
            for (int i = 0; i < b.count; i++) {
                std::memcpy(t + i * width, kb + int64_t(b.slot[i]) * dim, size_t(dim) * 2);
                std::memset(t + i * width + dim, 0, size_t(width - dim) * 2);
            }
            std::memset(t + b.count * width, 0, size_t(round_up(b.count, 16) - b.count) * width * 2);
            k = t;
            k_step = width;
            full = round_up(b.count, 16) / 16;
        }
    }

    void load_block(const bf16* kb, const bf16* vb, const Block& b, int dim) {
        load_keys(kb, b, dim);
        transpose_values(vb, b, dim);
    }

    // Values as A tiles: [32 keys][16 dims] becomes 16 rows of 32 keys.
    void transpose_values(const bf16* vb, const Block& b, int dim) {
        const int dims = round_up(dim, 16) / 16, steps = round_up(b.count, 32) / 32;
        uint32_t* to = work.value.get<uint32_t>(size_t(KEYS) / 32 * dims * 256);
        auto row = [&](int at, int dt) { return at < b.count ? vb + int64_t(b.slot[at]) * dim + 16 * dt : nullptr; };
        for (int s = 0; s < steps; s++) {
            for (int dt = 0; dt < dims; dt++) {
                __m512i r[16];
                for (int i = 0; i < 16; i++) r[i] = paired(row(32 * s + 2 * i, dt), row(32 * s + 2 * i + 1, dt));
                transpose16(r);
                for (int i = 0; i < 16; i++) _mm512_store_si512(to + (s * dims + dt) * 256 + 16 * i, r[i]);
            }
        }
    }

    void scores(const uint32_t* qt, int n, int dim, float* out) const {
        const int chunks = round_up(dim, 32) / 32, stride = k_step * 2, wanted = round_up(n, 16) / 16;
        const int whole = wanted < full ? wanted : full;
        int t = 0;
        for (; t + 4 <= whole; t += 4) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int c = 0; c < chunks; c++) {
                const bf16* a = k + t * 16 * k_step + 32 * c;
                _tile_loadd(4, qt + c * 256, 64);
                _tile_loadd(5, a, stride);
                _tile_dpbf16ps(0, 5, 4);
                _tile_loadd(6, a + 16 * k_step, stride);
                _tile_dpbf16ps(1, 6, 4);
                _tile_loadd(7, a + 32 * k_step, stride);
                _tile_dpbf16ps(2, 7, 4);
                _tile_loadd(5, a + 48 * k_step, stride);
                _tile_dpbf16ps(3, 5, 4);
            }
            _tile_stored(0, out + t * 256, 64);
            _tile_stored(1, out + t * 256 + 256, 64);
            _tile_stored(2, out + t * 256 + 512, 64);
            _tile_stored(3, out + t * 256 + 768, 64);
        }
        for (; t < whole; t++) one(k + t * 16 * k_step, stride, qt, chunks, out + t * 256);
        if (tail && wanted > full) one(tail, stride, qt, chunks, out + t * 256);
    }

    static INLINE void one(const bf16* a, int stride, const uint32_t* qt, int chunks, float* out) {
        _tile_zero(0);
        for (int c = 0; c < chunks; c++) {
            _tile_loadd(4, qt + c * 256, 64);
            _tile_loadd(5, a + 32 * c, stride);
            _tile_dpbf16ps(0, 5, 4);
        }
        _tile_stored(0, out, 64);
    }

    // Output dims 16 * d .. 16 * (d + N).
    template <int N>
    INLINE void mix(const uint32_t* pairs, const uint32_t* vt, int steps, int dims, int d, float* output) const {
        float* o = output + d * 256;
        _tile_loadd(0, o, 64);
        if (N > 1) _tile_loadd(1, o + 256, 64);
        if (N > 2) _tile_loadd(2, o + 512, 64);
        if (N > 3) _tile_loadd(3, o + 768, 64);
        for (int s = 0; s < steps; s++) {
            const uint32_t* a = vt + (s * dims + d) * 256;
            _tile_loadd(4, pairs + s * 256, 64);
            _tile_loadd(5, a, 64);
            _tile_dpbf16ps(0, 5, 4);
            if (N > 1) {
                _tile_loadd(6, a + 256, 64);
                _tile_dpbf16ps(1, 6, 4);
            }
            if (N > 2) {
                _tile_loadd(7, a + 512, 64);
                _tile_dpbf16ps(2, 7, 4);
            }
            if (N > 3) {
                _tile_loadd(5, a + 768, 64);
                _tile_dpbf16ps(3, 5, 4);
            }
        }
        _tile_stored(0, o, 64);
        if (N > 1) _tile_stored(1, o + 256, 64);
        if (N > 2) _tile_stored(2, o + 512, 64);
        if (N > 3) _tile_stored(3, o + 768, 64);
    }

    void values(const float*, const uint32_t* pairs, int n, int dim, float* output, const float* alpha) const {
        const int dims = round_up(dim, 16) / 16, steps = round_up(n, 32) / 32;
        if (alpha) {
            const f32x16 a = load16(alpha);
            for (int d = 0; d < dims * 16; d++) store16(output + d * LANES, load16(output + d * LANES) * a);
        }
        const uint32_t* vt = work.value.get<uint32_t>(size_t(KEYS) / 32 * dims * 256);
        int d = 0;
        for (; d + 4 <= dims; d += 4) mix<4>(pairs, vt, steps, dims, d, output);
        switch (dims - d) {
            case 1: mix<1>(pairs, vt, steps, dims, d, output); break;
            case 2: mix<2>(pairs, vt, steps, dims, d, output); break;
            case 3: mix<3>(pairs, vt, steps, dims, d, output); break;
        }
    }

    static void begin() { amx_begin(); }
    static void end() { amx_end(); }
};

// The same for a single tile, as in decoding, where reading the keys and values is what takes time: the
// values are only paired, not transposed, and the scores turned to [lane][key], so that softmax costs
// nothing for lanes that hold no query.  Output [lane][dim].
struct AmxSingle : Amx {
    static constexpr bool single = true;
    static constexpr int keys = 64;
    const bf16* v;

    void load_block(const bf16* kb, const bf16* vb, const Block& b, int dim) {
        load_keys(kb, b, dim);
        v = vb;
    }

    static void write(const float* o, const float* inverse, bf16* const* rows, int lanes, int dim) {
        for (int l = 0; l < lanes; l++)
            for (int d = 0; d < dim; d += 16) store16(rows[l] + d, load16(o + l * dim + d) * inverse[l]);
    }

    // Asks for the first lines of every page of a block; the hardware then fetches ahead by itself.
    static INLINE void wake(const bf16* at, int dim) {
        for (int page = 0; page < keys * dim * 2; page += 4096)
            for (int line = 0; line < 512; line += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(at) + page + line, 0, 2);
    }

    // Rows of 16 lanes, 16 of them, to one vector of 16 keys for each of `lanes` lanes.
    static INLINE void turn(const float* scores, int lanes, float* to) {
        __m512i r[16];
        if (lanes <= 4) {
            for (int j = 0; j < 4; j++) {
                __m512i x = _mm512_castsi128_si512(_mm_load_si128(reinterpret_cast<const __m128i*>(scores + j * 16)));
                for (int i = 1; i < 4; i++)
                    x = _mm512_mask_broadcast_i32x4(
                        x, __mmask16(15 << 4 * i),
                        _mm_load_si128(reinterpret_cast<const __m128i*>(scores + (4 * i + j) * 16)));
                r[j] = x;
            }
            __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
            __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
            r[0] = _mm512_unpacklo_epi64(a, c);
            r[1] = _mm512_unpackhi_epi64(a, c);
            r[2] = _mm512_unpacklo_epi64(b, d);
            r[3] = _mm512_unpackhi_epi64(b, d);
        } else {
            for (int i = 0; i < 16; i++) r[i] = _mm512_load_si512(scores + i * 16);
            transpose16(r);
        }
        for (int l = 0; l < lanes; l++) _mm512_store_si512(to + l * KEYS, r[l]);
    }

    void step(const Problem& p, Tile& tile, const uint32_t* query, const Block& b, float* output) const {
        const int dim = p.dim, dims = dim / 16, n = b.count, padded = round_up(n, 32), steps = padded / 32;
        float* columns = work.scores.get<float>(KEYS * LANES * 2);
        float* rows = columns + KEYS * LANES;
        bf16* weights = work.weights.get<bf16>(KEYS * LANES);
        uint32_t* pairs = work.value.get<uint32_t>(size_t(KEYS) / 32 * dims * 256);
        wake(v + int64_t(b.slot[0]) * dim, dim);
        scores(query, n, dim, columns);
        for (int j = 0; j < padded; j += 2) {
            const bf16* x = j < n ? v + int64_t(b.slot[j]) * dim : nullptr;
            const bf16* y = j + 1 < n ? v + int64_t(b.slot[j + 1]) * dim : nullptr;
            uint32_t* to = pairs + j / 32 * dims * 256 + j % 32 / 2 * 16;
            if (y) {
                for (int d = 0; d < dims; d++) _mm512_store_si512(to + d * 256, paired(x + 16 * d, y + 16 * d));
            } else {
                for (int d = 0; d < dims; d++)
                    _mm512_store_si512(to + d * 256, paired(x ? x + 16 * d : nullptr, nullptr));
            }
        }
        wake(k + int64_t(keys) * k_step, dim);  // most likely the next block lies right behind this one
        for (int i = 0; i < round_up(n, 16); i += 16) turn(columns + i * 16, tile.lanes, rows + i);
        const bool masked = b.high > tile.low || (p.window && int64_t(b.low) <= int64_t(tile.high) - p.window);
        for (int l = 0; l < tile.lanes; l++) {
            float* s = rows + l * KEYS;
            const f32x16 lowest = splat(-INFINITY);
            if (n < padded) {
                for (int i = n; i < padded; i++) s[i] = -INFINITY;
            }
            f32x16 factor = splat(p.scale * LOG2E), most = lowest;
            if (masked || p.slopes) {
                const int reach = p.window ? p.window : INT32_MAX;
                for (int i = 0; i < n; i += 16) {
                    i32x16 distance = tile.position[l] - *reinterpret_cast<const i32x16_any*>(b.position + i);
                    f32x16 x = load16(s + i);
                    if (p.slopes) x = x * factor - __builtin_convertvector(distance, f32x16) * tile.slope[l];
                    x = (distance >= 0) & (distance < reach) ? x : lowest;
                    store16(s + i, x);
                }
                for (int i = n; i < padded; i++) s[i] = -INFINITY;
                if (p.slopes) factor = splat(1.0f);
            }
            for (int i = 0; i < padded; i += 16) most = max16(most, load16(s + i));
            const float before = tile.most[l], top = top16(most) * factor[0], now = top > before ? top : before;
            f32x16 sum{};
            for (int i = 0; i < padded; i += 16) {
                f32x16 e = fast_exp2(load16(s + i) * factor - now);
                sum += e;
                store16(weights + l * KEYS + i, e);
            }
            tile.most[l] = now;
            if (now == before) {
                tile.sum[l] += sum16(sum);
            } else {
                const float alpha = std::exp2(before - now);
                tile.sum[l] = tile.sum[l] * alpha + sum16(sum);
                for (int d = 0; d < dim; d += 16) store16(output + l * dim + d, load16(output + l * dim + d) * alpha);
            }
        }
        int d = 0;
        for (; d + 4 <= dims; d += 4) blend<4>(weights, pairs, steps, dims, d, output);
        switch (dims - d) {
            case 1: blend<1>(weights, pairs, steps, dims, d, output); break;
            case 2: blend<2>(weights, pairs, steps, dims, d, output); break;
            case 3: blend<3>(weights, pairs, steps, dims, d, output); break;
        }
    }

    template <int N>
    static INLINE void blend(const bf16* weights, const uint32_t* pairs, int steps, int dims, int d, float* output) {
        float* o = output + d * 16;
        const int stride = dims * 64;
        _tile_loadd(0, o, stride);
        if (N > 1) _tile_loadd(1, o + 16, stride);
        if (N > 2) _tile_loadd(2, o + 32, stride);
        if (N > 3) _tile_loadd(3, o + 48, stride);
        for (int s = 0; s < steps; s++) {
            const uint32_t* b = pairs + (s * dims + d) * 256;
            _tile_loadd(4, weights + s * 32, KEYS * 2);
            _tile_loadd(5, b, 64);
            _tile_dpbf16ps(0, 4, 5);
            if (N > 1) {
                _tile_loadd(6, b + 256, 64);
                _tile_dpbf16ps(1, 4, 6);
            }
            if (N > 2) {
                _tile_loadd(7, b + 512, 64);
                _tile_dpbf16ps(2, 4, 7);
            }
            if (N > 3) {
                _tile_loadd(5, b + 768, 64);
                _tile_dpbf16ps(3, 4, 5);
            }
        }
        _tile_stored(0, o, stride);
        if (N > 1) _tile_stored(1, o + 16, stride);
        if (N > 2) _tile_stored(2, o + 32, stride);
        if (N > 3) _tile_stored(3, o + 48, stride);
    }
};

}  // namespace
}  // namespace ostinato
#endif
