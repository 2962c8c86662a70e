#include "ffi/ggml/linear/layout.h"

#include <cstring>

namespace jq {
namespace ggml {
namespace {

// One unit of `size` bytes of eight blocks; the plain blocks are a row apart.
template <bool kToPrepared>
void MoveUnit(const uint8_t* from, uint8_t* to, int64_t row_bytes, int size) {
  for (int row = 0; row < kLanes; ++row) {
    if (kToPrepared) {
      memcpy(to + row * size, from + row * row_bytes, size);
    } else {
      memcpy(to + row * row_bytes, from + row * size, size);
    }
  }
}

template <typename F, bool kToPrepared>
void MoveRows(const uint8_t* from, uint8_t* to, int64_t n, int64_t k, int64_t begin, int64_t end) {
  constexpr Units kOf = kUnits<F>;
  const int64_t row_bytes = k / F::kBlock * static_cast<int64_t>(sizeof(F));
  const int64_t interleaved = kOf.interleaved ? n / kLanes * kLanes : 0;
  int64_t row = begin;
  for (; row + kLanes <= end && row < interleaved; row += kLanes) {
    for (int64_t at = 0; at < row_bytes; at += sizeof(F)) {
      const uint8_t* source = from + row * row_bytes + (kToPrepared ? at : at * kLanes);
      uint8_t* target = to + row * row_bytes + (kToPrepared ? at * kLanes : at);
      const auto move = [&](int size) {
        MoveUnit<kToPrepared>(source, target, row_bytes, size);
        source += kToPrepared ? size : size * kLanes;
        target += kToPrepared ? size * kLanes : size;
      };
      if (kOf.lead != 0) move(kOf.lead);
      for (int i = 0; i < kOf.words; ++i) move(4);
      if (kOf.tail != 0) move(kOf.tail);
    }
  }
  memcpy(to + row * row_bytes, from + row * row_bytes, (end - row) * row_bytes);
}

template <bool kToPrepared>
bool Move(int type_id, const uint8_t* from, uint8_t* to, int64_t n, int64_t k, int64_t begin, int64_t end) {
  if (begin >= end || k == 0) return true;
  switch (type_id) {
#define JQ_CASE(F) \
  case F::kId: return MoveRows<F, kToPrepared>(from, to, n, k, begin, end), true;
    JQ_GGML_FORMATS(JQ_CASE)
#undef JQ_CASE
    default: return false;
  }
}

}  // namespace

bool HasPreparedForm(int type_id) {
  switch (type_id) {
#define JQ_CASE(F) \
  case F::kId: return kUnits<F>.interleaved;
    JQ_GGML_FORMATS(JQ_CASE)
#undef JQ_CASE
    default: return false;
  }
}

bool ToPrepared(int type_id, const uint8_t* plain, uint8_t* prepared, int64_t n, int64_t k, int64_t begin,
                int64_t end) {
  return Move<true>(type_id, plain, prepared, n, k, begin, end);
}
bool ToPlain(int type_id, const uint8_t* prepared, uint8_t* plain, int64_t n, int64_t k, int64_t begin, int64_t end) {
  return Move<false>(type_id, prepared, plain, n, k, begin, end);
}

}  // namespace ggml
}  // namespace jq
