#include "threads.h"

#include <omp.h>
#include <pthread.h>

#include <atomic>
#include <mutex>
#include <thread>

#if defined(__SSE2__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#else
#define RELAX() ((void)0)
#endif

namespace ostinato {

using Body = void (*)(void*, int64_t);

thread_local bool use_openmp = false;

namespace {

// Of the order of 200 µs: more than the time between two kernels of a step, less than anyone would notice.
constexpr int SPINS = 16000;

// The state of a pool is one number, so that joining a job and its end cannot cross: which job it is, whether
// it is open to workers, and how many of them are in it.
constexpr uint64_t JOB = uint64_t(1) << 32, OPEN = uint64_t(1) << 31, WORKERS = OPEN - 1;

struct Pool {
    std::mutex busy;
    int workers = 0;
    Body body = nullptr;
    void* context = nullptr;
    int64_t n = 0;
    alignas(64) std::atomic<uint64_t> state{0};
    alignas(64) std::atomic<int64_t> next{0};

    void take() {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) body(context, i);
    }

    void work(uint64_t seen) {
        for (;;) {
            uint64_t now = state.load(std::memory_order_acquire);
            for (int i = 0; now / JOB == seen / JOB; i++) {
                if (i < SPINS)
                    RELAX();
                else
                    state.wait(now);
                now = state.load(std::memory_order_acquire);
            }
            seen = now;
            while (now / JOB == seen / JOB && (now & OPEN)) {
                if (!state.compare_exchange_weak(now, now + 1, std::memory_order_acquire)) continue;
                take();
                state.fetch_sub(1, std::memory_order_release);
                break;
            }
        }
    }

    void run(int threads, int64_t count, Body f, void* argument) {
        for (; workers < threads - 1; workers++) std::thread([this, seen = state.load()] { work(seen); }).detach();
        body = f;
        context = argument;
        n = count;
        next.store(0, std::memory_order_relaxed);
        // No worker is in a job now: the last one closed when it was empty, and its workers had left.
        state.store((state.load(std::memory_order_relaxed) / JOB + 1) * JOB | OPEN, std::memory_order_release);
        state.notify_all();
        take();
        state.fetch_and(~OPEN, std::memory_order_acq_rel);
        for (int i = 0; state.load(std::memory_order_acquire) & WORKERS; i++) {
            if (i < SPINS)
                RELAX();
            else
                std::this_thread::yield();
        }
    }
};

// Never destroyed: its threads outlive everything. A forked child has none of them and gets a new pool.
Pool* pool = nullptr;

void renew() { pool = new Pool; }

}  // namespace

void run_parallel(int threads, int64_t n, Body body, void* context) {
    static std::once_flag once;
    std::call_once(once, [] {
        renew();
        pthread_atfork(nullptr, nullptr, renew);
    });
    if (use_openmp) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
        for (int64_t i = 0; i < n; i++) body(context, i);
        return;
    }
    Pool* mine = pool;
    if (mine->busy.try_lock()) {
        mine->run(threads, n, body, context);
        mine->busy.unlock();
        return;
    }
    // A second caller at the same time works alone rather than waiting.
    for (int64_t i = 0; i < n; i++) body(context, i);
}

}  // namespace ostinato

// For the calling thread: whether kernels run on OpenMP's threads, and how many of those PyTorch may use itself.
extern "C" __attribute__((visibility("default"))) void ostinato_use_openmp(int32_t on, int32_t threads) {
    ostinato::use_openmp = on;
    omp_set_num_threads(threads);
}
