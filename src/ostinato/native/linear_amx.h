// Many rows: AMX on bf16, the weights expanded tile by tile.
#pragma once

#include "linear.h"

#ifdef OSTINATO_AMX
namespace ostinato {
namespace {

// One group of a tile as bf16 pairs of columns, the B operand of AMX: 16 vectors.
//
// A code goes into the top of the mantissa of 1.0, which makes 1 + code / 2^BITS with a shift and a mask
// and no conversion; scale and minimum are changed to suit.
template <int BITS>
INLINE void expand(const uint8_t* w, uint32_t* to) {
    const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(int(0xffff0000));
    const __m512i one = _mm512_set1_epi32(0x3f800000), mask = _mm512_set1_epi32(((1 << BITS) - 1) << (23 - BITS));
    const __m512 scale = (__m512)(load_half16(w + BITS * 64) * float(1 << BITS));
    const __m512 minimum = (__m512)(load_half16(w + BITS * 64 + 32) - (f32x16)scale);
    for (int line = 0; line < group_bytes(BITS); line += 64) __builtin_prefetch(w + AHEAD + line, 0, 2);
    auto place = [&](__m512i v, int bit) {
        const int shift = 23 - BITS - bit;
        __m512i x = shift >= 0 ? _mm512_slli_epi32(v, shift) : _mm512_srli_epi32(v, -shift);
        return _mm512_fmadd_ps((__m512)_mm512_ternarylogic_epi32(x, mask, one, 0xea), scale, minimum);  // x & mask | one
    };
    auto pair = [&](__m512i v, int bit, uint32_t* at) {  // rounded to nearest, ties away from zero
        __m512i even = _mm512_add_epi32((__m512i)place(v, bit), half), odd = _mm512_add_epi32((__m512i)place(v, bit + 8), half);
        _mm512_store_si512(at, _mm512_ternarylogic_epi32(odd, upper, _mm512_srli_epi32(even, 16), 0xea));
    };
    for (int j = 0; j < BITS; j++) {
        const __m512i v = _mm512_loadu_si512(w + 64 * j);
        pair(v, 0, to + 32 * j);
        pair(v, 16, to + 32 * j + 16);
        if (BITS == 4) {
            pair(v, 4, to + 128 + 32 * j);
            pair(v, 20, to + 128 + 32 * j + 16);
        }
    }
}

// 16 * A rows of x times 16 * B rows of the weight; `next(g)` runs ahead of the products with group g.
// With A = 1 even and odd groups have sums of their own, as one chain of products would wait on itself.
template <int A, int B, class Next>
INLINE void multiply_amx(const bf16* x, int columns, const uint32_t* w, float* c, Next next) {
    constexpr int AHEAD = 3;
    const int groups = columns / GROUP, stride = columns * 2;
    const uint32_t* v = w + groups * 256;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int g = 0; g < AHEAD && g < groups; g++) next(g);
    for (int g = 0; g < groups; g++) {
        if (g + AHEAD < groups) next(g + AHEAD);
        _tile_loadd(4, x + g * GROUP, stride);
        _tile_loadd(6, w + g * 256, 64);
        if (B > 1) _tile_loadd(7, v + g * 256, 64);
        if (A > 1) {
            _tile_dpbf16ps(0, 4, 6);
            if (B > 1) _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, x + 16 * columns + g * GROUP, stride);
            _tile_dpbf16ps(2, 5, 6);
            if (B > 1) _tile_dpbf16ps(3, 5, 7);
        } else if (g & 1) {
            _tile_dpbf16ps(2, 4, 6);
            if (B > 1) _tile_dpbf16ps(3, 4, 7);
        } else {
            _tile_dpbf16ps(0, 4, 6);
            if (B > 1) _tile_dpbf16ps(1, 4, 7);
        }
    }
    _tile_stored(0, c, 64);
    if (B > 1) _tile_stored(1, c + 256, 64);
    _tile_stored(2, c + 512, 64);
    if (B > 1) _tile_stored(3, c + 768, 64);
    if (A == 1)
        for (int i = 0; i < 256 * B; i += 16) store16(c + i, load16(c + i) + load16(c + 512 + i));
}

template <int BITS, class O>
void multiply_tiles_amx(const Packed& w, int begin, int end, int first, int rows, const bf16* x, const Output<O>& out) {
    const int groups = w.columns / GROUP;
    const int64_t bytes = int64_t(groups) * group_bytes(BITS);
    uint32_t* strip = tile_scratch.get<uint32_t>(size_t(groups) * 512 + 1024);
    float* c = reinterpret_cast<float*>(strip + size_t(groups) * 512);
    for (int t = begin; t < end; t += 2) {
        const int wide = end - t < 2 ? 1 : 2;
        // The first rows expand the weights as they go, so that vector and tile units work side by side.
        auto grow = [&](int g) {
            expand<BITS>(w.data + t * bytes + int64_t(g) * group_bytes(BITS), strip + g * 256);
            if (wide == 2)
                expand<BITS>(w.data + (t + 1) * bytes + int64_t(g) * group_bytes(BITS), strip + (groups + g) * 256);
        };
        auto grown = [](int) {};
        auto step = [&](const bf16* a, bool tall, auto next) {
            if (tall && wide == 2)
                multiply_amx<2, 2>(a, w.columns, strip, c, next);
            else if (tall)
                multiply_amx<2, 1>(a, w.columns, strip, c, next);
            else if (wide == 2)
                multiply_amx<1, 2>(a, w.columns, strip, c, next);
            else
                multiply_amx<1, 1>(a, w.columns, strip, c, next);
        };
        for (int m = 0; m < rows; m += 32) {
            const int high = rows - m <= 16 ? 1 : 2;
            const bf16* a = x + int64_t(m) * w.columns;
            if (m == 0)
                step(a, high == 2, grow);
            else
                step(a, high == 2, grown);
            for (int i = 0; i < 16 * high && m + i < rows; i++)
                for (int b = 0; b < wide; b++)
                    out.write(first + m + i, t + b, load16(c + (i / 16 * 2 + b) * 256 + i % 16 * 16));
        }
    }
}

// Many rows: activations and weights in bf16, the weights expanded tile by tile and never stored.
template <class X, class O>
void linear_amx(const Packed& w, const X* x, int64_t x_stride, int rows, const Output<O>& out, const float* norm, float eps,
                int activation, int threads) {
    const int columns = w.columns, padded = (rows + 31) / 32 * 32;
    bf16* xb = shared_scratch.get<bf16>(size_t(padded) * columns);
    // Rows at a time such that they stay in the second-level cache.
    const int block = (1 << 19) / columns / 32 * 32 > 32 ? (1 << 19) / columns / 32 * 32 : 32;
    auto prepare = [&](int m) {
        bf16* to = xb + int64_t(m) * columns;
        if (m >= rows) {
            std::memset(static_cast<void*>(to), 0, size_t(columns) * 2);
            return;
        }
        float* y = row_scratch.get<float>(columns);
        prepare_row(x + m * x_stride, columns, norm, eps, activation, y);
        for (int k = 0; k < columns; k += 16) store16(to + k, load16(y + k));
    };
    parallel_for(threads, padded, prepare);
    parallel_parts(threads, (w.tiles + 1) / 2, [&](int64_t first, int64_t last) {
        const int begin = int(first * 2), end = int(last * 2 < w.tiles ? last * 2 : w.tiles);
        amx_begin();
        for (int m = 0; m < rows; m += block) {
            const int n = rows - m < block ? rows - m : block;
            if (w.bits == 4)
                multiply_tiles_amx<4>(w, begin, end, m, n, xb + int64_t(m) * columns, out);
            else
                multiply_tiles_amx<8>(w, begin, end, m, n, xb + int64_t(m) * columns, out);
        }
        amx_end();
    });
}

}  // namespace
}  // namespace ostinato
#endif
