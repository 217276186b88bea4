// dequantize_sum_requantize: a hop's arithmetic, block by block; see its _ref.py.
//   codes    num_rows rows of num_blocks x width bytes, `codes_stride` bytes apart
//   scales   num_rows rows of num_blocks scales, `scales_stride` bytes apart
//   own      numel numbers of `own_type`, added in the place of row `own_index`; or null
//   total    numel float32: the sum
// or, instead of `total`, where `to_kind` is not 0:
//   to_codes, to_scales   the sum as codes of `to_block_numel`
// Returns 0, or 1 for a kind or type it does not know.
#include <vector>

#include "codec.hpp"

using namespace comm_quant;

struct Rows {
    const uint8_t* codes;
    const char* scales;
    int64_t num_rows, codes_stride, scales_stride, block_numel;
    bool half_scales;
    const void* own;
    int64_t own_index;
};

struct To {
    uint8_t* codes;
    void* scales;
    int64_t block_numel;
    bool half_scales, stochastic;
    uint32_t seed;
};

// Adds blocks `from` to `to` of all rows into `total`, which begins with block `from`.
template <int KIND, class T>
COMM_QUANT_INLINE void sum(const Rows& rows, int64_t numel, int64_t from, int64_t to, float* __restrict total) {
    const int64_t width = (rows.block_numel + Codes<KIND>::PER - 1) / Codes<KIND>::PER;
    const auto* own = static_cast<const typename T::Stored*>(rows.own);
    for (int64_t b = from; b < to; b++) {
        const int64_t first = b * rows.block_numel;
        const int64_t here = numel - first < rows.block_numel ? numel - first : rows.block_numel;
        float* __restrict out = total + (b - from) * rows.block_numel;
        const bool is_full = here == width * Codes<KIND>::PER;
        const uint8_t* codes = rows.codes + b * width;
        const auto scale_of_row = [&rows, b](int64_t r) __attribute__((always_inline)) {
            return load_scale(rows.scales + r * rows.scales_stride, b, rows.half_scales);
        };
        // Rows `from` to `to` of this block, the first of all filling `out`.
        const auto add_rows = [&](int64_t start, int64_t stop) __attribute__((always_inline)) {
            if (is_full) {
                sum_block<KIND>(codes, rows.codes_stride, start, stop, width, out, start == 0, scale_of_row);
                return;
            }
            for (int64_t r = start; r < stop; r++)
                decode_block<KIND>(codes + r * rows.codes_stride, scale_of_row(r), here, rows.block_numel,
                                   [out, r](int64_t i, float value) __attribute__((always_inline)) {
                                       out[i] = r == 0 ? value : out[i] + value;
                                   });
        };
        if (!own) {
            add_rows(0, rows.num_rows);
            continue;
        }
        add_rows(0, rows.own_index);
        if (rows.own_index == 0)
            for (int64_t i = 0; i < here; i++) out[i] = T::load(own[first + i]);
        else
            for (int64_t i = 0; i < here; i++) out[i] += T::load(own[first + i]);
        add_rows(rows.own_index + 1, rows.num_rows);
    }
}

template <int KIND>
COMM_QUANT_INLINE void encode(const float* __restrict values, int64_t first, int64_t numel, const To& to) {
    const int64_t width = (to.block_numel + Codes<KIND>::PER - 1) / Codes<KIND>::PER;
    for (int64_t start = 0; start < numel; start += to.block_numel) {
        const int64_t here = numel - start < to.block_numel ? numel - start : to.block_numel;
        const int64_t block = (first + start) / to.block_numel;
        const Scale scale = finish_scale(scale_of<KIND>(values + start, here), to.half_scales);
        store_scale(to.scales, block, to.half_scales, scale);
        if (to.stochastic)
            encode_block<KIND, true>(values + start, to.codes + block * width, here, to.block_numel, scale,
                                     first + start, to.seed);
        else
            encode_block<KIND, false>(values + start, to.codes + block * width, here, to.block_numel, scale,
                                      first + start, to.seed);
    }
}

using Sum = void (*)(const Rows&, int64_t, int64_t, int64_t, float*);
using Encode = void (*)(const float*, int64_t, int64_t, const To&);

#define ONE(KIND, T)                                                                                             \
    COMM_QUANT_CLONES static void sum_##KIND##_##T(const Rows& r, int64_t n, int64_t from, int64_t to, float* out) { \
        sum<KIND, T>(r, n, from, to, out);                                                                       \
    }
#define KIND_OF(KIND)                                                                                            \
    ONE(KIND, F32) ONE(KIND, BF16) ONE(KIND, F16)                                                                \
    COMM_QUANT_CLONES static void encode_##KIND(const float* x, int64_t first, int64_t n, const To& to) {        \
        encode<KIND>(x, first, n, to);                                                                           \
    }
COMM_QUANT_KINDS(KIND_OF)

static Sum choose_sum(int kind, int type) {
#define SUM_CASE(KIND)                                                                                           \
    case KIND:                                                                                                   \
        return type == FLOAT32    ? sum_##KIND##_F32                                                             \
               : type == BFLOAT16 ? sum_##KIND##_BF16                                                            \
               : type == FLOAT16  ? sum_##KIND##_F16                                                             \
                                  : nullptr;
    switch (kind) { COMM_QUANT_KINDS(SUM_CASE) }
    return nullptr;
}

static Encode choose_encode(int kind) {
#define ENCODE_CASE(KIND)                                                                                        \
    case KIND:                                                                                                   \
        return encode_##KIND;
    switch (kind) { COMM_QUANT_KINDS(ENCODE_CASE) }
    return nullptr;
}

static int64_t common_multiple(int64_t a, int64_t b) {
    int64_t x = a, y = b;
    while (y) {
        const int64_t rest = x % y;
        x = y;
        y = rest;
    }
    return a / x * b;
}

extern "C" int comm_quant_dequantize_sum_requantize(
    const uint8_t* codes, int64_t codes_stride, const void* scales, int64_t scales_stride, int64_t num_rows, int kind,
    int64_t block_numel, int half_scales, int64_t numel, const void* own, int own_type, int64_t own_index, float* total,
    int to_kind, int64_t to_block_numel, int to_half_scales, int to_stochastic, uint32_t seed, uint8_t* to_codes,
    void* to_scales) {
    const Sum add = choose_sum(kind, own_type);
    const Encode pack = to_kind ? choose_encode(to_kind) : nullptr;
    if (!add || (to_kind && !pack)) return 1;
    const Rows rows{codes, static_cast<const char*>(scales), num_rows, codes_stride, scales_stride, block_numel,
                    half_scales != 0, own, own_index};
    const To to{to_codes, to_scales, to_block_numel, to_half_scales != 0, to_stochastic != 0, seed};
    // A piece is whole blocks of both codecs, and fits the first cache.
    const int64_t whole = to_kind ? common_multiple(block_numel, to_block_numel) : block_numel;
    const int64_t piece = whole < 4096 ? 4096 / whole * whole : whole;
    const int64_t num_pieces = (numel + piece - 1) / piece;
#pragma omp parallel if (numel > FEW)
    {
        std::vector<float> room(to_kind ? (piece < numel ? piece : numel) : 0);
#pragma omp for schedule(static)
        for (int64_t p = 0; p < num_pieces; p++) {
            const int64_t first = p * piece;
            const int64_t here = numel - first < piece ? numel - first : piece;
            float* out = to_kind ? room.data() : total + first;
            add(rows, numel, first / block_numel, (first + here + block_numel - 1) / block_numel, out);
            if (to_kind) pack(out, first, here, to);
        }
    }
    return 0;
}
