#include "ffi/ggml/linear/layout.h"

#include <cstring>

namespace jq {
namespace ggml {
namespace {

// Visits the units of a block: visit(its offset in the block, its size).
template <typename F, typename Visit>
void ForEachUnit(const Visit& visit) {
  constexpr Units kOf = kUnits<F>;
  if (kOf.lead != 0) visit(0, kOf.lead);
  for (int i = 0; i < kOf.words; ++i) visit(kOf.lead + 4 * i, 4);
  if (kOf.tail != 0) visit(kOf.lead + 4 * kOf.words, kOf.tail);
}

template <typename F, bool kToPrepared>
void MoveRows(const uint8_t* from, uint8_t* to, int rows, int64_t k) {
  const int64_t row_bytes = k / F::kBlock * static_cast<int64_t>(sizeof(F));
  for (int64_t at = 0; at < row_bytes; at += sizeof(F)) {
    ForEachUnit<F>([&](int offset, int size) {
      const int64_t plain = at + offset, prepared = kLanes * (at + offset);
      for (int row = 0; row < rows; ++row) {
        if (kToPrepared) {
          memcpy(to + prepared + row * size, from + plain + row * row_bytes, size);
        } else {
          memcpy(to + plain + row * row_bytes, from + prepared + row * size, size);
        }
      }
      if (kToPrepared && rows < kLanes) memset(to + prepared + rows * size, 0, (kLanes - rows) * size);
    });
  }
}

template <typename F>
void MoveBlocks(const uint8_t* prepared, int row, int64_t first, int64_t count, uint8_t* plain) {
  for (int64_t b = 0; b < count; ++b) {
    const uint8_t* from = prepared + (first + b) * kLanes * static_cast<int64_t>(sizeof(F));
    uint8_t* to = plain + b * static_cast<int64_t>(sizeof(F));
    ForEachUnit<F>([&](int offset, int size) { memcpy(to + offset, from + kLanes * offset + row * size, size); });
  }
}

// f(Type<F>()) for the format of a type id, if it has a prepared form.
template <typename F>
struct Type {
  using Of = F;
};
template <typename Function>
bool WithFormat(int type_id, const Function& f) {
  switch (type_id) {
#define JQ_CASE(F)                         \
  case F::kId:                             \
    if constexpr (kUnits<F>.interleaved) { \
      f(Type<F>());                        \
      return true;                         \
    }                                      \
    return false;
    JQ_GGML_FORMATS(JQ_CASE)
#undef JQ_CASE
    default: return false;
  }
}

}  // namespace

bool ToPrepared(int type_id, const uint8_t* plain, uint8_t* prepared, int rows, int64_t k) {
  return WithFormat(type_id, [&](auto f) { MoveRows<typename decltype(f)::Of, true>(plain, prepared, rows, k); });
}
bool ToPlain(int type_id, const uint8_t* prepared, uint8_t* plain, int rows, int64_t k) {
  return WithFormat(type_id, [&](auto f) { MoveRows<typename decltype(f)::Of, false>(prepared, plain, rows, k); });
}
void ToPlainBlocks(int type_id, const uint8_t* prepared, int row, int64_t first, int64_t count, uint8_t* plain) {
  WithFormat(type_id, [&](auto f) { MoveBlocks<typename decltype(f)::Of>(prepared, row, first, count, plain); });
}

}  // namespace ggml
}  // namespace jq
