// Threads of the kernels.
//
// A pool of our own, because libgomp's is not fit for calls of ten microseconds from a thread that is not the
// program's first: as soon as two threads have used OpenMP, it counts more threads than cores, stops spinning
// and puts its workers to sleep after every call. Ours spin for a while, then sleep.
//
// Where PyTorch's own OpenMP regions stand between the kernels (dense weights), two pools would fight over the
// cores; a thread that computes so sets `use_openmp`.
#pragma once

#include <atomic>
#include <cstdint>

namespace ostinato {

// One thread's view of a parallel region.
struct Team {
    int thread, count;
    std::atomic<uint32_t>* arrived;

    // Waits until all threads of the region are here. May be used once a region.
    void barrier() const;
};

extern thread_local bool use_openmp;

// Calls body(context, team) on that many threads, the calling one included.
void run_parallel(int threads, void (*body)(void*, const Team&), void* context);

template <class F>
void parallel(int threads, F&& f) {
    run_parallel(threads, [](void* context, const Team& team) { (*static_cast<F*>(context))(team); }, &f);
}

// f(i) for i below n, shared out in contiguous parts.
template <class F>
void parallel_for(int threads, int64_t n, F&& f) {
    parallel(threads, [&](const Team& t) {
        for (int64_t i = n * t.thread / t.count, end = n * (t.thread + 1) / t.count; i < end; i++) f(i);
    });
}

}  // namespace ostinato
