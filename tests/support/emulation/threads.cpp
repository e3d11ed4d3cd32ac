// SPDX-License-Identifier: Apache-2.0
// The threads, warps and blocks of cuda.h.
#include <setjmp.h>
#include <ucontext.h>

#include "cuda.h"

constexpr unsigned MOST_THREADS = 1024, STACK_BYTES = 64 * 1024;

// A context starts a coroutine; later switches are jumps, since swapcontext is a system call.
struct Coroutine {
  ucontext_t context;
  jmp_buf at;
  bool begun;
  Wait waits;
  unsigned steps;
};
uint3 threadIdx, blockIdx, gridDim;
const void* addresses[MOST_THREADS];
static Coroutine coroutines[MOST_THREADS];
static char stacks[MOST_THREADS][STACK_BYTES];
static unsigned exchanged[2][MOST_THREADS];
static jmp_buf scheduler;
static void (*kernel_body)(const void*);
static const void* kernel_params;

void hand_over(Wait waits) {
  Coroutine& own = coroutines[threadIdx.x];
  own.waits = waits;
  if (!_setjmp(own.at)) _longjmp(scheduler, 1);
}

// Two slots in turn: a coroutine is never more than one step ahead of another.
const unsigned* exchange(unsigned value) {
  unsigned* slots = exchanged[coroutines[threadIdx.x].steps++ & 1];
  slots[threadIdx.x] = value;
  __syncwarp();
  return slots;
}

static void coroutine_main() {
  kernel_body(kernel_params);
  hand_over(NO_MORE);
}

static void resume(Coroutine& coroutine) {
  if (_setjmp(scheduler)) return;
  if (coroutine.begun) _longjmp(coroutine.at, 1);
  coroutine.begun = true;
  setcontext(&coroutine.context);
}

// Runs the threads of a warp that wait so, each to where it waits next; whether there were any.
static bool run_warp(unsigned first, unsigned last, Wait waiting) {
  bool any = false;
  for (unsigned t = first; t < last; ++t) {
    if (coroutines[t].waits != waiting) continue;
    threadIdx = {t, 0, 0};
    resume(coroutines[t]);
    any = true;
  }
  return any;
}

static void run_block(unsigned threads) {
  for (unsigned t = 0; t < threads; ++t) {
    Coroutine& c = coroutines[t];
    c.waits = FOR_BLOCK;
    c.steps = 0;
    c.begun = false;
    getcontext(&c.context);
    c.context.uc_stack.ss_sp = stacks[t];
    c.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&c.context, coroutine_main, 0);
  }
  for (bool busy = true; busy;) {
    busy = false;
    for (unsigned t = 0; t < threads; t += 32) {
      unsigned last = min(t + 32, threads);
      busy |= run_warp(t, last, FOR_BLOCK);
      while (run_warp(t, last, FOR_WARP)) {
      }
    }
  }
}

void run_grid(
    void (*kernel)(const void*), const void* params, unsigned x, unsigned y, unsigned threads) {
  kernel_body = kernel;
  kernel_params = params;
  gridDim = {x, y, 1};
  for (unsigned j = 0; j < y; ++j)
    for (unsigned i = 0; i < x; ++i) {
      blockIdx = {i, j, 0};
      run_block(threads);
    }
}
