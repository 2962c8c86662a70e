// A function on a stack of its own, which it can leave and come back to. See cuda_on_host.h.
//
// On x86-64 a switch is a dozen instructions. Elsewhere (or with JQ_CUDA_ON_HOST_UCONTEXT) it is swapcontext, which
// makes a system call. AddressSanitizer is told of every switch, since it keeps an eye on the stack in use.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <memory>

#if defined(__x86_64__) && defined(__ELF__) && !defined(JQ_CUDA_ON_HOST_UCONTEXT)
#define JQ_FAST_SWITCH 1
#else
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define JQ_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define JQ_ADDRESS_SANITIZER 1
#endif
#endif
#if defined(JQ_ADDRESS_SANITIZER)
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(JQ_FAST_SWITCH)
// Pushes what a call must preserve, exchanges the stacks, pops the same from the other one. (Every fiber has the same
// floating-point mode.) It jumps instead of returning, since a processor predicts a return to go where the last call
// came from. Outside any function, so that the compiler takes no view of its own on what survives the call.
extern "C" __attribute__((visibility("hidden"))) void jq_switch_stack(void** save, void* load);
asm(R"(
  .pushsection .text
  .weak jq_switch_stack
  .hidden jq_switch_stack
  .type jq_switch_stack, @function
jq_switch_stack:
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
  popq %rcx
  jmp *%rcx
  .size jq_switch_stack, . - jq_switch_stack
  .popsection
)");
#endif

namespace jq {
namespace cuda_on_host {

// Resume() continues the function where Suspend() left it, and returns at its next Suspend(). The function begins with
// Enter() and never returns. Destroying a fiber abandons what is on its stack.
class Fiber {
 public:
  explicit Fiber(void (*function)()) : stack_(new char[kBytes]) {
    memcpy(stack_.get() + kReserve, &kGuard, sizeof(kGuard));
#if defined(JQ_FAST_SWITCH)
    // As if the function, called from nowhere, had just made the call that switched away from it.
    void** top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack_.get()) + kBytes) & ~uintptr_t{15});
    std::fill(top - 8, top, nullptr);
    top[-2] = reinterpret_cast<void*>(function);
    own_ = top - 8;
#else
    getcontext(&own_);
    own_.uc_stack.ss_sp = stack_.get();
    own_.uc_stack.ss_size = kBytes;
    own_.uc_link = nullptr;
    makecontext(&own_, function, 0);
#endif
  }

  void Resume() {
    void* fake_stack = nullptr;
    StartSwitch(&fake_stack, stack_.get(), kBytes);
    Switch(&resumer_, &own_);
    FinishSwitch(fake_stack, nullptr, nullptr);
  }

  void Suspend() {
    void* fake_stack = nullptr;
    StartSwitch(&fake_stack, resumer_stack_, resumer_bytes_);
    Switch(&own_, &resumer_);
    FinishSwitch(fake_stack, &resumer_stack_, &resumer_bytes_);
  }

  void Enter() { FinishSwitch(nullptr, &resumer_stack_, &resumer_bytes_); }

  // Whether the stack reached into its reserve, which is there for this to be an error and no crash.
  bool Overflowed() const { return memcmp(stack_.get() + kReserve, &kGuard, sizeof(kGuard)) != 0; }

 private:
#if defined(JQ_ADDRESS_SANITIZER)
  static constexpr size_t kBytes = 272 << 10;
  static void StartSwitch(void** save, const void* stack, size_t bytes) {
    __sanitizer_start_switch_fiber(save, stack, bytes);
  }
  static void FinishSwitch(void* saved, const void** stack, size_t* bytes) {
    __sanitizer_finish_switch_fiber(saved, stack, bytes);
  }
#else
  static constexpr size_t kBytes = (80 << 10) + 192;  // no power of two: all stacks would share a few cache lines
  static void StartSwitch(void**, const void*, size_t) {}
  static void FinishSwitch(void*, const void**, size_t*) {}
#endif

#if defined(JQ_FAST_SWITCH)
  using Context = void*;
  static void Switch(Context* from, Context* to) { jq_switch_stack(from, *to); }
#else
  using Context = ucontext_t;
  static void Switch(Context* from, Context* to) { swapcontext(from, to); }
#endif

  static constexpr size_t kReserve = 16 << 10;  // at the far end of the stack
  static constexpr uint64_t kGuard = 0x5a17c0de5a17c0de;

  std::unique_ptr<char[]> stack_;
  Context own_, resumer_;
  const void* resumer_stack_ = nullptr;
  size_t resumer_bytes_ = 0;
};

}  // namespace cuda_on_host
}  // namespace jq
