// SPDX-License-Identifier: Apache-2.0
// The quantizers: a rule rounds sixteen chunks at a time; then, with the global scale, the scales are rounded.
#pragma once
#include <cmath>
#include <memory>

#include "rules.h"

namespace q2 {

constexpr int64_t ALONE = 1 << 14;  // elements that pay for starting a thread

// The largest of the values that threads found; NaN if one of them is NaN.
struct Largest {
    float value = 0.0f;
    bool is_nan = false;

    void add(float x) {
        is_nan |= x != x;
        value = x > value ? x : value;
    }
    float result() const { return is_nan ? __builtin_nanf("") : value; }
};

// The work of a call, shared by all its tiles.
struct Job {
    const Operand& o;
    Layout layout;
    int64_t blocks;  // of a row
    float signs[LARGEST_CHUNK];
    float factor, global_scale;
    float* raw;  // raw scales, if the global scale depends on them; else null

    explicit Job(const Operand& operand) : o(operand), layout(operand), global_scale(1.0f), raw(nullptr) {
        blocks = layout.width / (o.rounding >= MX_NEAREST ? 32 : 16);
        factor = o.factor_tensor ? *o.factor_tensor * o.factor : o.factor;
        if (o.signs) signs_of(*o.sign_seed, signs);
    }

    int64_t scale_at(const Place& p, int lane, int64_t block, int in_chunk) const {
        return p.row[lane] / o.height * blocks + p.piece[lane] * in_chunk + block;
    }
};

template <Type TYPE>
inline void chunks(const Job& job, const Place& place, F* x) {
    load_chunks<TYPE>(job.o, place, x);
    rotate(job.o, job.signs, x);
    if (job.o.rounding == QUEST)  // other rules multiply the scale of a block
        for (int k = 0; k < job.o.chunk; k++) x[k] = x[k] * fill(job.factor);
}

inline void load_any(const Job& job, const Place& place, F* x) {
    return job.o.type == BF16 ? chunks<BF16>(job, place, x) : chunks<FP32>(job, place, x);
}

// Bits of each lane's largest |x| in the other tile of a block of 32 rows.
inline I largest_of_other_rows(const Job& job, Place place) {
    for (int64_t& row : place.row) row ^= LANES;
    int64_t left = job.layout.rows - place.row[0];
    if (left <= 0) return fill(0);
    place.live = (int32_t)(left < LANES ? left : LANES);
    F x[LARGEST_CHUNK];
    load_any(job, place, x);
    I largest = fill(0);
    for (int k = 0; k < job.o.chunk; k++) largest = most(largest, bits(x[k]) & fill(0x7FFFFFFF));
    return largest;
}

inline Context context_of(const Job& job, const Place& place) {
    const Operand& o = job.o;
    Context c{o, fill(job.global_scale), fill(1.0f / job.global_scale), fill(0), fill(0), fill(o.rounding == QUEST ? 1.0f : job.factor), fill(1.0f),
              fill(0)};
    if (o.rounding == STOCHASTIC || o.rounding == MX_STOCHASTIC) {
        int32_t low[LANES], high[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            uint64_t index = (uint64_t)(place.row[lane] * job.layout.width + place.piece[lane] * o.chunk) / 8;
            low[lane] = (int32_t)(uint32_t)index;
            high[lane] = (int32_t)(index >> 32);
        }
        c.index_low = load(low);
        c.index_high = load(high);
    }
    if (o.shares) c.share = fill(o.shares[place.piece[0]]);
    if (o.height > LANES) c.other_rows = largest_of_other_rows(job, place);
    return c;
}

template <int WIDTH>
inline void write_codes(const Job& job, const Place& p, const Codes<WIDTH>& codes, int first) {
    for (int w = 0; w < WIDTH / 8; w++) {
        int32_t words[LANES];
        store(words, codes.word[w]);
        for (int lane = 0; lane < p.live; lane++) {
            int64_t element = p.row[lane] * job.layout.width + p.piece[lane] * job.o.chunk + first + 8 * w;
            std::memcpy(job.o.codes + element / 2, &words[lane], 4);
        }
    }
}

// Blocks of a tile through a rule of nvfp4; the largest raw scale.
template <Block<16> (*RULE)(const Context&, const F*, int)>
inline void nvfp4_tile(const Job& job, const Place& place, F* x, Largest& largest) {
    const Operand& o = job.o;
    Context c = context_of(job, place);
    for (int first = 0; first < o.chunk; first += 16) {
        Block<16> b = RULE(c, x + first, first);
        write_codes(job, place, b.codes, first);
        int32_t poisoned[LANES], bytes[LANES];
        float scales[LANES];
        store(poisoned, b.poisoned);
        store(scales, b.scale);
        bool waits = job.raw != nullptr;
        if (!waits) store(bytes, encode_e4m3(nearest_e4m3(b.scale)));
        for (int lane = 0; lane < place.live; lane += o.height) {
            int64_t at = job.scale_at(place, lane, first / 16, o.chunk / 16);
            if (waits) {
                job.raw[at] = scales[lane];
                largest.add(scales[lane]);
                o.scales[at] = poisoned[lane] ? E4M3_NAN : 0;
            } else {
                o.scales[at] = poisoned[lane] ? E4M3_NAN : (uint8_t)bytes[lane];
            }
        }
    }
}

template <int ROUNDING>
inline void mxfp4_tile(const Job& job, const Place& place, F* x, Largest&) {
    const Operand& o = job.o;
    Context c = context_of(job, place);
    for (int first = 0; first < o.chunk; first += 32) {
        Block<32> b = mxfp4<ROUNDING>(c, x + first, first);
        write_codes(job, place, b.codes, first);
        int32_t poisoned[LANES], bytes[LANES], trusted[LANES];
        store(poisoned, b.poisoned);
        store(bytes, b.exponent);
        store(trusted, b.trusted);
        for (int lane = 0; lane < place.live; lane++) {
            if (place.row[lane] % o.height == 0)
                o.scales[job.scale_at(place, lane, first / 32, o.chunk / 32)] =
                    poisoned[lane] ? E8M0_NAN : (uint8_t)bytes[lane];
            if (o.mask) {
                int64_t element = place.row[lane] * job.layout.width + place.piece[lane] * o.chunk + first;
                std::memcpy(o.mask + element / 8, &trusted[lane], 4);
            }
        }
    }
}

// The largest |x| of the finite blocks of nvfp4.
inline void largest_of_tile(const Job& job, const Place&, F* x, Largest& largest) {
    for (int k = 0; k < job.o.chunk; k += 16) {
        I poisoned;
        float lanes[LANES];
        store(lanes, largest_of<16>(job.o, x + k, fill(job.factor), poisoned));
        for (int lane = 0; lane < LANES; lane++) largest.add(lanes[lane]);
    }
}

template <void (*TILE)(const Job&, const Place&, F*, Largest&)>
inline float all_tiles(const Job& job) {
    Largest all;
#pragma omp parallel if (job.layout.rows * job.layout.width > ALONE)
    {
        Largest own;
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < job.layout.tiles; tile++) {
            F x[LARGEST_CHUNK];
            Place place = job.layout.place(tile);
            load_any(job, place, x);
            TILE(job, place, x, own);
        }
#pragma omp critical(q2_largest)
        all.add(own.result());
    }
    return all.result();
}

inline float floored(float global_scale, float largest) {
    if (!std::isfinite(largest)) return __builtin_nanf("");
    if (global_scale == 0.0f) return 1.0f;
    return global_scale < TINY ? TINY : global_scale;
}

// The smallest 2^k with top / 2^k <= cap.
inline float power_of_two_scale(float top, float cap) {
    if (!std::isfinite(top)) return __builtin_nanf("");
    if (top == 0.0f) return 1.0f;
    int exponent, of_cap;
    float fraction = std::frexp(top, &exponent), cap_fraction = std::frexp(cap, &of_cap);
    int k = exponent - of_cap + (fraction > cap_fraction);
    return std::ldexp(1.0f, k < -126 ? -126 : k > 127 ? 127 : k);
}

// The raw scales over the global scale, rounded. Scales of poisoned blocks are NaN already.
inline void finish_scales(const Job& job, int64_t count) {
    const Operand& o = job.o;
    F global_scale = fill(job.global_scale);
#pragma omp parallel for schedule(static) if (count * 16 > ALONE)
    for (int64_t first = 0; first < count; first += LANES) {
        F scale = load(job.raw + first) / global_scale;
        I bytes;
        if (o.rounding == MS_EDEN) {
            int32_t words[4][LANES], random[LANES];
            I counter[4];
            int32_t lows[LANES] = {}, highs[LANES] = {};
            for (int i = 0; i < 4; i++) {
                uint64_t index = (uint64_t)first / 4 + i;
                lows[i] = (int32_t)(uint32_t)index;
                highs[i] = (int32_t)(index >> 32);
            }
            counter[0] = load(lows);
            counter[1] = load(highs);
            counter[2] = fill((int32_t)o.rng_offset);
            counter[3] = fill((int32_t)RANDOM_BITS);
            philox(counter, Key(*o.seed), RANDOM_BITS_ROUNDS);
            for (int w = 0; w < 4; w++) store(words[w], counter[w]);
            for (int i = 0; i < LANES; i++) random[i] = words[i % 4][i / 4];
            bytes = encode_e4m3(stochastic_e4m3(scale, load(random)));
        } else {
            bytes = encode_e4m3(nearest_e4m3(scale));
        }
        int32_t own[LANES];
        store(own, bytes);
        for (int i = 0; i < LANES && first + i < count; i++)
            if (!o.scales[first + i]) o.scales[first + i] = (uint8_t)own[i];
    }
}

inline float tiles_by_rule(const Job& job) {
    switch (job.o.rounding) {
        case MS_EDEN: return all_tiles<nvfp4_tile<ms_eden>>(job);
        case MX_NEAREST: return all_tiles<mxfp4_tile<MX_NEAREST>>(job);
        case MX_STOCHASTIC: return all_tiles<mxfp4_tile<MX_STOCHASTIC>>(job);
        case QUEST: return all_tiles<mxfp4_tile<QUEST>>(job);
        case STOCHASTIC:
            return job.o.selection ? all_tiles<nvfp4_tile<nvfp4<true, FOUR_SIX>>>(job)
                                   : all_tiles<nvfp4_tile<nvfp4<true, NONE>>>(job);
        default: break;
    }
    switch (job.o.selection) {
        case FOUR_SIX: return all_tiles<nvfp4_tile<nvfp4<false, FOUR_SIX>>>(job);
        case SEARCH: return all_tiles<nvfp4_tile<nvfp4<false, SEARCH>>>(job);
        default: return all_tiles<nvfp4_tile<nvfp4<false, NONE>>>(job);
    }
}

inline void quantize(const Operand& o) {
    Job job(o);
    if (o.rounding >= MX_NEAREST) {
        tiles_by_rule(job);
        *o.global_scale = o.global_scale_of_mx;
        return;
    }
    int64_t count = (job.layout.rows + o.height - 1) / o.height * job.blocks;
    bool waits = o.rounding == MS_EDEN || !o.exact;
    std::unique_ptr<float[]> raw;
    if (waits) {
        raw.reset(new float[count + LANES]());
        job.raw = raw.get();
    } else {
        float amax = o.amax ? *o.amax : all_tiles<largest_of_tile>(job);
        job.global_scale = floored(amax / o.amax_divisor, amax);
    }
    float top = tiles_by_rule(job);
    if (waits) {
        job.global_scale = o.exact ? floored(top / o.cap, top) : power_of_two_scale(top, o.cap);
        finish_scales(job, count);
    }
    *o.global_scale = job.global_scale;
}

}  // namespace q2
