// The tile unit of x86-64 (AMX). A tile is 16 rows of 64 bytes; one instruction adds to 16 x 16 sums of 32 bits the
// products of 16 rows of 64 codes with 16 columns of as many, whose codes lie in words of four.
//
// For code that TilesHere() allows, compiled where JQ_TILES is defined, within a TileScope.
#pragma once

#if defined(JQ_TILES)

#include <immintrin.h>

#include <cstdint>

#define JQ_TILE_TARGET __attribute__((target("amx-tile,amx-int8")))

namespace jq {

constexpr int kTileSide = 16;      // rows of a tile, and columns of one of sums
constexpr int kTileRowBytes = 64;  // the most of a row

// Of each of the eight tiles: how many rows, and bytes of a row.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void Set(int tile, int row_count, int bytes) {
    rows[tile] = static_cast<uint8_t>(row_count);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
  // All tiles become zero.
  JQ_TILE_TARGET void Load() const {
    // gcc 12 takes the instruction to read eight bytes alone, and would leave out the others.
    asm volatile("" : : "r"(this) : "memory");
    _tile_loadconfig(this);
  }
};

// Leaves a thread's tiles in the shapes they had before a scope: there are libraries that set them once. What the tiles
// held is lost.
class TileScope {
 public:
  JQ_TILE_TARGET TileScope() {
    saved_.palette = 0;
    _tile_storeconfig(&saved_);
    asm volatile("" : : "r"(&saved_) : "memory");
  }
  JQ_TILE_TARGET ~TileScope() {
    if (saved_.palette == 0) {
      _tile_release();
    } else {
      saved_.Load();
    }
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  TileShapes saved_;
};

}  // namespace jq

#endif
