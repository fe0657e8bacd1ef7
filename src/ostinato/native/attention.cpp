// Attention over runs of slots.
//
// Queries that share a key/value head are stacked (query, head of the group) and cut into tiles of 16
// lanes.  Keys come in blocks of up to 128, gathered from the runs of the sequence.  Scores are kept
// transposed, [key][lane]: softmax is then vertical (no horizontal reduction), masks and ALiBi are one
// vector operation per key, and the key rows of the pool feed AMX as they lie.  The output is kept
// transposed as well, [dim][lane], so that rescaling is vertical too.
#include "common.h"

#include <atomic>
#include <type_traits>
#include <vector>

using namespace ostinato;

namespace {

constexpr int LANES = 16;
constexpr int KEYS = 128;
constexpr int UNIT_TILES = 16;
constexpr int MAX_DIM = 256;
constexpr float LOWEST = -1e30f;
constexpr float LOG2E = 1.44269504089f;

struct Batch {
    int32_t sequences;
    int32_t most_queries;
    const int32_t *query_start, *positions, *run_start, *slot, *length, *position;
};

struct Problem {
    const Batch* batch;
    const void *q, *k, *v;
    void* out;
    const float* slopes;
    int64_t k_stride, v_stride;
    int32_t heads, kv_heads, dim, window, flags;  // flags: 1 bf16; bits 8.. the threads
    float scale;
    int32_t group, threads;  // derived
};

INLINE int round_up(int n, int to) { return (n + to - 1) / to * to; }

// The part of a run that positions low..high can see.
struct Visible {
    int slot, position, length;
};

INLINE Visible clip(const Batch& b, int run, int64_t low, int64_t high) {
    int64_t first = b.position[run], last = first + b.length[run] - 1;
    int64_t from = first > low ? first : low, to = last < high ? last : high;
    if (to < from) return {0, 0, 0};
    return {int(b.slot[run] + (from - first)), int(from), int(to - from + 1)};
}

// Up to KEYS keys of one sequence, in the order of its runs.
struct Block {
    int count, low, high;
    bool contiguous;  // consecutive slots
    bool ordered;     // consecutive positions
    alignas(64) int32_t slot[KEYS];
    alignas(64) int32_t position[KEYS];

    void clear() {
        count = 0;
        low = INT32_MAX;
        high = INT32_MIN;
        contiguous = ordered = true;
    }
    int add(const Visible& v, int skip, int limit) {
        int n = v.length - skip < limit - count ? v.length - skip : limit - count;
        int s = v.slot + skip, p = v.position + skip;
        if (count && s != slot[count - 1] + 1) contiguous = false;
        if (count && p != position[count - 1] + 1) ordered = false;
        for (int i = 0; i < n; i++) slot[count + i] = s + i;
        for (int i = 0; i < n; i++) position[count + i] = p + i;
        count += n;
        low = p < low ? p : low;
        high = p + n - 1 > high ? p + n - 1 : high;
        return n;
    }
};

// Calls f(block) for the keys from..to (in visible order) of a sequence.
template <class F>
INLINE void each_block(const Batch& b, int sequence, int64_t low, int64_t high, int64_t from, int64_t to, int limit,
                       Block& block, F f) {
    block.clear();
    int64_t at = 0;
    for (int r = b.run_start[sequence]; r < b.run_start[sequence + 1] && at < to; r++) {
        Visible v = clip(b, r, low, high);
        if (at + v.length > to) v.length = int(to - at);
        int skip = at < from ? int(from - at < v.length ? from - at : v.length) : 0;
        while (skip < v.length) {
            skip += block.add(v, skip, limit);
            if (block.count == limit) {
                f(block);
                block.clear();
            }
        }
        at += v.length;
    }
    if (block.count) f(block);
}

struct Tile {
    alignas(64) float most[LANES];
    alignas(64) float sum[LANES];
    alignas(64) int32_t position[LANES];
    alignas(64) float slope[LANES];
    int lanes, low, high;
};

struct Work {
    Scratch query, output, key, value, scores, weights, part;
    Tile tiles[UNIT_TILES];
    Block block;
};

thread_local Work work;

#ifdef OSTINATO_AMX
INLINE f32x16 fast_exp2(f32x16 x) {
    __m512 f = _mm512_reduce_ps((__m512)x, 1);  // x - floor(x)
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.0780243819f), f, _mm512_set1_ps(0.2260673558f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6958334717f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.9999252218f));
    return (f32x16)_mm512_scalef_ps(p, (__m512)x);
}
#endif

// Softmax of one block for one tile.  Scores become exp2(score - running maximum); `fast` writes them as
// bf16 pairs of keys, else in place.  Returns whether the earlier output has to be scaled by `alpha`.
template <bool FAST>
INLINE bool softmax(Tile& tile, const Block& block, int n, float* scores, uint32_t* pairs, float scale,
                    const float* slopes, int window, float* alpha) {
    const int padded = FAST ? round_up(n, 32) : n;
    const f32x16 lowest = splat(-INFINITY);
    for (int k = n; k < padded; k++) store16(scores + k * LANES, lowest);
    f32x16 before = load16(tile.most), most = lowest;
    f32x16 factor = splat(scale * LOG2E);
    const bool masked = block.high > tile.low || (window && int64_t(block.low) <= int64_t(tile.high) - window);
    if (masked || slopes) {
        const i32x16 q = *reinterpret_cast<const i32x16_any*>(tile.position);
        const f32x16 slope = load16(tile.slope);
        const int reach = window ? window : INT32_MAX;
        int k = 0;
        if (block.ordered && !window && !slopes && tile.low >= block.low) k = tile.low - block.low + 1;
        for (; k < n; k++) {
            f32x16 s = load16(scores + k * LANES);
            i32x16 distance = q - block.position[k];
            if (slopes) s = s * factor - slope * __builtin_convertvector(distance, f32x16);
            store16(scores + k * LANES, (distance >= 0) & (distance < reach) ? s : lowest);
        }
        if (slopes) factor = splat(1.0f);
    }
    alignas(64) float peak[LANES];
    for (int part = 0; part < LANES; part += WIDTH) {
        auto larger = [](f32v a, f32v b) { return a > b ? a : b; };
        f32v a = f32v{} - INFINITY, b = a, c = a, d = a;
        int k = 0;
        for (; k + 4 <= n; k += 4) {
            const float* s = scores + k * LANES + part;
            a = larger(a, load_part(s));
            b = larger(b, load_part(s + LANES));
            c = larger(c, load_part(s + 2 * LANES));
            d = larger(d, load_part(s + 3 * LANES));
        }
        for (; k < n; k++) a = larger(a, load_part(scores + k * LANES + part));
        store_part(peak + part, larger(larger(a, b), larger(c, d)));
    }
    most = load16(peak) * factor;
    most = max16(most, before);
    f32x16 sum{}, more{};
#ifdef OSTINATO_AMX
    if (FAST) {
        const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                                    22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        for (int k = 0; k < padded; k += 2) {
            f32x16 a = fast_exp2(load16(scores + k * LANES) * factor - most);
            f32x16 b = fast_exp2(load16(scores + (k + 1) * LANES) * factor - most);
            sum += a;
            more += b;
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
            _mm512_store_si512(pairs + k / 2 * LANES, _mm512_permutexvar_epi16(interleave, both));
        }
    }
#endif
    if (!FAST) {
        alignas(64) float top[LANES], total[LANES];
        store16(top, most);
        const float by = factor[0];
        for (int part = 0; part < LANES; part += WIDTH) {
            f32v all{};
            const f32v m = load_part(top + part);
            for (int k = 0; k < n; k++) {
                float* s = scores + k * LANES + part;
                const f32v e = exp2_part(load_part(s) * by - m);
                all += e;
                store_part(s, e);
            }
            store_part(total + part, all);
        }
        sum = load16(total);
    }
    f32x16 shrink = exp2_16(before - most);
    store16(tile.sum, load16(tile.sum) * shrink + (sum + more));
    store16(tile.most, most);
    store16(alpha, shrink);
    for (int i = 0; i < LANES; i++)
        if (alpha[i] != 1.0f) return true;
    return false;
}

// ---- float arithmetic: any machine, any type ----

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

#ifdef OSTINATO_AMX

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
#endif

// ---- units of work ----

// Rows `first`.. (of query * group + head) of one sequence and key/value head, keys from..to of those visible.
struct Unit {
    int sequence, kv_head, first, rows;
    int64_t from, to;
};

template <class T, class Math>
void attend_unit(const Problem& p, const Unit& u, float** output) {
    using Query = typename Math::Query;
    const Batch& b = *p.batch;
    const int D = p.dim, start = b.query_start[u.sequence];
    const int size = Math::query_size(D), width = round_up(D, 16) * LANES, tiles = (u.rows + LANES - 1) / LANES;
    Query* query = work.query.get<Query>(size_t(tiles) * size);
    float* out = work.output.get<float>(size_t(tiles) * width);
    std::memset(query, 0, sizeof(Query) * size_t(tiles) * size);
    std::memset(out, 0, sizeof(float) * size_t(tiles) * width);
    for (int t = 0; t < tiles; t++) {
        Tile& tile = work.tiles[t];
        const T* rows[LANES];
        tile.lanes = u.rows - t * LANES < LANES ? u.rows - t * LANES : LANES;
        for (int l = 0; l < LANES; l++) {
            const int row = u.first + t * LANES + (l < tile.lanes ? l : tile.lanes - 1);
            const int q = start + row / p.group, head = u.kv_head * p.group + row % p.group;
            tile.position[l] = b.positions[q];
            tile.slope[l] = p.slopes ? p.slopes[head] * LOG2E : 0.0f;
            tile.most[l] = LOWEST;
            tile.sum[l] = 0;
            rows[l] = static_cast<const T*>(p.q) + (int64_t(q) * p.heads + head) * D;
        }
        Math::load_query(query + size_t(t) * size, rows, tile.lanes, D);
        tile.low = tile.position[0];
        tile.high = tile.position[LANES - 1];
    }
    const T* kb = static_cast<const T*>(p.k) + u.kv_head * p.k_stride;
    const T* vb = static_cast<const T*>(p.v) + u.kv_head * p.v_stride;
    const int64_t low = p.window ? int64_t(work.tiles[0].low) - p.window + 1 : INT32_MIN;
    Math math;
    each_block(b, u.sequence, low, work.tiles[tiles - 1].high, u.from, u.to, Math::keys, work.block, [&](const Block& block) {
        math.load_block(kb, vb, block, D);
        if constexpr (Math::single) {
            math.step(p, work.tiles[0], query, block, out);
            return;
        } else {
            float* scores = work.scores.get<float>(KEYS * LANES);
            uint32_t* pairs = work.weights.get<uint32_t>(KEYS / 2 * LANES);
            for (int t = 0; t < tiles; t++) {
                Tile& tile = work.tiles[t];
                if (block.low > tile.high || (p.window && int64_t(block.high) <= int64_t(tile.low) - p.window))
                    continue;
                const int n = block.ordered && tile.high < block.high ? tile.high - block.low + 1 : block.count;
                alignas(64) float alpha[LANES];
                math.scores(query + size_t(t) * size, n, D, scores);
                const bool scaled =
                    softmax<Math::fast>(tile, block, n, scores, pairs, p.scale, p.slopes, p.window, alpha);
                math.values(scores, pairs, n, D, out + size_t(t) * width, scaled ? alpha : nullptr);
            }
        }
    });
    *output = out;
}

template <class T, class Math>
void write_unit(const Problem& p, const Unit& u, const float* out, int step = 0) {
    const int D = p.dim, start = p.batch->query_start[u.sequence], width = step ? step : round_up(D, 16) * LANES;
    for (int t = 0; t * LANES < u.rows; t++) {
        const int lanes = u.rows - t * LANES < LANES ? u.rows - t * LANES : LANES;
        alignas(64) float inverse[LANES];
        T* rows[LANES];
        for (int l = 0; l < LANES; l++) {
            const float sum = work.tiles[t].sum[l];
            inverse[l] = sum > 0 ? 1.0f / sum : 0.0f;
            const int row = u.first + t * LANES + (l < lanes ? l : 0);
            rows[l] = static_cast<T*>(p.out) +
                      (int64_t(start + row / p.group) * p.heads + u.kv_head * p.group + row % p.group) * D;
        }
        Math::write(out + size_t(t) * width, inverse, rows, lanes, D);
    }
}

// Many queries: units of some tiles, handed out one by one, longest first.
template <class T, class Math>
void attend_many(const Problem& p, const std::vector<int>& sequences) {
    const Batch& b = *p.batch;
    std::vector<Unit> units;
    int64_t total = 0;
    for (int s : sequences) total += int64_t(b.query_start[s + 1] - b.query_start[s]) * p.group * p.kv_heads;
    int64_t tiles = total / LANES / (p.threads * 6) + 1;
    const int step = LANES * int(tiles < 4 ? (tiles < 1 ? 1 : tiles) : tiles > UNIT_TILES ? UNIT_TILES : tiles);
    for (int s : sequences) {
        const int rows = (b.query_start[s + 1] - b.query_start[s]) * p.group;
        for (int first = (rows - 1) / step * step; first >= 0; first -= step)
            for (int h = 0; h < p.kv_heads; h++)
                units.push_back({s, h, first, rows - first < step ? rows - first : step, 0, INT64_MAX});
    }
    std::atomic<size_t> next{0};
    auto work_off = [&] {
        Math::begin();
        for (size_t i; (i = next.fetch_add(1)) < units.size();) {
            float* out;
            attend_unit<T, Math>(p, units[i], &out);
            write_unit<T, Math>(p, units[i], out);
        }
        Math::end();
    };
    if (p.threads == 1 || units.size() == 1) {
        work_off();
        return;
    }
#pragma omp parallel num_threads(p.threads)
    work_off();
}

thread_local Scratch item_scratch, part_scratch;

// Few queries: the keys of all (sequence, key/value head) in a row, cut evenly among the threads; heads
// whose keys were cut are merged afterwards.
struct Item {
    int sequence, kv_head, rows, tiles;
    int64_t keys, start;  // start: in the row, where a key counts once for every tile

    // The first key of this item at or behind a place in the row.
    int64_t key_at(int64_t place) const {
        if (place <= start) return 0;
        if (place >= start + keys * tiles) return keys;
        return (place - start) / tiles / 32 * 32;
    }
};

template <class T, class Math>
void attend_few(const Problem& p, const int* sequences, int count) {
    const Batch& b = *p.batch;
    const int64_t items = int64_t(count) * p.kv_heads;
    Item* item = item_scratch.get<Item>(items);
    int64_t total = 0;
    int most_tiles = 1;
    for (int i = 0; i < count; i++) {
        const int s = sequences[i], first = b.query_start[s], last = b.query_start[s + 1] - 1;
        const int rows = (last - first + 1) * p.group, tiles = (rows + LANES - 1) / LANES;
        if (tiles > most_tiles) most_tiles = tiles;
        int64_t keys = 0;
        for (int r = b.run_start[s]; r < b.run_start[s + 1]; r++)
            keys += clip(b, r, p.window ? int64_t(b.positions[first]) - p.window + 1 : INT32_MIN, b.positions[last]).length;
        for (int h = 0; h < p.kv_heads; h++) {
            item[i * p.kv_heads + h] = {s, h, rows, tiles, keys, total};
            total += keys * tiles;
        }
    }
    const int threads = total * p.dim < 8192 ? 1 : p.threads;
    const int width = round_up(p.dim, 16) * LANES, part = (width + 2 * LANES) * most_tiles;
    // A thread leaves at most two partial results: of an item it does not begin, and of one it does not end.
    float* parts = part_scratch.get<float>(size_t(2 * threads) * part);
    auto cut = [&](int64_t t, int64_t n) { return t >= n ? total : total * t / n; };
    auto run = [&](int thread, int n) {
        const int64_t begin = cut(thread, n), end = cut(thread + 1, n);
        Math::begin();
        for (int64_t i = 0; i < items; i++) {
            const Item& it = item[i];
            const int64_t from = it.key_at(begin), to = thread == n - 1 ? it.keys : it.key_at(end);
            if (from >= to && (it.keys || i % n != thread)) continue;
            const Unit u{it.sequence, it.kv_head, 0, it.rows, from, to};
            float* out;
            attend_unit<T, Math>(p, u, &out);
            if (from == 0 && to == it.keys) {
                write_unit<T, Math>(p, u, out);
                continue;
            }
            float* at = parts + size_t(2 * thread + (from == 0 ? 1 : 0)) * part;
            for (int t = 0; t < it.tiles; t++, at += width + 2 * LANES) {
                std::memcpy(at, out + size_t(t) * width, sizeof(float) * width);
                std::memcpy(at + width, work.tiles[t].most, sizeof(float) * LANES);
                std::memcpy(at + width + LANES, work.tiles[t].sum, sizeof(float) * LANES);
            }
        }
        Math::end();
    };
    // Joins a later part of an item to an earlier one.
    auto join = [&](float* sum, const float* other, int tiles) {
        for (int t = 0; t < tiles; t++, sum += width + 2 * LANES, other += width + 2 * LANES) {
            alignas(64) float x[LANES], y[LANES];
            const f32x16 a = load16(sum + width), c = load16(other + width), m = max16(a, c);
            store16(x, exp2_16(a - m));
            store16(y, exp2_16(c - m));
            store16(sum + width, m);
            store16(sum + width + LANES, load16(sum + width + LANES) * load16(x) + load16(other + width + LANES) * load16(y));
            for (int d = 0; d < width; d += LANES) {
                const f32x16 u = Math::single ? splat(x[d / p.dim]) : load16(x);
                const f32x16 v = Math::single ? splat(y[d / p.dim]) : load16(y);
                store16(sum + d, load16(sum + d) * u + load16(other + d) * v);
            }
        }
    };
    auto merge = [&](int thread, int n) {  // the item that this thread began and another ended
        for (int64_t i = 0; i < items; i++) {
            const Item& it = item[i];
            int t = thread;
            if (it.key_at(cut(t, n)) != 0 || it.key_at(cut(t + 1, n)) == 0 || t == n - 1) continue;
            if (it.key_at(cut(t + 1, n)) == it.keys) continue;
            float* sum = parts + size_t(2 * t + 1) * part;
            for (t++; t < n; t++) {
                const int64_t from = it.key_at(cut(t, n)), to = t == n - 1 ? it.keys : it.key_at(cut(t + 1, n));
                if (from < to) join(sum, parts + size_t(2 * t) * part, it.tiles);
            }
            for (int k = 0; k < it.tiles; k++)
                std::memcpy(work.tiles[k].sum, sum + k * (width + 2 * LANES) + width + LANES, sizeof(float) * LANES);
            write_unit<T, Math>(p, Unit{it.sequence, it.kv_head, 0, it.rows, 0, 0}, sum, width + 2 * LANES);
        }
    };
    if (threads == 1) {
        run(0, 1);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), n = omp_get_num_threads();
        run(thread, n);
#pragma omp barrier
        merge(thread, n);
    }
}

template <class T, class Many, class Single>
void attend(const Problem& p) {
    const Batch& b = *p.batch;
    static thread_local std::vector<int> single, few, many;
    single.clear();
    few.clear();
    many.clear();
    for (int s = 0; s < b.sequences; s++) {
        const int rows = (b.query_start[s + 1] - b.query_start[s]) * p.group;
        if (rows) (rows <= LANES ? single : rows <= LANES * UNIT_TILES ? few : many).push_back(s);
    }
    if (!many.empty()) attend_many<T, Many>(p, many);
    if (!few.empty()) attend_few<T, Many>(p, few.data(), int(few.size()));
    if (!single.empty()) attend_few<T, Single>(p, single.data(), int(single.size()));
}

}  // namespace

EXPORT void ostinato_attend(const Problem* problem) {
    Problem p = *problem;
    p.group = p.heads / p.kv_heads;
    p.threads = p.flags >> 8;
    if (!(p.flags & 1)) {
        attend<float, Plain<float>, Plain<float>>(p);
        return;
    }
#ifdef OSTINATO_AMX
    if (amx_allowed && p.dim % 16 == 0) {
        attend<bf16, Amx, AmxSingle>(p);
        return;
    }
#endif
    attend<bf16, Plain<bf16>, Plain<bf16>>(p);
}
