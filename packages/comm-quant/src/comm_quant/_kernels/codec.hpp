// What the three C++ kernels share: one block's arithmetic, and the clones of a function.
#pragma once
#include "numbers.hpp"
#include "sum_avx512.hpp"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// Three versions of a function, the machine's best chosen when the library is loaded.
#define COMM_QUANT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define COMM_QUANT_CLONES
#endif

namespace comm_quant {

// A block's scale, from its elements in float32.
template <int KIND>
COMM_QUANT_INLINE float scale_of(const float* __restrict x, int64_t numel) {
    if (KIND == SIGN) {
        float lanes[32] = {};
        int64_t i = 0;
        for (; i + 32 <= numel; i += 32)
            for (int lane = 0; lane < 32; lane++) lanes[lane] += float_of(bits_of(x[i + lane]) & 0x7FFFFFFFu);
        for (int lane = 0; i + lane < numel; lane++) lanes[lane] += float_of(bits_of(x[i + lane]) & 0x7FFFFFFFu);
        for (int width = 16; width; width /= 2)
            for (int lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
        return lanes[0] / float(numel);
    }
    int32_t most = 0;  // the bits of |x| are in the order of their values, inf and NaN on top
    for (int64_t i = 0; i < numel; i++) {
        const int32_t a = int32_t(bits_of(x[i]) & 0x7FFFFFFFu);
        most = a > most ? a : most;
    }
    return float_of(uint32_t(most)) / Codes<KIND>::MAX;
}

// Fills a block's bytes with code_of(i) for its elements; with ENDS the fields of the last bytes may
// be more than the elements.
template <int KIND, bool ENDS, class CodeOf>
COMM_QUANT_INLINE void pack_block(uint8_t* __restrict codes, int64_t width, int64_t block_numel, CodeOf code_of) {
    constexpr int PER = Codes<KIND>::PER;
    for (int64_t j = 0; j < width; j++) {
        uint8_t byte = 0;
        for (int field = 0; field < PER; field++) {
            const int64_t i = field * width + j;
            if (ENDS && i >= block_numel) break;
            byte |= uint8_t(code_of(i) << (field * (8 / PER)));
        }
        codes[j] = byte;
    }
}

// The codes of one block; elements from `numel` on count as zeros. `first` is the block's place.
template <int KIND, bool STOCHASTIC>
COMM_QUANT_INLINE void encode_block(const float* __restrict x, uint8_t* __restrict codes, int64_t numel,
                                    int64_t block_numel, const Scale& scale, int64_t first, uint32_t seed) {
    using C = Codes<KIND>;
    const int64_t width = (block_numel + C::PER - 1) / C::PER;
    const float inverse = scale.inverse;
    const bool is_full = numel == C::PER * width;
    const auto code_of = [=](int64_t i, float value) __attribute__((always_inline)) {
        const uint32_t drawn = STOCHASTIC ? draw(uint32_t(first + i), seed) : 0u;
        return C::template encode<STOCHASTIC>(value, inverse, drawn);
    };
    if (!(scale.value >= 0.f))  // NaN: the codes of zeros
        pack_block<KIND, true>(codes, width, block_numel, [](int64_t) __attribute__((always_inline)) {
            return C::template encode<false>(0.f, 0.f, 0);
        });
    else if (is_full && !STOCHASTIC && !scale.is_half)  // the usual one
        pack_block<KIND, false>(codes, width, block_numel, [=](int64_t i) __attribute__((always_inline)) {
            return C::encode_within(x[i], inverse);
        });
    else if (is_full)
        pack_block<KIND, false>(codes, width, block_numel,
                                [=](int64_t i) __attribute__((always_inline)) { return code_of(i, x[i]); });
    else
        pack_block<KIND, true>(codes, width, block_numel, [=](int64_t i) __attribute__((always_inline)) {
            return code_of(i, i < numel ? x[i] : 0.f);
        });
}

// Calls take(i, value) for the first `numel` elements of a block.
template <int KIND, class Take>
COMM_QUANT_INLINE void decode_block(const uint8_t* __restrict codes, float scale, int64_t numel,
                                    int64_t block_numel, Take take) {
    using C = Codes<KIND>;
    const int64_t width = (block_numel + C::PER - 1) / C::PER;
    for (int field = 0; field < C::PER; field++) {
        const int64_t start = field * width;
        const int64_t end = numel - start < width ? numel - start : width;
        for (int64_t j = 0; j < end; j++)
            take(start + j, C::decode(uint8_t(codes[j] >> (field * (8 / C::PER)))) * scale);
    }
}

// total[i] (+)= row_0[i] + ... over the codes of one block in ROWS rows, from left to right.
// `scale_of_row(r)` gives row r's scale.
template <int KIND, int ROWS, bool ADD, class ScaleOf>
COMM_QUANT_INLINE void sum_some(const uint8_t* __restrict codes, int64_t stride, int64_t width,
                                float* __restrict total, ScaleOf scale_of_row) {
    using C = Codes<KIND>;
    float scales[ROWS];
    for (int r = 0; r < ROWS; r++) scales[r] = scale_of_row(r);
#ifdef COMM_QUANT_AVX512
    if constexpr (KIND == INT8 || KIND == INT4)
        if (width % 16 == 0 && has_avx512()) {
            if constexpr (KIND == INT8) sum_int8_v4<ROWS, ADD>(codes, stride, width, total, scales);
            if constexpr (KIND == INT4) sum_int4_v4<ROWS, ADD>(codes, stride, width, total, scales);
            return;
        }
#endif
    for (int field = 0; field < C::PER; field++) {
        float* __restrict out = total + field * width;
        const int shift = field * (8 / C::PER);
        for (int64_t j = 0; j < width; j++) {
            float sum = ADD ? out[j] : 0.f;
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const float value = C::decode(uint8_t(codes[r * stride + j] >> shift)) * scales[r];
                sum = ADD || r > 0 ? sum + value : value;
            }
            out[j] = sum;
        }
    }
}

// The same for rows `from` to `to`, as many at a time as pays; the first ones fill `total` where it
// holds nothing yet (`is_empty`).
template <int KIND, class ScaleOf>
COMM_QUANT_INLINE void sum_block(const uint8_t* __restrict codes, int64_t stride, int64_t from, int64_t to, int64_t width,
                                 float* __restrict total, bool is_empty, ScaleOf scale_of_row) {
    for (int64_t r = from; r < to;) {
        const uint8_t* rows = codes + r * stride;
        const auto scale = [=](int64_t i) __attribute__((always_inline)) { return scale_of_row(r + i); };
        const int64_t left = to - r;
        if (left >= 4) {
            if (is_empty)
                sum_some<KIND, 4, false>(rows, stride, width, total, scale);
            else
                sum_some<KIND, 4, true>(rows, stride, width, total, scale);
            r += 4;
        } else if (left >= 2) {
            if (is_empty)
                sum_some<KIND, 2, false>(rows, stride, width, total, scale);
            else
                sum_some<KIND, 2, true>(rows, stride, width, total, scale);
            r += 2;
        } else {
            if (is_empty)
                sum_some<KIND, 1, false>(rows, stride, width, total, scale);
            else
                sum_some<KIND, 1, true>(rows, stride, width, total, scale);
            r += 1;
        }
        is_empty = false;
    }
}

constexpr int64_t FEW = 1 << 15;  // elements up to which threads do not pay

}  // namespace comm_quant

// One function a type of numbers and kind of codes; X(kind) is expanded for every kind.
#define COMM_QUANT_KINDS(X) X(INT8) X(INT4) X(INT2) X(SIGN) X(E4M3) X(E5M2)
