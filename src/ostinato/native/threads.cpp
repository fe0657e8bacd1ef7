#include "threads.h"

#include <omp.h>
#include <pthread.h>

#include <mutex>
#include <thread>

#if defined(__SSE2__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#else
#define RELAX() ((void)0)
#endif

namespace ostinato {
namespace {

// Of the order of 100 µs: more than the time between two kernels of a step, less than anyone would notice.
constexpr int SPINS = 4000;
constexpr int MAX_WORKERS = 255;

// Gives the core away now and then, in case the thread waited for is not running.
void wait_until_equal(const std::atomic<uint32_t>& value, uint32_t wanted) {
    for (int i = 0; value.load(std::memory_order_acquire) != wanted; i++) {
        if (i < SPINS)
            RELAX();
        else
            std::this_thread::yield();
    }
}

struct Pool {
    std::mutex busy;
    int workers = 0;
    void (*body)(void*, const Team&) = nullptr;
    void* context = nullptr;
    int count = 0;
    alignas(64) std::atomic<uint32_t> job{0};
    alignas(64) std::atomic<uint32_t> left{0};
    alignas(64) std::atomic<uint32_t> arrived{0};

    void work(int thread, uint32_t seen) {
        for (;;) {
            for (int i = 0; i < SPINS && job.load(std::memory_order_acquire) == seen; i++) RELAX();
            while (job.load(std::memory_order_acquire) == seen) job.wait(seen);
            seen++;
            if (thread < count) body(context, Team{thread, count, &arrived});
            left.fetch_sub(1, std::memory_order_release);
        }
    }

    void run(int threads, void (*f)(void*, const Team&), void* argument) {
        while (workers < threads - 1 && workers < MAX_WORKERS) {
            const int thread = ++workers;
            std::thread([this, thread, seen = job.load()] { work(thread, seen); }).detach();
        }
        body = f;
        context = argument;
        count = threads < workers + 1 ? threads : workers + 1;
        arrived.store(0, std::memory_order_relaxed);
        left.store(uint32_t(workers), std::memory_order_relaxed);
        job.fetch_add(1, std::memory_order_release);
        job.notify_all();
        f(argument, Team{0, count, &arrived});
        wait_until_equal(left, 0);
    }
};

// Never destroyed: its threads outlive everything. A forked child has none of them and gets a new pool.
Pool* pool = nullptr;

void renew() { pool = new Pool; }

}  // namespace

thread_local bool use_openmp = false;

void Team::barrier() const {
    arrived->fetch_add(1, std::memory_order_acq_rel);
    wait_until_equal(*arrived, uint32_t(count));
}

void run_parallel(int threads, void (*body)(void*, const Team&), void* context) {
    static std::once_flag once;
    std::call_once(once, [] {
        renew();
        pthread_atfork(nullptr, nullptr, renew);
    });
    std::atomic<uint32_t> arrived{0};
    if (use_openmp && threads > 1) {
#pragma omp parallel num_threads(threads)
        body(context, Team{omp_get_thread_num(), omp_get_num_threads(), &arrived});
        return;
    }
    Pool* mine = pool;
    // A second caller at the same time works alone rather than waiting.
    if (threads > 1 && mine->busy.try_lock()) {
        mine->run(threads, body, context);
        mine->busy.unlock();
        return;
    }
    body(context, Team{0, 1, &arrived});
}

}  // namespace ostinato

extern "C" __attribute__((visibility("default"))) void ostinato_use_openmp(int32_t on) { ostinato::use_openmp = on; }
