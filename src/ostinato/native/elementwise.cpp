// Norms, gated activations, rotary embedding with the write into the pool; library start-up.
#include "common.h"

#include <type_traits>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

using namespace ostinato;

bool ostinato::amx_allowed = false;

namespace {

// Rows shared out over threads, or none where the work is too small to wake one up for.
template <class F>
void each_row(int64_t rows, int64_t elements, int threads, F f) {
    if (threads == 1 || rows < 2 || elements < 32768) {
        for (int64_t i = 0; i < rows; i++) f(i);
        return;
    }
    parallel_for(threads, rows, f);
}

template <class T>
INLINE f32x16 load_n(const T* p, int n) {
    return n >= 16 ? load16(p) : load_some(p, n);
}

template <class T>
INLINE void store_n(T* p, f32x16 x, int n) {
    if (n >= 16)
        store16(p, x);
    else
        store_some(p, x, n);
}

template <class T>
INLINE float inverse_rms(const T* x, int n, float eps) {
    f32x16 a{}, b{};
    int k = 0;
    for (; k + 32 <= n; k += 32) {
        f32x16 u = load16(x + k), v = load16(x + k + 16);
        a += u * u;
        b += v * v;
    }
    for (; k < n; k += 16) {
        f32x16 u = load_n(x + k, n - k);
        a += u * u;
    }
    return 1.0f / std::sqrt(sum16(a + b) / float(n) + eps);
}

template <class T>
void rms_norm(const T* x, int64_t x_stride, int64_t rows, int n, const float* weight, float eps, T* out,
              int64_t out_stride, const T* residual, int64_t residual_stride, int threads) {
    each_row(rows, rows * n, threads, [=](int64_t m) {
        const T* a = x + m * x_stride;
        T* o = out + m * out_stride;
        const float r = inverse_rms(a, n, eps);
        for (int k = 0; k < n; k += 16) {
            f32x16 y = load_n(a + k, n - k) * r * load_n(weight + k, n - k);
            if (residual) y += load_n(residual + m * residual_stride + k, n - k);
            store_n(o + k, y, n - k);
        }
    });
}

template <class T>
void gated(const T* x, int64_t x_stride, int64_t rows, int n, int activation, T* out, int64_t out_stride, int threads) {
    each_row(rows, rows * n, threads, [=](int64_t m) {
        const T* a = x + m * x_stride;
        T* o = out + m * out_stride;
        for (int k = 0; k < n; k += 16)
            store_n(o + k, activate16(load_n(a + k, n - k), activation) * load_n(a + n + k, n - k), n - k);
    });
}

struct RopeStore {
    const void* qkv;
    const int32_t *positions, *slots;
    const float *cos, *sin;
    void *q, *k, *v;
    const float *q_norm, *k_norm;
    int64_t qkv_stride, k_stride, v_stride;
    int32_t tokens, heads, kv_heads, dim, half, flags;
    float eps;
};

// One head: optional RMS norm, then rotation of the first 2 * half elements.
template <class T>
INLINE void turn(const T* x, T* y, int dim, int half, const float* cos, const float* sin, const float* norm, float eps) {
    float t[512];
    if (!norm && half % 16 == 0) {
        for (int i = 0; i < half; i += 16) {
            f32x16 a = load16(x + i), b = load16(x + half + i), c = load16(cos + i), s = load16(sin + i);
            store16(y + i, a * c - b * s);
            store16(y + half + i, b * c + a * s);
        }
        std::memcpy(y + 2 * half, x + 2 * half, (dim - 2 * half) * sizeof(T));
        return;
    }
    if (norm) {
        const float r = inverse_rms(x, dim, eps);
        for (int i = 0; i < dim; i++) t[i] = to_float(x[i]) * r * norm[i];
    } else {
        for (int i = 0; i < dim; i++) t[i] = to_float(x[i]);
    }
    for (int i = 0; i < half; i++) {
        from_float(t[i] * cos[i] - t[half + i] * sin[i], y[i]);
        from_float(t[half + i] * cos[i] + t[i] * sin[i], y[half + i]);
    }
    for (int i = 2 * half; i < dim; i++) from_float(t[i], y[i]);
}

template <class T>
void rope_store(const RopeStore& p, int threads) {
    const int D = p.dim;
    const int64_t width = int64_t(p.heads + 2 * p.kv_heads) * D;
    each_row(p.tokens, p.tokens * width, threads, [&p, D](int64_t i) {
        const T* x = static_cast<const T*>(p.qkv) + i * p.qkv_stride;
        const float* cos = p.cos + int64_t(p.positions[i]) * p.half;
        const float* sin = p.sin + int64_t(p.positions[i]) * p.half;
        T* q = static_cast<T*>(p.q) + i * p.heads * D;
        for (int h = 0; h < p.heads; h++, x += D) turn(x, q + h * D, D, p.half, cos, sin, p.q_norm, p.eps);
        const int64_t at = int64_t(p.slots[i]) * D;
        for (int h = 0; h < p.kv_heads; h++, x += D)
            turn(x, static_cast<T*>(p.k) + h * p.k_stride + at, D, p.half, cos, sin, p.k_norm, p.eps);
        for (int h = 0; h < p.kv_heads; h++, x += D)
            std::memcpy(static_cast<T*>(p.v) + h * p.v_stride + at, x, D * sizeof(T));
    });
}

}  // namespace

// What this build uses: 1 AVX-512, 2 VNNI, 4 AMX (compiled in and granted by the kernel).
EXPORT int32_t ostinato_init() {
    int features = 0;
#ifdef OSTINATO_AVX512
    features |= 1;
#endif
#ifdef OSTINATO_VNNI
    features |= 2;
#endif
#if defined(OSTINATO_AMX) && defined(__linux__)
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    amx_allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    if (amx_allowed) features |= 4;
#endif
    return features;
}

// Asks for huge pages under bytes at..at + size, before they are first written: streams of weights or
// keys then miss the translation cache 512 times less often.
EXPORT void ostinato_huge_pages(void* at, int64_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t PAGE = 4096;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(at) + PAGE - 1) / PAGE * PAGE;
    const uintptr_t last = (reinterpret_cast<uintptr_t>(at) + uintptr_t(size)) / PAGE * PAGE;
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// Gives memory to the pages of at..at + size without changing what is in them, where the system can.
EXPORT void ostinato_populate(void* at, int64_t size) {
#if defined(__linux__)
    constexpr uintptr_t PAGE = 4096;
    constexpr int POPULATE_WRITE = 23;  // Linux 5.14; older C libraries have no name for it
    const uintptr_t first = reinterpret_cast<uintptr_t>(at) / PAGE * PAGE;
    const uintptr_t last = (reinterpret_cast<uintptr_t>(at) + uintptr_t(size)) / PAGE * PAGE;
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, POPULATE_WRITE);
#endif
}

// flags here and below: 1 bf16; bits 4..7 the activation; bits 8.. the threads.
struct NormCall {
    const void* x;
    const float* weight;
    void* out;
    const void* residual;
    int64_t x_stride, out_stride, residual_stride;
    int32_t rows, columns, flags;
    float eps;
};

EXPORT void ostinato_rms_norm(const NormCall* c) {
    auto run = [&](auto* out) {
        using T = std::remove_pointer_t<decltype(out)>;
        rms_norm(static_cast<const T*>(c->x), c->x_stride, c->rows, c->columns, c->weight, c->eps, out, c->out_stride,
                 static_cast<const T*>(c->residual), c->residual_stride, c->flags >> 8);
    };
    if (c->flags & 1)
        run(static_cast<bf16*>(c->out));
    else
        run(static_cast<float*>(c->out));
}

struct GatedCall {
    const void* x;
    void* out;
    int64_t x_stride, out_stride;
    int32_t rows, columns, flags;
};

EXPORT void ostinato_gated(const GatedCall* c) {
    auto run = [&](auto* out) {
        using T = std::remove_pointer_t<decltype(out)>;
        gated(static_cast<const T*>(c->x), c->x_stride, c->rows, c->columns, (c->flags >> 4) & 15, out, c->out_stride,
              c->flags >> 8);
    };
    if (c->flags & 1)
        run(static_cast<bf16*>(c->out));
    else
        run(static_cast<float*>(c->out));
}

EXPORT void ostinato_rope_store(const RopeStore* c) {
    if (c->flags & 1)
        rope_store<bf16>(*c, c->flags >> 8);
    else
        rope_store<float>(*c, c->flags >> 8);
}

struct TurnKeys {
    void* keys;
    const int32_t* layers;
    const float *cos, *sin;
    int64_t layer_stride, head_stride, slot;
    int32_t layer_count, heads, count, dim, half, flags;
};

// Turns keys where they lie, those of `count` slots in some layers, all by the same angle.
EXPORT void ostinato_turn_keys(const TurnKeys* c) {
    auto run = [&](auto* keys) {
        parallel_for(c->flags >> 8, int64_t(c->layer_count) * c->heads, [&](int64_t i) {
            auto* x = keys + c->layers[i / c->heads] * c->layer_stride + i % c->heads * c->head_stride + c->slot * c->dim;
            for (int t = 0; t < c->count; t++, x += c->dim) turn(x, x, c->dim, c->half, c->cos, c->sin, nullptr, 0);
        });
    };
    if (c->flags & 1)
        run(static_cast<bf16*>(c->keys));
    else
        run(static_cast<float*>(c->keys));
}

struct MergeCall {
    void* out;
    const void* other;
    const float *lse, *other_lse;
    int32_t rows, dim, flags;
};

// Joins attention over some keys with attention over others: each weighs as much as its sum of exponentials.
EXPORT void ostinato_merge(const MergeCall* c) {
    auto run = [&](auto* out) {
        using T = std::remove_pointer_t<decltype(out)>;
        const T* other = static_cast<const T*>(c->other);
        each_row(c->rows, int64_t(c->rows) * c->dim, c->flags >> 8, [&](int64_t i) {
            const float a = c->lse[i], b = c->other_lse[i], most = a > b ? a : b;
            if (most == -INFINITY || b == -INFINITY) return;
            const float x = std::exp2(a - most), y = std::exp2(b - most), w = y / (x + y);
            T* to = out + i * c->dim;
            const T* from = other + i * c->dim;
            for (int d = 0; d < c->dim; d++) {
                const float mine = to_float(to[d]);
                from_float(mine + (to_float(from[d]) - mine) * w, to[d]);
            }
        });
    };
    if (c->flags & 1)
        run(static_cast<bf16*>(c->out));
    else
        run(static_cast<float*>(c->out));
}
