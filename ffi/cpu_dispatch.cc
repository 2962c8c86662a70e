// Chooses the instruction set once per process.
#include <cstdlib>
#include <cstring>

#if defined(JQ_HAS_amx)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "ffi/affine/cpu_kernels.h"

namespace jq {

#define JQ_DECLARE(isa)                \
  namespace isa {                      \
  extern const CpuKernels cpu_kernels; \
  }
JQ_DECLARE(portable)
JQ_DECLARE(v2)
JQ_DECLARE(v3)
JQ_DECLARE(v4)

namespace {

struct Candidate {
  const CpuKernels* kernels;
  bool supported;
};

const CpuKernels& Choose() {
  const Candidate candidates[] = {
      {&portable::cpu_kernels, true},
#if defined(JQ_HAS_v2)
      {&v2::cpu_kernels, __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("ssse3")},
#endif
#if defined(JQ_HAS_v3)
      {&v3::cpu_kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                             __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c")},
#endif
#if defined(JQ_HAS_v4)
      {&v4::cpu_kernels, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                             __builtin_cpu_supports("avx512vl")},
#endif
  };
  const char* wanted = std::getenv("JAXQUANT_ISA");
  const CpuKernels* best = nullptr;
  for (const Candidate& candidate : candidates) {
    if (!candidate.supported) continue;
    if (wanted != nullptr && std::strcmp(wanted, candidate.kernels->isa) == 0) return *candidate.kernels;
    best = candidate.kernels;
  }
  return *best;
}

// Asks the system too, which has to make room for tiles in the state it keeps of each thread.
bool ChooseTiles() {
#if defined(JQ_HAS_amx)
  const char* wanted = std::getenv("JAXQUANT_ISA");
  if (wanted != nullptr && *wanted != '\0' && std::strcmp(wanted, "amx") != 0) return false;
  if (&CpuKernelsHere() != &v4::cpu_kernels || !__builtin_cpu_supports("avx512vnni")) return false;
  constexpr unsigned kTileBits = 3u << 24;  // AMX-TILE and AMX-INT8
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (edx & kTileBits) != kTileBits) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

bool TilesHere() {
  static const bool chosen = ChooseTiles();
  return chosen;
}

const char* InstructionSet() { return TilesHere() ? "amx" : CpuKernelsHere().isa; }

const CpuKernels& CpuKernelsHere() {
  static const CpuKernels& chosen = Choose();
  return chosen;
}

const char* CompiledIsas() { return JQ_COMPILED_ISAS; }

}  // namespace jq
