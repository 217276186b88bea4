// What the CUDA kernels share: a warp to a codec block, and what a warp does with it.
#pragma once
#include "numbers.hpp"

namespace comm_quant {

constexpr int LANES = 32, WARPS = 4;  // threads of a warp, warps of a thread block
constexpr unsigned EVERY = 0xffffffffu;

COMM_QUANT_INLINE int lane_of_warp() { return threadIdx.x % LANES; }
COMM_QUANT_INLINE int64_t block_of_warp() { return int64_t(blockIdx.x) * WARPS + threadIdx.x / LANES; }

template <class Pointer>
COMM_QUANT_INLINE bool is_aligned(Pointer pointer, int num_bytes) {
    return reinterpret_cast<unsigned long long>(pointer) % num_bytes == 0;
}

// N neighbours in one access; N is 1 or 4.
template <class T, int N>
COMM_QUANT_INLINE void load_numbers(const typename T::Stored* x, float (&values)[N]) {
    if constexpr (N == 1) {
        values[0] = T::load(x[0]);
    } else if constexpr (sizeof(typename T::Stored) == 4) {
        const float4 four = *reinterpret_cast<const float4*>(x);
        values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
    } else {
        const ushort4 four = *reinterpret_cast<const ushort4*>(x);
        values[0] = T::load(four.x), values[1] = T::load(four.y);
        values[2] = T::load(four.z), values[3] = T::load(four.w);
    }
}

template <class T, int N>
COMM_QUANT_INLINE void store_numbers(typename T::Stored* x, const float (&values)[N]) {
    if constexpr (N == 1)
        x[0] = T::store(values[0]);
    else if constexpr (sizeof(typename T::Stored) == 4)
        *reinterpret_cast<float4*>(x) = make_float4(values[0], values[1], values[2], values[3]);
    else
        *reinterpret_cast<ushort4*>(x) =
            make_ushort4(T::store(values[0]), T::store(values[1]), T::store(values[2]), T::store(values[3]));
}

// A block's scale before rounding; load(i) gives element i. Every lane gets it.
template <int KIND, class Load>
COMM_QUANT_INLINE float scale_of(Load load, int64_t numel) {
    const int lane = lane_of_warp();
    if constexpr (KIND == SIGN) {  // lane i adds elements i, i + 32, ...: the order of the definition
        float sum = 0.f;
        for (int64_t i = lane; i < numel; i += LANES) sum += float_of(bits_of(load(i)) & 0x7FFFFFFFu);
        for (int width = LANES / 2; width; width /= 2) sum += __shfl_down_sync(EVERY, sum, width);
        return __shfl_sync(EVERY, sum, 0) / float(numel);
    } else {
        uint32_t most = 0;  // the bits of |x| are in the order of their values, inf and NaN on top
        for (int64_t i = lane; i < numel; i += LANES) most = max(most, bits_of(load(i)) & 0x7FFFFFFFu);
        for (int width = LANES / 2; width; width /= 2) most = max(most, __shfl_xor_sync(EVERY, most, width));
        return float_of(most) / Codes<KIND>::MAX;
    }
}

// The codes of one block, N bytes a lane at a time; load(i, values) gives N elements from i on, zeros
// behind the end. `first` is the block's place. N = 4 wants full blocks and aligned codes.
template <int KIND, bool STOCHASTIC, int N, class Load>
COMM_QUANT_INLINE void encode_block(Load load, uint8_t* codes, int64_t block_numel, const Scale& scale,
                                    int64_t first, uint32_t seed) {
    using C = Codes<KIND>;
    const int64_t width = (block_numel + C::PER - 1) / C::PER;
    const bool is_broken = !(scale.value >= 0.f);  // NaN: the codes of zeros
    for (int64_t j = lane_of_warp() * N; j < width; j += LANES * N) {
        uint32_t bytes = 0;
        for (int field = 0; field < C::PER; field++) {
            const int64_t start = field * width + j;
            float values[N];
            load(start, values);
            for (int n = 0; n < N; n++) {
                const int64_t i = start + n;
                if (N == 1 && i >= block_numel) break;
                const uint32_t drawn = STOCHASTIC ? draw(uint32_t(first + i), seed) : 0u;
                const uint8_t code = C::template encode<STOCHASTIC>(is_broken ? 0.f : values[n], scale.inverse, drawn);
                bytes |= uint32_t(code) << (n * 8 + field * (8 / C::PER));
            }
        }
        if constexpr (N == 4)
            *reinterpret_cast<uint32_t*>(codes + j) = bytes;
        else
            codes[j] = uint8_t(bytes);
    }
}

// The numbers of one block, N bytes a lane at a time, as encode_block.
template <int KIND, class T, int N>
COMM_QUANT_INLINE void decode_block(const uint8_t* codes, float scale, int64_t numel, int64_t block_numel,
                                    typename T::Stored* out) {
    using C = Codes<KIND>;
    const int64_t width = (block_numel + C::PER - 1) / C::PER;
    for (int64_t j = lane_of_warp() * N; j < width; j += LANES * N) {
        uint32_t bytes;
        if constexpr (N == 4)
            bytes = *reinterpret_cast<const uint32_t*>(codes + j);
        else
            bytes = codes[j];
        for (int field = 0; field < C::PER; field++) {
            const int64_t start = field * width + j;
            if (N == 1 && start >= numel) break;
            float values[N];
            for (int n = 0; n < N; n++)
                values[n] = C::decode(uint8_t(uint8_t(bytes >> (n * 8)) >> (field * (8 / C::PER)))) * scale;
            store_numbers<T, N>(out + start, values);
        }
    }
}

}  // namespace comm_quant
