// Attention over runs of slots.
//
// Queries that share a key/value head are stacked (query, head of the group) and cut into tiles of 16
// lanes.  Keys come in blocks of up to 128, gathered from the runs of the sequence.  Scores are kept
// transposed, [key][lane]: softmax is then vertical (no horizontal reduction), masks and ALiBi are one
// vector operation per key, and the key rows of the pool feed AMX as they lie.  The output is kept
// transposed as well, [dim][lane], so that rescaling is vertical too.
#pragma once

#include "common.h"

#include <type_traits>

namespace ostinato {
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
    float* lse;  // [T, H], log2 of the sum of exponentials that each output was divided by; may be null
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

}  // namespace
}  // namespace ostinato
