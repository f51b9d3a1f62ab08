// Where in a range of addresses segments are mapped. It does no mapping: it tells a range what lies
// where, and aborts for places that no range may be asked for.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace larder {

class SegmentPlaces {
 public:
  struct Place {
    int64_t offset_bytes;
    int64_t size_bytes;
  };

  // `max_bytes` is rounded up to a multiple of the granularity.
  SegmentPlaces(int64_t max_bytes, int64_t granularity_bytes);

  int64_t max_bytes() const { return max_bytes_; }
  // The segments mapped in a place, in order. A bug, and checked: a place that is not aligned, or
  // not in the range, or cuts through a segment.
  std::vector<Place> within(int64_t offset_bytes, int64_t size_bytes) const;
  std::vector<Place> all() const;
  void add(int64_t offset_bytes, int64_t size_bytes) { sizes_[offset_bytes] = size_bytes; }
  void remove(int64_t offset_bytes) { sizes_.erase(offset_bytes); }

 private:
  int64_t max_bytes_;
  int64_t granularity_bytes_;
  std::map<int64_t, int64_t> sizes_;  // by offset
};

}  // namespace larder
