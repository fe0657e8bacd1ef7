// How attention is cut into units and shared out over threads.  See attention.h for the layout.
#include "attention_amx.h"
#include "attention_plain.h"

#include <vector>

using namespace ostinato;

namespace {

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
            const int64_t at = int64_t(start + row / p.group) * p.heads + u.kv_head * p.group + row % p.group;
            rows[l] = static_cast<T*>(p.out) + at * D;
            if (p.lse && l < lanes) p.lse[at] = sum > 0 ? work.tiles[t].most[l] + std::log2(sum) : -INFINITY;
        }
        Math::write(out + size_t(t) * width, inverse, rows, lanes, D);
    }
}

// How many tiles make a unit. Each unit reads its keys and prepares its values anew, which wants large ones; but
// where there are few, as with a question on a long prompt, they have to come out even among the threads.
int unit_tiles(const Problem& p, const std::vector<int>& sequences, int64_t total) {
    const int64_t usual = total / LANES / (p.threads * 6) + 1;
    if (usual > UNIT_TILES) return UNIT_TILES;
    int best = 4;
    int64_t least = INT64_MAX;
    for (int tiles = 4; tiles <= UNIT_TILES; tiles++) {
        int64_t units = 0;
        for (int s : sequences) {
            const int rows = (p.batch->query_start[s + 1] - p.batch->query_start[s]) * p.group;
            units += int64_t(rows + LANES * tiles - 1) / (LANES * tiles) * p.kv_heads;
        }
        const int64_t cost = (units + p.threads - 1) / p.threads * (tiles + 1);
        if (cost < least) least = cost, best = tiles;
    }
    return best;
}

// Many queries: units of some tiles, handed out one by one, longest first.
template <class T, class Math>
void attend_many(const Problem& p, const std::vector<int>& sequences) {
    const Batch& b = *p.batch;
    std::vector<Unit> units;
    int64_t total = 0;
    for (int s : sequences) total += int64_t(b.query_start[s + 1] - b.query_start[s]) * p.group * p.kv_heads;
    const int step = LANES * unit_tiles(p, sequences, total);
    for (int s : sequences) {
        const int rows = (b.query_start[s + 1] - b.query_start[s]) * p.group;
        for (int first = (rows - 1) / step * step; first >= 0; first -= step)
            for (int h = 0; h < p.kv_heads; h++)
                units.push_back({s, h, first, rows - first < step ? rows - first : step, 0, INT64_MAX});
    }
    parallel_for(p.threads, int64_t(units.size()), [&](int64_t i) {
        Math::begin();
        float* out;
        attend_unit<T, Math>(p, units[i], &out);
        write_unit<T, Math>(p, units[i], out);
        Math::end();
    });
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
            for (int k = 0; k < it.tiles; k++) {
                std::memcpy(work.tiles[k].most, sum + k * (width + 2 * LANES) + width, sizeof(float) * LANES);
                std::memcpy(work.tiles[k].sum, sum + k * (width + 2 * LANES) + width + LANES, sizeof(float) * LANES);
            }
            write_unit<T, Math>(p, Unit{it.sequence, it.kv_head, 0, it.rows, 0, 0}, sum, width + 2 * LANES);
        }
    };
    if (threads == 1) {
        run(0, 1);
        return;
    }
    parallel_for(threads, threads, [&](int64_t part) { run(int(part), threads); });
    for (int part = 0; part < threads; part++) merge(part, threads);
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
