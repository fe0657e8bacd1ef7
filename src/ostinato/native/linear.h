// y = x W' for weights of 4 or 8 bits per element with a scale and a minimum per 32 of them.
//
// Packed layout: 16 output rows make a tile; a tile is a sequence of groups of 32 columns, each
//   codes    4 bits: 4 vectors of 64 bytes; byte 4r+i of vector j holds row r, column 4j+i in its
//            low and column 16+4j+i in its high half.  8 bits: 8 vectors, byte 4r+i is column 4j+i.
//   scales   16 half-precision numbers
//   minima   16 half-precision numbers
// so that a matrix-vector product reads one sequential stream, and one vector times four
// broadcast activations is one VNNI instruction.
#pragma once

#include "common.h"

namespace ostinato {
namespace {

constexpr int GROUP = 32;
constexpr int AHEAD = 16384;  // bytes of weights to ask for before they are needed
constexpr int TILE = 16;
constexpr int AMX_ROWS = 11;  // from here on AMX on bf16 beats VNNI on 8 bits

struct Packed {
    int32_t rows, columns, bits, tiles;
    uint8_t* data;
};

INLINE int group_bytes(int bits) { return bits * TILE * GROUP / 8 + 4 * TILE; }

INLINE float half_to_float(uint16_t h) {
#ifdef __F16C__
    return _cvtsh_ss(h);
#else
    uint32_t sign = uint32_t(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 0x3ff, u;
    if (e == 0) {
        float f = float(m) * 5.9604644775390625e-8f;
        std::memcpy(&u, &f, 4);
        u |= sign;
    } else {
        u = sign | ((e == 31 ? 255 : e + 112) << 23) | (m << 13);
    }
    float f;
    std::memcpy(&f, &u, 4);
    return f;
#endif
}

INLINE uint16_t float_to_half(float f) {
#ifdef __F16C__
    return uint16_t(_cvtss_sh(f, 0));
#else
    uint32_t u;
    std::memcpy(&u, &f, 4);
    uint16_t sign = uint16_t((u >> 16) & 0x8000);
    float a = std::fabs(f);
    if (!(a < 65520.0f)) return sign | (a != a ? 0x7e00 : 0x7c00);
    if (a < 6.103515625e-5f) return sign | uint16_t(std::nearbyint(a * 16777216.0f));
    u &= 0x7fffffff;
    u += 0xfff + ((u >> 13) & 1);
    return sign | uint16_t((u - (112u << 23)) >> 13);
#endif
}

INLINE f32x16 load_half16(const uint8_t* p) {
#ifdef OSTINATO_AVX512
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
    uint16_t h[16];
    float f[16];
    std::memcpy(h, p, 32);
    for (int i = 0; i < 16; i++) f[i] = half_to_float(h[i]);
    return load16(f);
#endif
}

// The codes of one group as bytes [vector j of 8][row r of 16][i of 4], column 4j+i.
INLINE void unpack_group(const uint8_t* w, int bits, uint8_t* codes) {
    if (bits == 8) {
        std::memcpy(codes, w, TILE * GROUP);
        return;
    }
    for (int b = 0; b < TILE * GROUP / 2; b++) codes[b] = w[b] & 15;
    for (int b = 0; b < TILE * GROUP / 2; b++) codes[TILE * GROUP / 2 + b] = w[b] >> 4;
}

// One row of activations in float, after the optional norm or gated activation.
template <class X>
void prepare_row(const X* x, int columns, const float* norm, float eps, int activation, float* y) {
    if (activation) {
        for (int k = 0; k < columns; k += 16)
            store16(y + k, activate16(load16(x + k), activation) * load16(x + columns + k));
        return;
    }
    if (norm) {
        f32x16 a{}, b{};
        for (int k = 0; k < columns; k += 32) {
            f32x16 u = load16(x + k), v = load16(x + k + 16);
            a += u * u;
            b += v * v;
        }
        float r = 1.0f / std::sqrt(sum16(a + b) / float(columns) + eps);
        for (int k = 0; k < columns; k += 16) store16(y + k, load16(x + k) * r * load16(norm + k));
        return;
    }
    for (int k = 0; k < columns; k += 16) store16(y + k, load16(x + k));
}

template <class O>
struct Output {
    O* out;
    int64_t stride;
    const O* residual;
    int64_t residual_stride;
    const float* bias;
    int rows;

    INLINE void write(int m, int tile, f32x16 y) const {
        int first = tile * TILE, n = rows - first;
        if (n >= TILE) {
            if (bias) y += load16(bias + first);
            if (residual) y += load16(residual + m * residual_stride + first);
            store16(out + m * stride + first, y);
            return;
        }
        if (bias) y += load_some(bias + first, n);
        if (residual) y += load_some(residual + m * residual_stride + first, n);
        store_some(out + m * stride + first, y, n);
    }
};

thread_local Scratch shared_scratch, row_scratch, tile_scratch;

}  // namespace
}  // namespace ostinato
