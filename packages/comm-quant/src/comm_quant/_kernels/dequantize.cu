// dequantize: codes and scales to numbers; a warp a block. See dequantize_ref.py.
//   codes   num_blocks x width bytes, of the kind FROM
//   scales  num_blocks of float32 or, with `half_scales`, float16
//   out     numel numbers of NUMBER
// Built for one FROM and one NUMBER.
#include "codec.cuh"

using namespace comm_quant;

extern "C" __global__ void __launch_bounds__(128)
    dequantize(const uint8_t* codes, const void* scales, int64_t numel, int64_t block_numel, int half_scales,
               void* out) {
    constexpr int PER = Codes<FROM>::PER;
    const int64_t b = block_of_warp(), first = b * block_numel;
    if (first >= numel) return;
    const int64_t here = min(numel - first, block_numel);
    const int64_t width = (block_numel + PER - 1) / PER;
    const float scale = load_scale(scales, b, half_scales != 0);
    auto* numbers = static_cast<NUMBER::Stored*>(out) + first;
    codes += b * width;
    if (here == PER * width && width % 4 == 0 && is_aligned(codes, 4) && is_aligned(numbers, 4 * sizeof(*numbers)))
        decode_block<FROM, NUMBER, 4>(codes, scale, here, block_numel, numbers);
    else
        decode_block<FROM, NUMBER, 1>(codes, scale, here, block_numel, numbers);
}
