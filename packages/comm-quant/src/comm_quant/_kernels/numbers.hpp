// What C++ and CUDA share: types of numbers, kinds of codes, rounding, scales; one element at a time.
// The definitions are in *_ref.py; every bit here is theirs. No contraction (-ffp-contract=off,
// --fmad=false), no flush to zero.
#pragma once
#ifdef __CUDACC_RTC__
using uint8_t = unsigned char;
using int8_t = signed char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int32_t = int;
using int64_t = long long;
#else
#include <cstdint>
#include <cstring>
#endif

#ifdef __CUDACC__
#define COMM_QUANT_INLINE static __device__ __forceinline__
#else
#define COMM_QUANT_INLINE static inline __attribute__((always_inline))
#endif

namespace comm_quant {

enum Type { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum Kind { INT8 = 8, INT4 = 4, INT2 = 2, SIGN = 1, E4M3 = 43, E5M2 = 52 };

COMM_QUANT_INLINE uint32_t bits_of(float x) {
#ifdef __CUDACC__
    return __float_as_uint(x);
#else
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
#endif
}
COMM_QUANT_INLINE float float_of(uint32_t u) {
#ifdef __CUDACC__
    return __uint_as_float(u);
#else
    float x;
    std::memcpy(&x, &u, 4);
    return x;
#endif
}

struct F32 {
    using Stored = float;
    COMM_QUANT_INLINE float load(float x) { return x; }
    COMM_QUANT_INLINE float store(float x) { return x; }
};
struct BF16 {
    using Stored = uint16_t;
    COMM_QUANT_INLINE float load(uint16_t h) { return float_of(uint32_t(h) << 16); }
    COMM_QUANT_INLINE uint16_t store(float x) {  // to nearest even
        const uint32_t u = bits_of(x);
        const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1)) >> 16;
        return (u & 0x7FFFFFFFu) > 0x7F800000u ? uint16_t(0x7FC0) : uint16_t(rounded);
    }
};
struct F16 {
    using Stored = uint16_t;
    COMM_QUANT_INLINE float load(uint16_t h) {
        const uint32_t magnitude = uint32_t(h & 0x7FFF) << 13;
        uint32_t u = bits_of(float_of(magnitude) * float_of(0x77800000u));  // times 2**112
        u |= (h & 0x7C00) == 0x7C00 ? 0x7F800000u : 0u;
        return float_of(u | uint32_t(h & 0x8000) << 16);
    }
    COMM_QUANT_INLINE uint16_t store(float x) {  // to nearest even
        const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, a = u & 0x7FFFFFFFu;
        const uint32_t normal = (a + 0xFFFu + ((a >> 13) & 1) - (112u << 23)) >> 13;
        // Below 2**-14 an addition of 0.5 leaves the multiple of 2**-24 in the low bits.
        const uint32_t tiny = bits_of(float_of(a) + 0.5f) - 0x3F000000u;
        uint32_t h = a < 0x38800000u ? tiny : normal;
        h = a >= 0x477FF000u ? 0x7C00u : h;
        h = a > 0x7F800000u ? 0x7E00u : h;
        return uint16_t(h | sign);
    }
};

// The nearest whole number, ties to even, of |x| < 2**22.
COMM_QUANT_INLINE float nearest(float x) { return (x + 12582912.f) - 12582912.f; }

COMM_QUANT_INLINE uint32_t draw(uint32_t place, uint32_t seed) {
    uint32_t h = place * 0x9E3779B1u + seed * 0x85EBCA77u;
    h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
    h = (h ^ (h >> 13)) * 0xC2B2AE35u;
    return h ^ (h >> 16);
}

COMM_QUANT_INLINE float floor_small(float x) {  // of |x| < 2**22
    const float whole = nearest(x);
    return whole > x ? whole - 1.f : whole;
}

template <int KIND>
struct Codes;

template <int BITS>
struct Integers {
    static constexpr int PER = 8 / BITS;
    static constexpr float MAX = BITS == 8 ? 127.f : BITS == 4 ? 7.f : 1.f;
    template <bool STOCHASTIC>
    COMM_QUANT_INLINE uint8_t encode(float x, float inverse, uint32_t drawn) {
        float scaled = x * inverse;
        if (STOCHASTIC) scaled = floor_small(scaled + float(drawn >> 16) * 0x1p-16f);
        scaled = scaled > MAX ? MAX : scaled;
        scaled = scaled < -MAX ? -MAX : scaled;
        return fields(scaled);
    }
    // The same for a scale that is not rounded to float16: nothing then exceeds MAX + 1/2.
    COMM_QUANT_INLINE uint8_t encode_within(float x, float inverse) { return fields(x * inverse); }
    // Rounding leaves the whole number's low bits, in two's complement, at the end of the float's.
    COMM_QUANT_INLINE uint8_t fields(float scaled) {
        return uint8_t(bits_of(scaled + 12582912.f)) & uint8_t((1 << BITS) - 1);
    }
    COMM_QUANT_INLINE float decode(uint8_t code) {  // sign-extend the field
        return float(int32_t(int8_t(uint8_t(code << (8 - BITS)))) >> (8 - BITS));
    }
};
template <>
struct Codes<INT8> : Integers<8> {};
template <>
struct Codes<INT4> : Integers<4> {};
template <>
struct Codes<INT2> : Integers<2> {};
template <>
struct Codes<SIGN> {
    static constexpr int PER = 8;
    static constexpr float MAX = 1.f;
    template <bool STOCHASTIC>
    COMM_QUANT_INLINE uint8_t encode(float x, float, uint32_t) {
        return x >= 0.f;
    }
    COMM_QUANT_INLINE uint8_t encode_within(float x, float) { return x >= 0.f; }
    COMM_QUANT_INLINE float decode(uint8_t code) { return float(int32_t(code & 1) * 2 - 1); }
};

template <int MANTISSA>
struct Float8 {
    static constexpr int PER = 1;
    static constexpr int BIAS = MANTISSA == 3 ? 7 : 15, CUT = 23 - MANTISSA;
    static constexpr float MAX = MANTISSA == 3 ? 448.f : 57344.f;
    static constexpr float SMALLEST = MANTISSA == 3 ? 0x1p-6f : 0x1p-14f;  // normal
    static constexpr float QUANTA = MANTISSA == 3 ? 0x1p9f : 0x1p16f;      // in 1
    template <bool STOCHASTIC>
    COMM_QUANT_INLINE uint8_t encode(float x, float inverse, uint32_t drawn) {
        const uint32_t u = bits_of(x * inverse), sign = (u >> 24) & 0x80u;
        float a = float_of(u & 0x7FFFFFFFu);
        a = a > MAX ? MAX : a;
        const uint32_t n = bits_of(a);
        const uint32_t up = STOCHASTIC ? drawn & ((1u << CUT) - 1)
                                       : ((1u << (CUT - 1)) - 1) + ((n >> CUT) & 1);
        uint32_t normal = ((n + up) >> CUT) - (uint32_t(127 - BIAS) << MANTISSA);
        const uint32_t most = MANTISSA == 3 ? 0x7Eu : 0x7Bu;
        normal = normal > most ? most : normal;
        const float quanta = a * QUANTA;
        const float small = STOCHASTIC ? floor_small(quanta + float(drawn >> 16) * 0x1p-16f)
                                       : nearest(quanta);
        const uint32_t tiny = uint32_t(int32_t(a < SMALLEST ? small : 0.f));
        return uint8_t((a < SMALLEST ? tiny : normal) | sign);
    }
    COMM_QUANT_INLINE uint8_t encode_within(float x, float inverse) { return encode<false>(x, inverse, 0); }
    COMM_QUANT_INLINE float decode(uint8_t code) {
        const uint32_t sign = uint32_t(code & 0x80) << 24, magnitude = code & 0x7Fu;
        // The bits of a float whose exponent is too small by 127 - BIAS.
        const float shifted = float_of(magnitude << CUT);
        const uint32_t u = bits_of(shifted * float_of(uint32_t(254 - BIAS) << 23));
        const bool odd = MANTISSA == 3 ? magnitude == 0x7Fu : magnitude >= 0x7Cu;  // inf or NaN
        return float_of(u | (odd ? 0x7F800000u : 0u) | sign);
    }
};
template <>
struct Codes<E4M3> : Float8<3> {};
template <>
struct Codes<E5M2> : Float8<2> {};

struct Scale {
    float value, inverse;  // inverse is 0 where there is nothing to scale
    uint16_t half;         // the scale as float16, where it is stored so
    bool is_half;
};

COMM_QUANT_INLINE Scale finish_scale(float s, bool as_half) {
    Scale scale;
    scale.is_half = as_half;
    s = s < 0x1p-126f ? 0.f : s;
    scale.half = as_half ? F16::store(s) : uint16_t(0);
    s = as_half ? F16::load(scale.half) : s;
    if ((bits_of(s) & 0x7F800000u) == 0x7F800000u) {
        s = float_of(0x7FC00000u);
        scale.half = 0x7E00;
    }
    scale.value = s;
    scale.inverse = s > 0.f ? 1.f / s : 0.f;
    return scale;
}

COMM_QUANT_INLINE float load_scale(const void* scales, int64_t block, bool as_half) {
    return as_half ? F16::load(static_cast<const uint16_t*>(scales)[block])
                   : static_cast<const float*>(scales)[block];
}

COMM_QUANT_INLINE void store_scale(void* scales, int64_t block, bool as_half, const Scale& scale) {
    if (as_half)
        static_cast<uint16_t*>(scales)[block] = scale.half;
    else
        static_cast<float*>(scales)[block] = scale.value;
}

}  // namespace comm_quant
