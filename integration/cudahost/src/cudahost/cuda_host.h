// Runs the source of a CUDA kernel on a CPU: a fiber a thread, one thread block after another.
//
// Barriers and warp collectives are switches between fibers. Threads of a round run forwards or
// shuffled, so a missing barrier changes the result; a barrier that not all reach is reported.
// Not here: tensor cores, inline PTX, grid-wide sync, clusters, races between thread blocks.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <vector_functions.h>
#include <vector_types.h>

#undef __device__
#undef __forceinline__
#undef __global__
#undef __grid_constant__
#undef __host__
#undef __launch_bounds__
#undef __shared__
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __host__
#define __launch_bounds__(...)
#define __shared__ static  // one thread block runs at a time

using std::max;
using std::min;

namespace cuda_host {

constexpr int LANES = 32;
constexpr size_t STACK_BYTES = 128 << 10;

// --- fibers --------------------------------------------------------------------------------------

struct Fiber {
    void* stack_pointer = nullptr;
    char* stack = nullptr;
    bool is_done = true;
    uint3 thread;
    int place;  // in the thread block
};

inline std::vector<Fiber> fibers;
inline Fiber* current = nullptr;
inline void* scheduler = nullptr;
inline void (*body)(void**) = nullptr;
inline void** body_arguments = nullptr;

#if defined(__x86_64__)
// Saves what a call must keep, swaps the stacks, and returns into the other fiber.
extern "C" void cuda_host_switch(void** from, void* to);
asm(R"(
.text
.weak cuda_host_switch
.type cuda_host_switch, @function
cuda_host_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

inline void to_scheduler() { cuda_host_switch(&current->stack_pointer, scheduler); }
inline void to_fiber(Fiber& fiber) { cuda_host_switch(&scheduler, fiber.stack_pointer); }
inline void set_start(Fiber& fiber, void (*start)()) {
    void** top = reinterpret_cast<void**>(fiber.stack + STACK_BYTES - 64);
    *--top = nullptr;  // where `start` would return to; it never does
    *--top = reinterpret_cast<void*>(start);
    fiber.stack_pointer = top - 6;  // six registers, of any value
}
#else
}
#include <ucontext.h>
namespace cuda_host {
inline ucontext_t scheduler_context;
inline ucontext_t& context_of(Fiber& fiber) {
    if (!fiber.stack_pointer) fiber.stack_pointer = new ucontext_t;
    return *static_cast<ucontext_t*>(fiber.stack_pointer);
}
inline void to_scheduler() { swapcontext(&context_of(*current), &scheduler_context); }
inline void to_fiber(Fiber& fiber) { swapcontext(&scheduler_context, &context_of(fiber)); }
inline void set_start(Fiber& fiber, void (*start)()) {
    ucontext_t& context = context_of(fiber);
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = nullptr;
    makecontext(&context, start, 0);
}
#endif

// --- one thread block ----------------------------------------------------------------------------

// What the lanes of a warp exchange. Free again only when all that arrived have read.
struct Exchange {
    uint32_t mask = 0, arrived = 0, read_mask = 0;
    int num_readers = 0;
    unsigned round = 0;
    uint64_t values[LANES];
};

struct Warp {
    Exchange exchanges[8];
    uint32_t live = 0;
};

struct Barrier {
    int num_waiting = 0, num_true = 0;
    unsigned round = 0;
    int counts[2], sizes[2];  // of the last two rounds
};

inline std::vector<Warp> warps;
inline Barrier barrier;
inline int num_live = 0;
inline bool has_progress = false;
inline uint3 thread_index, block_index;
inline dim3 block_size, grid_size;
inline char* dynamic_memory = nullptr;

inline void open_barrier_if_complete() {
    if (num_live == 0 || barrier.num_waiting < num_live) return;
    barrier.counts[barrier.round % 2] = barrier.num_true;
    barrier.sizes[barrier.round % 2] = barrier.num_waiting;
    barrier.num_waiting = barrier.num_true = 0;
    barrier.round++;
    has_progress = true;
}

struct Count {
    int num_true, num_threads;
};

inline Count wait_for_block(bool value = false) {
    const unsigned round = barrier.round;
    barrier.num_waiting++;
    barrier.num_true += value;
    has_progress = true;
    open_barrier_if_complete();
    while (barrier.round == round) to_scheduler();
    return {barrier.counts[round % 2], barrier.sizes[round % 2]};
}

// Lanes that have ended are not waited for, even if they end after others have arrived.
inline void close_if_complete(Warp& warp, Exchange& each) {
    if (!each.arrived || each.arrived != (each.mask & warp.live)) return;
    each.num_readers = __builtin_popcount(each.arrived);
    each.read_mask = std::exchange(each.arrived, 0u);
    each.round++;
    has_progress = true;
}

[[noreturn]] inline void stop(const char* reason, int lane, uint32_t mask) {
    std::fprintf(stderr, "cuda_host: %s (lane %d, mask %08x)\n", reason, lane, mask);
    std::abort();
}

// Waits for the lanes of `mask`, and gives read(values, those that arrived).
template <class Read>
auto exchange(uint32_t mask, uint64_t value, Read read) {
    const int lane = current->place % LANES;
    Warp& warp = warps[current->place / LANES];
    if (!(mask >> lane & 1)) stop("a warp collective's mask leaves out a lane that calls it", lane, mask);
    Exchange* found = nullptr;
    for (Exchange& each : warp.exchanges)
        if (each.arrived && each.mask == mask) found = &each;
    for (Exchange& each : warp.exchanges)
        if (!found && !each.arrived && !each.num_readers) (found = &each)->mask = mask;
    if (!found) stop("a warp has more collectives under way than are kept apart", lane, mask);
    const unsigned round = found->round;
    found->values[lane] = value;
    found->arrived |= 1u << lane;
    has_progress = true;
    close_if_complete(warp, *found);
    while (found->round == round) to_scheduler();
    auto result = read(found->values, found->read_mask);
    found->num_readers--;
    has_progress = true;
    return result;
}

inline void run_fiber() {
    body(body_arguments);
    current->is_done = true;
    num_live--;
    has_progress = true;
    Warp& warp = warps[current->place / LANES];
    warp.live &= ~(1u << (current->place % LANES));
    for (Exchange& each : warp.exchanges) close_if_complete(warp, each);
    open_barrier_if_complete();
    for (;;) to_scheduler();
}

enum Order { FORWARD = 0, SHUFFLED = 1 };

// Returns 0, or 1 where threads wait for others that never come.
inline int run(const unsigned* grid, const unsigned* block, size_t dynamic_bytes, void (*kernel)(void**),
               void** arguments, int order) {
    const int num_threads = int(block[0] * block[1] * block[2]);
    body = kernel;
    body_arguments = arguments;
    grid_size = dim3(grid[0], grid[1], grid[2]);
    block_size = dim3(block[0], block[1], block[2]);
    while (int(fibers.size()) < num_threads) {
        fibers.emplace_back();
        fibers.back().stack = static_cast<char*>(
            mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    }
    dynamic_memory = static_cast<char*>(std::aligned_alloc(128, (dynamic_bytes + 127) / 128 * 128));
    std::vector<int> places(num_threads);
    std::iota(places.begin(), places.end(), 0);
    std::mt19937 random(1);
    int result = 0;
    const unsigned num_blocks = grid[0] * grid[1] * grid[2];
    for (unsigned b = 0; b < num_blocks && !result; b++) {
        block_index = make_uint3(b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]);
        num_live = num_threads;
        barrier = Barrier();
        warps.assign((num_threads + LANES - 1) / LANES, Warp());
        if (dynamic_bytes) std::memset(dynamic_memory, 0xA5, dynamic_bytes);  // nothing may count on zeros
        for (int i = 0; i < num_threads; i++) {
            const unsigned x = unsigned(i) % block[0], y = unsigned(i) / block[0] % block[1];
            fibers[i].is_done = false;
            fibers[i].place = i;
            fibers[i].thread = make_uint3(x, y, unsigned(i) / block[0] / block[1]);
            warps[i / LANES].live |= 1u << (i % LANES);
            set_start(fibers[i], run_fiber);
        }
        if (order == SHUFFLED) std::shuffle(places.begin(), places.end(), random);
        while (num_live > 0) {
            has_progress = false;
            for (int place : places) {
                if (fibers[place].is_done) continue;
                current = &fibers[place];
                thread_index = current->thread;
                to_fiber(*current);
            }
            if (!has_progress) {
                std::fprintf(stderr, "cuda_host: deadlock in thread block (%u, %u, %u): of %d threads %d wait at a barrier\n",
                             block_index.x, block_index.y, block_index.z, num_live, barrier.num_waiting);
                result = 1;
                break;
            }
        }
    }
    std::free(dynamic_memory);
    return result;
}

template <class T>
uint64_t to_bits(T value) {
    static_assert(sizeof(T) <= 8, "a collective exchanges 8 bytes at most");
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    return bits;
}
template <class T>
T from_bits(uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}
template <class T>
T shuffle(unsigned mask, T value, int source) {
    return exchange(mask, to_bits(value), [source](const uint64_t* values, uint32_t) { return from_bits<T>(values[source]); });
}
inline int lane() { return current->place % LANES; }

}  // namespace cuda_host

// --- CUDA's names --------------------------------------------------------------------------------

#define threadIdx cuda_host::thread_index
#define blockIdx cuda_host::block_index
#define blockDim cuda_host::block_size
#define gridDim cuda_host::grid_size
#define warpSize 32

inline void __syncthreads() { cuda_host::wait_for_block(); }
inline int __syncthreads_count(int value) { return cuda_host::wait_for_block(value != 0).num_true; }
inline int __syncthreads_or(int value) { return cuda_host::wait_for_block(value != 0).num_true > 0; }
inline int __syncthreads_and(int value) {
    const auto count = cuda_host::wait_for_block(value != 0);
    return count.num_true == count.num_threads;
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
    cuda_host::exchange(mask, 0, [](const uint64_t*, uint32_t) { return 0; });
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const int lane = cuda_host::lane();
    return cuda_host::shuffle(mask, value, (lane & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    const int lane = cuda_host::lane(), other = lane ^ bits;
    return cuda_host::shuffle(mask, value, (other & ~(width - 1)) > (lane & ~(width - 1)) ? lane : other);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int lane = cuda_host::lane();
    return cuda_host::shuffle(mask, value, (lane & (width - 1)) + int(delta) < width ? lane + int(delta) : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int lane = cuda_host::lane();
    return cuda_host::shuffle(mask, value, (lane & (width - 1)) >= int(delta) ? lane - int(delta) : lane);
}
inline unsigned __ballot_sync(unsigned mask, int value) {
    return cuda_host::exchange(mask, value != 0, [](const uint64_t* values, uint32_t lanes) {
        unsigned bits = 0;
        for (int i = 0; i < 32; i++)
            if (lanes >> i & 1) bits |= unsigned(values[i]) << i;
        return bits;
    });
}
inline int __any_sync(unsigned mask, int value) { return __ballot_sync(mask, value) != 0; }
inline int __all_sync(unsigned mask, int value) { return __ballot_sync(mask, !value) == 0; }
inline unsigned __activemask() { return cuda_host::warps[cuda_host::current->place / 32].live; }

template <class T>
T atomicAdd(T* place, T value) {
    return std::exchange(*place, T(*place + value));
}
template <class T>
T atomicMax(T* place, T value) {
    return std::exchange(*place, std::max(*place, value));
}
template <class T>
T atomicExch(T* place, T value) {
    return std::exchange(*place, value);
}
template <class T>
T atomicCAS(T* place, T expected, T value) {
    return std::exchange(*place, *place == expected ? value : *place);
}
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T>
T __ldg(const T* place) {
    return *place;
}
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline int __float2int_rn(float x) { return int(std::nearbyint(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline float __int_as_float(int x) { return cuda_host::from_bits<float>(cuda_host::to_bits(x)); }
inline int __float_as_int(float x) { return cuda_host::from_bits<int>(cuda_host::to_bits(x)); }
