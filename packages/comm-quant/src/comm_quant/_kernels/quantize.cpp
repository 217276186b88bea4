// quantize: numbers to codes and scales, block by block; see quantize_ref.py.
//   x       numel numbers of `type`
//   codes   num_blocks x width bytes
//   scales  num_blocks of float32 or, with `half_scales`, float16
// Returns 0, or 1 for a kind or type it does not know.
#include <vector>

#include "codec.hpp"

using namespace comm_quant;

template <int KIND, class T, bool STOCHASTIC>
COMM_QUANT_INLINE void run(const void* given, int64_t numel, int64_t block_numel, uint8_t* codes, void* scales,
                           bool half_scales, uint32_t seed, int64_t from, int64_t to, float* room) {
    const auto* x = static_cast<const typename T::Stored*>(given);
    const int64_t width = (block_numel + Codes<KIND>::PER - 1) / Codes<KIND>::PER;
    for (int64_t b = from; b < to; b++) {
        const int64_t first = b * block_numel;
        const int64_t here = numel - first < block_numel ? numel - first : block_numel;
        const float* values = room;
        if constexpr (sizeof(typename T::Stored) == 4)
            values = reinterpret_cast<const float*>(x + first);
        else
            for (int64_t i = 0; i < here; i++) room[i] = T::load(x[first + i]);
        const Scale scale = finish_scale(scale_of<KIND>(values, here), half_scales);
        store_scale(scales, b, half_scales, scale);
        encode_block<KIND, STOCHASTIC>(values, codes + b * width, here, block_numel, scale, first, seed);
    }
}

using Run = void (*)(const void*, int64_t, int64_t, uint8_t*, void*, bool, uint32_t, int64_t, int64_t, float*);

#define ONE(KIND, T, STOCHASTIC, NAME)                                                                           \
    COMM_QUANT_CLONES static void NAME(const void* x, int64_t n, int64_t k, uint8_t* c, void* s, bool half,      \
                                       uint32_t seed, int64_t from, int64_t to, float* room) {                   \
        run<KIND, T, STOCHASTIC>(x, n, k, c, s, half, seed, from, to, room);                                     \
    }
#define KIND_OF(KIND)                                                                                            \
    ONE(KIND, F32, false, KIND##_F32_nearest) ONE(KIND, F32, true, KIND##_F32_stochastic)                        \
    ONE(KIND, BF16, false, KIND##_BF16_nearest) ONE(KIND, BF16, true, KIND##_BF16_stochastic)                    \
    ONE(KIND, F16, false, KIND##_F16_nearest) ONE(KIND, F16, true, KIND##_F16_stochastic)
COMM_QUANT_KINDS(KIND_OF)

static Run choose(int kind, int type, bool stochastic) {
#define CASE(KIND)                                                                                               \
    case KIND:                                                                                                   \
        return type == FLOAT32 ? (stochastic ? KIND##_F32_stochastic : KIND##_F32_nearest)                       \
               : type == BFLOAT16 ? (stochastic ? KIND##_BF16_stochastic : KIND##_BF16_nearest)                  \
               : type == FLOAT16 ? (stochastic ? KIND##_F16_stochastic : KIND##_F16_nearest)                     \
                                 : nullptr;
    switch (kind) { COMM_QUANT_KINDS(CASE) }
    return nullptr;
}

extern "C" int comm_quant_quantize(const void* x, int type, int64_t numel, int kind, int64_t block_numel,
                                   int half_scales, int stochastic, uint32_t seed, uint8_t* codes, void* scales) {
    const Run run_blocks = choose(kind, type, stochastic != 0);
    if (!run_blocks) return 1;
    const int64_t num_blocks = (numel + block_numel - 1) / block_numel;
    const int64_t at_once = block_numel < FEW ? FEW / block_numel : 1;
    const int64_t num_parts = (num_blocks + at_once - 1) / at_once;
#pragma omp parallel if (num_parts > 1)
    {
        std::vector<float> room(type == FLOAT32 ? 0 : block_numel);
#pragma omp for schedule(static)
        for (int64_t part = 0; part < num_parts; part++) {
            const int64_t to = (part + 1) * at_once < num_blocks ? (part + 1) * at_once : num_blocks;
            run_blocks(x, numel, block_numel, codes, scales, half_scales != 0, seed, part * at_once, to, room.data());
        }
    }
    return 0;
}
