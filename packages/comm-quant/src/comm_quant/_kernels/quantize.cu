// quantize: numbers to codes and scales; a warp a block, the lanes side by side. See quantize_ref.py.
//   x       numel numbers of NUMBER
//   codes   num_blocks x width bytes, of the kind TO
//   scales  num_blocks of float32 or, with `half_scales`, float16
// Built for one TO and one NUMBER.
#include "codec.cuh"

using namespace comm_quant;

template <bool STOCHASTIC>
COMM_QUANT_INLINE void run(const NUMBER::Stored* x, int64_t numel, int64_t block_numel, bool half_scales,
                           uint32_t seed, uint8_t* codes, void* scales) {
    constexpr int PER = Codes<TO>::PER;
    const int64_t b = block_of_warp(), first = b * block_numel;
    if (first >= numel) return;  // all lanes of the warp together
    const int64_t here = min(numel - first, block_numel);
    const int64_t width = (block_numel + PER - 1) / PER;
    x += first;
    codes += b * width;
    const float most = scale_of<TO>([=](int64_t i) { return NUMBER::load(x[i]); }, here);
    const Scale scale = finish_scale(most, half_scales);
    if (lane_of_warp() == 0) store_scale(scales, b, half_scales, scale);
    if (here == PER * width && width % 4 == 0 && is_aligned(codes, 4) && is_aligned(x, 4 * sizeof(*x)))
        encode_block<TO, STOCHASTIC, 4>([=](int64_t i, float(&v)[4]) { load_numbers<NUMBER>(x + i, v); }, codes,
                                        block_numel, scale, first, seed);
    else
        encode_block<TO, STOCHASTIC, 1>(
            [=](int64_t i, float(&v)[1]) { v[0] = i < here ? NUMBER::load(x[i]) : 0.f; }, codes, block_numel, scale,
            first, seed);
}

extern "C" __global__ void __launch_bounds__(128)
    quantize(const void* x, int64_t numel, int64_t block_numel, int half_scales, int stochastic, uint32_t seed,
             uint8_t* codes, void* scales) {
    const auto* numbers = static_cast<const NUMBER::Stored*>(x);
    if (stochastic)
        run<true>(numbers, numel, block_numel, half_scales != 0, seed, codes, scales);
    else
        run<false>(numbers, numel, block_numel, half_scales != 0, seed, codes, scales);
}
