// What every kernel shares: number types, 16-lane vectors, scratch memory.
//
// Vectors are GCC vector extensions of 16 lanes, which compile to one AVX-512 register, two AVX or
// four SSE ones; intrinsics appear only where an instruction has no portable spelling (VNNI, AMX).
#pragma once

#include "threads.h"

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define OSTINATO_AVX512 1
#endif
#if defined(OSTINATO_AVX512) && defined(__AVX512VNNI__)
#define OSTINATO_VNNI 1
#endif
#if defined(OSTINATO_AVX512) && defined(__AVX512BF16__) && defined(__AMX_BF16__) && defined(__AMX_TILE__)
#define OSTINATO_AMX 1
#endif
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE inline __attribute__((always_inline))

namespace ostinato {

struct bf16 {
    uint16_t bits;
};

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef float f32x16_any __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i32x16_any __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t u16x16_any __attribute__((vector_size(32), aligned(2), may_alias));

// The widest vector with registers of its own. A wider one works, but lives in memory; hot loops that have
// to run on any machine go over the 16 lanes in parts of this width.
#if defined(OSTINATO_AVX512)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
typedef float f32v __attribute__((vector_size(4 * WIDTH)));
typedef int32_t i32v __attribute__((vector_size(4 * WIDTH)));
typedef float f32v_any __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

INLINE f32v load_part(const float* p) { return *reinterpret_cast<const f32v_any*>(p); }
INLINE void store_part(float* p, f32v x) { *reinterpret_cast<f32v_any*>(p) = x; }

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
    uint32_t u = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

INLINE void from_float(float x, float& y) { y = x; }
INLINE void from_float(float x, bf16& y) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    y.bits = uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

INLINE f32x16 splat(float x) { return f32x16{} + x; }

INLINE f32x16 load16(const float* p) { return *reinterpret_cast<const f32x16_any*>(p); }
INLINE f32x16 load16(const bf16* p) {
    u16x16 h = *reinterpret_cast<const u16x16_any*>(p);
    return (f32x16)(__builtin_convertvector(h, u32x16) << 16);
}

INLINE void store16(float* p, f32x16 x) { *reinterpret_cast<f32x16_any*>(p) = x; }
INLINE void store16(bf16* p, f32x16 x) {
#if defined(OSTINATO_AVX512) && defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    u32x16 u = (u32x16)x;
    u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    *reinterpret_cast<u16x16_any*>(p) = __builtin_convertvector(u, u16x16);
#endif
}

template <class T>
INLINE f32x16 load_some(const T* p, int n) {
    float t[16] = {};
    for (int i = 0; i < n; i++) t[i] = to_float(p[i]);
    return load16(t);
}

template <class T>
INLINE void store_some(T* p, f32x16 x, int n) {
    float t[16];
    store16(t, x);
    for (int i = 0; i < n; i++) from_float(t[i], p[i]);
}

INLINE f32x16 max16(f32x16 a, f32x16 b) {
#ifdef OSTINATO_AVX512
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

INLINE f32x16 abs16(f32x16 a) { return (f32x16)((u32x16)a & 0x7fffffffu); }

INLINE float sum16(f32x16 a) {
#ifdef OSTINATO_AVX512
    return _mm512_reduce_add_ps((__m512)a);
#else
    float t[16], s = 0;
    store16(t, a);
    for (int i = 0; i < 8; i++) t[i] += t[i + 8];
    for (int i = 0; i < 4; i++) t[i] += t[i + 4];
    s = (t[0] + t[2]) + (t[1] + t[3]);
    return s;
#endif
}

INLINE float top16(f32x16 a) {
#ifdef OSTINATO_AVX512
    return _mm512_reduce_max_ps((__m512)a);
#else
    float t[16];
    store16(t, a);
    for (int w = 8; w; w /= 2)
        for (int i = 0; i < w; i++) t[i] = t[i] > t[i + w] ? t[i] : t[i + w];
    return t[0];
#endif
}

// 2^x to float accuracy; 0 for x below -126 (minus infinity included).
INLINE f32v exp2_part(f32v x) {
    const f32v low = f32v{} - 126.0f, high = f32v{} + 127.0f;
    i32v alive = x >= low;
    x = alive ? x : low;
    x = x > high ? high : x;
    const f32v magic = f32v{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    f32v shifted = x + magic;
    f32v f = x - (shifted - magic);
    f32v p = f32v{} + 1.5252733804e-5f;
    p = p * f + 1.5403530393e-4f;
    p = p * f + 1.3333558146e-3f;
    p = p * f + 9.6181291076e-3f;
    p = p * f + 5.5504108665e-2f;
    p = p * f + 2.4022650696e-1f;
    p = p * f + 6.9314718056e-1f;
    p = p * f + 1.0f;
    i32v n = (i32v)shifted - 0x4b400000;
    p = (f32v)((i32v)p + (n << 23));
    return alive ? p : f32v{};
}

INLINE f32x16 exp2_16(f32x16 x) {
    alignas(64) float t[16];
    store16(t, x);
    for (int i = 0; i < 16; i += WIDTH) store_part(t + i, exp2_part(load_part(t + i)));
    return load16(t);
}

INLINE f32x16 exp_16(f32x16 x) { return exp2_16(x * 1.44269504089f); }

enum Activation { NONE = 0, SILU = 1, GELU_TANH = 2, GELU = 3 };

// 1 / x to float accuracy, for 1 <= x.
INLINE f32x16 inverse16(f32x16 x) {
#ifdef OSTINATO_AVX512
    const f32x16 r = (f32x16)_mm512_rcp14_ps((__m512)x);
    return r * (2.0f - x * r);
#else
    return 1.0f / x;
#endif
}

INLINE f32x16 silu16(f32x16 x) { return x * inverse16(exp_16(-x) + 1.0f); }

INLINE f32x16 gelu_tanh16(f32x16 x) {
    f32x16 u = x * (x * x * 0.044715f + 1.0f) * 1.5957691216f;  // 2 * sqrt(2 / pi)
    return x * inverse16(exp_16(-u) + 1.0f);
}

INLINE f32x16 gelu16(f32x16 x) {
    float t[16];
    store16(t, x);
    for (int i = 0; i < 16; i++) t[i] = 0.5f * t[i] * (1.0f + erff(t[i] * 0.70710678f));
    return load16(t);
}

INLINE f32x16 activate16(f32x16 x, int activation) {
    return activation == SILU ? silu16(x) : activation == GELU_TANH ? gelu_tanh16(x) : gelu16(x);
}

// Memory of one thread that only ever grows, so that a kernel call allocates nothing.
class Scratch {
  public:
    ~Scratch() { std::free(data_); }
    template <class T>
    T* get(size_t count) {
        size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
        if (bytes > size_) {
            std::free(data_);
            data_ = std::aligned_alloc(64, bytes);
            size_ = data_ ? bytes : 0;
            if (!data_) std::abort();
        }
        return static_cast<T*>(data_);
    }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

extern bool amx_allowed;

#ifdef OSTINATO_AMX
// All eight tiles are 16 rows of 64 bytes; kernels pad to that.
INLINE void amx_begin() {
    alignas(64) uint8_t config[64] = {1};
    for (int i = 0; i < 8; i++) {
        config[16 + 2 * i] = 64;
        config[48 + i] = 16;
    }
    _tile_loadconfig(config);
}
INLINE void amx_end() { _tile_release(); }
#endif

}  // namespace ostinato
