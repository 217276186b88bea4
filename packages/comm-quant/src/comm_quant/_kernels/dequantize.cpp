// dequantize: codes and scales to numbers; see dequantize_ref.py.
//   codes   num_blocks x width bytes
//   scales  num_blocks of float32 or, with `half_scales`, float16
//   out     numel numbers of `type`
// Returns 0, or 1 for a kind or type it does not know.
#include "codec.hpp"

using namespace comm_quant;

template <int KIND, class T>
COMM_QUANT_INLINE void run(const uint8_t* codes, const void* scales, int64_t numel, int64_t block_numel,
                           bool half_scales, void* given, int64_t from, int64_t to) {
    auto* __restrict out = static_cast<typename T::Stored*>(given);
    const int64_t width = (block_numel + Codes<KIND>::PER - 1) / Codes<KIND>::PER;
    for (int64_t b = from; b < to; b++) {
        const int64_t first = b * block_numel;
        const int64_t here = numel - first < block_numel ? numel - first : block_numel;
        auto* __restrict place = out + first;
        decode_block<KIND>(codes + b * width, load_scale(scales, b, half_scales), here, block_numel,
                           [place](int64_t i, float value) __attribute__((always_inline)) { place[i] = T::store(value); });
    }
}

using Run = void (*)(const uint8_t*, const void*, int64_t, int64_t, bool, void*, int64_t, int64_t);

#define ONE(KIND, T)                                                                                             \
    COMM_QUANT_CLONES static void KIND##_##T(const uint8_t* c, const void* s, int64_t n, int64_t k, bool half,   \
                                             void* out, int64_t from, int64_t to) {                              \
        run<KIND, T>(c, s, n, k, half, out, from, to);                                                           \
    }
#define KIND_OF(KIND) ONE(KIND, F32) ONE(KIND, BF16) ONE(KIND, F16)
COMM_QUANT_KINDS(KIND_OF)

static Run choose(int kind, int type) {
#define CASE(KIND)                                                                                               \
    case KIND:                                                                                                   \
        return type == FLOAT32 ? KIND##_F32 : type == BFLOAT16 ? KIND##_BF16 : type == FLOAT16 ? KIND##_F16 : nullptr;
    switch (kind) { COMM_QUANT_KINDS(CASE) }
    return nullptr;
}

extern "C" int comm_quant_dequantize(const uint8_t* codes, const void* scales, int kind, int64_t block_numel,
                                     int half_scales, int64_t numel, int type, void* out) {
    const Run run_blocks = choose(kind, type);
    if (!run_blocks) return 1;
    const int64_t num_blocks = (numel + block_numel - 1) / block_numel;
    const int64_t at_once = block_numel < FEW ? FEW / block_numel : 1;
    const int64_t num_parts = (num_blocks + at_once - 1) / at_once;
#pragma omp parallel for schedule(static) if (num_parts > 1)
    for (int64_t part = 0; part < num_parts; part++) {
        const int64_t to = (part + 1) * at_once < num_blocks ? (part + 1) * at_once : num_blocks;
        run_blocks(codes, scales, numel, block_numel, half_scales != 0, out, part * at_once, to);
    }
    return 0;
}
