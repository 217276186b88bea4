// dequantize_sum, dequantize_sum_requantize: a hop's arithmetic; see dequantize_sum_requantize_ref.py.
//   codes    num_rows rows of num_blocks x width bytes of the kind FROM, `codes_stride` bytes apart
//   scales   num_rows rows of num_blocks scales, `scales_stride` bytes apart
//   own      numel numbers of `own_type`, added in the place of row `own_index`; or null
//   total    numel float32: the sum. A thread an element.
// or, built with a TO:
//   to_codes, to_scales   the sum as codes of `to_block_numel`. A warp a block of these.
#include "codec.cuh"

using namespace comm_quant;

struct Rows {
    const uint8_t* codes;
    int64_t codes_stride;
    const char* scales;
    int64_t scales_stride;
    int num_rows;
    uint32_t block_numel;
    bool half_scales;
    const void* own;
    int own_type, own_index;
};

COMM_QUANT_INLINE float own_at(const Rows& rows, int64_t i) {
    if (rows.own_type == FLOAT32) return static_cast<const float*>(rows.own)[i];
    const uint16_t half = static_cast<const uint16_t*>(rows.own)[i];
    return rows.own_type == BFLOAT16 ? BF16::load(half) : F16::load(half);
}

// The sum at `place` within block `block`: row 0 + row 1 + ..., from left to right.
COMM_QUANT_INLINE float sum_at(const Rows& rows, int64_t block, uint32_t place) {
    constexpr uint32_t PER = Codes<FROM>::PER;
    const uint32_t width = (rows.block_numel + PER - 1) / PER;
    const uint32_t field = PER == 1 ? 0 : place / width;
    const uint8_t* codes = rows.codes + block * width + (place - field * width);
    float total = 0.f;
    for (int r = 0; r < rows.num_rows; r++) {
        float value;
        if (rows.own && r == rows.own_index)
            value = own_at(rows, block * rows.block_numel + place);
        else
            value = Codes<FROM>::decode(uint8_t(codes[r * rows.codes_stride] >> (field * (8 / PER)))) *
                    load_scale(rows.scales + r * rows.scales_stride, block, rows.half_scales);
        total = r == 0 ? value : total + value;
    }
    return total;
}

#ifndef TO

extern "C" __global__ void __launch_bounds__(128)
    dequantize_sum(const uint8_t* codes, int64_t codes_stride, const void* scales, int64_t scales_stride,
                   int num_rows, uint32_t block_numel, int half_scales, int64_t numel, const void* own, int own_type,
                   int own_index, float* total) {
    const Rows rows{codes,       codes_stride,     static_cast<const char*>(scales), scales_stride, num_rows,
                    block_numel, half_scales != 0, own,                              own_type,      own_index};
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= numel) return;
    const int64_t block = i / block_numel;
    total[i] = sum_at(rows, block, uint32_t(i - block * block_numel));
}

#else

constexpr int ROOM = 1024;  // sums that a warp keeps between scale and codes; larger blocks sum twice

// At least 8 of 128 threads a processor leave it 64 registers; left alone, sm_100 takes 40 and spills.
extern "C" __global__ void __launch_bounds__(128, 8)
    dequantize_sum_requantize(const uint8_t* codes, int64_t codes_stride, const void* scales, int64_t scales_stride,
                              int num_rows, uint32_t block_numel, int half_scales, int64_t numel, const void* own,
                              int own_type, int own_index, uint32_t to_block_numel, int to_half_scales,
                              int to_stochastic, uint32_t seed, uint8_t* to_codes, void* to_scales) {
    __shared__ float kept[WARPS][ROOM];
    const Rows rows{codes,       codes_stride,     static_cast<const char*>(scales), scales_stride, num_rows,
                    block_numel, half_scales != 0, own,                              own_type,      own_index};
    const int64_t b = block_of_warp(), first = b * to_block_numel;
    if (first >= numel) return;
    const int64_t here = min(numel - first, int64_t(to_block_numel));
    const int64_t block = first / block_numel;  // in which this block begins
    const uint32_t offset = uint32_t(first - block * block_numel);
    float* room = kept[threadIdx.x / LANES];
    const auto sum = [=](int64_t i) {
        const uint32_t place = offset + uint32_t(i), more = place / block_numel;
        return sum_at(rows, block + more, place - more * block_numel);
    };
    const bool fits = here <= ROOM;
    const float most = scale_of<TO>(
        [=](int64_t i) {
            const float value = sum(i);
            if (fits) room[i] = value;
            return value;
        },
        here);
    const Scale scale = finish_scale(most, to_half_scales != 0);
    if (lane_of_warp() == 0) store_scale(to_scales, b, to_half_scales != 0, scale);
    __syncwarp();
    const auto load = [=](int64_t i, float(&v)[1]) { v[0] = i >= here ? 0.f : fits ? room[i] : sum(i); };
    to_codes += b * ((to_block_numel + Codes<TO>::PER - 1) / Codes<TO>::PER);
    if (to_stochastic)
        encode_block<TO, true, 1>(load, to_codes, to_block_numel, scale, first, seed);
    else
        encode_block<TO, false, 1>(load, to_codes, to_block_numel, scale, first, seed);
}

#endif
