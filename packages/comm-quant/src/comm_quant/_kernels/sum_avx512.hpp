// Sums of rows of 8- and 4-bit codes with AVX-512, which compilers do not find by themselves.
// Same bits as sum_some: code * scale, then an addition, row after row.
#pragma once
#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__)
// GCC 12 takes the intrinsics' own undefined values for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#define COMM_QUANT_AVX512 1
#define COMM_QUANT_V4 __attribute__((target("arch=x86-64-v4,prefer-vector-width=512")))

namespace comm_quant {

inline bool has_avx512() {
    static const bool found = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return found;
}

// total[i] = sum over ROWS rows, or is added to where ADD; width must be a multiple of 16.
template <int ROWS, bool ADD>
COMM_QUANT_V4 static void sum_int8_v4(const uint8_t* codes, int64_t stride, int64_t width, float* total,
                                      const float* scales) {
    __m512 scale[ROWS];
    for (int r = 0; r < ROWS; r++) scale[r] = _mm512_set1_ps(scales[r]);
    for (int64_t j = 0; j < width; j += 16) {
        __m512 sum = ADD ? _mm512_loadu_ps(total + j) : _mm512_setzero_ps();
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + r * stride + j));
            const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), scale[r]);
            sum = ADD || r > 0 ? _mm512_add_ps(sum, value) : value;
        }
        _mm512_storeu_ps(total + j, sum);
    }
}

// The same for 4 bits: a row's sixteen values, times its scale, are a table; a lookup decodes.
template <int ROWS, bool ADD>
COMM_QUANT_V4 static void sum_int4_v4(const uint8_t* codes, int64_t stride, int64_t width, float* total,
                                      const float* scales) {
    const __m512 values = _mm512_setr_ps(0.f, 1.f, 2.f, 3.f, 4.f, 5.f, 6.f, 7.f, -8.f, -7.f, -6.f, -5.f, -4.f, -3.f,
                                         -2.f, -1.f);
    __m512 table[ROWS];
    for (int r = 0; r < ROWS; r++) table[r] = _mm512_mul_ps(values, _mm512_set1_ps(scales[r]));
    float* high_total = total + width;
    for (int64_t j = 0; j < width; j += 16) {
        __m512 low = ADD ? _mm512_loadu_ps(total + j) : _mm512_setzero_ps();
        __m512 high = ADD ? _mm512_loadu_ps(high_total + j) : _mm512_setzero_ps();
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + r * stride + j));
            const __m512i places = _mm512_cvtepu8_epi32(bytes);  // a lookup reads their low four bits
            const __m512 first = _mm512_permutexvar_ps(places, table[r]);
            const __m512 second = _mm512_permutexvar_ps(_mm512_srli_epi32(places, 4), table[r]);
            low = ADD || r > 0 ? _mm512_add_ps(low, first) : first;
            high = ADD || r > 0 ? _mm512_add_ps(high, second) : second;
        }
        _mm512_storeu_ps(total + j, low);
        _mm512_storeu_ps(high_total + j, high);
    }
}

}  // namespace comm_quant
#endif
