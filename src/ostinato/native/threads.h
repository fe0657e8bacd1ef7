// Threads of the kernels.
//
// A pool of our own, because libgomp's is not fit for calls of ten microseconds from a thread that is not the
// program's first: as soon as two threads have used OpenMP, it counts more threads than cores, stops spinning
// and puts its workers to sleep after every call. Ours spin for a while, then sleep.
//
// And because its regions wait for all their threads. Here work is taken piece by piece, and the caller waits
// for no worker that has not begun: with other programs on the cores, a worker that is not scheduled in time
// costs nothing instead of milliseconds a call.
//
// Where PyTorch's own OpenMP regions stand between the kernels (dense weights), two pools would fight over the
// cores; a thread that computes so sets `use_openmp`.
#pragma once

#include <cstdint>
#include <type_traits>

namespace ostinato {

extern thread_local bool use_openmp;

// body(context, i) for every i below n, each once, on up to that many threads, the calling one included.
void run_parallel(int threads, int64_t n, void (*body)(void*, int64_t), void* context);

template <class F>
void parallel_for(int threads, int64_t n, F&& f) {
    if (threads == 1 || n == 1) {
        for (int64_t i = 0; i < n; i++) f(i);
        return;
    }
    run_parallel(threads, n, [](void* context, int64_t i) { (*static_cast<std::remove_reference_t<F>*>(context))(i); },
                 const_cast<void*>(static_cast<const void*>(&f)));
}

// f(begin, end) for parts of 0..n: a few for each thread, so that a slow one holds up little.
template <class F>
void parallel_parts(int threads, int64_t n, F&& f) {
    const int64_t parts = threads == 1 ? 1 : n < threads * 4 ? n : threads * 4;
    parallel_for(threads, parts, [&](int64_t i) { f(n * i / parts, n * (i + 1) / parts); });
}

}  // namespace ostinato
